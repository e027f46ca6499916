"""Take a power that is scaled down later of a smaller number.

Before::

    main(%x: 2x8xfp16) {
      %square: 2x8xfp16 = mul(x=%x, y=%x)
      %cube: 2x8xfp16 = mul(x=%square, y=%x)
      %y: 2x8xfp16 = mul(x=%cube, y=0.000100017)
      return %y
    }

After::

    main(%x: 2x8xfp16) {
      %y_scale_powers_mul: 2x8xfp16 = mul(x=%x, y=0.03125)
      %y_scale_powers_pow: 2x8xfp16 = pow(x=%y_scale_powers_mul, y=3)
      %y: 2x8xfp16 = mul(x=%y_scale_powers_pow, y=3.27734)
      return %y
    }

The number is divided by a power of two, chosen so that the remaining factor is at least 1. Powers that are
summed or averaged before they are scaled down are rewritten too. So are powers that stored weights multiply, as
after a squared relu: the weights grow by the power of two, up to a magnitude of 1.

Refuses when the values are not of fp16, when the exponent is not a whole number from 2 on, when the factor is
not a constant number below 1, when weights are compressed or too large to make anything small, and when
intervals show that the power does not overflow.

Why it helps: a cube of fp16 overflows above 40, a square from 256 on, even if the final result is small
(computed). There are as many ops as before, or one more; what that costs in time was not measured.

Grade: proved.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from anesurgery import authoring as an
from anesurgery.authoring import Builder, Match, Refusal, Rewrite, Var, mb
from anesurgery.mil import is_compressed
from anesurgery.regions.small_builds import again
from anesurgery.semantics import bounds, rows
from anesurgery.semantics.intervals import magnitude

MOST_SHIFT = 4
"""Before weights a number is divided by 2^4 at most: then the square of a number below 0.1 is subnormal."""


@dataclass(frozen=True)
class ScalePowers(Rewrite):
    """`x^n * c` becomes `(x / 2^k)^n * (c * 2^(k n))`."""

    name = "scale_powers"
    kinds = frozenset({"mul", "real_div"}) | an.ops.PRODUCTS
    tolerance = an.Tolerance(1e-3)
    tolerates_nonfinite = False

    def check(self, m: Match) -> Match | Refusal:
        """Match a power that may overflow, times a constant below 1 or small weights."""
        if m.root.op_type in an.ops.PRODUCTS:
            return self._weighted(m)
        scaled = an.reading.scaled_by_all(m.root)
        if scaled is None or not an.intervals.is_half(m.root.outputs[0]):
            return an.NO_MATCH
        value, factor, scaling = scaled
        total = an.producer(value, "reduce_sum", "reduce_mean")
        power = an.reading.integer_power(value if total is None else total.x)
        if power is None:
            return an.NO_MATCH
        x, exponent, ops = power
        most = magnitude(x, products=1)
        if most**exponent * (1 if total is None else rows.reduced_size(total)) <= an.fp16.LARGEST:
            return Refusal(f"%{x.name} is at most {most:g}, and its power {exponent} does not overflow", m.root)
        shift = math.ceil(-math.log2(abs(factor)) / exponent) if factor else 0
        if shift < 1 or abs(factor) > 0.5:
            return Refusal(f"the power is multiplied by {factor:g}, and does not become small", m.root)
        ops = (*scaling, *([] if total is None else [total]), *ops)
        return m.bind(ops=ops, x=x, exponent=exponent, shift=shift, factor=factor, total=total)

    def _weighted(self, m: Match) -> Match | Refusal:
        """Match a product of a power and stored weights."""
        power = an.reading.integer_power(m.root.x)
        weight = an.reading.weight(m.root)
        if power is None or weight is None or weight is m.root.x or an.np_dtype(weight) != np.float16:
            return an.NO_MATCH
        x, exponent, ops = power
        most, largest = magnitude(x, products=1), max(map(abs, bounds.constant_range(weight)))
        if most**exponent <= an.fp16.LARGEST:
            return Refusal(f"%{x.name} is at most {most:g}, and its power {exponent} does not overflow", m.root)
        if an.constant(weight) is None or is_compressed(weight):
            return Refusal(f"%{weight.name} is compressed, or no constant", m.root)
        shift = min(MOST_SHIFT, math.floor(-math.log2(largest) / exponent)) if largest else 0
        if shift < 1:
            return Refusal(f"the weights reach {largest:g}, and make nothing small", m.root)
        name = next(name for name, value in m.root.inputs.items() if value is weight)
        weights = {name: np.asarray(an.constant(weight)) * np.float16(2.0 ** (shift * exponent))}
        return m.bind(ops=(m.root, *ops), x=x, exponent=exponent, shift=shift, weights=weights)

    def rewrite(self, mb: Builder, m: Match) -> Var:
        """Build the power of the smaller number, times the rest of the factor."""
        small = mb.mul(x=m.x, y=2.0**-m.shift)
        power = mb.square(x=small) if m.exponent == 2 else mb.pow(x=small, y=float(m.exponent))
        if m.root.op_type in an.ops.PRODUCTS:
            return again(mb, m.root, x=power, **m.weights)
        if m.total is not None:
            axes, keep = an.ints(m.total, "axes"), an.flag(m.total, "keep_dims")
            power = getattr(mb, m.total.op_type)(x=power, axes=axes, keep_dims=keep)
        return mb.mul(x=power, y=m.factor * 2.0 ** (m.shift * m.exponent))


@an.example((2, 8), dtype="fp16")
def example(x: Var) -> Var:
    """A ten-thousandth of a cube."""
    square = mb.mul(x=x, y=x, name="square")
    return mb.mul(x=mb.mul(x=square, y=x, name="cube"), y=np.float16(1e-4), name="y")
