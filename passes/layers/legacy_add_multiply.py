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

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from anesurgery import authoring as an
from anesurgery.authoring import Refusal, Site

NEWER = "loadConstantND"
"""Plain layers are looked at for the sake of a constant of this kind, which they read."""


@dataclass(frozen=True)
class LegacyAddMultiply(an.two_sides.TwoSided):
    """Broadcasting sums and products become `add`, `multiply`, `bias`, `scale` or a linear activation."""

    name = "legacy_add_multiply"
    plain: ClassVar[Mapping[str, str]] = {
        "addBroadcastable": "add",
        "add": "add",
        "multiplyBroadcastable": "multiply",
        "multiply": "multiply",
    }

    def rewrite(self, site: Site) -> Refusal | None:
        """As any layer of two sides, but a plain one only for the sake of its constant."""
        if site.node.kind in self.plain.values() and not any(site.network.maker(b, NEWER) for b in site.inputs):
            return None
        return super().rewrite(site)

    def by_blobs(self, site: Site, x: str, y: str) -> Refusal | None:
        """A plain layer has one such constant, so that it has two where neither side is computed."""
        if site.node.kind in self.plain.values():
            return Refusal("both sides are constant")
        return super().by_blobs(site, x, y)


def example() -> Any:
    """A sum of two images, scaled by channel and shifted by one number."""
    layers = [
        an.make_constant("scale", [[[2]], [[3]]]),
        an.make_constant("half", 0.5),
        an.make_layer("addBroadcastable", ["x", "z"], ["sum"]),
        an.make_layer("multiplyBroadcastable", ["sum", "scale"], ["scaled"]),
        an.make_layer("addBroadcastable", ["half", "scaled"], ["y"]),
    ]
    return an.make_network({"x": (1, 2, 4, 4), "z": (1, 2, 4, 4)}, layers, ["y"])
