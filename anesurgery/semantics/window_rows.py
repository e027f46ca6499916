"""Rows of pools and of image resizing: planes of [images, channels, spatial...]."""

from __future__ import annotations

import math

from anesurgery.mil import Operation, constant
from anesurgery.ops import names
from anesurgery.semantics.constant_ends import Interval
from anesurgery.semantics.meaning import Axes, Meaning, Ranges, mixing, same, unless_summed
from anesurgery.semantics.reading import flag, ints


def _planes(op: Operation) -> Axes:
    """Each channel of each image by itself."""
    return mixing(op, set(range(2, op.x.rank)))


def _pictures(op: Operation) -> Axes:
    """The last two axes are a picture."""
    return mixing(op, {op.x.rank - 2, op.x.rank - 1})


def _average(op: Operation, ranges: Ranges) -> Interval:
    """Zeros that pad an edge may count, and those beyond the data."""
    low, high = ranges.at(op.x)
    unpadded = constant(op.inputs.get("pad_type")) == "valid" and not flag(op, "ceil_mode")
    bare = unpadded or flag(op, "exclude_padding_from_average")
    return unless_summed(op, (low, high) if bare else (min(low, 0.0), max(high, 0.0)), _window(op), ranges)


def _window(op: Operation) -> float:
    return float(math.prod(ints(op, "kernel_sizes")))


def _largest(op: Operation, ranges: Ranges) -> Interval:
    """Of a window that lies in the padding, or beyond the data, the largest number is -inf."""
    low, high = ranges.at(op.x)
    kernel, pad = ints(op, "kernel_sizes"), ints(op, "pad")
    beyond = flag(op, "ceil_mode") and any(s > k for s, k in zip(ints(op, "strides"), kernel, strict=False))
    bare = any(p >= k for i, k in enumerate(kernel) for p in pad[2 * i : 2 * i + 2])
    return (-math.inf if beyond or bare else low), high


ROWS: dict[str, Meaning] = {
    "avg_pool": Meaning(_average, _planes, terms=_window),
    "l2_pool": Meaning(axes=_planes),
    "max_pool": Meaning(_largest, _planes),
    **dict.fromkeys(names("resize_nearest_neighbor upsample_nearest_neighbor"), Meaning(same, _pictures)),
    **dict.fromkeys(names("resize_bilinear upsample_bilinear"), Meaning(axes=_pictures)),
}
