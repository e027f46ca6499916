"""The search: what is kept, what is not, and pairs of steps that pay only together."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
from small_rewrites import small_rewrite

from anesurgery.errors import PassError
from anesurgery.files.copying import copy_program
from anesurgery.files.interface import InterfaceChange
from anesurgery.files.package import Loaded
from anesurgery.mil import Operation, Program, Var, ct, mb, types
from anesurgery.placement.evidence import Finding, Grade
from anesurgery.placement.score import GAINS, Expected
from anesurgery.placement.target import Target
from anesurgery.placement.verdicts import Legality
from anesurgery.rewriting import search as searching
from anesurgery.rewriting.builder import Builder
from anesurgery.rewriting.ml_program import MLProgram
from anesurgery.rewriting.passes import Pass
from anesurgery.rewriting.pattern import Match, OpPattern, Ops
from anesurgery.rewriting.rewrite import Rewrite
from anesurgery.rewriting.search import Search, Searching
from anesurgery.rewriting.session import Session
from anesurgery.rewriting.step_trials import LEAST, Trial, Trials

TARGET = Target.parse("M4/macOS 15")


def built(build: Callable[[Var], Any]) -> Program:
    return mb.program(
        input_specs=[mb.TensorSpec((32, 512, 64, 64), dtype=types.fp16)], opset_version=ct.target.iOS17
    )(lambda x: build(x))


CumsumToModes = small_rewrite(
    "cumsum_to_modes",
    lambda op: op.cumsum(),
    lambda mb, m: mb.mod(x=mb.mod(x=m.root.x, y=m.root.x), y=m.root.x),
)
"""Makes it worse: one op that is off the ANE becomes two."""
ModToExp = small_rewrite(
    "mod_to_exp", lambda op: op.mod(x=op.mod(as_="first")), lambda mb, m: mb.exp(x=m.first.x)
)
"""What only pays after the other step."""
Crowd = small_rewrite("crowd", lambda op: op.tanh(), lambda mb, m: mb.exp(x=mb.exp(x=mb.exp(x=m.root.x))))
"""A share that rises by more ops on the ANE, with nothing repaired."""


@dataclass(frozen=True)
class Fails(Pass):
    """A pass that raises."""

    name: ClassVar[str] = "fails"

    def run(self, program: Program, session: Session) -> None:
        raise PassError("out of luck")


Remedies = Callable[[Sequence[Finding]], Sequence[Pass]]


@dataclass(frozen=True)
class Sought(Searching):
    """A search for what a test names."""

    name: ClassVar[str] = "sought"
    named: Remedies = lambda findings: ()
    trials: int = 20

    def remedies(self, findings: Sequence[Finding], target: Target) -> Sequence[Pass]:
        return self.named(findings)


def sought(program: Program, named: Remedies, trials: int = 20) -> tuple[Search, Trial]:
    start = Trial(MLProgram(Loaded(copy_program(program))), TARGET, Session())
    found = Search(start, Trials(Session()))
    return found, found.best([Sought(named, trials)])


def search(program: Program, *steps: Pass, trials: int = 20) -> tuple[Search, Trial]:
    return sought(program, lambda findings: steps, trials)


def sums(x: Var) -> Any:
    return mb.tanh(x=mb.cumsum(x=mb.tanh(x=x), axis=-1), name="y")


def test_a_pair_is_found_whose_first_step_does_harm() -> None:
    for steps in ((CumsumToModes(), ModToExp()), (ModToExp(), CumsumToModes())):
        found, end = search(built(sums), *steps)
        assert [step.name for step in end.steps] == ["cumsum_to_modes", "mod_to_exp"]
        assert end.score.share["ops"] == 1
        ((steps_kept, said),) = found.results.remedy_gains.items()
        assert [step.name for step in steps_kept] == ["cumsum_to_modes", "mod_to_exp"]
        assert said.startswith("expected time ")
        assert not found.results.remedies_rejected


def test_the_first_step_alone_is_not_kept() -> None:
    found, end = search(built(sums), CumsumToModes())
    assert not end.steps
    (_, refusal), *_ = found.results.remedies_rejected.values()
    assert "the expected time would rise" in refusal.reason


def test_more_ops_on_the_ane_are_no_gain() -> None:
    found, end = search(built(sums), Crowd())
    assert not end.steps
    assert "tried and undone" in str(found.results.remedies_rejected["crowd"][1])


def test_a_step_that_fails_does_not_stop_the_others() -> None:
    found, end = search(built(sums), Fails(), CumsumToModes(), ModToExp())
    assert len(end.steps) == 2
    assert "out of luck" in found.results.remedies_rejected["fails"][1].reason


@pytest.mark.parametrize("trials", [0, 1])
def test_trials_are_counted(trials: int) -> None:
    assert not search(built(sums), CumsumToModes(), ModToExp(), trials=trials)[1].steps


def named(rule: str, op: Operation) -> Finding:
    return Finding(rule, "legality", "", "", "", Grade.MEASURED, op=op.outputs[0].name)


def test_what_stands_second_against_an_op_is_tried_where_the_first_has_no_remedy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first reason against the sum names nothing that helps; a later one names the first of a pair."""
    steps = {"later": CumsumToModes(), "op-mod": ModToExp()}

    def remedies(findings: Sequence[Finding]) -> Sequence[Pass]:
        return [step for rule, step in steps.items() if rule in {f.rule for f in findings}]

    class Both(Legality):
        def speaking(self, op: Operation) -> Iterator[Finding]:
            yield from super().speaking(op)
            if op.op_type == "cumsum":
                yield named("later", op)

    def end() -> Trial:
        return sought(built(sums), remedies)[1]

    assert not end().steps
    monkeypatch.setattr(searching, "Legality", Both)
    assert [step.name for step in end().steps] == ["cumsum_to_modes", "mod_to_exp"]


