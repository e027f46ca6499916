"""How often a loop runs by its counter, against what straight code was made of it."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

import anesurgery as ane
from anesurgery.facts.loops import loop_rounds, ops_with_run_counts
from anesurgery.mil import Operation, Program, Var, mb, walk_ops
from anesurgery.passes.unroll_loop.inlining import Inliner


def loop(start: int, more: Callable[[Var], Var], step: Callable[[Var], Var]) -> Program:
    @mb.program(input_specs=[mb.TensorSpec((8, 8))])
    def program(x: Var) -> Var:
        def body(i: Var, h: Var) -> tuple[Var, Var]:
            return step(i), mb.matmul(x=h, y=h)

        test = lambda i, h: more(i)  # noqa: E731
        return mb.while_loop(_cond=test, _body=body, loop_vars=(np.int32(start), x))[1]

    return program


def of(program: Program) -> Operation:
    return next(op for op in walk_ops(program) if op.op_type == "while_loop")


COUNTED = {
    "up": (0, lambda i: mb.less(x=i, y=np.int32(5)), lambda i: mb.add(x=i, y=np.int32(2)), 3),
    "closed": (1, lambda i: mb.less_equal(x=i, y=np.int32(5)), lambda i: mb.add(x=np.int32(2), y=i), 3),
    "down": (4, lambda i: mb.greater(x=i, y=np.int32(0)), lambda i: mb.sub(x=i, y=np.int32(1)), 4),
    "the bound first": (0, lambda i: mb.greater(x=np.int32(3), y=i), lambda i: mb.add(x=i, y=np.int32(1)), 3),
    "never": (7, lambda i: mb.less(x=i, y=np.int32(5)), lambda i: mb.add(x=i, y=np.int32(1)), 0),
}


@pytest.mark.parametrize("name", COUNTED)
def test_a_counter_says_how_often(name: str) -> None:
    start, more, step, wanted = COUNTED[name]
    assert loop_rounds(of(loop(start, more, step))) == wanted
    walked = Inliner(None, 64, 2000)
    walked.inline_control(of(loop(start, more, step)))
    assert 2000 - walked.ops_left == wanted, "one product in each round"


def test_other_arithmetic_of_single_numbers_counts_too() -> None:
    more = lambda i: mb.logical_not(x=mb.equal(x=i, y=np.int32(16)))  # noqa: E731
    assert loop_rounds(of(loop(1, more, lambda i: mb.mul(x=i, y=np.int32(2))))) == 4


def test_a_condition_that_a_round_hands_on_counts() -> None:
    """As an upgraded network has it: the condition is a value of the loop, as a number."""

    @mb.program(input_specs=[mb.TensorSpec((8, 8))])
    def program(x: Var) -> Var:
        def body(go: Var, i: Var, h: Var) -> tuple[Var, Var, Var]:
            following = mb.add(x=i, y=np.float32(1))
            more = mb.cast(x=mb.less(x=following, y=np.float32(3)), dtype="fp32")
            return mb.abs(x=more), following, mb.relu(x=h)

        test = lambda go, i, h: mb.greater(x=go, y=np.float32(1e-6))  # noqa: E731
        return mb.while_loop(_cond=test, _body=body, loop_vars=(np.float32(2), np.float32(0), x))[2]

    assert loop_rounds(of(program)) == 3


@pytest.mark.one_of(5)
@pytest.mark.parametrize(
    ("more", "step"),
    [
        (lambda i: mb.less(x=i, y=np.int32(5)), lambda i: mb.sub(x=i, y=np.int32(1))),
        (lambda i: mb.less(x=i, y=np.int32(5)), lambda i: mb.mod(x=i, y=np.int32(2))),
    ],
)
def test_what_never_ends_or_is_unknown_is_not_counted(
    more: Callable[[Var], Var], step: Callable[[Var], Var]
) -> None:
    assert loop_rounds(of(loop(1, more, step))) is None


def test_what_an_input_decides_is_not_counted() -> None:
    @mb.program(input_specs=[mb.TensorSpec((1,))])
    def program(x: Var) -> Var:
        less = lambda h: mb.squeeze(x=mb.less(x=h, y=np.float32(5)), axes=[0])  # noqa: E731
        return mb.while_loop(_cond=less, _body=lambda h: (mb.add(x=h, y=np.float32(1)),), loop_vars=(x,))

    assert loop_rounds(of(program)) is None


def test_each_round_counts_in_an_inspection() -> None:
    def inspected(last: int) -> ane.Inspection:
        more = lambda i: mb.less(x=i, y=np.int32(last))  # noqa: E731
        return ane.inspect(loop(0, more, lambda i: mb.add(x=i, y=np.int32(1))), "M4/macOS 15")

    once, often = inspected(1), inspected(5)
    assert sum(row.flop for row in often.ops) == 5 * sum(row.flop for row in once.ops) > 0


def test_an_op_runs_once_for_each_round_of_the_loops_around_it() -> None:
    def counted(last: int, body: Callable[[Var], Var], x: Var) -> Var:
        test = lambda i, h: mb.less(x=i, y=np.int32(last))  # noqa: E731
        step = lambda i, h: (mb.add(x=i, y=np.int32(1)), body(h))  # noqa: E731
        return mb.while_loop(_cond=test, _body=step, loop_vars=(np.int32(0), x))[1]

    @mb.program(input_specs=[mb.TensorSpec((8, 8))])
    def program(x: Var) -> Var:
        return counted(3, lambda h: counted(5, lambda g: mb.matmul(x=g, y=g), h), x)

    runs = [(op.op_type, times) for op, times in ops_with_run_counts(program.functions["main"])]
    assert sorted(times for kind, times in runs if kind == "while_loop") == [1, 3]
    assert [times for kind, times in runs if kind == "matmul"] == [15]
