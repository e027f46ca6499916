"""A pass as a table of cases: what it makes of a program, or why it does not.

A test file lists rows, and `table` makes its tests::

    test_cases, test_surroundings = table(
        ScaleShares(),
        rewrites(built),
        rewrites(built, turned=True),
        refuses("512 keys, below 2048", built, 512),
        stays(built, axis=1),
    )

Each row that is rewritten is checked for the ops of the result (`after/NAME.txt`, written anew by
`pytest --write-results`), a proof of each site, the numbers in fp32 and fp16, and a second run that changes
nothing; then in each surrounding: in a condition, in a loop, with values read elsewhere, with any batch, after
coremltools' default pipeline, saved and loaded, and with a mutation of the result, which must be caught.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from mutations import outcomes
from surroundings import SURROUNDINGS, UnbuildableError, settled

import anesurgery as ane
from anesurgery import testing
from anesurgery.checking.grades import EarlierChecks
from anesurgery.interpret import run
from anesurgery.loading import load
from anesurgery.mil import MOST_AXES, Array, Program, is_symbolic, types, walk_ops
from anesurgery.rewriting.passes import Pass
from anesurgery.rewriting.rewrite import Rewrite
from anesurgery.rewriting.session import Session
from anesurgery.testing import assert_refuses, assert_same_numbers, random_inputs, reasons, text_of

RESULTS = Path(__file__).resolve().parents[1] / "passes" / "after"
"""What rows become: one file for each test file, one line for each row."""
MANY = 16
"""Ops from which a result is told by their number."""
ROUNDING = 2.0**-9
"""Of the largest magnitude: by how much more than before a result in fp16 may be off, about four roundings."""
FOLDED = 2.0**-11
"""Of the largest magnitude: what coremltools' own passes round, where they fold weights of fp16."""
FEW = 32
"""Rows of a table that `make test` runs whole; of twice as many it runs each other one that is rewritten."""
EVERYWHERE = (*SURROUNDINGS, "after the default pipeline", "saved and loaded", "mutated")
KINDS = ("rewrites", "stays", "ignores")
OF_MAIN = {
    "integers_as_floats": "integers that come from a block may be any",
    "select_last_token": "the logits are outputs of the function",
}
"""Rewrites that do not look into blocks, and why."""
CHECKS: dict[type[Pass], dict[str, EarlierChecks]] = {}
"""The checks of sites in this process: rows of a pass and their surroundings repeat most of them."""


@dataclass(frozen=True)
class Repaired:
    """What a repair promises: on the inputs of the row numbers are not finite before, and right after.

    Attributes:
        arithmetic: of the interpreter.
        rtol, atol: what each number may differ by from that of fp32.
        largest: what it may differ by, of the largest number.
        broken: are numbers not finite before?
    """

    arithmetic: str = "fp16"
    rtol: float = 0.0
    atol: float = 0.0
    largest: float = 0.0
    broken: bool = True

    def check(self, before: Program, after: Program, inputs: Mapping[str, Array]) -> None:
        """Run both."""
        (wanted,) = run(before, inputs, precision="fp32").values()
        (old,), (new,) = (run(p, inputs, precision=self.arithmetic).values() for p in (before, after))
        assert np.isfinite(old).all() != self.broken
        off = np.abs(new.astype(np.float64) - wanted)
        bound = self.rtol * np.abs(wanted) + self.atol + self.largest * np.abs(wanted).max()
        assert (off <= bound).all(), (off - bound).max()


@dataclass(frozen=True)
class Case:
    """A row of a table."""

    build: Callable[..., Any]
    args: tuple[Any, ...]
    options: Mapping[str, Any]
    kind: str
    """"rewrites", "stays", "ignores", or the words of the refusal."""
    step: Pass | None = None
    """The pass with other options."""
    inputs: Any = None
    """Arrays by name, ranges (low, high) by name, or a function of the program; drawn where None."""
    rtol: float | None = None
    """What numbers may differ by, of the largest; what the pass promises where None."""
    differs: str = ""
    """Why numbers are not the same on purpose."""
    id: str = ""
    """Its name, where the arguments are not told apart by theirs."""
    alone: Mapping[str, str] = field(default_factory=dict)
    """Surrounding -> why the row is not tried there."""
    repaired: Repaired | None = None
    """How near the numbers are in an arithmetic in which they were not."""
    quick: bool = False
    """Does `make test` run it, however many rows the table has?"""

    def __str__(self) -> str:
        if self.kind not in KINDS:
            return self.kind
        if self.id:
            return self.id
        words = [*map(_word, self.args), *(f"{k}={_word(v)}" for k, v in self.options.items())]
        words = [*words, *([str(self.step)] if self.step else [])]
        return " ".join([self.build.__name__.replace("<lambda>", "program"), *words])

    def model(self) -> Any:
        """The program, or the specification of a network."""
        return self.build(*self.args, **self.options)

    def numbers(self, program: Program, like: Program | None = None) -> dict[str, Array]:
        """The inputs that both sides are run on; a dynamic size is what it is in `like`."""
        if callable(self.inputs):
            return dict(self.inputs(program))
        given = dict(self.inputs or {})
        ranges = {k: v for k, v in given.items() if isinstance(v, tuple)}
        arrays = {k: v for k, v in given.items() if k not in ranges}
        return random_inputs(program, ranges=ranges, like=like) | arrays


