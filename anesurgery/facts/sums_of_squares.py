"""Sums and means of squares as they stand under roots and logarithms: of a row, or of several values."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from anesurgery import fp16
from anesurgery.facts.written_exponentials import log_guard
from anesurgery.mil import Operation, Var, producer, static_shape
from anesurgery.semantics.bounds import squared
from anesurgery.semantics.reading import beside_number, clipped_divisor, ints, number, readers_after, scaled

LEAST = 2.0**-12
"""The largest magnitude is taken for no less, since it is divided by; smaller numbers square to 0 in fp16."""


@dataclass(frozen=True)
class SumOfSquares:
    """`factor * sum(x * x) + epsilon` over axes, or `factor * (a * a + b * b) + epsilon`."""

    values: tuple[Var, ...]
    """What is squared; several have one shape."""
    total: Operation | None
    """The reduction; None where values are added."""
    epsilon: float
    ops: tuple[Operation, ...]
    """All that it is written with."""
    count: int
    """The sum is at most so many times the largest square."""
    factor: float = 1.0
    """What the sum is multiplied with, as by n / (n - 1) for an unbiased variance."""

    @property
    def most(self) -> float:
        """The whole is at most so many times the largest square, the epsilon left out."""
        return self.count * max(self.factor, 1.0)

    def reaches(self, size: Callable[[Var], float]) -> float:
        """What the squares add up to at most, the epsilon left out, where `size` bounds each value."""
        return max(map(size, self.values)) ** 2 * self.most

    @property
    def reduces(self) -> str:
        """The op type that adds the squares up: a mean stays one."""
        return "reduce_mean" if self.total is not None and self.total.op_type == "reduce_mean" else "reduce_sum"


def read_by_root(op: Operation) -> tuple[SumOfSquares, float] | None:
    """The sum of squares of which an op is the root or the logarithm, and the least of it that is read.

    The reciprocal root of a norm, which is multiplied with the very numbers, is a form of its own, and none.
    """
    if op.op_type == "log":
        guarded = log_guard(op.x, number(op.inputs.get("epsilon")) or 0.0)
        if guarded is None:
            return None
        var, guard, clips, before = guarded
        found = sum_of_squares(var if clips else op.x)
        if found is None or (guard and not before) or any(_caps(before_op) for before_op in before):
            return None
        return (replace(found, ops=(*before, *found.ops)), guard) if clips else (found, 0.0)
    if op.op_type == "pow" and number(op.y) != 0.5:
        return None
    found = sum_of_squares(op.x)
    if found is None or (op.op_type == "rsqrt" and (_guards(op) or _ends_norm(op, found.values))):
        return None
    return found, 0.0


def _guards(op: Operation) -> bool:
    """Does a reciprocal root add something of its own that fp16 can hold?"""
    return (number(op.inputs.get("epsilon")) or 0.0) >= fp16.LEAST / 2


def _ends_norm(op: Operation, values: tuple[Var, ...]) -> bool:
    """Is what an op makes multiplied with one of the values?"""
    readers = readers_after(op.outputs[0])
    return any(r.op_type == "mul" and any(v in (r.x, r.y) for v in values) for r in readers)


def _caps(op: Operation) -> bool:
    """Does a clip cut off what fp16 could hold?"""
    return op.op_type == "clip" and (number(op.beta) or 0.0) < fp16.LARGEST


def sum_of_squares(var: Var) -> SumOfSquares | None:
    """What a value is, if it is one of these; one square counts where something is added to it."""
    epsilon, factor, ops = 0.0, 1.0, list[Operation]()
    while (op := producer(var, "add", "mul", "real_div")) is not None:
        step = _step(op)
        if step is None:
            break
        var, times, more = step
        epsilon, factor = epsilon + factor * more, factor * times
        ops.append(op)
    found = _reduced(var) or added_squares(var, 1 if epsilon else 2)
    if found is None:
        return None
    return SumOfSquares(found.values, found.total, epsilon, (*ops, *found.ops), found.count, factor)


def _step(op: Operation) -> tuple[Var, float, float] | None:
    """What an op reads, the positive number that it multiplies it with, and the one that it adds."""
    if op.op_type != "add":
        times = scaled(op)
        return (times[0], times[1], 0.0) if times is not None and times[1] > 0 else None
    more = beside_number(op)
    return (more[0], 1.0, more[1]) if more is not None and more[1] >= 0 else None


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


def added_squares(var: Var, least: int) -> SumOfSquares | None:
    """Squares of so many values or more of one shape."""
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
    if len(values) < least or len({static_shape(v) for v in values}) != 1:
        return None
    return SumOfSquares(tuple(values), None, 0.0, tuple(ops), len(values))


def is_scaled(x: Var) -> bool:
    """Is a value divided already: by the largest magnitude, or by as much as that is not quiet?"""
    if (division := producer(x, "real_div")) is None:
        return False
    unit = producer(division.y, "real_div")
    largest = division.y if unit is None or clipped_divisor(unit) is None else unit.x
    return producer(largest, "maximum") is not None
