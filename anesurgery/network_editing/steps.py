"""Layers of one input, described before they are made: a type with its fields, such as ("slice", {...}).

`Site.put` and `Site.chain` make layers of these. Axes are counted from the end, as the definition of the format
counts those of (sequence, batch, channel, height, width): -3 is the channel axis of every blob.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from anesurgery.neuralnetwork.making import weights

Step = tuple[str, dict[str, Any]]
"""A layer type and the fields of its message: ("activation", {"linear": {"alpha": 2.0, "beta": 0.0}})."""

SEQUENCE, BATCH, CHANNEL, HEIGHT, WIDTH = -5, -4, -3, -2, -1
NAMES = {SEQUENCE: "sequence", BATCH: "batch", CHANNEL: "channel", HEIGHT: "height", WIDTH: "width"}
SLICED = {CHANNEL: "CHANNEL_AXIS", HEIGHT: "HEIGHT_AXIS", WIDTH: "WIDTH_AXIS"}
"""Axis -> its name in a `slice` layer. The blob needs no axes in front of it."""
MOST_MIXED = 512
"""The most channels for which a pass writes a matrix of C x C weights, which costs C x C products for each
pixel: 262,144 with 512 channels."""

Margins = tuple[int, int]
"""The number of elements before and after an axis."""


def from_end(axis: int, rank: int) -> int:
    """Return an axis counted from the end: 1 of 4 axes is -3."""
    return axis - rank if axis >= 0 else axis


def slicing(axis: int, span: range) -> Step:
    """Return the `slice` that keeps the elements of `span` along an axis of `SLICED`."""
    fields = {"startIndex": span.start, "endIndex": span.stop, "stride": span.step}
    return "slice", {"axis": SLICED[axis], **fields}


def constant_padding(height: Margins, width: Margins, value: float) -> Step:
    """Return the `padding` of height and width with one number."""
    return "padding", {"constant": {"value": value}, "paddingAmounts": border_amounts(height, width)}


def edge_padding(height: Margins, width: Margins) -> Step:
    """Return the `padding` of height and width that repeats the pixels at the edge."""
    return "padding", {"replication": {}, "paddingAmounts": border_amounts(height, width)}


def border_amounts(height: Margins, width: Margins) -> dict[str, list[dict[str, int]]]:
    """Return the fields of a `BorderAmounts` message."""
    return {"borderAmounts": [{"startEdgeSize": a, "endEdgeSize": b} for a, b in (height, width)]}


def channel_picking(picks: Sequence[int], channels: int) -> Step:
    """Return the 1x1 `convolution` whose channel i is channel picks[i] of its input.

    Each result is 1 times one number plus zeros, so it is exact for finite numbers. An infinity makes the
    other picked channels of its pixel NaN.

    Args:
        picks: the channel of the input for each channel of the result.
        channels: how many channels the input has.
    """
    matrix = np.zeros((len(picks), channels), np.float32)
    matrix[np.arange(len(picks)), list(picks)] = 1
    sizes = {"outputChannels": len(picks), "kernelChannels": channels, "kernelSize": [1, 1]}
    return "convolution", {**sizes, "valid": {}, "weights": weights(matrix)}