@dataclass(frozen=True)
class Known(Rewrite):
    """No gain by the estimate, but one that was measured."""

    name: ClassVar[str] = "known"

    def pattern(self, op: Ops) -> OpPattern:
        return op.tanh()

    def rewrite(self, mb: Builder, m: Match) -> Var:
        return mb.exp(x=m.root.x)

    def known_gain(self, graph: Any, target: Target) -> str:
        return "twice as fast (measured)"


@dataclass(frozen=True)
class KnownLoss(Rewrite):
    """What was measured does not help where an op leaves the engine."""

    name: ClassVar[str] = "known_loss"

    def pattern(self, op: Ops) -> OpPattern:
        return op.tanh()

    def rewrite(self, mb: Builder, m: Match) -> Var:
        return mb.mod(x=m.root.x, y=m.root.x)

    def known_gain(self, graph: Any, target: Target) -> str:
        return "twice as fast (measured)"


def test_what_was_measured_counts_more_than_the_estimate() -> None:
    found, end = search(built(sums), Known())
    assert [step.name for step in end.steps][:1] == ["known"]
    assert next(iter(found.results.remedy_gains.values())) == "twice as fast (measured)"
    _, end = search(built(sums), KnownLoss())
    assert not end.steps


@dataclass(frozen=True)
class ChangedExp(Rewrite):
    """A result that callers must read in another way, for the sake of a step that pays."""

    name: ClassVar[str] = "cumsum_to_changed_exp"

    def pattern(self, op: Ops) -> OpPattern:
        return op.cumsum()

    def rewrite(self, mb: Builder, m: Match) -> Var:
        return mb.exp(x=m.root.x)

    def run(self, program: Program, session: Session) -> None:
        super().run(program, session)
        if session.changes:
            session.contract.append(InterfaceChange("y is another", ("y",)))


CumsumToExp = small_rewrite("cumsum_to_exp", lambda op: op.cumsum(), lambda mb, m: mb.exp(x=m.root.x))
"""The same, and callers read what they read before."""


def test_a_result_that_need_not_change_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """The wrong version: the step that changes the result is tried first, and then nothing is left to gain."""
    monkeypatch.setattr(searching, "CLEARLY", 0.95)
    found, end = search(built(sums), ChangedExp(), CumsumToExp())
    assert [step.name for step in end.steps] == ["cumsum_to_exp"]
    (_, refusal) = found.results.remedies_rejected["cumsum_to_changed_exp"]
    assert refusal.reason.startswith("tried and undone: as much is gained without it")
    assert [step.name for step in search(built(sums), ChangedExp())[1].steps] == ["cumsum_to_changed_exp"]


def test_a_result_does_not_change_for_a_gain_that_is_not_clear() -> None:
    """The wrong version: any gain in time, as of a decoder that gave one position of all for nothing."""
    found, end = search(built(sums), ChangedExp())
    assert not end.steps
    (_, refusal) = found.results.remedies_rejected["cumsum_to_changed_exp"]
    assert refusal.reason.startswith(
        "tried and undone: the results would change, and the expected time 9.72 ms -> 7.11 ms"
    )


