"""Quotients that need care in fp16: of sums, by a mask or of a total, and those whose angle is taken."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from anesurgery import fp16
from anesurgery.interpret.table import TABLE
from anesurgery.mil import (
    Array,
    Operation,
    Var,
    consumers,
    is_stored,
    op_inputs,
    operands,
    producer,
    static_shape,
)
from anesurgery.ops import names
from anesurgery.semantics.intervals import interval, is_half, magnitude
from anesurgery.semantics.reading import ints, number, value_and_number
from anesurgery.semantics.rows import reduced_size

FOLLOWED = frozenset({"add", "maximum", "clip", "tile"})
"""Ops that may stand between a sum and the division: guards and tiles."""


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
        return max(magnitude(total.x) * reduced_size(total) for total in self.sums)

    @property
    def overflows(self) -> bool:
        """May a sum overflow in fp16?"""
        return self.largest > fp16.LARGEST


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
    if below is None or not all(math.isfinite(reduced_size(total)) and ints(total, "axes") for total in sums):
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
    guarded = value_and_number(op)
    if guarded is None or static_shape(guarded[0]) != static_shape(op.outputs[0]):
        return None
    return guarded[0]


# Angles of quotients: `atan(y / x)` and the comparisons that choose a quadrant, in any spelling.
#
# `torch.atan2` is converted to an arc tangent of y / (x + a little) and many ops of comparisons. What such ops
# mean is found by computing them, at points of all four quadrants.


OPS = names(
    "add sub mul real_div abs cast less less_equal greater greater_equal equal not_equal logical_and "
    "logical_or logical_xor logical_not select sign atan clip maximum minimum identity"
)
"""Ops that such an angle is written with."""
ENDS = names("add sub mul select atan")
"""Ops that may end one."""
MOST = 40
"""Ops of one; torch's has 30."""
NEXT = 3
"""Ops between an angle and a later op that is the angle too. A choice: selects and sums that tell the quadrants
apart."""
LITTLE = 1e-6
"""What is added to a divisor so that it is not 0, at most: of divisors of 0.01 and more, the least that are
computed here, it changes nothing that fp16 tells apart."""
CLOSE = 2e-3
"""How far angles may be from the exact ones: pi in fp16 is off by 9.7e-4, and one of its steps there is 2e-3.
"""
SIZES = (1e-2, 0.3, 1.0, 2.5, 7.0, 300.0, 3e4)
"""Magnitudes of the points at which ops are computed, quotients up to 3e6 among them."""
BESIDE = (0.5, 0.99, 1.01, 2.0)
"""Factors of each constant of the ops, at which they are computed too: on both sides, and beyond it."""


@dataclass(frozen=True)
class QuotientAngle:
    """The angle of y and x."""

    y: Var
    x: Var
    ops: tuple[Operation, ...]
    """All that it is written with, the last one first."""
    turns: bool
    """Does it tell all four quadrants apart, as atan2 does, and not two?"""


def quotient_angle(op: Operation) -> QuotientAngle | None:
    """The angle that an op is the last of, where its divisor may be 0; None for all others."""
    angle = _angle(op)
    return None if angle is None or _goes_on(angle) else angle


def may_divide_by_zero(division: Operation) -> bool:
    """May a divisor be 0, or be that but for a little which fp16 does not hold?"""
    x = _divisor(division.y)
    low, high = interval(x)
    return low <= 0 <= high and not is_stored(x) and not _is_replaced(x)


def _angle(op: Operation) -> QuotientAngle | None:
    division = _division(op)
    if division is None:
        return None
    y, x = division.x, _divisor(division.y)
    ops = _between(op, y, x) if may_divide_by_zero(division) and not is_stored(y) else None
    if ops is None or y.shape != op.outputs[0].shape or x.shape != y.shape:
        return None
    points = _points(ops)
    angles = _computed(op, y, x, points)
    if angles is None:
        return None
    for turns, exact in ((True, np.arctan2(*points)), (False, np.arctan(points[0] / points[1]))):
        if np.all(np.abs(angles - exact) < CLOSE):
            return QuotientAngle(y, x, ops, turns)
    return None


