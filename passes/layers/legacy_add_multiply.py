"""Write broadcasting additions and products with the layers of the first releases.

Before::

    network(%x: 1x2x4x4, %z: 1x2x4x4) {
      %scale: 2x1x1 = loadConstantND(shape=[2, 1, 1], data=[2, 3])
      %half: 1 = loadConstantND(shape=[1], data=[0.5])
      %sum: 1x2x4x4 = addBroadcastable(%x, %z)
      %scaled: 1x2x4x4 = multiplyBroadcastable(%sum, %scale)
      %y: 1x2x4x4 = addBroadcastable(%half, %scaled)
      return %y
    }

After::

    network(%x: 1x2x4x4, %z: 1x2x4x4) {
      %sum: 1x2x4x4 = add(%x, %z)
      %scaled: 1x2x4x4 = scale(%sum, shapeScale=[2], scale=[2, 3])
      %y: 1x2x4x4 = activation(%scaled, linear={alpha=1, beta=0.5})
      return %y
    }

Two computed blobs become `add` or `multiply`; a constant becomes a linear activation where it is one number,
else `bias` or `scale`. So does one that a plain `add` or `multiply` reads from a `loadConstantND`.

Refuses when the broadcasting is not one that the definition of the format lists for the layer: of (B, C, H, W),
the other side may be (B, C, H, W), (B, C, 1, 1), (B, 1, H, W) or (B, 1, 1, 1), with as many axes; a constant
may have the sizes [1], [C], [1, H, W] or [C, H, W], and the result must be as large as the other side. Refuses
too when a shape that matters is dynamic.

Why it helps: layers of the Broadcastable kind were reported off the ANE, `add`, `multiply`, `scale` and linear
activations on it, but for a product of (C, H, W) and (C, 1, 1) (hollance/neural-engine, unsupported-layers;
through Core ML, iOS 11 to 15). Not measured on later systems. Exact: the same numbers are added and multiplied.

Grade: bit for bit.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from anesurgery import authoring as an
from anesurgery.authoring import LayerRewrite, Refusal, Site

FORMS = {
    "addBroadcastable": ("add", an.two_sides.plus),
    "add": ("add", an.two_sides.plus),
    "multiplyBroadcastable": ("multiply", an.two_sides.times),
    "multiply": ("multiply", an.two_sides.times),
}
"""Layer type -> the plain layer of two blobs, and what puts a constant there."""
PLAIN, ND = frozenset({"add", "multiply"}), "loadConstantND"
"""Plain layers are looked at for the sake of a constant of the newer kind that they read."""


@dataclass(frozen=True)
class LegacyAddMultiply(LayerRewrite):
    """Broadcasting sums and products become `add`, `multiply`, `bias`, `scale` or a linear activation."""

    name: ClassVar[str] = "legacy_add_multiply"
    kinds: ClassVar[frozenset[str]] = frozenset(FORMS)

    def rewrite(self, site: Site) -> Refusal | None:
        """By a constant if one side is one, else between the two sides."""
        if site.node.kind in PLAIN and not any(site.network.maker(b, ND) for b in site.inputs):
            return None
        sides, (plain, constant) = an.two_sides.two_sides(site), FORMS[site.node.kind]
        if isinstance(sides, Refusal):
            return sides
        if not isinstance(sides, an.two_sides.Constant) and site.node.kind in PLAIN:
            return Refusal("both sides are constant")
        if not isinstance(sides, an.two_sides.Constant):
            return an.two_sides.combine(site, plain, *sides)
        if isinstance(sides.form, Refusal):
            return sides.form
        constant(site, sides.x, sides.value, sides.form)
        return None


def example() -> Any:
    """A sum of two images, scaled by channel and shifted by one number."""
    layers = [
        an.make_layer("loadConstantND", [], ["scale"], shape=[2, 1, 1], data=an.weights(np.array([2, 3]))),
        an.make_layer("loadConstantND", [], ["half"], shape=[1], data=an.weights(np.array([0.5]))),
        an.make_layer("addBroadcastable", ["x", "z"], ["sum"]),
        an.make_layer("multiplyBroadcastable", ["sum", "scale"], ["scaled"]),
        an.make_layer("addBroadcastable", ["half", "scaled"], ["y"]),
    ]
    return an.make_network({"x": (1, 2, 4, 4), "z": (1, 2, 4, 4)}, layers, ["y"])
