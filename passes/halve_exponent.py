"""An exponential that is made small afterwards is taken of half the number, and squared.

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

Refuses when the values are not of fp16, when the factor is no constant number between 0 and 1, and when
intervals show that the exponential does not overflow.

Why it helps: the exponential overflows in fp16 above 11.09, though what is made of it would be small
(computed). Two ops more; what they cost in time was not measured.

Grade: checked: that an exponential of a half is a root is no identity of polynomials.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from anesurgery import authoring as an
from anesurgery.authoring import Builder, Match, Refusal, Rewrite, Var, mb

OVERFLOWS = math.log(65504)
"""Where an exponential leaves fp16: 11.09."""


@dataclass(frozen=True)
class HalveExponent(Rewrite):
    """`exp(x) * c` becomes `(exp(x / 2) * sqrt(c))^2`."""

    name = "halve_exponent"
    kinds = frozenset({"mul", "real_div"})
    tolerance = an.Tolerance(1e-3)
    tolerates_nonfinite = False

    def check(self, m: Match) -> Match | Refusal:
        """An exponential that may overflow, times a constant below 1."""
        scaled = an.reading.scaled(m.root)
        exponential = None if scaled is None else an.producer(scaled[0], "exp")
        if scaled is None or exponential is None or not an.intervals.is_half(m.root.outputs[0]):
            return an.NO_MATCH
        if not 0 < scaled[1] < 1:
            return Refusal(f"the exponential is multiplied by {scaled[1]:g}, and does not become small", m.root)
        halved = an.producer(exponential.x, "mul")
        if halved is not None and an.number(halved.y) == 0.5:  # the form that it leaves behind
            return an.NO_MATCH
        if (high := an.interval(exponential.x)[1]) <= OVERFLOWS:
            return Refusal(f"%{exponential.x.name} is at most {high:g}: nothing overflows", m.root)
        return m.bind(ops=(m.root, exponential), exponent=exponential.x, factor=scaled[1])

    def rewrite(self, mb: Builder, m: Match) -> Var:
        """Half the exponent is exact, and is squared last."""
        root = mb.mul(x=mb.exp(x=mb.mul(x=m.exponent, y=0.5)), y=math.sqrt(m.factor))
        return mb.square(x=root)


@an.example((2, 8), dtype="fp16")
def example(x: Var) -> Var:
    """A thousandth of an exponential."""
    return mb.mul(x=mb.exp(x=x, name="e"), y=np.float16(1e-3), name="y")
