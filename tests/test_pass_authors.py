"""What a pass author may rely on: one import, a page that lists every helper, rules of one's own."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import math
import pkgutil
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

import anesurgery as ane
from anesurgery import authoring as an
from anesurgery import facts, ops, regions, semantics, testing
from anesurgery.errors import NO_MATCH, PassError, PatternError, ProofError, Refusal, SurgeryError
from anesurgery.mil import Operation, Program, Var, ct, mb, types
from anesurgery.placement import Grade, Rule, Target
from anesurgery.placement.evidence import Scope, unregister_rule
from anesurgery.rewriting.builder import Builder
from anesurgery.rewriting.pattern import Match, OpPattern, Ops, var
from anesurgery.rewriting.rewrite import Rewrite

DOCS = Path(__file__).resolve().parents[1] / "docs"
PAGE = "".join((DOCS / name).read_text(encoding="utf-8") for name in ("writing-a-pass.md", "authoring.md"))


def public(owner: object) -> list[str]:
    return [name for name in vars(owner) if not name.startswith("_")]


def helpers() -> Iterator[str]:
    """What the page must name, as it names it."""
    yield from (f"`mb.{name}" for name in public(Builder))
    yield from (f"m.{name}" for name in public(Match))
    yield from (f"op.{name}(" for name in public(Ops))
    yield from (name for name in public(Rewrite) if name != "run")
    yield from (f"`{name}`" for name, value in vars(ops).items() if isinstance(value, frozenset))
    yield from (f"`facts.{module.name}`" for module in pkgutil.iter_modules(facts.__path__))
    yield from (f"`regions.{module.name}`" for module in pkgutil.iter_modules(regions.__path__))
    yield from (f"`semantics.{module.name}`" for module in pkgutil.iter_modules(semantics.__path__))
    own = (f for _, f in inspect.getmembers(testing, inspect.isfunction) if f.__module__ == testing.__name__)
    yield from (f.__name__ for f in own if not f.__name__.startswith("_"))


@pytest.mark.parametrize("name", list(helpers()))
def test_the_page_names_every_helper(name: str) -> None:
    assert name in PAGE


ROW = re.compile(r"^\| `(?:(\w+(?:\.\w+)+|mil)` \| `)?(\w+)[^`]*` \| ", re.MULTILINE)
"""A row of the tables of names: the module, if the table has a column for it, and the name."""


def test_the_tables_of_names_have_names_that_exist() -> None:
    own, others = PAGE.split("## Names in `anesurgery.authoring`")[1].split("## Names in other modules")
    assert sorted(name for _, name in ROW.findall(own)) == sorted(an.__all__)
    rows = [(module, name) for module, name in ROW.findall(others) if module]
    modules = {module: importlib.import_module(f"anesurgery.{module}") for module, _ in rows}
    assert len(rows) > 60
    assert [row for row in rows if not hasattr(modules[row[0]], row[1])] == []
    assert [module for module, _ in rows] == [module for m in modules for module, _ in rows if module == m]


def test_one_import_is_enough_and_light() -> None:
    code = "import sys, anesurgery; assert 'coremltools' not in sys.modules"
    subprocess.run([sys.executable, "-W", "error::ImportWarning", "-c", code], check=True)
    names = "Builder Match OpPattern Ops Refusal Rewrite Tolerance any_of var register register_rule"
    assert set(names.split()) <= set(ane.__all__)
    assert all(getattr(ane, name) for name in names.split())


def half() -> Program:
    return mb.program(input_specs=[mb.TensorSpec((2, 64), types.fp16)])(
        lambda x: mb.relu(x=mb.mul(x=x, y=np.float16(0.5)), name="y")
    )


def found(op: Operation, target: Target) -> str:
    return f"%{op.outputs[0].name} is rectified"


RULE = Rule("own", frozenset({"relu"}), "because", "not measured", test=found, kind="speed", grade=Grade.GUESS)


@pytest.fixture
def own() -> Iterator[Rule]:
    yield ane.register_rule(dataclasses.replace(RULE, remedy="rerank"))
    unregister_rule("own")


def said() -> list[tuple[str, str | None]]:
    return [(f.message, f.remedy) for f in ane.inspect(half()).all_findings if f.rule == "own"]


def test_inspect_asks_a_rule_of_ones_own(own: Rule) -> None:
    assert said() == [("%y is rectified", "rerank")]
    ane.register_rule(dataclasses.replace(own, remedy=None, advice="leave it out"))
    assert said() == [("%y is rectified", None)]  # the same id: replaced
    unregister_rule("own")
    assert said() == []


@pytest.mark.parametrize(
    ("rule", "words"),
    [
        (dataclasses.replace(RULE, test=None, advice="x"), "rule 'own' has no test"),
        (RULE, "rule 'own' does not help: name a pass as `remedy`"),
    ],
)
def test_a_rule_that_says_nothing_is_an_error(rule: Rule, words: str) -> None:
    with pytest.raises(SurgeryError, match=words):
        ane.register_rule(rule)


@pytest.mark.parametrize("help", [{"remedy_for": lambda op, target: "rerank"}, {"legal": True}])
def test_a_rule_helps_by_a_pass_for_each_op_or_needs_no_help(help: dict[str, Any]) -> None:
    ane.register_rule(dataclasses.replace(RULE, **help))
    unregister_rule("own")


def test_a_rule_of_an_unknown_kind_is_an_error() -> None:
    with pytest.raises(SurgeryError, match="'own' has the kind 'numerics'; it is one of .*numeric"):
        dataclasses.replace(RULE, kind="numerics")


def test_a_family_without_a_named_chip_is_not_every_chip() -> None:
    assert str(Scope(families=frozenset({99}))) == "family 99"


def test_a_pass_without_a_name_is_an_error_when_it_is_made() -> None:
    with pytest.raises(PassError, match='the pass HalfPrice has no name, .* write `name = "half_price"`'):

        class HalfPrice(Rewrite):
            def pattern(self, op: Ops) -> OpPattern:
                return op.relu(x=var("x"))

    with pytest.raises(PassError, match="the name of the pass Optional would be one of its options"):

        class Optional(Rewrite):
            name: str = "optional"  # type: ignore[misc]

    with pytest.raises(PassError, match="the pass Empty has the name ''"):

        class Empty(ane.Pass):
            name: ClassVar[str] = ""


def clipped(mb: Builder, m: Match) -> Var:
    return mb.clip(x=m.root.x, alpha=0, beta=6)


TRAPS: dict[str, tuple[dict[str, object], str]] = {
    "a bare number as tolerance": (
        {"tolerance": 1e-3, "rewrite": lambda self, mb, m: clipped(mb, m)},
        r"the pass Own states the tolerance 0.001; write `tolerance = Tolerance\(0.001\)`",
    ),
    "a pattern of nothing": (
        {"pattern": lambda self, op: None},
        "`pattern` of Own returned None; it returns that",
    ),
    "a pattern of any value": ({"pattern": lambda self, op: var("x")}, r"`pattern` of Own returned AnyVar"),
    "no pattern": ({"kinds": frozenset()}, "the pass own looks for nothing: write `pattern`, or `kinds`"),
    "nothing is built": ({}, "the pass own builds nothing: write `rewrite`, which returns the new value"),
    "no such op": (
        {"rewrite": lambda self, mb, m: mb.klip(x=m.root.x)},
        "there is no op 'klip'; did you mean 'clip'",
    ),
    "no such parameter": (
        {"rewrite": lambda self, mb, m: mb.clip(x=m.root.x, min=0.0, max=6.0)},
        "clip has no parameter 'm(in|ax)'; it has alpha, beta, x",
    ),
    "another shape": (
        {"rewrite": lambda self, mb, m: mb.expand_dims(x=m.root.x, axes=[0])},
        "%y is 2x64xfp16, its replacement 1x2x64xfp16; let `check` refuse such a place",
    ),
}
"""What a stranger may write -> what the error says."""


@pytest.mark.parametrize("trap", TRAPS)
def test_what_a_stranger_may_write_gets_an_error_that_says_what_to_write(trap: str) -> None:
    body, words = TRAPS[trap]
    with pytest.raises((PassError, PatternError), match=words):
        testing.apply_pass(
            type("Own", (Rewrite,), {"name": "own", "kinds": frozenset({"relu"}), **body})(), half()
        )


def test_one_kind_may_be_a_word() -> None:
    own = type("Own", (Rewrite,), {"name": "own", "kinds": "relu", "rewrite": lambda self, mb, m: m.root.x})
    assert testing.apply_pass(own(), half(), prove=False)[1].changes


class Approximately(Rewrite):
    """A quotient is off by half a millionth."""

    name: ClassVar[str] = "approximately"

    def pattern(self, op: Ops) -> OpPattern:
        return op.real_div(x=var("x"), y=var("y"))

    def rewrite(self, mb: Builder, m: Match) -> Var:
        return mb.real_div(x=mb.mul(x=m.x, y=1.0000005), y=m.y)

    def check(self, m: Match) -> Match | Refusal:
        return NO_MATCH if m.x.op is not None else m


class Doubled(Approximately):
    """That is no rounding."""

    def rewrite(self, mb: Builder, m: Match) -> Var:
        return mb.real_div(x=m.x, y=mb.mul(x=m.y, y=2))


quotient = mb.program(input_specs=[mb.TensorSpec((2, 64)), mb.TensorSpec((2, 64))])(
    lambda x, y: mb.real_div(x=x, y=y, name="z")
)


def test_an_edit_that_rounds_says_how_to_declare_that_and_by_how_much() -> None:
    with pytest.raises(
        ProofError, match=r"old and new differ by .* promised: bit-exact\. Where that is"
    ) as error:
        testing.apply_pass(Approximately(), quotient)
    enough = float(str(error.value).split("Tolerance(")[1].split(")")[0])
    Approximately.tolerance = ane.Tolerance(enough)
    try:
        assert testing.apply_pass(Approximately(), quotient)[1].changes
    finally:
        del Approximately.tolerance
    with pytest.raises(ProofError) as other:
        testing.apply_pass(Doubled(), quotient)
    assert "Tolerance(" not in str(other.value)


class Picky(Approximately):
    """Refuses."""

    def check(self, m: Match) -> Refusal:
        return Refusal("it is no Sunday", m.root)


def test_a_refusal_shows_the_op() -> None:
    surgery = ane.apply(quotient, [Picky()])
    lines = surgery.details.splitlines()
    at = next(i for i, line in enumerate(lines) if "it is no Sunday" in line)
    assert lines[at + 1].strip() == "%z: 2x64 = real_div(x=%x, y=%y)"
    assert [row["op"] for row in surgery.to_json()["refusals"]] == ["%z: 2x64 = real_div(x=%x, y=%y)"]


def test_op_types_alone_stand_for_a_pattern() -> None:
    @dataclasses.dataclass(frozen=True)
    class Doubled(Rewrite):
        name = "doubled"
        kinds = frozenset({"relu", "abs"})

        def rewrite(self, mb: Builder, m: Match) -> Var:
            return mb.relu6(x=m.root.x)

    program = mb.program(input_specs=[mb.TensorSpec((2,))])(
        lambda x: mb.abs(x=mb.square(x=mb.relu(x=x, name="r"), name="s"), name="y")
    )

    rewritten, _ = testing.apply_pass(Doubled(), program, prove=False)
    assert [op.op_type for op in rewritten.functions["main"].operations] == ["relu6", "square", "relu6"]


def test_an_op_type_that_does_not_exist_is_an_error_of_kinds_too() -> None:
    with pytest.raises(PatternError, match="there is no op 'cumsumm'; did you mean 'cumsum'"):

        @dataclasses.dataclass(frozen=True)
        class Misspelt(Rewrite):
            name = "misspelt"
            kinds = frozenset({"cumsumm"})


class MeanOfSum(Rewrite):
    """The pass of the page."""

    name = "mean_of_sum"
    tolerance = an.Tolerance(1e-3)

    def pattern(self, op: Ops) -> OpPattern:
        return op.mul(x=op.reduce_sum(x=var("x"), as_="sum"), y=var("factor"), commutes=True)

    def check(self, m: Match) -> Match | Refusal:
        axes = [int(axis) for axis in an.constant(m.sum.axes)]
        n = math.prod(m.x.shape[axis] for axis in axes)
        if not an.is_constant(m.factor, 1 / n, rtol=2**-11):
            return Refusal(f"the factor is not 1/{n}", m.root)
        return m.bind(axes=axes)

    def rewrite(self, mb: Builder, m: Match) -> Var:
        return mb.reduce_mean(x=m.x, axes=m.axes, keep_dims=an.constant(m.sum.keep_dims))


class MergeClips(Rewrite):
    """Two clips are one."""

    name = "merge_clips"

    def pattern(self, op: Ops) -> OpPattern:
        return op.clip(x=op.clip(x=var("x"), as_="inner"), as_="outer")

    def check(self, m: Match) -> Match | Refusal:
        low, high = (
            pick(float(an.constant(clip.inputs[end])) for clip in (m.inner, m.outer))
            for pick, end in ((max, "alpha"), (min, "beta"))
        )
        return m.bind(low=low, high=high) if low <= high else Refusal("they do not meet", m.root)

    def rewrite(self, mb: Builder, m: Match) -> Var:
        return mb.clip(x=m.x, alpha=m.low, beta=m.high)


class DropOne(Rewrite):
    """A multiplication by 1 goes."""

    name = "drop_one"

    def pattern(self, op: Ops) -> OpPattern:
        return op.mul(x=var("x"), y=var("one"), commutes=True)

    def check(self, m: Match) -> Match | Refusal:
        return m if an.is_constant(m.one, 1.0) else an.NO_MATCH

    def rewrite(self, mb: Builder, m: Match) -> Var:
        x: Var = m.x
        return x


class LeakyAsMaximum(Rewrite):
    """A leaky ReLU is a maximum."""

    name = "leaky_as_maximum"
    kinds = frozenset({"leaky_relu"})

    def check(self, m: Match) -> Match | Refusal:
        slope = float(an.constant(m.alpha))
        return m.bind(slope=slope) if 0 <= slope <= 1 else Refusal(f"the slope is {slope:g}", m.root)

    def rewrite(self, mb: Builder, m: Match) -> Var:
        return mb.maximum(x=m.x, y=mb.mul(x=m.x, y=m.slope))


STRANGERS = (MeanOfSum(), MergeClips(), DropOne(), LeakyAsMaximum())
EDITS = ["drop_one", "leaky_as_maximum", "mean_of_sum", "merge_clips"]


@pytest.mark.parametrize("kind", [np.float16, np.float32])
def test_four_passes_of_strangers_act_on_models_of_both_types(kind: type[np.floating[Any]]) -> None:
    element = types.fp16 if kind is np.float16 else types.fp32

    @mb.program(input_specs=[mb.TensorSpec((2, 8), element)], opset_version=ct.target.iOS16)
    def program(x: Var) -> Var:
        x = mb.leaky_relu(x=mb.mul(x=x, y=kind(1)), alpha=kind(0.1))
        x = mb.clip(x=mb.clip(x=x, alpha=kind(-3), beta=kind(3)), alpha=kind(-2), beta=kind(5))
        return mb.mul(x=mb.reduce_sum(x=x, axes=[-1], keep_dims=True), y=kind(0.125))

    surgery = ane.apply(program, list(STRANGERS), prove="both", quiet=True)
    assert sorted(change.pass_name for change in surgery.changes) == EDITS
    assert surgery.refusals == []


@pytest.mark.parametrize("precision", ["FLOAT16", "FLOAT32"])
def test_four_passes_of_strangers_act_inside_a_conversion(precision: str) -> None:
    """Without the passes of coremltools that would do the same before them."""

    class Net(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = torch.nn.functional.leaky_relu(x * 1.0, 0.1)
            return torch.clamp(torch.clamp(x, -3, 3), -2, 5).sum(-1, keepdim=True) * 0.125

    pipeline = ane.Recipe(name="mine", steps=STRANGERS).pipeline()
    pipeline.remove_passes({"common::noop_elimination", "common::fuse_reduce_mean"})
    model = ct.convert(
        torch.jit.trace(Net().eval(), torch.ones(2, 8)),  # type: ignore[no-untyped-call]
        inputs=[ct.TensorType("x", (2, 8))],
        pass_pipeline=pipeline,
        compute_precision=getattr(ct.precision, precision),
        minimum_deployment_target=ct.target.iOS16,
    )
    assert sorted({change.pass_name for change in pipeline.report.changes}) == EDITS
    assert "reduce_mean" in ane.to_text(model)
