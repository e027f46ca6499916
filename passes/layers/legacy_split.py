"""Split blobs with the layers of the first releases.

Before::

    network(%x: 1x6x4x4) {
      %a: 1x3x4x4, %b: 1x3x4x4 = splitND(%x, axis=1, numSplits=2)
      %c: 1x3x1x4, %d: 1x3x3x4 = splitND(%a, axis=2, splitSizes=[1, 3])
      return %b, %c, %d
    }

After::

    network(%x: 1x6x4x4) {
      %a: 1x3x4x4, %b: 1x3x4x4 = split(%x, nOutputs=2)
      %c: 1x3x1x4 = slice(%a, endIndex=1, stride=1, axis=HEIGHT_AXIS)
      %d: 1x3x3x4 = slice(%a, startIndex=1, endIndex=4, stride=1, axis=HEIGHT_AXIS)
      return %b, %c, %d
    }

Equally many channels are a `split`; other parts of channels, rows or columns are a `slice` for each output that
is read. A single output is its input.

Refuses when the axis lies in front of the channels, when a blob is split into more equal parts than divide it,
or when its length is dynamic. `split` takes three axes or more in Core ML's own check.

Why it helps: layers of the ND kind were reported off the ANE; `split` and `slice` are of the first releases,
which mostly run there (hollance/neural-engine, unsupported-layers; through Core ML, iOS 11 to 15). Not measured
on later systems. Exact: numbers are only copied.

Grade: bit for bit.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from anesurgery import authoring as an
from anesurgery.authoring import LayerRewrite, Refusal, Site


@dataclass(frozen=True)
class LegacySplit(LayerRewrite):
    """`splitND` becomes `split`, or a `slice` for each part."""

    name = "legacy_split"
    kinds = frozenset({"splitND"})

    def rewrite(self, site: Site) -> Refusal | None:
        """Choose by the axis and the sizes of the parts."""
        (x,), shape = site.inputs, site.shape(site.inputs[0])
        if len(site.outputs) == 1:
            site.forward(x)
            return None
        axis = an.spatial_axes.from_end(site.params.axis, len(shape))
        if axis not in an.spatial_axes.CUT:
            return Refusal(
                f"it splits axis {axis} of {len(shape)}; the layers of the first releases cut channels, rows "
                "and columns"
            )
        parts = _parts(site, axis, shape[axis])
        if isinstance(parts, Refusal):
            return parts
        if axis == an.spatial_axes.CHANNEL and len(set(parts)) == 1:
            site.emit("split", [x], site.outputs, nOutputs=len(parts))
            return None
        for i, blob in enumerate(site.outputs):
            if site.network.is_read(blob):
                begin = sum(parts[:i])
                an.spatial_axes.cut(site, x, axis, range(begin, begin + parts[i]), [blob])
        return None


def _parts(site: Site, axis: int, length: int | None) -> list[int] | Refusal:
    """The sizes of the parts along the axis."""
    if length is None:
        return Refusal("the length that is split is dynamic")
    if stated := [int(n) for n in site.params.splitSizes]:
        return stated
    count = len(site.outputs)
    if length % count:
        return Refusal(f"{length} do not divide into {count} equal parts, for which the format states no sizes")
    return [length // count] * count


def example() -> Any:
    """Channels in two halves, rows in unequal parts."""
    layers = [
        an.make_layer("splitND", ["x"], ["a", "b"], axis=1, numSplits=2),
        an.make_layer("splitND", ["a"], ["c", "d"], axis=2, splitSizes=[1, 3]),
    ]
    return an.make_network({"x": (1, 6, 4, 4)}, layers, ["b", "c", "d"])
