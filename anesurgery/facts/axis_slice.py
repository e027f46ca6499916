"""Slices that take a part of one axis, and all of the others."""

from __future__ import annotations

from dataclasses import dataclass

from anesurgery.mil import Operation, static_shape
from anesurgery.semantics.reading import slice_places, sliced


@dataclass(frozen=True)
class AxisSlice:
    """Which part of which axis."""

    axis: int
    begin: int
    end: int
    stride: int = 1
    dropped: bool = False
    """Does the result lack the axis (of which one element is taken)?"""

    @property
    def size(self) -> int:
        """How many elements it takes."""
        return -(-(self.end - self.begin) // self.stride)


def axis_slice(op: Operation) -> AxisSlice | None:
    """What a `slice_by_index` takes, where that is part of one axis, forward; else None."""
    shape, places = static_shape(op.x), slice_places(op)
    if shape is None or places is None:
        return None
    rows = enumerate(zip(*places, sliced(op), strict=True))
    each = [AxisSlice(a, b, e, 1 if s.single else s.stride, s.single) for a, (b, e, s) in rows]
    parts = [part for part, size in zip(each, shape, strict=True) if part.size != size or part.dropped]
    if len(parts) != 1 or parts[0].stride < 1 or parts[0].size < 1:
        return None
    return parts[0]
