"""Means and sums of which fp16 keeps few digits, or none."""

from __future__ import annotations

import math

import numpy as np

from anesurgery.mil import Maker, Operation, Var, any_symbolic, producer
from anesurgery.numeric.hazard import Found, Hazard
from anesurgery.regions.small_builds import again
from anesurgery.semantics.bounds import squared
from anesurgery.semantics.intervals import interval
from anesurgery.semantics.reading import axes_of, flag, ints


def _difference_of_means(op: Operation) -> Found | None:
    """The mean of the squares of x less the square of its mean."""
    first, square = producer(op.x, "reduce_mean"), producer(op.y)
    mean, squares = producer(squared(square), "reduce_mean"), producer(None if first is None else first.x)
    if first is None or mean is None or mean.x is not squared(squares):
        return None
    over = [(axes_of(mean), flag(mean, "keep_dims")) for mean in (first, mean)]
    return Found(op, first, squares, square, mean, x=mean.x, first=first, over=over)


def _squares_of_differences(mb: Maker, at: Found) -> Var:
    axes = ints(at.first, "axes")
    apart = mb.sub(x=at.x, y=mb.reduce_mean(x=at.x, axes=axes, keep_dims=True))
    return again(mb, at.first, x=mb.square(x=apart))


VARIANCE = Hazard(
    frozenset({"sub"}),
    _difference_of_means,
    "%{at.op.x.name} and %{at.op.y.name} are nearly equal where %{at.x.name} is far from 0",
    _squares_of_differences,
    reach=lambda at, size: float(np.ptp(interval(at.x))),
    limit=2.0,  # what lies so near together, as after a tanh, cancels no more than the last digits
    safe="all %{at.x.name} lie within {most:g} of each other, and few digits cancel",
    unable=lambda at: (
        "" if at.over[0] == at.over[1] else f"the means are over {at.over[0]} and {at.over[1]} (axes, kept)"
    ),
    half=False,
)


MANY = 1 << 18
"""Values of a mean from which on a running sum is too long. A choice: a map of 512 x 512 has so many."""


def _long_mean(op: Operation) -> Found | None:
    sizes = {axis: op.x.shape[axis] for axis in sorted(axes_of(op))}
    if any_symbolic(sizes.values()) or (count := math.prod(sizes.values())) < MANY:
        return None
    return Found(op, count=count, axes=[*sizes], long=[axis for axis, size in sizes.items() if size > 1])


LONG_MEAN = Hazard(
    frozenset({"reduce_mean"}),
    _long_mean,
    "a mean of {at.count} values",
    lambda mb, at: again(mb, at.op, x=again(mb, at.op, axes=at.long[-1:], keep_dims=True), axes=at.axes),
    unable=lambda at: "" if len(at.long) > 1 else f"the {at.count} values lie along one axis",
)
