"""Slices that take a part of one axis, and all of the others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from anesurgery.mil import Operation, constant, static_shape
from anesurgery.semantics.reading import each_axis


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
    shape, begin, end = static_shape(op.x), constant(op.begin), constant(op.end)
    if shape is None or begin is None or end is None:
        return None
    found = [_along(op, axis, size, begin, end) for axis, size in enumerate(shape)]
    parts = [s for s, size in zip(found, shape, strict=True) if s.size != size or s.dropped]
    if len(parts) != 1 or parts[0].stride < 1 or parts[0].size < 1:
        return None
    return parts[0]


def _along(op: Operation, axis: int, size: int, begin: Sequence[Any], end: Sequence[Any]) -> AxisSlice:
    stride = int(each_axis(op, "stride", 1)[axis])
    first = 0 if each_axis(op, "begin_mask", False)[axis] else _within(int(begin[axis]), size)
    if each_axis(op, "squeeze_mask", False)[axis]:
        return AxisSlice(axis, first, first + 1, 1, True)
    last = size if each_axis(op, "end_mask", False)[axis] else _within(int(end[axis]), size)
    return AxisSlice(axis, first, last, stride)


def _within(place: int, size: int) -> int:
    return min(place + size if place < 0 else place, size)
