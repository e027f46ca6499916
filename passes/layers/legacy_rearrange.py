"""Write rows of layers that only move numbers with the layers of the first releases, or without any.

Before::

    network(%x: 1x4x2x2) {
      %groups: 1x2x2x2x2 = reshapeStatic(%x, targetShape=[1, 2, 2, 2, 2])
      %swapped: 1x2x2x2x2 = transpose(%groups, axes=[0, 2, 1, 3, 4])
      %y: 1x4x2x2 = reshapeStatic(%swapped, targetShape=[1, 4, 2, 2])
      return %y
    }

After::

    network(%x: 1x4x2x2) {
      %y: 1x4x2x2 = convolution(%x, outputChannels=4, kernelChannels=4, kernelSize=[1, 1], valid={}, weights=const<16>)
      return %y
    }

Where the numbers land decides, not how the row is written:

* all at their place: the row goes;
* whole channels in another order: a 1x1 `convolution` with one 1 in each kernel, C x C products for each
  pixel (option `channels`: the most);
* blocks of pixels to channels or back: `reorganizeData` (option `blocks`: their sizes), with such a
  convolution where the channels come in another order;
* all numbers of an image as channels: `flatten`;
* five axes: `reshape`, which keeps the batch, or `permute`.

Of a row that is none of these, the longest parts that are one are written so.

Refuses when the row changes the number of axes, when it does something else, when a size is dynamic,
and beyond the two options. Blobs inside a row that others read end it.

Why it helps: layers of the first releases mostly run on the ANE (hollance/neural-engine, unsupported-layers;
through Core ML, iOS 11 to 15), and of the others no report is known. Five axes were off it in some cases, and
reshapes and transposes are copies (sbryngelson/ane-guide; Apple, Deploying Transformers). The layers were not
measured. Exact for finite numbers: each is moved, or taken 1 time beside zeros; an infinite one in a pixel
makes the others of a convolution NaN.

Grade: proved.
"""  # noqa: E501 - the sketch is one line for each layer

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from anesurgery import authoring as an
from anesurgery.authoring import LayerRewrite, Refusal, Site


@dataclass(frozen=True)
class LegacyRearrange(LayerRewrite):
    """Rows of reshapes and transposes become one layer of the first releases, or none."""

    name = "legacy_rearrange"
    tolerates_nonfinite = False
    """A movement that is a product with zeros makes NaN of an infinity."""
    kinds = frozenset(an.movement.MOVERS)
    channels: int = an.channels.CHANNELS
    """The most channels that a convolution may put in another order."""
    blocks: tuple[int, ...] = an.moving_forms.BLOCKS
    """The sizes of blocks of pixels that `reorganizeData` may have."""

    def rewrite(self, site: Site) -> Refusal | None:
        """What ends at this layer is written otherwise; what goes on waits for its end."""
        row = an.movement.moving_row(site.network, site.node)
        at = row.index(site.node)
        begin = 0
        while begin <= at:
            steps, length = an.moving_forms.longest(row[begin:], functools.partial(self._written, site))
            if isinstance(steps, list) and begin + length == at + 1:
                an.moving_forms.emit(site, row[begin].inputs[0], steps, site.outputs)
                return None
            if isinstance(steps, Refusal) and begin == at:
                return None if site.node.kind in an.movement.FIRST_MOVERS else steps
            begin += length
        return None

    def _written(self, site: Site, part: Sequence[an.Node]) -> an.moving_forms.Layers:
        """A part of a row in layers of the first releases."""
        version = int(site.network.spec.specificationVersion)
        limits = an.moving_forms.Limits(version, self.channels, self.blocks)
        steps = an.moving_forms.first_layers(an.movement.movement(site, part), limits)
        if isinstance(steps, Refusal) or _better(steps, part):
            return steps
        return Refusal("nothing is gained")


def _better(steps: Sequence[an.moving_forms.Step], part: Sequence[an.Node]) -> bool:
    """Is it more than the exchange of layers of the first releases for as many?"""
    return len(steps) < len(part) or any(node.kind not in an.movement.FIRST_MOVERS for node in part)


def example() -> Any:
    """Channels of two groups, taken in turn."""
    layers = [
        an.make_layer("reshapeStatic", ["x"], ["groups"], targetShape=[1, 2, 2, 2, 2]),
        an.make_layer("transpose", ["groups"], ["swapped"], axes=[0, 2, 1, 3, 4]),
        an.make_layer("reshapeStatic", ["swapped"], ["y"], targetShape=[1, 4, 2, 2]),
    ]
    return an.make_network({"x": (1, 4, 2, 2)}, layers, ["y"])
