"""The search: what is kept, what is not, and pairs of steps that pay only together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest

from anesurgery.errors import PassError
from anesurgery.mil import Program, Var, ct, mb, types
from anesurgery.placement.evidence import Finding
from anesurgery.placement.target import Target
from anesurgery.rewriting.builder import Builder
from anesurgery.rewriting.copying import copied
from anesurgery.rewriting.passes import Pass
from anesurgery.rewriting.pattern import Match, OpPattern, Ops
from anesurgery.rewriting.rewrite import Rewrite
from anesurgery.rewriting.search import Search, State
from anesurgery.rewriting.session import Session

TARGET = Target.parse("M4/macOS 15")


def built(build: Callable[[Var], Any]) -> Program:
    @mb.program(input_specs=[mb.TensorSpec((32, 512, 64, 64), dtype=types.fp16)], opset_version=ct.target.iOS17)
    def program(x: Var) -> Any:
        return build(x)

    return program


@dataclass(frozen=True)
class CumsumToModes(Rewrite):
    """Makes it worse: one op that is off the ANE becomes two."""

    name: ClassVar[str] = "cumsum_to_modes"

    def pattern(self, op: Ops) -> OpPattern:
        return op.cumsum()

    def rewrite(self, mb: Builder, m: Match) -> Var:
        return mb.mod(x=mb.mod(x=m.root.x, y=m.root.x), y=m.root.x)


@dataclass(frozen=True)
class ModToExp(Rewrite):
    """What only pays after the other step."""

    name: ClassVar[str] = "mod_to_exp"

    def pattern(self, op: Ops) -> OpPattern:
        return op.mod()

    def rewrite(self, mb: Builder, m: Match) -> Var:
        return mb.exp(x=m.root.x)


@dataclass(frozen=True)
class Crowd(Rewrite):
    """A share that rises by more ops on the ANE, with nothing repaired."""

    name: ClassVar[str] = "crowd"

    def pattern(self, op: Ops) -> OpPattern:
        return op.tanh()

    def rewrite(self, mb: Builder, m: Match) -> Var:
        return mb.exp(x=mb.exp(x=mb.exp(x=m.root.x)))


@dataclass(frozen=True)
class Fails(Pass):
    """A pass that raises."""

    name: ClassVar[str] = "fails"

    def run(self, program: Program, session: Session) -> None:
        raise PassError("out of luck")


def search(program: Program, *steps: Pass, trials: int = 20) -> tuple[Search, State]:
    def remedies(findings: Sequence[Finding]) -> Sequence[Pass]:
        return steps

    found = Search(TARGET, Session(), remedies, lambda session, program: None, trials)
    return found, found.improve(State(copied(program), TARGET))


def sums(x: Var) -> Any:
    return mb.tanh(x=mb.cumsum(x=mb.tanh(x=x), axis=-1), name="y")


def test_a_pair_is_found_whose_first_step_does_harm() -> None:
    for steps in ((CumsumToModes(), ModToExp()), (ModToExp(), CumsumToModes())):
        found, end = search(built(sums), *steps)
        assert [step.name for step in end.steps] == ["cumsum_to_modes", "mod_to_exp"]
        assert end.standing.share["ops"] == 1
        (said,) = found.kept
        assert said.startswith("kept cumsum_to_modes and then mod_to_exp: ops off the ANE ")
        assert not found.rejected


def test_the_first_step_alone_is_not_kept() -> None:
    found, end = search(built(sums), CumsumToModes())
    assert not end.steps
    (_, refusal), *_ = found.rejected.values()
    assert "the share of ops on the ANE would fall" in refusal.reason


def test_more_ops_on_the_ane_are_no_gain() -> None:
    found, end = search(built(sums), Crowd())
    assert not end.steps
    assert "tried and not kept" in str(found.rejected["crowd"][1])


def test_a_step_that_fails_does_not_stop_the_others() -> None:
    found, end = search(built(sums), Fails(), CumsumToModes(), ModToExp())
    assert len(end.steps) == 2
    assert "out of luck" in found.rejected["fails"][1].reason


@pytest.mark.parametrize("trials", [0, 1])
def test_trials_are_counted(trials: int) -> None:
    assert not search(built(sums), CumsumToModes(), ModToExp(), trials=trials)[1].steps
