"""Repeat one number for each channel over the image before two blobs are multiplied.

Before::

    network(%x: 3x1x4, %z: 3x1x1) {
      %y: 3x1x4 = multiply(%x, %z)
      return %y
    }

After::

    network(%x: 3x1x4, %z: 3x1x1) {
      %y_padding: 3x1x4 = padding(%z, replication={}, paddingAmounts={borderAmounts=[{}, {endEdgeSize=3}]})
      %y: 3x1x4 = multiply(%x, %y_padding)
      return %y
    }

`padding` that replicates the border makes an image of one pixel as large as the other side; so gates of
squeeze-and-excitation networks are written. It writes a blob as large as the result.

Refuses when a size of the two blobs is dynamic. A constant side is for
`legacy_add_multiply`, which makes it a `scale`.

Why it helps: the product of (C, H, W) and (C, 1, 1) was reported off the ANE, layers of the first releases
mostly on it (hollance/neural-engine, unsupported-layers; through Core ML, iOS 11 to 15). Whether the padding
costs less than the switch was not measured. Exact: the same numbers are multiplied.

Grade: bit for bit.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from anesurgery import authoring as an
from anesurgery.authoring import LayerRewrite, Refusal, Site


@dataclass(frozen=True)
class SpreadChannels(LayerRewrite):
    """`multiply` of (C, H, W) and (C, 1, 1) becomes `padding` and `multiply` of equal shapes."""

    name = "spread_channels"
    kinds = frozenset({"multiply"})

    def rewrite(self, site: Site) -> Refusal | None:
        """Only for two computed blobs, one with a single pixel."""
        if len(site.inputs) != 2 or any(site.constant(b) is not None for b in site.inputs):
            return None
        image, gate = site.inputs
        if site.shape(image)[-2:] == (1, 1):
            image, gate = gate, image
        if site.shape(gate)[-2:] != (1, 1) or site.shape(image)[-2:] == (1, 1):
            return None
        whole, single = site.sizes(image), site.sizes(gate)
        if len(whole) != len(single) or len(whole) < 3 or whole[:-2] != single[:-2]:
            return None
        amounts = an.spatial_axes.borders((0, whole[-2] - 1), (0, whole[-1] - 1))
        spread = site.emit("padding", [gate], replication={}, paddingAmounts=amounts)
        site.emit("multiply", [image, spread], site.outputs)
        return None


def example() -> Any:
    """An image and a gate."""
    layer = an.make_layer("multiply", ["x", "z"], ["y"])
    return an.make_network({"x": (3, 1, 4), "z": (3, 1, 1)}, [layer], ["y"])
