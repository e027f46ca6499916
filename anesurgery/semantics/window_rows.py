"""Rows of pools and of image resizing: planes of [images, channels, spatial...]."""

from __future__ import annotations

from anesurgery.mil import Operation, constant
from anesurgery.ops import names
from anesurgery.semantics.constant_ends import Interval
from anesurgery.semantics.meaning import Axes, Meaning, Ranges, mixing, same
from anesurgery.semantics.reading import flag


def _planes(op: Operation) -> Axes:
    """Each channel of each image by itself."""
    return mixing(op, set(range(2, op.x.rank)))


def _pictures(op: Operation) -> Axes:
    """The last two axes are a picture."""
    return mixing(op, {op.x.rank - 2, op.x.rank - 1})


def _average(op: Operation, ranges: Ranges) -> Interval:
    """Zeros that pad an edge may count."""
    low, high = ranges.at(op.x)
    bare = constant(op.inputs.get("pad_type")) == "valid" or flag(op, "exclude_padding_from_average")
    return (low, high) if bare else (min(low, 0.0), max(high, 0.0))


ROWS: dict[str, Meaning] = {
    "avg_pool": Meaning(_average, _planes),
    "l2_pool": Meaning(axes=_planes),
    "max_pool": Meaning(same, _planes),
    **dict.fromkeys(names("resize_nearest_neighbor upsample_nearest_neighbor"), Meaning(same, _pictures)),
    **dict.fromkeys(names("resize_bilinear upsample_bilinear"), Meaning(axes=_pictures)),
}
