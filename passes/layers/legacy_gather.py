"""Write a gather of fixed channels, rows or columns as slices, or as a convolution that picks channels.

Before::

    network(%x: 1x6x4x4) {
      %even: 3 = loadConstantND(shape=[3], data=[0, 2, 4])
      %ends: 2 = loadConstantND(shape=[2], data=[0, -1])
      %some: 1x3x4x4 = gather(%x, %even, axis=1)
      %y: 1x3x4x2 = gather(%some, %ends, axis=3)
      return %y
    }

After::

    network(%x: 1x6x4x4) {
      %some: 1x3x4x4 = slice(%x, endIndex=5, stride=2)
      %y: 1x3x4x2 = slice(%some, endIndex=4, stride=3, axis=WIDTH_AXIS)
      return %y
    }

Indices at even distances are one `slice`. Channels in a few such runs (option `runs`: the most) are slices and
a `concat`, else a 1x1 `convolution` with one 1 in each kernel, which costs a product for each channel that is
read and made, for each pixel (option `channels`: the most of either). All indices in their order: nothing.

Refuses when the indices are dynamic (for `convolution`: or a size of the blob), are not in one
row (a scalar, a table), or lie outside; rows and columns at uneven distances, as the layers join channels only;
an axis before the channels; and where Core ML's own check wants more axes: 4 for `convolution`.

Why it helps: gather was reported off the ANE, `slice`, `concat` and `convolution` mostly on it
(hollance/neural-engine, unsupported-layers; through Core ML, iOS 11 to 15). Not measured on later systems.
Exact for finite numbers: each is moved, or taken 1 time beside zeros; an infinite one in a pixel makes the
others of a convolution NaN.

Grade: bit for bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from anesurgery import authoring as an
from anesurgery.authoring import LayerRewrite, Refusal, Site

IMAGE = 4
"""Axes that `convolution` takes at least in Core ML's own check."""


@dataclass(frozen=True)
class LegacyGather(LayerRewrite):
    """Gathers at constant indices become `slice`, `concat` or `convolution`."""

    name = "legacy_gather"
    tolerates_nonfinite = False
    """A selection that is a product with zeros makes NaN of an infinity."""
    kinds = frozenset({"gather"})

    runs: int = 4
    """The most slices that are joined; beyond, channels are picked by a convolution."""
    channels: int = an.channels.CHANNELS
    """The most channels that such a convolution may read or make."""

    def rewrite(self, site: Site) -> Refusal | None:
        """One slice if possible, else slices, else a convolution."""
        x, indices = site.inputs
        rank = len(site.shape(x))
        axis = an.spatial_axes.from_end(site.params.axis, rank)
        if axis not in an.spatial_axes.CUT:
            return Refusal(f"it gathers along axis {axis} of {rank}, before the channels")
        size = site.shape(x)[axis]
        if size is None:
            return Refusal("the length of the axis is dynamic")
        picks = _picks(site, indices, size)
        if isinstance(picks, Refusal):
            return picks
        runs = _runs(picks)
        if picks == list(range(size)):
            site.forward(x)
        elif len(runs) == 1:
            an.spatial_axes.cut(site, x, axis, runs[0], site.outputs)
        elif axis != an.spatial_axes.CHANNEL:
            return Refusal(
                f"its {len(picks)} indices along the {an.spatial_axes.NAMES[axis]} are {len(runs)} slices, "
                "and the layers of the first releases join channels only"
            )
        else:
            return self._joined(site, picks, runs, size)
        return None

    def _joined(self, site: Site, picks: Sequence[int], runs: Sequence[range], size: int) -> Refusal | None:
        x, rank = site.inputs[0], len(site.shape(site.inputs[0]))
        if len(runs) <= self.runs:
            parts = [an.spatial_axes.cut(site, x, an.spatial_axes.CHANNEL, run) for run in runs]
            site.emit("concat", parts, site.outputs)
            return None
        if rank < IMAGE:
            return Refusal(
                f"it takes {len(runs)} slices, more than {self.runs}; Core ML's own check wants {IMAGE} axes "
                f"for convolution, and there are {rank}"
            )
        most = max(len(picks), size)
        if most > self.channels:
            return Refusal(
                f"it takes {len(runs)} slices, more than {self.runs}, and {most} channels are more than "
                f"{self.channels}; raise `runs` or `channels`"
            )
        site.sizes(x)  # what a convolution makes of a size that is not known is another such size
        site.emit("convolution", [x], site.outputs, **an.channels.picking(picks, size))
        return None


def _picks(site: Site, blob: str, size: int) -> list[int] | Refusal:
    """The indices, counted from the beginning."""
    value = site.constant(blob)
    if value is None:
        return Refusal(f"its indices {blob!r} are dynamic")
    if value.ndim != 1:
        return Refusal(f"its indices have the shape {value.shape}, not [n], so that the result has other axes")
    if not value.size or (value != np.floor(value)).any():
        return Refusal("its indices are none, or no whole numbers")
    if value.min() < -size or value.max() >= size:
        outside = value.min() if value.min() < -size else value.max()
        return Refusal(f"index {outside:g} lies outside of {size}")
    return [int(i) % size for i in value]


def _runs(picks: Sequence[int]) -> list[range]:
    """Indices as runs of even distance upwards, each as long as it can be."""
    runs: list[range] = []
    for pick in picks:
        last = runs[-1] if runs else None
        if last is not None and len(last) == 1 and pick > last[0]:
            runs[-1] = range(last[0], pick + 1, pick - last[0])
        elif last is not None and len(last) > 1 and pick == last[-1] + last.step:
            runs[-1] = range(last.start, pick + 1, last.step)
        else:
            runs.append(range(pick, pick + 1))
    return runs


def example() -> Any:
    """Every other channel, then the first and the last column."""
    layers = [
        an.make_constant("even", [0, 2, 4]),
        an.make_constant("ends", [0, -1]),
        an.make_layer("gather", ["x", "even"], ["some"], axis=1),
        an.make_layer("gather", ["some", "ends"], ["y"], axis=3),
    ]
    return an.make_network({"x": (1, 6, 4, 4)}, layers, ["y"])