def rewrites(build: Callable[..., Any], *args: Any, **options: Any) -> Case:
    """The pass changes the program; options of the row: `step`, `inputs`, `rtol`, `differs`, `id`, `alone`."""
    return _case("rewrites", build, args, options)


def refuses(words: str, build: Callable[..., Any], *args: Any, **options: Any) -> Case:
    """The pass changes nothing, and says so in these words."""
    return _case(words, build, args, options)


def stays(build: Callable[..., Any], *args: Any, **options: Any) -> Case:
    """The pass changes nothing."""
    return _case("stays", build, args, options)


def ignores(build: Callable[..., Any], *args: Any, **options: Any) -> Case:
    """The pass changes nothing, and has nothing to say."""
    return _case("ignores", build, args, options)


def rewrites_each(
    models: Mapping[str, Any], alone: Mapping[str, Mapping[str, str]] | None = None, **options: Any
) -> list[Case]:
    """A row for each model, or what makes it, under its name; `alone` by that name."""
    kept = alone or {}
    return [rewrites(_maker(m), id=name, alone=kept.get(name, {}), **options) for name, m in models.items()]


def refuses_each(models: Mapping[str, Any], **options: Any) -> list[Case]:
    """A row for each model, or what makes it, under the words of its refusal."""
    return [refuses(words, _maker(model), **options) for words, model in models.items()]


def _maker(model: Any) -> Callable[[], Any]:
    return model if callable(model) and not isinstance(model, Program) else lambda: model


