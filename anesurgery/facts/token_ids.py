"""Read how a program treats integer ids: where they come from, and whether they can be negative.

Everything here is about values, so an answer holds for all inputs: `never_negative` is a proof and not a guess.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from anesurgery.mil import Operation, Var, constant, consumers, is_constant, is_output, np_dtype, producer
from anesurgery.ops import INDEXING, MOVING

DEPTH = 24
"""How far back a proof looks; further back it gives up."""

NOT_NEGATIVE = INDEXING | {"abs", "relu", "sigmoid"}
"""Ops whose result is never negative."""


def behind_casts(ids: Var, low: int, high: int) -> Var:
    """The value before the integer casts that keep every number of [low, high)."""
    cast = producer(ids, "cast")
    while cast is not None and np_dtype(cast.x).kind in "iu" and _holds(ids, low, high):
        ids = cast.x
        cast = producer(ids, "cast")
    return ids


def _holds(ids: Var, low: int, high: int) -> bool:
    dtype = np_dtype(ids)
    return dtype.kind in "iu" and np.iinfo(dtype).min <= low and high - 1 <= np.iinfo(dtype).max


def behind_guard(ids: Var, rows: int) -> Var | None:
    """The ids that `select(ids >= 0, ids, ids + rows)` makes non-negative, or None: no such guard here."""
    guard = producer(ids, "select")
    test = producer(guard.cond, "greater_equal") if guard is not None else None
    wrapped = producer(guard.b, "add") if guard is not None else None
    if guard is None or test is None or wrapped is None or not is_constant(test.y, 0):
        return None
    added_to = [v for v in (wrapped.x, wrapped.y) if not is_constant(v, rows)]
    if len(added_to) != 1:
        return None
    sources = {behind_casts(v, -rows, rows) for v in (guard.a, test.x, *added_to)}
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


def never_negative(var: Var, depth: int = DEPTH) -> bool:
    """Is it certain that no element of `var` is below zero, whatever the inputs of the program are?"""
    if np_dtype(var).kind in "ub":
        return True
    value = constant(var)
    if value is not None:
        return bool(np.min(value, initial=0) >= 0)
    op = var.op
    if op is None or depth == 0:
        return False
    if op.op_type in NOT_NEGATIVE or (op.op_type == "topk" and var is op.outputs[1]):
        return True
    if op.op_type in MOVING:
        return never_negative(op.x, depth - 1)
    rule = RULES.get(op.op_type)
    return rule is not None and rule(op, lambda v: never_negative(v, depth - 1))


Proof = Callable[[Var], bool]


def _cast(op: Operation, proven: Proof) -> bool:
    """A narrowing integer cast may wrap; any other keeps the sign."""
    old, new = np_dtype(op.x), np_dtype(op.outputs[0])
    if old.kind in "iu" and new.kind == "i" and np.iinfo(new).max < np.iinfo(old).max:
        return False
    return proven(op.x)


def _select(op: Operation, proven: Proof) -> bool:
    """Both sides; where the condition is `a >= 0` itself, `a` needs no proof of its own."""
    test = producer(op.cond, "greater_equal")
    tested = test is not None and test.x is op.a and is_constant(test.y, 0)
    return (tested or proven(op.a)) and proven(op.b)


def _clip(op: Operation, proven: Proof) -> bool:
    low = constant(op.alpha)
    return low is not None and float(low) >= 0


def _range(op: Operation, proven: Proof) -> bool:
    step = constant(op.step)
    return step is not None and float(step) > 0 and proven(op.start)


def _floor_quotient(op: Operation, proven: Proof) -> bool:
    return proven(op.x) and proven(op.y)


def _remainder(op: Operation, proven: Proof) -> bool:
    """The remainder takes the sign of the divisor."""
    return proven(op.y)


RULES: dict[str, Callable[[Operation, Proof], bool]] = {
    "cast": _cast,
    "clip": _clip,
    "concat": lambda op, proven: all(proven(v) for v in op.values),
    "floor_div": _floor_quotient,
    "gather": lambda op, proven: proven(op.x),
    "maximum": lambda op, proven: proven(op.x) or proven(op.y),
    "minimum": lambda op, proven: proven(op.x) and proven(op.y),
    "mod": _remainder,
    "range_1d": _range,
    "reduce_max": lambda op, proven: proven(op.x),
    "reduce_min": lambda op, proven: proven(op.x),
    "select": _select,
    "stack": lambda op, proven: all(proven(v) for v in op.values),
}
"""Further ops, each with its argument; sums and products are absent, since int32 can overflow."""
