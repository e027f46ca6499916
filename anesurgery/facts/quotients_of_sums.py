"""Quotients in which a sum may overflow though the result is small: means by a mask, shares of a total."""

from __future__ import annotations

import math
from dataclasses import dataclass

from anesurgery.mil import Operation, Var, producer, static_shape
from anesurgery.semantics.bounds import LARGEST
from anesurgery.semantics.intervals import interval, is_half, magnitude
from anesurgery.semantics.reading import beside_number, ints, number
from anesurgery.semantics.rows import summed

FOLLOWED = frozenset({"add", "maximum", "clip", "tile"})
"""Ops that may stand between a sum and the division: guards, and what repeats a value."""


@dataclass(frozen=True)
class QuotientOfSums:
    """`sum(a) / sum(b)`, or `b / sum(|b|)`, the lower sum perhaps guarded and then tiled."""

    root: Operation
    below: Operation
    """The sum that divides."""
    between: tuple[Operation, ...]
    """From that sum to the divisor, in this order: guards, and a tile."""
    above: Operation | None
    """The sum that is divided; None: one of the numbers that are added below."""

    @property
    def sums(self) -> tuple[Operation, ...]:
        """All sums."""
        return (self.below,) if self.above is None else (self.below, self.above)

    @property
    def largest(self) -> float:
        """What a sum can reach; infinite where nothing can be said."""
        return max(magnitude(total.x) * summed(total) for total in self.sums)

    @property
    def overflows(self) -> bool:
        """May a sum overflow in fp16?"""
        return self.largest > LARGEST


def quotient_of_sums(op: Operation) -> QuotientOfSums | None:
    """What a division of fp16 is, if it is one."""
    if op.op_type != "real_div" or not is_half(op.outputs[0]):
        return None
    value, between = op.y, list[Operation]()
    while (maker := producer(value, *FOLLOWED)) is not None:
        source = value_of(maker)
        if source is None:
            break
        between.insert(0, maker)
        value = source
    below, above = producer(value, "reduce_sum"), producer(op.x, "reduce_sum")
    sums = [total for total in (below, above) if total is not None]
    if below is None or not all(math.isfinite(summed(total)) and ints(total, "axes") for total in sums):
        return None
    if above is None and not _part_of(op.x, below):
        return None
    return QuotientOfSums(op, below, tuple(between), above)


def _part_of(var: Var, total: Operation) -> bool:
    """Is the magnitude of each number at most that of the sum?"""
    magnitudes = producer(total.x, "abs")
    if magnitudes is not None:
        return var in (magnitudes.x, total.x)
    return var is total.x and interval(var)[0] >= 0


def value_of(op: Operation) -> Var | None:
    """What a guard of one number is applied to, or what a tile repeats; None: it is something else."""
    if op.op_type in ("clip", "tile"):
        return op.x if op.op_type == "tile" or (number(op.beta) or 0) == math.inf else None
    guarded = beside_number(op)
    if guarded is None or static_shape(guarded[0]) != static_shape(op.outputs[0]):
        return None
    return guarded[0]
