"""Channel, height and width: the axes that layers of the first releases work along, and what they do there.

Axes are counted from the end, as the definition of the format counts them.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from anesurgery.errors import Refused
from anesurgery.network_editing.layer_pass import Site, Step
from anesurgery.neuralnetwork.making import weights

SEQUENCE, BATCH, CHANNEL, HEIGHT, WIDTH = -5, -4, -3, -2, -1
NAMES = {SEQUENCE: "sequence", BATCH: "batch", CHANNEL: "channel", HEIGHT: "height", WIDTH: "width"}
CUT = {CHANNEL: "CHANNEL_AXIS", HEIGHT: "HEIGHT_AXIS", WIDTH: "WIDTH_AXIS"}
"""Axis -> its name in a `slice`, which needs no more axes than come after it."""
MOST_MIXED = 512
"""Channels above which a pass does not write a matrix: C x C weights, and C x C products for each pixel, of
which 512 have 262,144."""

Margins = tuple[int, int]
"""Elements before and after."""


def from_end(axis: int, rank: int) -> int:
    """An axis that counts from either end, from the end."""
    return axis - rank if axis >= 0 else axis


def cut(axis: int, span: range) -> Step:
    """The `slice` that leaves the places of `span`, upwards, of an axis of `CUT`."""
    fields = {"startIndex": span.start, "endIndex": span.stop, "stride": span.step}
    return "slice", {"axis": CUT[axis], **fields}


def border(height: Margins, width: Margins, value: float) -> Step:
    """A `padding` with one number, for a blob of two axes or more."""
    return "padding", {"constant": {"value": value}, "paddingAmounts": borders(height, width)}


def repeated_border(height: Margins, width: Margins) -> Step:
    """A `padding` that repeats the pixels of the border."""
    return "padding", {"replication": {}, "paddingAmounts": borders(height, width)}


def borders(height: Margins, width: Margins) -> dict[str, list[dict[str, int]]]:
    """The fields of a `BorderAmounts` message."""
    return {"borderAmounts": [{"startEdgeSize": a, "endEdgeSize": b} for a, b in (height, width)]}


def height_and_width(site: Site, blob: str) -> list[int]:
    """The last two sizes of a blob.

    Raises:
        Refused: one is dynamic.
    """
    extent = [d for d in site.shape(blob)[-2:] if d is not None]
    if len(extent) != 2:
        raise Refused(f"height or width of {blob!r} is dynamic")
    return extent


def picking(picks: Sequence[int], channels: int) -> Step:
    """The 1x1 `convolution` whose channel i is channel picks[i] of the `channels` of its input.

    Each number is 1 times one number plus zeros, hence exact for finite ones; an infinite number makes the
    others of its pixel NaN.
    """
    matrix = np.zeros((len(picks), channels), np.float32)
    matrix[np.arange(len(picks)), list(picks)] = 1
    sizes = {"outputChannels": len(picks), "kernelChannels": channels, "kernelSize": [1, 1]}
    return "convolution", {**sizes, "valid": {}, "weights": weights(matrix)}
