"""Read how a program treats integer ids: where they come from, and whether they can be negative.

The answers hold for all inputs: `never_negative` rests on intervals, and not on numbers that were tried.
"""

from __future__ import annotations

import numpy as np

from anesurgery.mil import Operation, Var, consumers, is_constant, is_output, np_dtype, producer
from anesurgery.semantics.intervals import stored_interval


def before_casts(ids: Var, low: int, high: int) -> Var:
    """The value before the integer casts that keep every number of [low, high)."""
    cast = producer(ids, "cast")
    while cast is not None and np_dtype(cast.x).kind in "iu" and _holds(ids, low, high):
        ids = cast.x
        cast = producer(ids, "cast")
    return ids


def _holds(ids: Var, low: int, high: int) -> bool:
    dtype = np_dtype(ids)
    return dtype.kind in "iu" and np.iinfo(dtype).min <= low and high - 1 <= np.iinfo(dtype).max


def before_guard(ids: Var, rows: int) -> Var | None:
    """The ids that `select(ids >= 0, ids, ids + rows)` makes non-negative, or None: no such guard here."""
    guard = producer(ids, "select")
    test = producer(guard.cond, "greater_equal") if guard is not None else None
    wrapped = producer(guard.b, "add") if guard is not None else None
    if guard is None or test is None or wrapped is None or not is_constant(test.y, 0):
        return None
    added_to = [v for v in (wrapped.x, wrapped.y) if not is_constant(v, rows)]
    if len(added_to) != 1:
        return None
    sources = {before_casts(v, -rows, rows) for v in (guard.a, test.x, *added_to)}
    return sources.pop() if len(sources) == 1 else None


def serves_only(ids: Var, lookup: Operation) -> bool:
    """Do the ids serve this lookup alone, directly or through casts and its guard?"""
    values = [ids]
    while values:
        value = values.pop()
        if is_output(value):
            return False
        for op in consumers(value):
            if op is not lookup and op.op_type not in ("cast", "greater_equal", "add", "select"):
                return False
            values += op.outputs if op is not lookup else []
    return True


def never_negative(var: Var) -> bool:
    """Is it certain that no element of `var` is below zero, whatever the inputs of the program are?"""
    return stored_interval(var)[0] >= 0
