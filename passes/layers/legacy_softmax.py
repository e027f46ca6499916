"""Compute softmax over channels with the layer of the first releases.

Before::

    network(%x: 1x4x2x2) {
      %y: 1x4x2x2 = softmaxND(%x, axis=1)
      return %y
    }

After::

    network(%x: 1x4x2x2) {
      %y: 1x4x2x2 = softmax(%x)
      return %y
    }

Over the sequence, the rows or the columns of five axes it is a `softmax` between two `permute`, which change
places of that axis and the channel.

Refuses when a blob of another number of axes than five is normalized over another axis than the channel, since
Core ML's own check wants exactly five for `permute`; over the batch of five; and when it has fewer than three
axes, which `softmax` needs.

Why it helps: layers of the ND kind were reported off the ANE (hollance/neural-engine, unsupported-layers;
through Core ML, iOS 11 to 15), `softmax` on it (fredyshox/ANECompat; Macs, macOS 12 or later). `permute` is of
the first releases, which mostly run there. Not measured on later systems.

Numbers: over the channel bit for bit the same. After a `permute` the terms of a sum may be taken in another
order: within 1e-5 of the largest number in fp32.

Grade: bit for bit.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from anesurgery import authoring as an
from anesurgery.authoring import LayerRewrite, Refusal, Site

LEAST, PERMUTED = 3, 5
"""Axes that `softmax` takes at least, and that `permute` takes."""


@dataclass(frozen=True)
class LegacySoftmax(LayerRewrite):
    """`softmaxND` becomes `softmax`, with permutations around it where it is not over the channels."""

    name = "legacy_softmax"
    kinds = frozenset({"softmaxND"})
    tolerance = an.REASSOCIATED

    def rewrite(self, site: Site) -> Refusal | None:
        """Choose the layer by the axis."""
        (x,) = site.inputs
        rank = len(site.shape(x))
        axis = an.spatial_axes.from_end(site.params.axis, rank)
        if rank < LEAST:
            return Refusal(f"the blob has {rank} axes; Core ML's own check wants {LEAST} or more for softmax")
        if axis == an.spatial_axes.CHANNEL:
            site.emit("softmax", [x], site.outputs)
            return None
        if rank != PERMUTED:
            words = f"axis {axis} ({an.spatial_axes.NAMES.get(axis, 'in front of the sequence')}) of {rank}"
            return Refusal(f"it normalizes {words}; Core ML's own check wants {PERMUTED} axes for permute")
        if axis not in an.spatial_axes.SWAPS:
            return Refusal(f"it normalizes the {an.spatial_axes.NAMES[axis]}, which permute leaves where it is")
        an.spatial_axes.swap(
            site, site.emit("softmax", [an.spatial_axes.swap(site, x, axis)]), axis, site.outputs
        )
        return None


def example() -> Any:
    """The classes of an image."""
    return an.make_network({"x": (1, 4, 2, 2)}, [an.make_layer("softmaxND", ["x"], ["y"], axis=1)], ["y"])
