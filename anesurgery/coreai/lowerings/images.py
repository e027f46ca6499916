"""Images: the last axes in other sizes, interpolated at places that the interpreter's table states."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import reduce
from itertools import product
from operator import add
from typing import Any

import numpy as np

from anesurgery.coreai.lowerings.elementwise import floor
from anesurgery.coreai.lowerings.indexing import take
from anesurgery.coreai.table import lowers
from anesurgery.coreai.toolkit import ops
from anesurgery.coreai.values import Value, array, attribute, call, indices, where
from anesurgery.errors import NotExpressible
from anesurgery.interpret.ops.image import BOXES, FOLDS, GRIDS, NEAREST, UPSAMPLE, pixels
from anesurgery.mil import Operation, static_shape


def _sizes(op: Operation, x: Value) -> list[int]:
    """The lengths of the result.

    Raises:
        NotExpressible: one is dynamic.
    """
    shape = static_shape(op.outputs[0])
    if shape is None or -1 in x.shape[2:]:
        raise NotExpressible(f"it is resized from {x.shape} to {tuple(op.outputs[0].shape)}, which is dynamic")
    return [int(length) for length in shape]


def _line(mode: str, size: int, count: int) -> tuple[float, float]:
    """(a, b): the i-th of `count` places along `size` pixels is at a i + b."""
    start, step, over = GRIDS[mode](size, count)
    return (step / over if count > 1 and step else 1.0), start / over


def _resampled(x: Value, shape: Sequence[int], lines: Sequence[tuple[float, float]], how: str) -> Value:
    """Core AI writes a line by its inverse, between the outer edges of the pixels."""
    one = [(1.0, 0.0)] * (x.rank - len(lines))
    scales, offsets = zip(*((1 / a, 0.5 - (b + 0.5) / a) for a, b in [*one, *lines]), strict=True)
    form = (indices(list(shape)), array(scales, "fp32"), array(offsets, "fp32"))
    return Value(ops.interpolate(x.node, *(v.node for v in form), attribute("interpolation_mode", how)))


def _linear(x: Value, shape: Sequence[int], mode: str, axes: int = 2) -> Value:
    sizes = list(zip(x.shape, shape, strict=True))[-axes:]
    return _resampled(x, shape, [_line(mode, size, count) for size, count in sizes], "linear")


def _nearest(x: Value, shape: Sequence[int], shift: float, axes: int = 2) -> Value:
    """The pixel that holds each place; whole factors are one op, others pick rows and columns."""
    sizes = list(zip(x.shape, shape, strict=True))[-axes:]
    if all(count % size == 0 for size, count in sizes):
        lines = [(size / count, size / count / 2 - 0.5) for size, count in sizes]
        return _resampled(x, shape, lines, "nearest_neighbor")
    for axis, (size, count) in enumerate(sizes, x.rank - axes):
        if size != count:
            places = np.floor((np.arange(count) + shift) * (size / count)).clip(0, size - 1)
            x = take(x, indices(places), axis)
    return x


@lowers("upsample_nearest_neighbor", "resize_nearest_neighbor")
def nearest(x: Value, op: Operation, **size: Any) -> Value:
    """The pixel before each place, or the nearest; factors and sizes only make the shape."""
    return _nearest(x, _sizes(op, x), 0.5 if op.op_type == "resize_nearest_neighbor" else 0.0)


@lowers("upsample_bilinear")
def upsample_bilinear(
    x: Value, op: Operation, align_corners: bool = True, half_pixel_centers: Any = None, **factors: Any
) -> Value:
    """Larger or smaller by factors, which only make the size."""
    half = not align_corners if half_pixel_centers is None else bool(half_pixel_centers)
    return _linear(x, _sizes(op, x), UPSAMPLE[bool(align_corners), half])


@lowers("resize_bilinear")
def resize_bilinear(x: Value, op: Operation, sampling_mode: str = "DEFAULT", **size: Any) -> Value:
    """A given size."""
    return _linear(x, _sizes(op, x), sampling_mode)


@lowers("resize")
def resize(
    x: Value,
    op: Operation,
    shape: Any,
    resized_dims: int,
    interpolation_mode: str = "LINEAR",
    sampling_mode: str = "DEFAULT",
) -> Value:
    """The last axes in the sizes that end `shape`."""
    sizes, axes = _sizes(op, x), int(resized_dims)
    if not NEAREST[interpolation_mode]:
        return _linear(x, sizes, sampling_mode, axes)
    if sampling_mode not in ("DEFAULT", "UNALIGN_CORNERS"):
        raise NotExpressible(f"the nearest pixel by {sampling_mode}")
    return _nearest(x, sizes, 0.5, axes)


Tap = tuple[Value, Value]
"""A pixel along an axis, and how much of it a value holds."""


def _taps(at: Value, nearest: bool) -> list[Tap]:
    """The pixels along an axis that make a value, and how much of each."""
    if nearest:
        return [(call("round", at), at * 0.0 + 1.0)]
    low = floor(at)
    return [(low, low - at + 1.0), (low + 1.0, at - low)]


@lowers("resample")
def resample(
    x: Value,
    coordinates: Value,
    sampling_mode: str,
    padding_mode: str,
    padding_value: float,
    coordinates_mode: str,
    align_corners: bool,
) -> Value:
    """An image at places (x, y) for each pixel of the result: one pixel that is looked up, or four."""
    b, c, h, w = x.fixed()
    out, axes = coordinates.fixed()[1:3], []
    for i, size in ((1, h), (0, w)):
        at = coordinates.along(3, i, i + 1).reshape([b, 1, math.prod(out)]).cast("fp32")
        at = pixels(at, size, coordinates_mode.lower(), align_corners)  # type: ignore[arg-type, assignment]
        at = FOLDS[padding_mode.lower()](where(at.equal(at), at, -1.0), size)  # type: ignore[arg-type, assignment]
        axes.append(_taps(at, sampling_mode.lower() == "nearest"))
    pad = float(padding_value) if padding_mode.lower() == "constant" else 0.0
    return _picked(x, axes[0], axes[1], pad).reshape([b, c, *out])


def _picked(x: Value, rows: Sequence[Tap], columns: Sequence[Tap], pad: float) -> Value:
    """Weighted sums of pixels of x [b, c, h, w] at places [b, 1, n] of both axes; beyond x they are `pad`."""
    b, c, h, w = x.fixed()
    flat, parts = x.reshape([b, c, h * w]), []
    for (row, up), (column, left) in product(rows, columns):
        inside = (row >= 0.0) & (row < float(h)) & (column >= 0.0) & (column < float(w))
        place = row.maximum(0.0).minimum(h - 1.0) * float(w) + column.maximum(0.0).minimum(w - 1.0)
        index = place.cast("int32").broadcast([b, c, row.shape[2]])
        found = where(inside, Value(ops.gather_along_axis(flat.node, index.node, 2)), pad)
        parts.append(found * (up * left).cast(x.dtype))
    return reduce(add, parts)


@lowers("affine")
def affine(
    x: Value, transform_matrix: Value, output_height: int, output_width: int, align_corners: bool, **form: Any
) -> Value:
    """Resampled where a matrix [a0, a1, a2, b0, b1, b2] puts each pixel of the result."""
    counts = (int(output_height), int(output_width))
    y, x_ = (np.linspace(-1, 1, n) if align_corners else (2 * np.arange(n) + 1) / n - 1 for n in counts)
    grid = np.stack([*np.meshgrid(x_, y), np.ones(counts)], -1).reshape(1, -1, 3)
    matrix = transform_matrix.cast("fp32").reshape([-1, 2, 3]).mT
    images = x.fixed()[0]
    at = call("broadcasting_batch_matmul", array(grid, "fp32"), matrix).broadcast([images, grid.shape[1], 2])
    return resample(x, at.reshape([images, *counts, 2]), align_corners=align_corners, **form)


def _between(start: Value, end: Value, count: int, mode: str, size: int) -> Value:
    """Where `count` samples from `start` to `end` lie, for each box; backwards where it ends before it starts.

    In each mode a place is a line of the number of pixels, and two numbers of pixels show which.
    """
    pixels = (end - start).abs() + 1.0
    pixels = pixels.maximum(2.0) if mode == "OFFSET_CORNERS" else pixels

    def places(n: float) -> Any:
        a, b, c = GRIDS[mode](n, count)
        return ((a + b * np.arange(count)) / c)[None]

    slope = places(3.0) - places(2.0)
    along = pixels * array(slope, "fp32") + array(places(2.0) - 2 * slope, "fp32")
    along = along.maximum(0.0).minimum((end - start).abs())
    low, high = start.minimum(end), start.maximum(end)
    at = where(start > end, start - along, start + along).maximum(low).minimum(high)
    if mode == "UNALIGN_CORNERS":
        at = where(start > end, array(places(size).clip(0, size - 1), "fp32"), at)
    return at


@lowers("crop_resize")
def crop_resize(
    x: Value,
    roi: Value | None = None,
    boxes: Value | None = None,
    box_indices: Value | None = None,
    target_height: int = 1,
    target_width: int = 1,
    normalized_coordinates: bool = False,
    spatial_scale: float = 1.0,
    box_coordinate_mode: str = "CORNERS_HEIGHT_FIRST",
    sampling_mode: str = "DEFAULT",
    pad_value: float = 0.0,
) -> Value:
    """Boxes cut out of images and resized; a place outside of its image is `pad_value`."""
    given, of = (boxes, box_indices) if roi is None else _split_roi(roi, x.shape[0])
    assert given is not None
    n, counts = given.fixed()[0], (int(target_height), int(target_width))
    order, centered = BOXES[box_coordinate_mode]
    columns = [given.cast("fp32").along(1, i, i + 1) for i in order]
    if centered:
        columns = [columns[i] + columns[i + 2] * sign for sign in (-0.5, 0.5) for i in (0, 1)]
    images = x if of is None and x.shape[0] == n else take(x, indices(range(n)) if of is None else of, 0)
    axes, outside = [], None
    for axis, (size, count) in enumerate(zip(x.fixed()[2:], counts, strict=True)):
        scale = float(spatial_scale) * (size - 1 if normalized_coordinates else 1)
        at = _between(columns[axis] * scale, columns[axis + 2] * scale, count, sampling_mode, size)
        at = at.reshape([n, count, 1] if axis == 0 else [n, 1, count]).broadcast([n, *counts])
        beyond = (at < 0.0) | (at > size - 1.0)
        outside = beyond if outside is None else outside | beyond
        axes.append(_taps(at.maximum(0.0).minimum(size - 1.0).reshape([n, 1, math.prod(counts)]), False))
    assert outside is not None
    crops = _picked(images, axes[0], axes[1], 0.0).reshape([n, x.shape[1], *counts])
    crops = where(outside.expand([1]), float(pad_value), crops)
    return crops if roi is None else crops.expand([1])


def _split_roi(roi: Value, images: int) -> tuple[Value, Value]:
    """The boxes, and the image of each, of the form before iOS 17: [N, 1, 4 or 5, 1, 1].

    Raises:
        NotExpressible: each box is cut out of several images.
    """
    rows = roi.reshape([roi.fixed()[0], -1])
    n, width = rows.fixed()
    if width == 4 and images > 1:
        raise NotExpressible("each box is cut out of several images")
    boxes = rows.along(1, width - 4, width)
    return boxes, indices(np.zeros(n)) if width == 4 else rows.along(1, 0, 1).squeeze([1]).cast("int32")
