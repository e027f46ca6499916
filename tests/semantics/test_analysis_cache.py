"""Answers are kept while nothing is edited, and only then."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np

from anesurgery.mil import Program, Var, mb
from anesurgery.rewriting.builder import Builder
from anesurgery.rewriting.passes import run_pass
from anesurgery.rewriting.pattern import Match, OpPattern, Ops
from anesurgery.rewriting.rewrite import Rewrite
from anesurgery.rewriting.session import Session
from anesurgery.semantics.analysis_cache import cached, caching
from anesurgery.semantics.intervals import interval


def clipped() -> Program:
    return mb.program(input_specs=[mb.TensorSpec((2, 3))])(
        lambda x: mb.relu(x=mb.clip(x=x, alpha=0.0, beta=1.0, name="inner"), name="y")
    )


def test_a_function_is_asked_once_within_and_each_time_outside() -> None:
    asked = list[int]()

    @cached
    def twice(number: int) -> int:
        asked.append(number)
        return 2 * number

    assert [twice(3), twice(3)] == [6, 6]
    assert asked == [3, 3]
    with caching():
        assert [twice(3), twice(3), twice(4)] == [6, 6, 8]
        assert asked == [3, 3, 3, 4]
        with caching():
            twice(3)
        assert asked == [3, 3, 3, 4, 3]
    twice(3)
    assert asked[-2:] == [3, 3]


def test_what_is_kept_is_forgotten_after_an_edit() -> None:
    """The wrong version forgets nothing, and answers for the program as it was."""
    program = clipped()
    (function,) = program.functions.values()
    (y,) = function.outputs
    (clip,) = (op for op in function.operations if op.op_type == "clip")
    with caching() as forget:
        assert interval(y) == (0, 1)
        with function:
            wider = mb.const(val=np.float32(5), before_op=clip)
        clip.set_inputs(beta=wider)
        assert interval(y) == (0, 1)
        forget()
        assert interval(y) == (0, 5)


@dataclass(frozen=True)
class _DropsClips(Rewrite):
    """Takes clips away, without an op in their place, and asks where the result of the program lies before."""

    name: ClassVar[str] = "drops_clips"
    end: Var | None = None
    ends: list[tuple[float, float]] = field(default_factory=list, compare=False)

    def pattern(self, op: Ops) -> OpPattern:
        return op.clip()

    def check(self, m: Match) -> Match:
        self.ends.append(interval(self.end))
        return m

    def rewrite(self, mb: Builder, m: Match) -> Var:
        value: Var = m.root.x
        return value


def test_an_edit_that_makes_no_op_is_one_too() -> None:
    """The wrong version forgets only after edits that make ops, and still knows of the inner clip."""

    @mb.program(input_specs=[mb.TensorSpec((2, 3))])
    def program(x: Var) -> Var:
        inner = mb.clip(x=x, alpha=0.0, beta=1.0)
        return mb.relu(x=mb.clip(x=inner, alpha=0.0, beta=5.0), name="y")

    step = _DropsClips(end=program.functions["main"].outputs[0])
    run_pass(step, program, Session(prove_sites=False))
    assert step.ends == [(0, 1), (0, 5)]
