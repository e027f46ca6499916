"""Integers: their ranges, whether ids can be negative, and which integer ops give the same numbers in fp16.

fp16 holds every integer up to 2048, so integer ops whose values stay within that can be computed in floats. The
answers hold for all inputs: they rest on intervals, not on numbers that were tried. The last section reads the
guards (`select(ids >= 0, ids, ids + rows)`) that conversions put before lookups.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import cast

import numpy as np

from anesurgery.mil import (
    Operation,
    Var,
    any_symbolic,
    constant,
    consumers,
    is_constant,
    is_output,
    np_dtype,
    operands,
    producer,
    static_shape,
)
from anesurgery.ops import JOINING, LOGICAL, LOOKUPS, names
from anesurgery.semantics.intervals import Intervals, stored_interval
from anesurgery.semantics.reading import is_float, number
from anesurgery.semantics.rows import ALWAYS, OF_WHOLE, SPECS

Range = tuple[float, float]

MOVES = (
    names("reshape expand_dims squeeze transpose slice_by_index slice_by_size tile reverse identity")
    | JOINING
    | LOOKUPS
)
"""Ops that pass numbers on, whatever their dtype."""
TRUTHS = LOGICAL | {"logical_not"}

NUMBERS = {"select": ("a", "b"), **dict.fromkeys(JOINING, ("values",))}
"""Op type -> the operands that hold numbers, where they are not `x` and `y`."""


def number_operands(op: Operation) -> Iterator[tuple[str, Var]]:
    """Yield the operands of an op that hold numbers, with their parameter."""
    for name in NUMBERS.get(op.op_type, ("x", "y")):
        value = op.inputs.get(name)
        for var in value if isinstance(value, (list, tuple)) else [value]:
            if isinstance(var, Var):
                yield name, var


def integer_op(var: Var) -> Operation | None:
    """Return the op that makes an integer or a condition, if floats can compute it too; else None."""
    op = var.op
    if op is None or np_dtype(var).kind not in "iub":
        return None
    if op.op_type in LOOKUPS and constant(op.indices) is None:
        return None
    if op.op_type in MOVES:
        return op
    if op.op_type in TRUTHS if np_dtype(var).kind == "b" else whole_results(op) is not None:
        return op
    return op if op.op_type == "cast" and np_dtype(op.x).kind in "iubf" else None


def whole_results(op: Operation) -> str | None:
    """Return `ALWAYS` or `OF_WHOLE` if an op gives whole numbers always or for whole operands; else None."""
    row = SPECS.get(op.op_type)
    return None if row is None else row.whole


def unmoved_source(var: Var) -> Var:
    """Return where an integer comes from, before it was moved or widened."""
    while (op := integer_op(var)) is not None and (op.op_type in MOVES or _widens(op)):
        sources = [v for _, v in number_operands(op)]
        if len(sources) != 1:
            break
        (var,) = sources
    return var


def from_inputs(var: Var) -> bool:
    """Is an integer or a condition computed from integer inputs of the caller?"""
    seen, todo = set[Var](), [var]
    while todo:
        value = todo.pop()
        if value in seen or np_dtype(value).kind == "f" or constant(value) is not None:
            continue
        if value.op is None:
            return True
        seen.add(value)
        todo += [v for _, v in operands(value.op)]
    return False


def _widens(op: Operation) -> bool:
    """Is an op a cast of integers to a type that holds all of them?"""
    if op.op_type != "cast":
        return False
    before, after = np_dtype(op.x), np_dtype(op.outputs[0])
    return before.kind in "iu" and after.kind == "i" and np.can_cast(before, after)


class WholeNumbers:
    """Ranges of integers, given what the caller promises about inputs (name -> range)."""

    def __init__(self, assume: Mapping[str, Range]) -> None:
        self.intervals = Intervals(assume=assume)

    def known(self, var: Var) -> Range:
        """Return the range of an integer: as promised, or from the ops that compute it, cut to its dtype."""
        return self.intervals.of(var)

    def reach(self, var: Var) -> float:
        """Return the largest magnitude of an integer."""
        return max(map(abs, self.known(var)))

    def leaves(self, var: Var, most: int) -> str:
        """Return why an integer computed in floats that are exact up to `most` may differ.

        "" if it does not.
        """
        if is_float(var):
            return ""
        sources = _upstream(unmoved_source(var), lambda at: map(unmoved_source, _whole_operands(at)))
        return next(filter(None, (self._leaves_at(at, most) for at in sources)), "")

    def _leaves_at(self, at: Var, most: int) -> str:
        if not self.reach(at) <= most:
            return f"%{at.name} {in_words(self.reach(at))}, above {most}"
        op = integer_op(at)
        if op is not None and op.op_type in ("floor_div", "mod") and not (number(op.y) or 0) > 0:
            return f"%{at.name} is divided by %{op.y.name}, which is not a positive constant"
        return ""


def _whole_operands(var: Var) -> list[Var]:
    """Return the integers that an integer is computed from."""
    op = integer_op(var)
    return [] if op is None else [v for _, v in number_operands(op) if not is_float(v)]


def _upstream(var: Var, sources: Callable[[Var], Iterable[Var]]) -> Iterator[Var]:
    """Yield a value, then what it comes from, first sources first, each once."""
    seen, pending = set[Var](), [var]
    while pending:
        value = pending.pop()
        if value not in seen:
            seen.add(value)
            yield value
            pending += [*sources(value)][::-1]


def in_words(reach: float) -> str:
    """Return words for how large an integer may get."""
    return "has an unknown range" if reach == math.inf else f"reaches {reach:g}"


def symbolic_reason(var: Var) -> str:
    """Return why an integer depends on a symbolic shape, which another op would name otherwise; else ""."""
    for value in _upstream(var, _whole_operands):
        if static_shape(value) is None:
            return f"%{value.name} has the symbolic shape {tuple(value.shape)}"
        if value.sym_val is not None and any_symbolic(np.ravel(np.asarray(value.sym_val, dtype=object))):
            return f"%{value.name} is counted from a symbolic shape"
    return ""


def is_whole(var: Var) -> bool:
    """Does a float hold whole numbers only?"""
    return all(_whole_itself(v) is not False for v in _upstream(var, _whole_through))


def _whole_itself(var: Var) -> bool | None:
    """Is a value whole by itself? None where that depends on its sources."""
    if (value := constant(var)) is not None:
        return bool(np.all(np.asarray(value) == np.floor(value)))
    op = var.op
    if op is None or np_dtype(var).kind in "ib":
        return np_dtype(var).kind in "ib"
    if whole_results(op) == ALWAYS:
        return True
    return None if op.op_type == "cast" or op.op_type in MOVES or whole_results(op) == OF_WHOLE else False


def _whole_through(var: Var) -> list[Var]:
    return [v for _, v in number_operands(cast(Operation, var.op))] if _whole_itself(var) is None else []


def before_casts(ids: Var, low: int, high: int) -> Var:
    """Return the value before integer casts that keep every number of [low, high)."""
    while (op := producer(ids, "cast")) is not None:
        before, after = np_dtype(op.x), np_dtype(ids)
        if before.kind not in "iu" or after.kind not in "iu":
            break
        if low < np.iinfo(after).min or np.iinfo(after).max < high - 1:
            break
        ids = op.x
    return ids


def before_guard(ids: Var, rows: int) -> Var | None:
    """Return the ids that `select(ids >= 0, ids, ids + rows)` makes nonnegative; None without such a guard."""
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
    """Do ids serve one lookup alone, directly or through casts and its guard?"""
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
    """Is it certain that no element is below zero, whatever the inputs are?"""
    return stored_interval(var)[0] >= 0
