"""Sums and means of squares as they stand under roots: of a row of numbers, or of several values."""

from __future__ import annotations

import math
from dataclasses import dataclass

from anesurgery.mil import Operation, Var, producer, static_shape
from anesurgery.semantics.reading import ints, number
from anesurgery.semantics.row_lengths import squared


@dataclass(frozen=True)
class SumOfSquares:
    """`sum(x * x) + epsilon` over axes, or `a * a + b * b + epsilon`."""

    values: tuple[Var, ...]
    """What is squared; several have one shape."""
    total: Operation | None
    """The reduction; None where values are added."""
    epsilon: float
    ops: tuple[Operation, ...]
    """All that it is written with."""
    count: int
    """The sum is at most so many times the largest square."""

    @property
    def reduces(self) -> str:
        """The op type that adds the squares up: a mean stays one."""
        return "reduce_mean" if self.total is not None and self.total.op_type == "reduce_mean" else "reduce_sum"


def sum_of_squares(var: Var) -> SumOfSquares | None:
    """What a value is, if it is one of these."""
    epsilon, ops = 0.0, list[Operation]()
    while (op := producer(var, "add")) is not None:
        small = next(((x, v) for x, y in ((op.x, op.y), (op.y, op.x)) if (v := number(y)) is not None), None)
        if small is None or small[1] < 0:
            break
        var, epsilon = small[0], epsilon + small[1]
        ops.append(op)
    found = _reduced(var) or _added(var)
    if found is None:
        return None
    return SumOfSquares(found.values, found.total, epsilon, (*ops, *found.ops), found.count)


def _reduced(var: Var) -> SumOfSquares | None:
    total = producer(var, "reduce_sum", "reduce_mean", "reduce_sum_square")
    if total is None:
        return None
    square = None if total.op_type == "reduce_sum_square" else producer(total.x)
    source = total.x if total.op_type == "reduce_sum_square" else squared(square)
    shape, axes = static_shape(total.x), ints(total, "axes")
    if source is None or shape is None or not axes:
        return None
    count = 1 if total.op_type == "reduce_mean" else math.prod(shape[axis] for axis in axes)
    return SumOfSquares((source,), total, 0.0, (total,) if square is None else (total, square), count)


def _added(var: Var) -> SumOfSquares | None:
    """Squares of two values or more of one shape."""
    pending, values, ops = [var], list[Var](), list[Operation]()
    while pending:
        op = pending.pop().op
        source = squared(op)
        if op is None or (source is None and op.op_type != "add"):
            return None
        ops.append(op)
        if source is None:
            pending += [op.y, op.x]
        else:
            values.append(source)
    if len(values) < 2 or len({static_shape(v) for v in values}) != 1:
        return None
    return SumOfSquares(tuple(values), None, 0.0, tuple(ops), len(values))
