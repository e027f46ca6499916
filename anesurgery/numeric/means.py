"""Hazards of means: a variance of which fp16 keeps few digits, and means over very many values."""

from __future__ import annotations

import math

import numpy as np

from anesurgery.mil import Maker, Operation, Var, any_symbolic, producer
from anesurgery.numeric.hazard import Found, Hazard
from anesurgery.regions.small_builds import again
from anesurgery.semantics.bounds import squared_operand
from anesurgery.semantics.intervals import interval
from anesurgery.semantics.reading import axes_of, flag, ints


def _variance_by_subtraction(op: Operation) -> Found | None:
    """Match mean(x * x) - mean(x) ** 2."""
    first, square = producer(op.x, "reduce_mean"), producer(op.y)
    mean, squares = (
        producer(squared_operand(square), "reduce_mean"),
        producer(None if first is None else first.x),
    )
    if first is None or mean is None or mean.x is not squared_operand(squares):
        return None
    over = [(axes_of(mean), flag(mean, "keep_dims")) for mean in (first, mean)]
    return Found(op, first, squares, square, mean, x=mean.x, first=first, over=over)


def _mean_of_squared_differences(mb: Maker, at: Found) -> Var:
    """Build mean((x - mean(x)) ** 2)."""
    axes = ints(at.first, "axes")
    difference = mb.sub(x=at.x, y=mb.reduce_mean(x=at.x, axes=axes, keep_dims=True))
    return again(mb, at.first, x=mb.square(x=difference))


VARIANCE = Hazard(
    kinds=frozenset({"sub"}),
    match=_variance_by_subtraction,
    message="%{at.op.x.name} and %{at.op.y.name} are nearly equal where %{at.x.name} is far from 0",
    repair=_mean_of_squared_differences,
    largest=lambda at, bound: float(np.ptp(interval(at.x))),
    limit=2.0,  # of values so near each other, as after a tanh, only the last digits cancel
    harmless="all %{at.x.name} lie within {most:g} of each other, and few digits cancel",
    not_repairable=lambda at: (
        "" if at.over[0] == at.over[1] else f"the means are over {at.over[0]} and {at.over[1]} (axes, kept)"
    ),
    fp16_only=False,
)


MANY = 1 << 18
"""Values of a mean from which on a running sum is too long. A choice: a map of 512 x 512 has so many."""


def _long_mean(op: Operation) -> Found | None:
    """Match a mean of so many values that a running sum in fp16 loses the small ones."""
    sizes = {axis: op.x.shape[axis] for axis in sorted(axes_of(op))}
    if any_symbolic(sizes.values()) or (count := math.prod(sizes.values())) < MANY:
        return None
    return Found(op, count=count, axes=[*sizes], long=[axis for axis, size in sizes.items() if size > 1])


LONG_MEAN = Hazard(
    kinds=frozenset({"reduce_mean"}),
    match=_long_mean,
    message="a mean of {at.count} values",
    repair=lambda mb, at: again(mb, at.op, x=again(mb, at.op, axes=at.long[-1:], keep_dims=True), axes=at.axes),
    not_repairable=lambda at: "" if len(at.long) > 1 else f"the {at.count} values lie along one axis",
)
