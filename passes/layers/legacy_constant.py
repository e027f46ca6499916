"""Load constants of five axes with the layer of the first releases.

Before::

    network(%x: 1x1x2x4x4) {
      %c: 1x1x2x1x1 = loadConstantND(shape=[1, 1, 2, 1, 1], data=[1, 2])
      %y: 1x1x2x4x4 = multiply(%x, %c)
      return %y
    }

After::

    network(%x: 1x1x2x4x4) {
      %c: 1x1x2x1x1 = loadConstant(shape=[2, 1, 1], data=[1, 2])
      %y: 1x1x2x4x4 = multiply(%x, %c)
      return %y
    }

The numbers stay as they are stored. Constants that a layer can hold itself are for other passes: apply
those that rewrite their readers first (`legacy_add_multiply`, for example), and the constants go.

Refuses when the constant has fewer than five axes, since `loadConstant` always makes (1, 1, C, H, W), which
Core ML's own check wants too; when its sequence or batch is more than 1; and when it is an output of the
network.

Why it helps: layers of the ND kind were reported off the ANE; `loadConstant` is of the first releases, which
mostly run there (hollance/neural-engine, unsupported-layers; through Core ML, iOS 11 to 15). Not measured on
later systems.

Grade: bit for bit.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from anesurgery import authoring as an
from anesurgery.authoring import LayerRewrite, Refusal, Site

RANK = 5
"""Axes of what `loadConstant` makes."""


@dataclass(frozen=True)
class LegacyConstant(LayerRewrite):
    """`loadConstantND` of shape (1, 1, C, H, W) becomes `loadConstant`."""

    name = "legacy_constant"
    follows = ("legacy_*",)  # they put constants into the layers that read them
    kinds = frozenset({"loadConstantND"})

    def rewrite(self, site: Site) -> Refusal | None:
        """Where the shape is the one that `loadConstant` makes."""
        (blob,) = site.outputs
        if blob in site.network.outputs:
            return Refusal("it is an output of the network")
        shape = site.sizes(blob)
        if len(shape) != RANK:
            return Refusal(f"it has {len(shape)} axes; loadConstant makes {RANK}")
        if shape[:2] != (1, 1):
            sequence, batch = shape[:2]
            return Refusal(f"its sequence and batch are {sequence} and {batch}; those of loadConstant are 1")
        site.emit("loadConstant", [], [blob], shape=shape[2:], data=site.params.data)
        return None


def example() -> Any:
    """Channels times constants of five axes."""
    layers = [an.make_constant("c", [[[[[1]], [[2]]]]]), an.make_layer("multiply", ["x", "c"], ["y"])]
    return an.make_network({"x": (1, 1, 2, 4, 4)}, layers, ["y"])