def table(step: Pass, *cases: Case) -> tuple[Callable[..., None], Callable[..., None] | None]:
    """The tests of a table: each row, and each rewritten row in every surrounding."""
    counted, share = Counter[str](), 1 + len(cases) // FEW
    rows = []
    for case in cases:
        counted[str(case)] += 1
        more = f" {counted[str(case)]}" if counted[str(case)] > 1 else ""
        sampled = case.kind == "rewrites" and not case.quick
        marks = (pytest.mark.one_of(share),) if sampled else ()
        rows.append(pytest.param(case, id=f"{case}{more}", marks=marks))

    @pytest.mark.parametrize("case", rows)
    def test_cases(case: Case, request: pytest.FixtureRequest) -> None:
        check(case.step or step, case, request)

    rewritten = [(case, row.id) for case, row in zip(cases, rows, strict=True) if case.kind == "rewrites"]
    edited = [pytest.param(case, id=name) for case, name in rewritten]

    @pytest.mark.one_of(share * (len(EVERYWHERE) + 1))
    @pytest.mark.parametrize("case", edited)
    @pytest.mark.parametrize("where", EVERYWHERE)
    def test_surroundings(case: Case, where: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        check_there(case.step or step, case, where, monkeypatch, tmp_path)

    return test_cases, test_surroundings if edited else None


def apply_pass(step: Pass, model: Any) -> tuple[Any, Session]:
    """`testing.apply_pass`, which does not check again what it checked for an earlier row."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(testing, "Session", partial(Session, checks=CHECKS.setdefault(type(step), {})))
        return testing.apply_pass(step, model)


def check(step: Pass, case: Case, request: pytest.FixtureRequest) -> None:
    """One row: the result, the proofs, the numbers, a second run."""
    model = case.model()
    if case.kind not in KINDS:
        assert_refuses(step, model, case.kind)
        return
    after, session = apply_pass(step, model)
    if case.kind != "rewrites":
        assert not session.changes, text_of(after)
        assert case.kind == "stays" or not session.refusals, reasons(session)
        assert text_of(after) == text_of(model)
        assert isinstance(model, Program) or case.kind == "stays" or after == model
        return
    assert session.changes, f"{step.name} changed nothing; refusals: {reasons(session)}"
    assert all(change.proof is not None or change.unchecked for change in session.changes), session.changes
    assert not apply_pass(step, after)[1].changes, text_of(after)
    _compare_result(request, after)
    if not case.differs:
        _same_numbers(step, case, model, after, session)
    if case.repaired:
        case.repaired.check(model, after, case.numbers(model))


def check_there(step: Pass, case: Case, where: str, patch: pytest.MonkeyPatch, folder: Path) -> None:
    """A row in a surrounding."""
    if where in case.alone:
        return
    model, rtol = case.model(), step.tolerance.rtol if case.rtol is None else case.rtol
    if where == "mutated":
        caught = outcomes(step, model, patch, enough=1)
        assert not caught or any(caught.values()), caught
        return
    if not isinstance(model, Program):
        return
    if where in SURROUNDINGS:
        if isinstance(step, Rewrite):  # others read the interface of the whole model
            _rewrites_in(step, case, where, model, max(rtol, 1e-6))
        return
    after, session = apply_pass(step, model)
    if where == "saved and loaded":
        if any(len(v.shape or ()) > MOST_AXES for op in walk_ops(after) for v in op.outputs):
            return  # no package holds it
        later = load(str(ane.save(load(after), folder / "after.mlpackage"))).program
    else:
        later = settled(after)
        with suppress(AttributeError):  # of coremltools, on the program as given: a batch_norm without beta
            model = settled(model)
        assert not apply_pass(step, later)[1].changes, text_of(later)
    if not case.differs:
        inputs, rtol = case.numbers(model, later), max(rtol, FOLDED if _is_half(model) else 1e-6)
        assert_same_numbers(model, later, inputs, rtol=rtol, session=session)


def _rewrites_in(step: Pass, case: Case, where: str, model: Program, rtol: float) -> None:
    try:
        program = SURROUNDINGS[where](model)
        inputs = case.numbers(program)
        run(program, inputs)
    except (UnbuildableError, ane.SurgeryError):
        return  # there is no such program
    after, session = apply_pass(step, program)
    if where.startswith("in a ") and step.name not in OF_MAIN:
        assert session.changes, reasons(session)
    if session.changes and not case.differs:
        assert_same_numbers(program, after, inputs, rtol=rtol, session=session)


def _same_numbers(step: Pass, case: Case, model: Any, after: Any, session: Any) -> None:
    rtol = step.tolerance.rtol if case.rtol is None else case.rtol
    if not isinstance(model, Program):
        assert_same_numbers(model, after, case.inputs, rtol=rtol)
        return
    inputs = case.numbers(model, after)
    assert_same_numbers(model, after, inputs, rtol=rtol, session=session)
    if session.contract or not any(v.dtype is types.fp16 for v in model.functions["main"].outputs):
        return
    truth = run(model, inputs, precision="fp32")
    old, new = (run(program, inputs, precision="fp16") for program in (model, after))
    for name, wanted in truth.items():
        off = [np.abs(np.asarray(found[name], np.float64) - wanted) for found in (new, old)]
        scale = np.abs(wanted).max(initial=0.0)
        if np.isfinite(scale) and np.isfinite(off[1]).all():
            assert off[0].max(initial=0) <= off[1].max(initial=0) + (ROUNDING + rtol) * scale, name


def _is_half(model: Program) -> bool:
    made = [v for op in walk_ops(model) for v in op.outputs]
    return any(types.is_tensor(v.sym_type) and v.dtype is types.fp16 for v in made)


def _compare_result(request: pytest.FixtureRequest, after: Any) -> None:
    """The ops of the result are those on file."""
    test = request.node
    file = RESULTS / f"{test.path.stem.removeprefix('test_')}.txt"
    lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
    known = dict(line.split(" => ", 1) for line in lines)
    found = result(after)
    if request.config.getoption("--write-results"):
        known[test.callspec.id] = found
        file.parent.mkdir(exist_ok=True)
        file.write_text("".join(f"{k} => {v}\n" for k, v in sorted(known.items())), encoding="utf-8")
    assert known.get(test.callspec.id) == found, f"pytest --write-results {test.path} stores\n{text_of(after)}"


def result(model: Any) -> str:
    """The ops of a model in one line, its values numbered; many ops by their number."""
    lines = [line.strip() for line in text_of(model).splitlines()][1:-1]
    if len(lines) > MANY:
        kinds = Counter(re.findall(r" = (\w+)\(", "\n".join(lines)))
        return ", ".join(f"{n} {kind}" for kind, n in sorted(kinds.items()))
    names: dict[str, str] = {}
    return re.sub(r"%[\w.]+", lambda m: names.setdefault(m[0], f"%{len(names)}"), "; ".join(lines))


def _case(kind: str, build: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any]) -> Case:
    own = {
        k: options.pop(k)
        for k in ("step", "inputs", "rtol", "differs", "id", "alone", "repaired", "quick")
        if k in options
    }
    return Case(build, args, options, kind, **own)


def _word(value: Any) -> str:
    """A short name of an argument."""
    if isinstance(value, np.ndarray):
        return f"{'x'.join(map(str, value.shape))} {value.dtype}"
    if isinstance(value, (type, ModuleType)) or callable(value):
        return str(getattr(value, "__name__", type(value).__name__)).strip("<>")
    if isinstance(value, (tuple, list)):
        return "x".join(map(_word, value))
    if is_symbolic(value):  # its own name has a number that counts on
        return "n"
    text = str(value)
    plain = len(text) <= 40 and "\n" not in text and " at 0x" not in text
    return text if plain else type(value).__name__
