"""Passes and pipelines: what they need and promise, in which order they run, and what they refused."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pytest
from small_rewrites import DoubleRelu, one_input, target

from anesurgery.errors import PassError, Refusal
from anesurgery.mil import Program, Var, mb, walk_ops
from anesurgery.passes.negate_subtract import NegateSubtract
from anesurgery.rewriting.builder import Builder
from anesurgery.rewriting.passes import Pass, Pipeline, run_pass
from anesurgery.rewriting.pattern import Match, OpPattern, Ops, var
from anesurgery.rewriting.refusals import grouped_refusals
from anesurgery.rewriting.rewrite import Rewrite
from anesurgery.rewriting.session import Session, counts
from anesurgery.testing import apply_pass, reasons

# Passes and pipelines


@dataclass(frozen=True)
class Note(Pass):
    """Writes down that it ran."""

    name: ClassVar[str] = "note"
    label: str = "a"

    def run(self, program: Program, session: Session) -> None:
        session.artifacts[f"{self.label}{len(session.artifacts)}"] = np.zeros(1)


@dataclass(frozen=True)
class Broken(Pass):
    """Promises or needs what is not so."""

    name: ClassVar[str] = "broken"
    how: str = "ensures"

    def requires(self, program: Program) -> Refusal | None:
        return Refusal("there is no attention") if self.how == "requires" else None

    def run(self, program: Program, session: Session) -> None:
        if self.how == "runs":
            raise RuntimeError("oh")

    def ensures(self, program: Program) -> Refusal | None:
        return Refusal("a sub is left", next(walk_ops(program))) if self.how == "ensures" else None


def test_what_a_pass_needs_and_promises() -> None:
    session = Session()
    run_pass(Broken("requires"), target(), session)
    assert reasons(session) == ["there is no attention"]
    with pytest.raises(PassError, match=r"pass broken did not keep its promise: .*a sub is left"):
        run_pass(Broken("ensures"), target(), session)
    with pytest.raises(PassError, match=r"pass broken failed: RuntimeError: oh; .*unchanged"):
        run_pass(Broken("runs"), target(), session)


def test_a_pipeline_runs_in_order_and_names_what_ran_before() -> None:
    session, seen = Session(), []
    steps = Pipeline((Note(), Note("b")), observer=lambda step, program: seen.append(str(step)))
    run_pass(steps, target(), session)
    assert list(session.artifacts) == ["a0", "b1"]
    assert seen == ["note", "note(label='b')"]
    with pytest.raises(PassError, match=r"oh; .*\(passes before it: note, note\)"):
        run_pass(Pipeline((Note(), Note(), Broken("runs"))), target(), Session())


def test_a_pipeline_until_stable() -> None:
    program = one_input(lambda x: mb.relu(x=mb.relu(x=mb.sub(x=x, y=mb.exp(x=x)))))
    session = Session()
    run_pass(Pipeline((DoubleRelu(), NegateSubtract()), until_stable=True), program, session)
    assert counts(session.changes) == {"double_relu": 1, "negate_subtract": 1}

    @dataclass(frozen=True)
    class Turn(Rewrite):
        name: ClassVar[str] = "turn"
        there: str = "exp"
        back: str = "exp2"

        def pattern(self, op: Ops) -> OpPattern:
            return op.any(self.there)(x=var("x"))

        def rewrite(self, mb: Builder, m: Match) -> Any:
            return getattr(mb, self.back)(x=m.x)

    endless = Pipeline((Turn(), Turn("exp2", "exp")), until_stable=True, limit=3)
    with pytest.raises(PassError, match="still changes the model after 3 rounds: turn, turn"):
        run_pass(endless, target(), Session())


@dataclass(frozen=True)
class First(Note):
    """Runs before notes."""

    name: ClassVar[str] = "first"
    precedes: ClassVar[tuple[str, ...]] = ("note",)


@dataclass(frozen=True)
class Last(Note):
    """Runs after notes."""

    name: ClassVar[str] = "last"
    follows: ClassVar[tuple[str, ...]] = ("note", "elsewhere")


def test_steps_are_sorted_by_what_they_declare_and_otherwise_stay() -> None:
    def names(*steps: Pass) -> list[str]:
        return [str(step) for step in Pipeline(steps).steps]

    assert names(Last(), Note(), First()) == ["first", "note", "last"]
    assert names(First(), Note(), Last()) == ["first", "note", "last"]
    assert names(Last(), DoubleRelu(), First()) == ["last", "double_relu", "first"]
    assert names(Note(), DoubleRelu(), Last("b"), Last(), Note("c")) == [
        "note",
        "double_relu",
        "last(label='b')",
        "last",
        "note(label='c')",
    ]


def test_an_order_that_contradicts_itself_names_the_passes() -> None:
    @dataclass(frozen=True)
    class Both(Note):
        name: ClassVar[str] = "both"
        precedes: ClassVar[tuple[str, ...]] = ("note",)
        follows: ClassVar[tuple[str, ...]] = ("note",)

    with pytest.raises(PassError, match="contradicts itself: (both before note|note before both), "):
        Pipeline((Note(), Both()))


def test_refusals_are_grouped_by_reason() -> None:
    def body(x: Var) -> Any:
        inner = mb.relu(x=x, name="inner")
        return mb.relu(x=inner, name="r1"), mb.relu(x=inner, name="r2")

    _, session = apply_pass(DoubleRelu(), one_input(body))
    ((name, reason, found),) = grouped_refusals(session.refusals)
    assert (name, reason, len(found)) == ("double_relu", "%inner is read elsewhere", 2)
    assert found[0].where is not None
    assert found[0].where.name == "r1"
