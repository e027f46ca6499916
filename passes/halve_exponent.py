"""Compute an exponential that is scaled down later from half its exponent, and square the result.

Before::

    main(%x: 2x8xfp16) {
      %e: 2x8xfp16 = exp(x=%x)
      %y: 2x8xfp16 = mul(x=%e, y=0.0010004)
      return %y
    }

After::

    main(%x: 2x8xfp16) {
      %y_halve_exponent_mul: 2x8xfp16 = mul(x=%x, y=0.5)
      %y_halve_exponent_exp: 2x8xfp16 = exp(x=%y_halve_exponent_mul)
      %y_halve_exponent_mul_1: 2x8xfp16 = mul(x=%y_halve_exponent_exp, y=0.0316162)
      %y: 2x8xfp16 = square(x=%y_halve_exponent_mul_1)
      return %y
    }

`exp(a) * d^2`, as in the likelihood of a normal distribution, likewise becomes `(exp(a / 2) * d)^2`.

Refuses when the values are not of fp16, when the factor is neither a square nor a constant number between 0 and
1, and when intervals show that the exponential does not overflow.

Why it helps: the exponential overflows in fp16 above 11.09, even if the final result is small (computed). The
rewrite adds two ops; what they cost in time was not measured.

Grade: checked: that an exponential of a half is a root is no identity of polynomials.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from anesurgery import authoring as an
from anesurgery.authoring import Builder, Match, Operation, Refusal, Rewrite, Var, mb
from anesurgery.semantics import bounds
from anesurgery.semantics.intervals import interval


@dataclass(frozen=True)
class HalveExponent(Rewrite):
    """`exp(x) * c` becomes `(exp(x / 2) * sqrt(c))^2`, and `exp(x) * d^2` becomes `(exp(x / 2) * d)^2`."""

    name = "halve_exponent"
    kinds = frozenset({"mul", "real_div"})
    tolerance = an.Tolerance(1e-3)
    tolerates_nonfinite = False

    def check(self, m: Match) -> Match | Refusal:
        """Match an exponential that may overflow, times a constant below 1 or a square."""
        parts = _of_squares(m.root) or _scaled(m.root.outputs[0])
        if parts is None or not parts.ops or not an.intervals.is_half(m.root.outputs[0]):
            return an.NO_MATCH
        if parts.base is None and any(map(_of_squares, an.consumers(m.root.outputs[0]))):
            return an.NO_MATCH  # the product with a square, which follows, is rewritten as a whole
        exponential = parts.ops[-1]
        if parts.base is None and not 0 < parts.factor < 1:
            words = f"the exponential is multiplied by {parts.factor:g}, and does not become small"
            return Refusal(words, m.root)
        halved = an.producer(exponential.x, "mul")
        if halved is not None and an.number(halved.y) == 0.5:  # the form that it leaves behind
            return an.NO_MATCH
        if (high := interval(exponential.x)[1]) <= an.fp16.LARGEST_EXPONENT:
            return Refusal(f"%{exponential.x.name} is at most {high:g}: nothing overflows", m.root)
        return m.bind(ops=parts.ops, exponent=exponential.x, factor=parts.factor, base=parts.base)

    def rewrite(self, mb: Builder, m: Match) -> Var:
        """Build the square of the exponential of half the exponent; halving is exact."""
        root = mb.exp(x=mb.mul(x=m.exponent, y=0.5))
        root = root if m.factor == 1 else mb.mul(x=root, y=math.sqrt(m.factor))
        return mb.square(x=root if m.base is None else mb.mul(x=root, y=m.base))


@dataclass(frozen=True)
class _Parts:
    """A product of a constant, an exponential, and perhaps the square of a value."""

    ops: tuple[Operation, ...]
    """All ops of the product; the exponential comes last."""
    factor: float = 1.0
    """The constant."""
    base: Var | None = None
    """The value that is squared."""


def _scaled(value: Var) -> _Parts | None:
    """Read a value as a constant times an exponential; None if it is another."""
    times = None if value.op is None else an.reading.scaled(value.op)
    exponential = None if times is None else an.producer(times.value, "exp")
    if value.op is None or times is None or exponential is None:
        return None
    return _Parts((value.op, exponential), times.factor)


def _of_squares(root: Operation) -> _Parts | None:
    """Read an op as an exponential, perhaps times a positive constant, times a square; None for others."""
    for factor, other in ((root.x, root.y), (root.y, root.x)) if root.op_type == "mul" else ():
        square, exponential = an.producer(other), an.producer(factor, "exp")
        base = bounds.squared_operand(square)
        parts = _Parts((exponential,)) if exponential is not None else _scaled(factor)
        if square is not None and base is not None and parts is not None and parts.factor > 0:
            return _Parts((root, square, *parts.ops), parts.factor, base)
    return None


@an.example((2, 8), dtype="fp16")
def example(x: Var) -> Var:
    """A thousandth of an exponential."""
    return mb.mul(x=mb.exp(x=x, name="e"), y=np.float16(1e-3), name="y")
