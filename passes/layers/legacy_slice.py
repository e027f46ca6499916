"""Slice channels, rows and columns with the layers of the first releases.

Before::

    network(%x: 1x6x8x8) {
      %c: 1x3x8x8 = sliceStatic(%x, beginIds=[0, 0, 0, 0], beginMasks=[True, True, True, True], endIds=[0, 0, 0, 0], endMasks=[True, True, True, True], strides=[1, 2, 1, 1])
      %y: 1x3x4x6 = sliceStatic(%c, beginIds=[0, 0, 2, 1], beginMasks=[True, True, False, False], endIds=[0, 0, -2, 7], endMasks=[True, True, False, False], strides=[1, 1, 1, 1])
      return %y
    }

After::

    network(%x: 1x6x8x8) {
      %c: 1x3x8x8 = slice(%x, endIndex=6, stride=2)
      %y: 1x3x4x6 = crop(%c, cropAmounts={borderAmounts=[{startEdgeSize=2, endEdgeSize=2}, {startEdgeSize=1, endEdgeSize=1}]})
      return %y
    }

Each axis that loses something is a `slice`; rows and columns without a stride are one `crop` together. Where
nothing is lost, the input is passed on. `sliceBySize` from a constant beginning is treated alike.

Refuses when an axis is taken away (squeezeMasks), walked backwards, or lies in front of the channels, when the
layer states another number of axes than its input has, when nothing would be left, and when the length of a
sliced axis or the beginning is dynamic.

Why it helps: `slice` and `crop` are of the first releases, which mostly run on the ANE (hollance/neural-engine,
unsupported-layers; through Core ML, iOS 11 to 15); of the slices of specification 4 nothing was reported. Not
measured on later systems. Exact: numbers are only copied.

Grade: bit for bit.
"""  # noqa: E501 - the sketch is as the printer prints it

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from anesurgery import authoring as an
from anesurgery.authoring import LayerRewrite, Refusal, Shape, Site

Spans = dict[int, range]
"""Sliced axis, from the end -> the places that stay."""
DYNAMIC = Refusal("the length of a sliced axis is dynamic")
CROPPED = 3
"""Axes that `crop` takes at least in Core ML's own check."""


@dataclass(frozen=True)
class LegacySlice(LayerRewrite):
    """`sliceStatic` and `sliceBySize` become `slice` and `crop`."""

    name = "legacy_slice"
    kinds = frozenset({"sliceStatic", "sliceBySize"})

    def rewrite(self, site: Site) -> Refusal | None:
        """What stays of each axis, then a layer for each that loses something."""
        shape = site.shape(site.inputs[0])
        spans = SPANS[site.node.kind](site, shape)
        if isinstance(spans, Refusal):
            return spans
        for axis, span in spans.items():
            if axis not in an.spatial_axes.CUT:
                return Refusal(
                    f"it slices axis {axis} of {len(shape)}; the layers of the first releases slice channels, "
                    "rows and columns"
                )
            if not span:
                return Refusal(f"nothing is left of axis {axis}")
        _cut_all(site, shape, spans)
        return None


def _cut_all(site: Site, shape: Shape, spans: Spans) -> None:
    """The layers, channels first: they make the others smaller."""
    x, steps = site.inputs[0], []
    for axis in (an.spatial_axes.CHANNEL, an.spatial_axes.HEIGHT, an.spatial_axes.WIDTH):
        if axis in spans:
            steps.append(axis)
    if not steps:
        site.forward(x)
    window = an.spatial_axes.HEIGHT in spans and an.spatial_axes.WIDTH in spans and len(shape) >= CROPPED
    window = window and spans[an.spatial_axes.HEIGHT].step == spans[an.spatial_axes.WIDTH].step == 1
    if window:
        steps.remove(an.spatial_axes.WIDTH)
    for axis in steps:
        outputs = site.outputs if axis == steps[-1] else None
        if window and axis == an.spatial_axes.HEIGHT:
            edges = [
                (spans[a].start, (shape[a] or 0) - spans[a].stop)
                for a in (an.spatial_axes.HEIGHT, an.spatial_axes.WIDTH)
            ]
            x = site.emit("crop", [x], outputs, cropAmounts=an.spatial_axes.borders(*edges))
        else:
            x = an.spatial_axes.cut(site, x, axis, spans[axis], outputs)


def _static(site: Site, shape: Shape) -> Spans | Refusal:
    """The spans of a `sliceStatic`; indices beyond the axis are its ends, as in numpy."""
    p, rank = site.params, len(shape)
    if len(p.beginIds) != rank:
        return Refusal(f"it states {len(p.beginIds)} axes for a blob of {rank}")
    if any(an.blob_axes.of_each(p.squeezeMasks, rank, False)):
        return Refusal("it removes an axis, but keeps one position of it")
    masks = zip(
        an.blob_axes.of_each(p.beginMasks, rank, 0), an.blob_axes.of_each(p.endMasks, rank, 0), strict=True
    )
    strides = an.blob_axes.of_each(p.strides, rank, 1)
    spans = {}
    for i, (no_begin, no_end) in enumerate(masks):
        begin = None if no_begin else int(p.beginIds[i])
        end = None if no_end else int(p.endIds[i])
        if strides[i] < 1:
            return Refusal(f"its stride along axis {i - rank} is {strides[i]}, not positive")
        if (begin or 0) == 0 and end is None and strides[i] == 1:
            continue
        if (length := shape[i]) is None:
            return DYNAMIC
        span = range(length)[begin : end : strides[i]]
        if len(span) != length:
            spans[i - rank] = span
    return spans


def _by_size(site: Site, shape: Shape) -> Spans | Refusal:
    """The span of a `sliceBySize`."""
    axis, size = an.spatial_axes.from_end(site.params.axis, len(shape)), int(site.params.size)
    value = site.constant(site.inputs[1])
    if value is None:
        return Refusal("its beginning is dynamic")
    begin, length = int(value.flat[0]), shape[axis]
    if length is None:
        return DYNAMIC
    if size < 1 or begin < 0 or begin + size > length:
        return Refusal(f"it takes {size} from {begin} on, of {length}")
    return {axis: range(begin, begin + size)} if size < length else {}


SPANS: dict[str, Callable[[Site, Shape], Spans | Refusal]] = {"sliceStatic": _static, "sliceBySize": _by_size}


def example() -> Any:
    """Every second channel, and a window."""
    free, kept = [True] * 4, [True, True, False, False]
    layers = [
        an.make_layer(
            "sliceStatic",
            ["x"],
            ["c"],
            beginIds=[0] * 4,
            beginMasks=free,
            endIds=[0] * 4,
            endMasks=free,
            strides=[1, 2, 1, 1],
        ),
        an.make_layer(
            "sliceStatic",
            ["c"],
            ["y"],
            beginIds=[0, 0, 2, 1],
            beginMasks=kept,
            endIds=[0, 0, -2, 7],
            endMasks=kept,
            strides=[1] * 4,
        ),
    ]
    return an.make_network({"x": (1, 6, 8, 8)}, layers, ["y"])
