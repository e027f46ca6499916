"""Norms by a root mean square, as they are written out, and a form of them that cannot overflow in fp16.

Squares of fp16 numbers above 255 overflow, and those of numbers below 2^-12 are 0. Numbers whose largest is so
large, or small, are divided by a unit first, and the norm is the same. Where it is neither, the unit is 1: then
each number is what it was, and no digit is lost.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from anesurgery import fp16
from anesurgery.errors import Refusal
from anesurgery.mil import Maker, Operation, Var, np_dtype, producer, static_shape
from anesurgery.semantics.bounds import squared
from anesurgery.semantics.intervals import magnitude
from anesurgery.semantics.reading import axes_of, beside_number, flag, number


@dataclass(frozen=True)
class RootNorm:
    """`n / sqrt(mean(n * n) + epsilon)`, where n is x, or x less its mean."""

    x: Var
    centred: bool
    """Is the mean taken away first?"""
    axes: tuple[int, ...]
    epsilon: float
    ops: tuple[Operation, ...]
    """The last one first."""


def root_norm(op: Operation) -> RootNorm | None:
    """The norm that ends with a division or a multiplication by the reciprocal."""
    for numerator, divisor, inverse in _divisions(op):
        root = _root(divisor, inverse)
        if root is None:
            continue
        inner, epsilon, ops = root
        if (total := producer(inner, "add")) is not None and (extra := beside_number(total)) is not None:
            inner, epsilon, ops = extra[0], epsilon + extra[1], (*ops, total)
        mean = producer(inner, "reduce_mean")
        square = None if mean is None else producer(mean.x)
        source = squared(square)
        if mean is None or square is None or source is None or not flag(mean, "keep_dims"):
            continue
        axes = tuple(sorted(axes_of(mean)))
        centre = _centred(numerator, axes)
        if source is numerator or (centre is not None and _centred(source, axes) is centre):
            parts = (op, *ops, mean, square, *_centring(numerator, source, axes))
            return RootNorm(numerator if centre is None else centre, centre is not None, axes, epsilon, parts)
    return None


def _divisions(op: Operation) -> Iterator[tuple[Var, Var, bool]]:
    """Numerator and divisor; and is the latter a reciprocal?"""
    if op.op_type == "real_div":
        yield op.x, op.y, False
    elif op.op_type == "mul":
        yield op.x, op.y, True
        yield op.y, op.x, True


def _root(var: Var, inverse: bool) -> tuple[Var, float, tuple[Operation, ...]] | None:
    """What stands under a root, what the op adds to it, and the op."""
    op = producer(var, "rsqrt" if inverse else "sqrt", "pow")
    if op is None or (op.op_type == "pow" and number(op.y) != (-0.5 if inverse else 0.5)):
        return None
    return op.x, number(op.inputs.get("epsilon")) or 0.0, (op,)


def _centred(var: Var, axes: tuple[int, ...]) -> Var | None:
    """The x of `x - mean(x)` over these axes."""
    op = producer(var, "sub")
    mean = None if op is None else producer(op.y, "reduce_mean")
    if op is None or mean is None or mean.x is not op.x or not flag(mean, "keep_dims"):
        return None
    return op.x if tuple(sorted(axes_of(mean))) == axes else None


def _centring(numerator: Var, source: Var, axes: tuple[int, ...]) -> Iterator[Operation]:
    """The subtractions of a mean, and the means."""
    for var in dict.fromkeys((numerator, source)):
        if _centred(var, axes) is not None and var.op is not None:
            yield var.op
            yield var.op.y.op


def cannot_overflow(norm: RootNorm) -> Refusal | None:
    """Why a norm needs no other form."""
    where, limit = norm.ops[0], fp16.LARGEST
    if np_dtype(norm.x) != np.float16:
        return Refusal(f"%{norm.x.name} holds {np_dtype(norm.x)}, whose squares do not overflow", where)
    if norm.epsilon <= 0:
        return Refusal("the epsilon is 0 in fp16", where)
    most = magnitude(norm.x) * (2 if norm.centred else 1)
    if most**2 <= limit:
        return Refusal(f"%{norm.x.name} is at most {most:g}: its squares do not overflow", where)
    if static_shape(norm.x) is None:
        return Refusal(f"%{norm.x.name} has the dynamic shape {tuple(map(str, norm.x.shape))}", where)
    return None


@dataclass(frozen=True)
class Quiet:
    """Largest magnitudes of which no square is lost: such numbers are squared as they are."""

    least: float
    """A power of two. The square of it, or a mean of squares with it, is no subnormal number."""
    most: float
    """A power of two. So many squares of it add up to a quarter of the largest number of fp16 at most."""

    @classmethod
    def of(cls, added: float, averaged: int = 1) -> Quiet:
        """Of so many squares that are added up, or that a mean is taken of."""
        most = 2.0 ** math.floor(math.log2(fp16.LARGEST / 4 / added) / 2)
        return cls(min(2.0 ** math.ceil(math.log2(fp16.NORMAL * averaged) / 2), most), most)

    def unit(self, mb: Maker, largest: Var) -> Var:
        """What numbers with this largest magnitude are divided by: 1 where it is quiet.

        Louder numbers come down to `most`, smaller ones up to `least`.
        """
        kind = np_dtype(largest).type
        return mb.real_div(x=largest, y=mb.clip(x=largest, alpha=kind(self.least), beta=kind(self.most)))


def by_largest(mb: Maker, norm: RootNorm) -> Var:
    """The norm of values whose squares fp16 holds.

    A mean is taken of halves, so that no difference overflows, and then of what is left, which is what rounding
    did to the first: of a mean of 60 fp16 keeps steps of 1/32. Below `floor`, a power of two, the magnitude is
    not divided by, so that the scaled epsilon is at most 4 times the square of what is quiet.
    """
    x, epsilon = norm.x, norm.epsilon
    kind, over = np_dtype(x).type, {"axes": list(norm.axes), "keep_dims": True}
    shape = static_shape(x)
    quiet = Quiet.of(1, 1 if shape is None else math.prod(int(shape[axis]) for axis in norm.axes))
    if norm.centred:
        x, epsilon = mb.mul(x=x, y=kind(0.5)), epsilon / 4
        for _ in range(2):
            x = mb.sub(x=x, y=mb.reduce_mean(x=x, **over))
    floor = 2.0 ** math.floor(math.log2(epsilon) / 2)
    unit = quiet.unit(mb, mb.maximum(x=mb.reduce_max(x=mb.abs(x=x), **over), y=kind(floor)))
    scaled = mb.real_div(x=x, y=unit)
    rest = guard_of(mb, epsilon, floor / quiet.least, unit)
    mean = mb.reduce_mean(x=mb.square(x=scaled), **over)
    return mb.mul(x=scaled, y=mb.rsqrt(x=mb.add(x=mean, y=rest)))


def guard_of(mb: Maker, guard: float, least: float, unit: Var, other: Var | None = None) -> Var:
    """What guards a sum, divided by two units or the square of one, which are no less than `least`."""
    kind, first = np_dtype(unit).type, min(least, 1.0)
    shares = [mb.real_div(x=kind(first), y=v) for v in (unit, other) if v is not None]
    both = mb.square(x=shares[0]) if other is None else mb.mul(x=shares[0], y=shares[1])
    return mb.mul(x=both, y=kind(guard / first**2))
