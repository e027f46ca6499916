"""Hazards of means: a variance of which fp16 keeps few digits, and means over very many values."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from anesurgery import fp16
from anesurgery.mil import Maker, Operation, Var, any_symbolic, producer, static_shape
from anesurgery.numeric.hazard import Found, Hazard
from anesurgery.regions.small_builds import again
from anesurgery.semantics.bounds import squared_operand
from anesurgery.semantics.intervals import interval, is_half, magnitude
from anesurgery.semantics.reading import axes_of, flag, ints, number, value_and_number
from anesurgery.semantics.rows import reduced_size

FOLLOWED = frozenset({"add", "maximum", "clip", "tile"})
"""Ops that may stand between a sum and the division: guards and tiles."""


@dataclass(frozen=True)
class QuotientOfSums:
    """`sum(a) / sum(b)`, or `b / sum(|b|)`; the lower sum may be guarded and then tiled."""

    root: Operation
    below: Operation
    """The sum that divides."""
    between: tuple[Operation, ...]
    """The guards, and perhaps a tile, from that sum to the divisor, in this order."""
    above: Operation | None
    """The sum that is divided; None where one of the added numbers is divided instead."""

    @property
    def sums(self) -> tuple[Operation, ...]:
        """All sums."""
        return (self.below,) if self.above is None else (self.below, self.above)

    @property
    def largest(self) -> float:
        """The largest magnitude that a sum can reach; infinite where nothing is known."""
        return max(magnitude(total.x) * reduced_size(total) for total in self.sums)

    @property
    def overflows(self) -> bool:
        """May a sum overflow in fp16?"""
        return self.largest > fp16.LARGEST


def quotient_of_sums(op: Operation) -> QuotientOfSums | None:
    """Return the quotient of sums that an fp16 division is; None for others."""
    if op.op_type != "real_div" or not is_half(op.outputs[0]):
        return None
    value, between = op.y, list[Operation]()
    while (maker := producer(value, *FOLLOWED)) is not None:
        source = guarded_or_tiled(maker)
        if source is None:
            break
        between.insert(0, maker)
        value = source
    below, above = producer(value, "reduce_sum"), producer(op.x, "reduce_sum")
    sums = [total for total in (below, above) if total is not None]
    if below is None or not all(math.isfinite(reduced_size(total)) and ints(total, "axes") for total in sums):
        return None
    if above is None and not _is_term_of(op.x, below):
        return None
    return QuotientOfSums(op, below, tuple(between), above)


def _is_term_of(var: Var, total: Operation) -> bool:
    """Is each number of a value one of the nonnegative numbers (or their signed form) that a sum adds up?"""
    magnitudes = producer(total.x, "abs")
    if magnitudes is not None:
        return var in (magnitudes.x, total.x)
    return var is total.x and interval(var)[0] >= 0


def guarded_or_tiled(op: Operation) -> Var | None:
    """Return the operand of a guard or a tile; None for other ops."""
    if op.op_type in ("clip", "tile"):
        return op.x if op.op_type == "tile" or (number(op.beta) or 0) == math.inf else None
    guarded = value_and_number(op)
    if guarded is None or static_shape(guarded[0]) != static_shape(op.outputs[0]):
        return None
    return guarded[0]


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