SumsToThree = small_rewrite(
    "sums_to_three",
    lambda op: op.cumsum(x=op.cumsum(as_="first")),
    lambda mb, m: mb.exp(x=mb.relu(x=mb.relu(x=m.first.x))),
)
"""Pays, and makes the model larger: two sums become three ops that are legal."""
AllRelu = small_rewrite("all_relu", lambda op: op.any("exp", "cumsum")(), lambda mb, m: mb.relu(x=m.root.x))
"""Does as much for any op in the middle, whatever it has become."""


def test_a_step_that_a_later_one_makes_useless_is_taken_back() -> None:
    """The wrong version: a greedy row, in which what was kept once stays."""

    def twice(x: Var) -> Any:
        return mb.tanh(x=mb.cumsum(x=mb.cumsum(x=mb.tanh(x=x), axis=-1), axis=-1), name="y")

    found, end = search(built(twice), SumsToThree(), AllRelu())
    assert [step.name for step in end.steps] == ["all_relu"]
    (_, refusal) = found.results.remedies_rejected["sums_to_three"]
    words = "kept first, and undone: the other steps do as well without it (expected time"
    assert refusal.reason.startswith(words)
    assert [step.name for steps in found.results.remedy_gains for step in steps] == ["all_relu"]


@dataclass(frozen=True)
class SumsToMany(Rewrite):
    """A sum becomes so many ops that to judge them takes longer than all else."""

    name: ClassVar[str] = "sums_to_many"

    def pattern(self, op: Ops) -> OpPattern:
        return op.cumsum()

    def rewrite(self, mb: Builder, m: Match) -> Var:
        out = m.root.x
        for _ in range(2 * LEAST):
            out = mb.mod(x=out, y=m.root.x)
        return out


def test_large_trials_use_up_what_may_be_tried() -> None:
    """The wrong version: as many trials, however large a step makes the program."""
    found, end = search(built(sums), SumsToMany(), trials=4)
    tried = [state for state in found.tried.reached.values() if isinstance(state, Trial)]
    assert not end.steps
    assert sum(state.size for state in tried) <= 4 * LEAST + max(state.size for state in tried)
    assert len(tried) < 4


def test_two_steps_are_tried_in_one_order() -> None:
    """The wrong version: both orders, which lead to the same program."""
    found, _ = search(built(sums), CumsumToModes(), Crowd())
    pairs = [
        [str(step) for step in steps]
        for steps, end in found.tried.reached.items()
        if len(steps) == 2 and isinstance(end, Trial)
    ]
    assert [sorted(pair) for pair in pairs] == [["crowd", "cumsum_to_modes"]]


Rounds = small_rewrite(
    "rounds", lambda op: op.any("exp", "cumsum")(), lambda mb, m: mb.relu(x=m.root.x), rounds=True
)
"""A gain in time for which every value is rounded."""


@pytest.mark.parametrize(("least", "kept"), [(0.0, False), (1.0, True)])
def test_rounding_pays_by_more_on_the_engine_or_a_clear_gain(
    monkeypatch: pytest.MonkeyPatch, least: float, kept: bool
) -> None:
    """The wrong version: any gain in time, however small, for numbers that are less exact."""
    monkeypatch.setattr(searching, "CLEARLY", least)
    monkeypatch.setattr(searching, "why_too_far", lambda *_: "")
    monkeypatch.setitem(GAINS, "on the ANE", lambda *_: "")
    monkeypatch.setitem(GAINS, "perhaps", lambda *_: "")
    found, end = search(built(sums), Rounds())
    assert bool(end.steps) == kept
    said = (
        found.results.remedies_rejected["rounds"][1].reason
        if "rounds" in found.results.remedies_rejected
        else "kept"
    )
    assert ("values would be rounded" in said) != kept


def test_what_core_ml_counts_is_no_run_time_and_pays_for_no_rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    """The wrong version: fp16 on the CPU, since Core ML counts less for it."""
    monkeypatch.setattr(searching, "CLEARLY", 1.0)
    monkeypatch.setattr(Expected, "times", lambda *_: None)
    monkeypatch.setattr(searching, "why_too_far", lambda *_: "")
    monkeypatch.setitem(GAINS, "on the ANE", lambda *_: "")
    monkeypatch.setitem(GAINS, "perhaps", lambda *_: "")
    found, end = search(built(sums), Rounds())
    assert not end.steps
    assert found.results.remedies_rejected["rounds"][1].reason.endswith(
        "no more would run on the ANE, and no run time is known"
    )
    monkeypatch.setitem(GAINS, "perhaps", lambda *_: "more")
    assert search(built(sums), Rounds())[1].steps
