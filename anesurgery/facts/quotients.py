"""Match quotients of sums, `sum(a) / sum(b)`, as in a mean over a mask.

A sum may overflow in fp16 although the quotient is ordinary.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from anesurgery import fp16
from anesurgery.mil import Operation, Var, producer, static_shape
from anesurgery.semantics.intervals import interval, is_half, magnitude
from anesurgery.semantics.reading import ints, number, value_and_number
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