def _points(ops: tuple[Operation, ...]) -> Array:
    """Points [2, n], y and x, in all quadrants: of ordinary sizes, and beside each constant of some ops."""
    stored = (v for op in ops for v in op_inputs(op).values() if isinstance(v, Var) and is_stored(v))
    numbers = {abs(n) for v in stored if not isinstance(v.val, str) and (n := number(v)) is not None}
    sizes = sorted({*SIZES, *(n * factor for n in numbers if n > LITTLE for factor in BESIDE)})
    signed = np.array([*sizes, *(-size for size in sizes)])
    return np.stack([axis.reshape(-1) for axis in np.meshgrid(signed, signed)])


def _division(op: Operation) -> Operation | None:
    """The division of the one arc tangent that is made before an op, of few ops."""
    pending, seen = [op], {op}
    while pending and len(seen) <= MOST:
        one = pending.pop()
        if one.op_type == "atan":
            return producer(one.x, "real_div")
        makers = [producer(v) for v in _values(one)]
        fresh = [m for m in makers if m is not None and m.op_type in OPS and m not in seen]
        pending += fresh
        seen |= set(fresh)
    return None


def _values(op: Operation) -> list[Var]:
    """What an op computes with, and is no constant."""
    return [v for _, v in operands(op) if not is_stored(v)]


def _divisor(var: Var) -> Var:
    """The x of `x + a little`, where x is near 0, or everywhere."""
    add = producer(var, "add")
    for value, other in () if add is None else ((add.x, add.y), (add.y, add.x)):
        shift = producer(other, "mul")
        factors = [] if shift is None else [v for v in (shift.x, shift.y) if is_stored(v)]
        little = number(other) if is_stored(other) else number(factors[0]) if factors else None
        if little is not None and abs(little) <= LITTLE:
            return value
    return var


def _is_replaced(var: Var) -> bool:
    """Does a number stand where a divisor would be 0?"""
    select = producer(var, "select")
    return select is not None and any(is_stored(v) and number(v) for v in (select.a, select.b))


def _between(op: Operation, y: Var, x: Var) -> tuple[Operation, ...] | None:
    """All ops from y and x to an op; None where something else comes in."""
    ops, pending = list[Operation](), [op]
    while pending:
        one = pending.pop()
        if one in ops:
            continue
        if one.op_type not in OPS or len(ops) >= MOST:
            return None
        ops.append(one)
        for var in _values(one):
            if var is y or var is x:
                continue
            maker = producer(var)
            if maker is None:
                return None
            pending.append(maker)
    return tuple(ops)


def _computed(op: Operation, y: Var, x: Var, points: Array) -> Array | None:
    """What an op makes of some numbers; None where a constant is no single number."""
    values: dict[Var, torch.Tensor] = dict(zip((y, x), torch.from_numpy(points), strict=True))

    def of(var: Var) -> Any:
        if not isinstance(var, Var):
            return var
        if is_stored(var):
            return var.val if isinstance(var.val, str) else number(var)
        if var not in values:
            maker = var.op
            assert maker is not None
            arguments = {name: of(v) for name, v in op_inputs(maker).items()}
            if any(a is None for a in arguments.values()):
                raise ValueError(var.name)
            values[var] = TABLE[maker.op_type].function(**arguments)
        return values[var]

    try:
        angles: Array = of(op.outputs[0]).double().numpy()
    except ValueError:
        return None
    return angles


def _goes_on(angle: QuotientAngle) -> bool:
    """Is an op further downstream the angle too, which tells places on the axes apart?"""
    reached = [angle.ops[0]]
    for _ in range(NEXT):
        reached = [r for op in reached for v in op.outputs for r in consumers(v) if r.op_type in ENDS]
        if any((a := _angle(r)) is not None and (a.y, a.x) == (angle.y, angle.x) for r in reached):
            return True
    return False
