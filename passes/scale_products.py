"""Weights whose sums may pass 32768 are divided by a power of two, and the result is multiplied by it.

Before::

    main(%x: 2x16xfp16) {
      %t: 2x16xfp16 = tanh(x=%x)
      %y: 2x4xfp16 = linear(x=%t, weight=const<4x16xfp16>)
      return %y
    }

After::

    main(%x: 2x16xfp16) {
      %t: 2x16xfp16 = tanh(x=%x)
      %y_scale_products_linear: 2x4xfp16 = linear(x=%t, weight=const<4x16xfp16>)
      %y: 2x4xfp16 = mul(x=%y_scale_products_linear, y=4)
      return %y
    }

Refuses when the weights are not of fp16, compressed or no constants, when nothing bounds the sums or they
stay below 32768, and when a weight or bias that fp16 holds in full would lose digits.

Why it helps: a result or partial sum of products of magnitude 32768 or more becomes infinite on the engine,
even where later terms cancel it (measured, M1 to M6: sbryngelson/ane-guide; 751K), and products of single
numbers go on to 65504. The multiplication is one op more; what it costs in time was not measured.

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


@dataclass(frozen=True)
class ScaleProducts(Rewrite):
    """`linear(x, w)` becomes `linear(x, w / 2^k) * 2^k`."""

    name = "scale_products"
    kinds = an.ops.PRODUCTS
    """A sum of products."""
    tolerates_nonfinite = False

    def check(self, m: Match) -> Match | Refusal:
        """One with constant weights, whose bound is beyond the ceiling."""
        weight = an.reading.weight(m.root)
        if weight is None or an.np_dtype(weight) != np.float16:
            return an.NO_MATCH
        most = an.intervals.product(m.root)
        if not an.fp16.CEILING <= most < math.inf:
            return Refusal(f"a sum reaches at most {most:g}; the ceiling is {an.fp16.CEILING:g}", m.root)
        places = {n: v for n, v in m.root.inputs.items() if v is weight or (n == "bias" and v is not None)}
        if any(an.constant(v) is None or is_compressed(v) for v in places.values()):
            return Refusal(f"%{weight.name} is compressed, or no constant", m.root)
        exponent = 1 + math.floor(math.log2(most / an.fp16.CEILING))
        values = {n: np.asarray(an.constant(v)) for n, v in places.items()}
        for name, value in values.items():
            size = np.abs(value.astype(np.float64))
            if lost := int(np.sum((size > 0) & (size < an.fp16.NORMAL * 2**exponent))):
                return Refusal(f"{lost} numbers of {name} would lose digits by 2^-{exponent}", m.root)
        return m.bind(values=values, exponent=exponent)

    def rewrite(self, mb: Builder, m: Match) -> Var:
        """The same op with smaller weights, and a multiplication."""
        part = np.float16(2.0**-m.exponent)
        product = again(mb, m.root, **{n: v * part for n, v in m.values.items()})
        return mb.mul(x=product, y=2.0**m.exponent)


@an.example((2, 16), dtype="fp16")
def example(x: Var) -> Var:
    """Sixteen numbers up to 1 times 4096."""
    weight = np.full((4, 16), 4096, np.float16)
    return mb.linear(x=mb.tanh(x=x, name="t"), weight=weight, name="y")
