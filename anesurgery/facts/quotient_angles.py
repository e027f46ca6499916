"""Match the angle of (y, x) in any spelling, such as `atan(y / x)` with comparisons that choose a quadrant.

`torch.atan2` is converted to an arc tangent of y / (x + a little) and many ops of comparisons. What such ops
mean is found by computing them, at points of all four quadrants.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from anesurgery.interpret.table import TABLE
from anesurgery.mil import Array, Operation, Var, consumers, is_stored, op_inputs, operands, producer
from anesurgery.ops import names
from anesurgery.semantics.intervals import interval
from anesurgery.semantics.reading import number

OPS = names(
    "add sub mul real_div abs cast less less_equal greater greater_equal equal not_equal logical_and "
    "logical_or logical_xor logical_not select sign atan clip maximum minimum identity"
)
"""Ops that an angle is written with."""
ENDS = names("add sub mul select atan")
"""Ops that may be the last of an angle."""
MOST_OPS = 40
"""The most ops of an angle; that of torch has 30."""
OPS_TO_NEXT = 3
"""The most ops between an angle and a later op that is the angle, too: selects and sums for the quadrants."""
LARGEST_ADDED = 1e-6
"""The largest number added to a divisor so that it is not 0. For divisors of 0.01 and more (the least that are
tried here) it changes nothing that fp16 can tell.
"""
TOLERANCE = 2e-3
"""How far angles may be from the exact ones: pi in fp16 is off by 9.7e-4, and a step of fp16 there is 2e-3."""
SIZES = (1e-2, 0.3, 1.0, 2.5, 7.0, 300.0, 3e4)
"""Magnitudes of the coordinates that are tried; quotients go up to 3e6."""
BESIDE = (0.5, 0.99, 1.01, 2.0)
"""Factors of each constant of the ops, for coordinates on both sides of it."""


@dataclass(frozen=True)
class QuotientAngle:
    """The angle of (y, x), written with several ops."""

    y: Var
    x: Var
    ops: tuple[Operation, ...]
    """All ops: the last one first, the others in no order."""
    all_quadrants: bool
    """Does it tell all four quadrants apart, as atan2 does, and not two as atan does?"""


def quotient_angle(op: Operation) -> QuotientAngle | None:
    """Return the angle that an op is the last of, if the divisor may be 0; None for other ops."""
    angle = _angle(op)
    return None if angle is None or _continues_downstream(angle) else angle


def may_divide_by_zero(division: Operation) -> bool:
    """May a divisor be 0? Of x plus at most `LARGEST_ADDED`, x decides."""
    divisor = _divisor(division.y)
    low, high = interval(divisor)
    return low <= 0 <= high and not is_stored(divisor) and not _is_replaced(divisor)


def _angle(op: Operation) -> QuotientAngle | None:
    """Return the angle if the ops give that of (y, x) at all points that are tried; else None."""
    division = _division(op)
    if division is None:
        return None
    y, x = division.x, _divisor(division.y)
    ops = _ops_between(op, y, x) if may_divide_by_zero(division) and not is_stored(y) else None
    if ops is None or y.shape != op.outputs[0].shape or x.shape != y.shape:
        return None
    points = _points(ops)
    angles = results_at_points(op, y, x, points)
    if angles is None:
        return None
    if np.all(np.abs(angles - np.arctan2(*points)) < TOLERANCE):
        return QuotientAngle(y, x, ops, all_quadrants=True)
    if np.all(np.abs(angles - np.arctan(points[0] / points[1])) < TOLERANCE):
        return QuotientAngle(y, x, ops, all_quadrants=False)
    return None


def _points(ops: tuple[Operation, ...]) -> Array:
    """Return points [2, n] of y and x in all quadrants: ordinary sizes, and near each constant of the ops."""
    stored = (v for op in ops for v in op_inputs(op).values() if isinstance(v, Var) and is_stored(v))
    numbers = {abs(n) for v in stored if not isinstance(v.val, str) and (n := number(v)) is not None}
    sizes = sorted({*SIZES, *(n * factor for n in numbers if n > LARGEST_ADDED for factor in BESIDE)})
    signed = np.array([*sizes, *(-size for size in sizes)])
    return np.stack([axis.reshape(-1) for axis in np.meshgrid(signed, signed)])


def _division(op: Operation) -> Operation | None:
    """Return the division in the first arc tangent upstream of an op, within `MOST_OPS` ops; else None."""
    pending, seen = [op], {op}
    while pending and len(seen) <= MOST_OPS:
        current = pending.pop()
        if current.op_type == "atan":
            return producer(current.x, "real_div")
        makers = [producer(v) for v in _values(current)]
        fresh = [m for m in makers if m is not None and m.op_type in OPS and m not in seen]
        pending += fresh
        seen |= set(fresh)
    return None


def _values(op: Operation) -> list[Var]:
    """Return the operands of an op that are not stored."""
    return [v for _, v in operands(op) if not is_stored(v)]


def _divisor(var: Var) -> Var:
    """Return the x of `x + a little`, or of `x + a little * mask`, which is added only where x is near 0."""
    if (add := producer(var, "add")) is None:
        return var
    for value, other in ((add.x, add.y), (add.y, add.x)):
        shift = producer(other, "mul")
        factors = [] if shift is None else [v for v in (shift.x, shift.y) if is_stored(v)]
        little = number(other) if is_stored(other) else number(factors[0]) if factors else None
        if little is not None and abs(little) <= LARGEST_ADDED:
            return value
    return var


def _is_replaced(var: Var) -> bool:
    """Is a number selected where a divisor would be 0?"""
    select = producer(var, "select")
    return select is not None and any(is_stored(v) and number(v) for v in (select.a, select.b))


def _ops_between(op: Operation, y: Var, x: Var) -> tuple[Operation, ...] | None:
    """Return all ops from y and x to an op; None where another value comes in."""
    ops, pending = list[Operation](), [op]
    while pending:
        current = pending.pop()
        if current in ops:
            continue
        if current.op_type not in OPS or len(ops) >= MOST_OPS:
            return None
        ops.append(current)
        for var in _values(current):
            if var is y or var is x:
                continue
            maker = producer(var)
            if maker is None:
                return None
            pending.append(maker)
    return tuple(ops)


def results_at_points(op: Operation, y: Var, x: Var, points: Array) -> Array | None:
    """Return what an op gives in fp64 at points [2, n] of y and x; None where a constant is several numbers."""
    values: dict[Var, torch.Tensor] = dict(zip((y, x), torch.from_numpy(points), strict=True))

    def of(var: Var) -> Any:
        if not isinstance(var, Var):
            return var
        if is_stored(var):
            single = var.val if isinstance(var.val, str) else number(var)
            return torch.tensor(single) if isinstance(single, (bool, float)) else single
        if var not in values:
            maker = var.op
            assert maker is not None
            arguments = {name: of(v) for name, v in op_inputs(maker).items()}
            if any(a is None for a in arguments.values()):
                return None
            values[var] = TABLE[maker.op_type].function(**arguments)
        return values[var]

    angles = of(op.outputs[0])
    return None if angles is None else np.asarray(angles.double().numpy())


def _continues_downstream(angle: QuotientAngle) -> bool:
    """Is an op further downstream the same angle, corrected where x or y is 0?"""
    reached = [angle.ops[0]]
    for _ in range(OPS_TO_NEXT):
        reached = [r for op in reached for v in op.outputs for r in consumers(v) if r.op_type in ENDS]
        if any((a := _angle(r)) is not None and (a.y, a.x) == (angle.y, angle.x) for r in reached):
            return True
    return False
