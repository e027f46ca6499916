"""Where a value lies before any input is known: an interval from the ops that make it.

The unknown is infinite: `(-inf, inf)` says nothing. `interval` is that of real numbers, which findings ask for:
what a value would be where its dtype ends. `stored_interval` is that of the numbers which the program computes,
rounded outwards in the dtype of each value; it is infinite where a value may overflow, and proofs rest on it.
Weights are read only where what they multiply is bounded, and those of more than `MOST` elements never.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from anesurgery.mil import Operation, Var, np_dtype
from anesurgery.ops import MOVING, PADDING, UNROUNDED, names
from anesurgery.semantics.constant_ends import ANY, CORRECT, EXACT, FUNCTION, Interval, of_constant, outwards
from anesurgery.semantics.meaning import Meaning
from anesurgery.semantics.product_rows import reach
from anesurgery.semantics.rows import MEANINGS
from anesurgery.semantics.unedited import kept

STEPS = 48
"""Ops that are looked at for one interval: more are seldom needed, and each question costs as many."""
DEEP = 100
"""The same where many questions share what is learned; Python calls five functions for each op, of 1,000."""

OF_TYPES: dict[str, Interval] = {"b": (0, 1), "u": (0, math.inf)}
"""What the kind of a type says: booleans are 0 or 1, and unsigned integers not negative."""

WRAPPING = names("abs add cast cumsum exp2 floor_div matmul mul pow real_div reduce_prod reduce_sum square sub")
"""Ops whose results, in integers, start again or stop at the ends of their type."""

UNCHANGED = UNROUNDED | MOVING | PADDING | names("max_pool resize_nearest_neighbor upsample_nearest_neighbor")
"""Ops whose results are numbers of their dtype before they are rounded; a cast to a narrower float is not."""
ROUNDED_ONCE = names("add sub mul real_div sqrt square")
"""Ops that IEEE arithmetic rounds correctly."""


class Intervals:
    """One question, and how far it may still look; or many questions that share what is learned."""

    def __init__(
        self, products: int = 0, assume: Mapping[str, Interval] | None = None, *, stored: bool = False
    ) -> None:
        self.products, self.assume, self.stored = products, assume or {}, stored
        self.steps = STEPS if assume is None else DEEP
        self.shared: dict[Var, Interval] | None = None if assume is None else {}

    def of(self, var: Var) -> Interval:
        """The answer to another question."""
        self.steps = DEEP
        return self.at(var)

    def at(self, var: Any) -> Interval:
        """The interval of a value."""
        if not isinstance(var, Var):
            return ANY
        if self.shared is None:
            return self._found(var)
        if var not in self.shared:
            interval = self._found(var)
            if self.steps <= 0:  # more could be learned
                return interval
            self.shared[var] = interval
        return self.shared[var]

    def _found(self, var: Var) -> Interval:
        op, kind = var.op, np_dtype(var).kind
        of_type = OF_TYPES.get(kind, ANY)
        if op is None:
            return self.assume.get(var.name, of_type)
        if self.steps <= 0 or kind == "b":
            return of_type
        if op.op_type == "const":
            return of_constant(var)
        self.steps -= 1
        low, high = self._result(op, var)
        if kind in "iu":  # what is computed in floats is cut off towards zero
            low, high = (math.trunc(v) if math.isfinite(v) else v for v in (low, high))
        if kind in "iu" and op.op_type in WRAPPING and not _holds(var, low, high):
            return of_type
        return max(low, of_type[0]), min(high, of_type[1])

    def _result(self, op: Operation, var: Var) -> Interval:
        """In numbers without end, of operands as they are."""
        row = MEANINGS.get(op.op_type)
        if row is None:
            return ANY
        if row.positions is not None and var in op.outputs[row.positions :][:1]:
            return 0.0, math.inf
        if row.range is None or isinstance(row.range, tuple):
            return row.range or ANY
        low, high = self.rounded(op, row.range(op, self), _roundings(op, row))
        return max(low, row.limits[0]), min(high, row.limits[1])

    def rounded(self, op: Operation, ends: Interval, roundings: float) -> Interval:
        """Where numbers lie that an op makes, its result or others on the way, after so many roundings."""
        dtype = np_dtype(op.outputs[0])
        return outwards(ends, dtype, roundings) if self.stored and dtype.kind == "f" else ends


def _roundings(op: Operation, row: Meaning) -> float:
    """How often the result of an op is rounded, the sums on the way to it included."""
    if op.op_type in UNCHANGED:
        return EXACT
    if op.op_type in ROUNDED_ONCE:
        return CORRECT
    return FUNCTION + (0 if row.terms is None else 2 * row.terms(op))  # a product and a sum for each


def _holds(var: Var, low: float, high: float) -> bool:
    """Does the integer type of a value hold all of an interval?"""
    limits = np.iinfo(np_dtype(var))
    return bool(limits.min <= low and high <= limits.max)


def interval(var: Any, products: int = 0) -> Interval:
    """Where a value lies, whatever the inputs are; `ANY` where nothing can be said.

    Args:
        var: the value.
        products: through how many products with stored weights to look.
    """
    return _interval(var, products, stored=False) if isinstance(var, Var) else ANY


def stored_interval(var: Var) -> Interval:
    """Where a value lies as the program computes it, rounded in the dtype of each value on the way."""
    return _interval(var, 0, stored=True)


@kept
def _interval(var: Var, products: int, *, stored: bool) -> Interval:
    return Intervals(products, stored=stored).at(var)


def magnitude(var: Any, products: int = 0) -> float:
    """The largest magnitude of a value; infinite where nothing can be said."""
    low, high = interval(var, products)
    return max(abs(low), abs(high))


def product(op: Operation) -> float:
    """What a sum of a conv, linear or matmul with stored weights can reach; infinite where it is unbounded."""
    return reach(op, Intervals())


def is_half(var: Var) -> bool:
    """Is a value fp16?"""
    return np_dtype(var) == np.float16
