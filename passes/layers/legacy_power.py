"""Write broadcasting powers with a constant exponent as products, square roots or unary powers.

An exponent of 1 goes, so that the base is read in its place; 2, 3 and 4 become products, 0.5 the square root
(the `unary` layer without a type), and any other number a unary POWER. -1 and -0.5 are POWER too: INVERSE and
RSQRT would add an epsilon, which the format reads as 1e-6 where it is 0.

Refuses when the exponent is computed, varies, is not finite, or makes the result larger than the base, and when
the base is constant.

Why it helps: layers of the Broadcastable kind were reported off the ANE, `multiply` and `unary` mostly on it
(hollance/neural-engine, unsupported-layers; through Core ML, iOS 11 to 15). Not measured on later systems.

POWER is exact. A product of up to four factors is rounded by three times 2^-24 of itself at most, the power
before by up to 2^-23 (a unit in the last place): together 3e-7, and the root stays below. A root of -inf is
NaN, where the power was inf; of other negative numbers both are NaN, but the engine gives 0 (measured on M1
and M5).

Grade: proved.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from anesurgery import authoring as an
from anesurgery.authoring import Refusal, Site, Var

MOST_FACTORS = 4
"""Exponent up to which products stand for a power: two layers at most."""


@dataclass(frozen=True)
class LegacyPower(an.two_sides.TwoSided):
    """Broadcasting powers with one constant exponent become products, a square root or a unary power."""

    name = "legacy_power"
    plain: ClassVar[Mapping[str, str]] = {"powBroadcastable": "multiply"}
    tolerance = an.Tolerance(3e-7)

    def by_blobs(self, site: Site, x: str, y: str) -> Refusal | None:
        """No plain layer has a computed exponent."""
        return Refusal("the exponent is computed")

    def by_constant(self, site: Site, sides: an.two_sides.Constant) -> Refusal | None:
        """Choose the layer by what the exponent is."""
        if sides.first:
            return Refusal("the base is constant, the exponent computed")
        exponent = sides.number
        if exponent is None:
            words = f"the exponent of shape {sides.value.shape} is not one number"
            return Refusal(f"{words}, or makes the result larger than the base")
        if not math.isfinite(exponent):
            return Refusal(f"the exponent is {exponent}")
        _raise(site, sides.x, exponent)
        return None

    def sample(self, site: Site, var: Var, rng: np.random.Generator) -> an.Array | None:
        """Positive bases: others have no power with a broken exponent."""
        sides = an.two_sides.two_sides(site)
        exponent = sides.number if isinstance(sides, an.two_sides.Constant) else None
        if exponent is None or exponent % 1 == 0:
            return None
        return np.abs(rng.standard_normal(an.drawn_shape(var))).astype(np.float32)


def _raise(site: Site, x: str, exponent: float) -> None:
    if exponent == 1:
        site.forward(x)
    elif exponent in range(2, MOST_FACTORS + 1):
        square = [x, x] if exponent == 2 else [site.emit("multiply", [x, x])]
        rest = {2: [], 3: [x], 4: square}[int(exponent)]
        site.emit("multiply", [*square, *rest], site.outputs)
    elif exponent == 0.5:
        site.emit("unary", [x], site.outputs, type="SQRT")
    else:
        site.emit("unary", [x], site.outputs, type="POWER", alpha=exponent)


def example() -> Any:
    """A square, a cube, a root and a power with a negative exponent."""
    exponents = {"two": 2, "three": 3, "half": 0.5, "less": -1.5}
    blobs = ("x", "square", "cube", "root", "y")
    layers = [an.make_constant(name, value) for name, value in exponents.items()]
    for base, name, power in zip(blobs, exponents, blobs[1:], strict=False):
        layers.append(an.make_layer("powBroadcastable", [base, name], [power]))
    return an.make_network({"x": (1, 2, 4, 4)}, layers, ["y"])
