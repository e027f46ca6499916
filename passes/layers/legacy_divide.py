"""Write broadcasting quotients as products with the inverse of the divisor.

Before::

    network(%x: 1x2x4x4, %z: 1x2x4x4) {
      %deviation: 2x1x1 = loadConstantND(shape=[2, 1, 1], data=[4, 0.5])
      %quotient: 1x2x4x4 = divideBroadcastable(%x, %z)
      %y: 1x2x4x4 = divideBroadcastable(%quotient, %deviation)
      return %y
    }

After::

    network(%x: 1x2x4x4, %z: 1x2x4x4) {
      %quotient_unary: 1x2x4x4 = unary(%z, type=INVERSE, epsilon=1.17549e-38)
      %quotient: 1x2x4x4 = multiply(%x, %quotient_unary)
      %y: 1x2x4x4 = scale(%quotient, shapeScale=[2], scale=[0.25, 2])
      return %y
    }

A constant divisor becomes its reciprocal in the file: a linear activation where it is one number, else `scale`.
Of a computed divisor y, the layer `unary` gives 1 / (y + epsilon), which `multiply` takes, or `scale` where the
first side is constant. The format reads an epsilon of 0 as 1e-6, so the default is the smallest normal fp32
number: every |y| above 1e-30 absorbs it, and fp16 does not hold it. Larger ones, up to 2^-24 (6e-8, the
smallest that fp16 holds, absorbed by every |y| from 2 on), are an option.

Refuses when a constant divisor holds a number whose reciprocal is no normal fp32 number (0, 2e38, NaN), or
when the broadcasting is not one that the definition of the format lists for `multiply` and `scale`: of
(B, C, H, W), the other side may be (B, C, H, W), (B, C, 1, 1), (B, 1, H, W) or (B, 1, 1, 1), with as many axes;
a constant may have the sizes [1], [C], [1, H, W] or [C, H, W], and the result must be as large as the other
side. With `exact=True`, also where a divisor is computed, or no power of two.

Why it helps: layers of the Broadcastable kind were reported off the ANE, `multiply`, `scale` and `unary` mostly
on it, but a product of (C, H, W) and (C, 1, 1) off it as well (hollance/neural-engine, unsupported-layers;
through Core ML, iOS 11 to 15). Not measured on later systems.

Bit-exact by powers of two. Else the quotient was rounded, and now the reciprocal and the product are: three
times 2^-24 of the number at most, so the promise is 2^-22. Beyond it, a divisor of 0 gives x / epsilon, not an
infinity, and 0 / 0 gives 0, not NaN. In fp16 the inverse of a divisor below 1.5e-5 is infinite, and above 16384
it has fewer digits, even where the quotient is an ordinary number.

Grade: checked: reciprocals are rounded.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from anesurgery import authoring as an
from anesurgery.authoring import Refusal, Site, Var

SMALLEST, LARGEST = float(np.finfo(np.float32).tiny), an.fp16.LEAST
"""Bounds of epsilon: the smallest normal fp32 number, and the smallest fp16 number."""


@dataclass(frozen=True)
class LegacyDivide(an.two_sides.TwoSided):
    """Broadcasting quotients become products with the inverse; by powers of two exactly.

    Attributes:
        exact: leave the layers whose numbers would change.
        epsilon: what a computed divisor is increased by.
    """

    name = "legacy_divide"
    plain: ClassVar[Mapping[str, str]] = {"divideBroadcastable": "multiply"}
    tolerance = an.Tolerance(2.0**-22)
    caveat = "where a computed divisor is 0 the quotient is x / epsilon, not infinite"

    exact: bool = False
    epsilon: float = an.option(SMALLEST, least=SMALLEST, most=LARGEST)

    def sample(self, site: Site, var: Var, rng: np.random.Generator) -> an.Array | None:
        """Divisors of a size of 2 to 8, which absorb any epsilon."""
        if var is not site.network.blobs.var(site.inputs[1]):
            return None
        return an.adversarial.signed(rng, rng.uniform(2, 8, an.drawn_shape(var))).astype(np.float32)

    def turned(self, site: Site, y: str, outputs: Sequence[str] | None = None) -> str | Refusal:
        """The inverse of the divisor, unless every number has to stay."""
        if self.exact:
            return Refusal("the divisor is computed, so the product with its inverse is not exact")
        return site.emit("unary", [y], outputs, type="INVERSE", epsilon=self.epsilon)

    def turned_numbers(self, value: an.Array) -> an.Array | Refusal:
        """The reciprocals, if they are normal numbers and, where that is asked for, exact."""
        value = value.astype(np.float32)
        with np.errstate(all="ignore"):
            factor: an.Array = 1 / value
        broken = ~np.isfinite(factor) | (np.abs(factor) < SMALLEST)
        if broken.any():
            return Refusal(f"the divisor holds {value[broken][0]:g}, whose reciprocal is no normal fp32 number")
        rounded = np.abs(np.frexp(value)[0]) != 0.5
        if self.exact and rounded.any():
            return Refusal(f"the divisor holds {value[rounded][0]:g}, which is no power of two")
        return factor

    def by_constant(self, site: Site, sides: an.two_sides.Constant) -> Refusal | None:
        """1 over a blob is its inverse, without a product."""
        if not sides.first or sides.number != 1:
            return super().by_constant(site, sides)
        inverse = self.turned(site, sides.x, site.outputs)
        return inverse if isinstance(inverse, Refusal) else None


def example() -> Any:
    """A quotient of two images, divided by channel."""
    layers = [
        an.make_constant("deviation", [[[4.0]], [[0.5]]]),
        an.make_layer("divideBroadcastable", ["x", "z"], ["quotient"]),
        an.make_layer("divideBroadcastable", ["quotient", "deviation"], ["y"]),
    ]
    return an.make_network({"x": (1, 2, 4, 4), "z": (1, 2, 4, 4)}, layers, ["y"])
