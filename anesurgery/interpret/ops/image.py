"""Images: resize, crop, resample, and exchange blocks of the spatial axes, which are the last two.

Resizing is separable: a sampling mode says where along an axis the samples lie, and each axis is interpolated
at these places in turn. Crops are resized in the same way between the sides of a box.

Blocks are exchanged for channels or batches. Where elements only move, the code uses just `shape`, `reshape`
and `permute`: `coreai` writes these ops by the same code. Where a block becomes channels, "first" names what
the outer part of the channel number counts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from itertools import product
from typing import Any, TypeVar

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 - the usual name

from anesurgery.interpret.table import Unsupported, impl, ints

Tensor = torch.Tensor
V = TypeVar("V")

GRIDS: dict[str, Callable[[float, int], tuple[float, float, float]]] = {
    "STRICT_ALIGN_CORNERS": lambda size, n: (0, size - 1, max(n - 1, 1)),
    "ALIGN_CORNERS": lambda size, n: (0 if n > 1 else (size - 1) / 2, size - 1, max(n - 1, 1)),
    "DEFAULT": lambda size, n: (0, size, n),
    "OFFSET_CORNERS": lambda size, n: (max(1, size - 1) / 2, max(1, size - 1), n),
    "UNALIGN_CORNERS": lambda size, n: ((size - n) / 2, size, n),
}
"""Sampling mode -> (a, b, c): of n samples along `size` pixels, the i-th is at (a + b i) / c."""

TORCH_MODE: dict[tuple[str, bool], dict[str, Any]] = {
    ("UNALIGN_CORNERS", True): {"mode": "nearest-exact"},
    ("STRICT_ALIGN_CORNERS", False): {"mode": "bilinear", "align_corners": True},
}
"""(sampling mode, nearest) -> the arguments with which `F.interpolate` computes the same.  UNALIGN_CORNERS
between pixels is not among them: torch computes places in fp32, off by 1e-4 of a pixel after 2000."""

UPSAMPLE = {(True, False): "STRICT_ALIGN_CORNERS", (False, True): "UNALIGN_CORNERS", (False, False): "DEFAULT"}
"""(align_corners, half_pixel_centers) -> sampling mode."""

NEAREST = {"LINEAR": False, "NEAREST_NEIGHBOR": True}
"""Interpolation mode -> is the nearest pixel taken?"""

BOXES: dict[str, tuple[list[int], bool]] = {
    "CORNERS_HEIGHT_FIRST": ([0, 1, 2, 3], False),
    "CORNERS_WIDTH_FIRST": ([1, 0, 3, 2], False),
    "CENTER_SIZE_HEIGHT_FIRST": ([0, 1, 2, 3], True),
    "CENTER_SIZE_WIDTH_FIRST": ([1, 0, 3, 2], True),
}
"""Form of a box -> the order that puts height first, and whether it is (center, size) rather than corners."""

COORDINATES: dict[str, tuple[float, float] | None] = {
    "unnormalized": None,
    "normalized_minus_one_to_one": (0.5, 0.5),
    "normalized_zero_to_one": (1.0, 0.0),
}
"""Form of coordinates -> the factor and the offset that bring them to [0, 1]; None for pixels."""

FOLDS: dict[str, Callable[[Tensor, int], Tensor]] = {
    "constant": lambda at, size: at.clamp(-1, size),
    "border": lambda at, size: at.clamp(0, size - 1),
    "reflection": lambda at, size: _reflect(at, 0, size - 1),
    "symmetric": lambda at, size: _reflect(at, -0.5, size - 0.5).clamp(0, size - 1),
}
"""Padding mode -> brings a place outside of the pixels back."""

TORCH_PADDING: dict[tuple[str, bool], str] = {
    **dict.fromkeys(product(["constant"], [False, True]), "zeros"),
    **dict.fromkeys(product(["border"], [False, True]), "border"),
    ("reflection", True): "reflection",
    ("symmetric", False): "reflection",
}
"""(padding mode, align_corners) -> the padding mode with which `F.grid_sample` computes the same."""


def _look_up(table: Mapping[Any, V], key: Any, what: str) -> V:
    """Return an entry of a table.

    Raises:
        Unsupported: there is none.
    """
    if key not in table:
        raise Unsupported(f"{what} {key!r} is not known")
    return table[key]


def _places(mode: str, size: float, count: int) -> Tensor:
    """Return where so many samples of `size` pixels lie."""
    a, b, c = _look_up(GRIDS, mode, "sampling_mode")(size, count)
    return ((a + b * torch.arange(count, dtype=torch.float64)) / c).clamp(0, size - 1)


def _linear(x: Tensor, axis: int, at: Tensor) -> Tensor:
    """Return the values of x at places along an axis, interpolated."""
    last = x.shape[axis] - 1
    at = at.clamp(0, last)
    low = at.floor().long()
    weight = (at - low).to(x.dtype).reshape(-1, *[1] * (x.ndim - 1 - axis))
    high = (low + 1).clamp(max=last)
    return torch.lerp(x.index_select(axis, low), x.index_select(axis, high), weight)


def _interpolate(x: Tensor, sizes: list[int], **how: Any) -> Tensor:
    """Resize the last two axes of x by torch."""
    image = x.reshape(1, math.prod(x.shape[:-2]), *x.shape[-2:])
    return F.interpolate(image, sizes, **how).reshape(*x.shape[:-2], *sizes)


def _resize(x: Tensor, sizes: list[int], mode: str, nearest: bool) -> Tensor:
    """Resize the last axes of x."""
    if mode == "ALIGN_CORNERS" and 1 not in sizes:
        mode = "STRICT_ALIGN_CORNERS"
    if nearest and mode == "DEFAULT":  # by coremltools' tests: of pixels, not of their corners
        mode = "UNALIGN_CORNERS"
    same = TORCH_MODE.get((mode, nearest))
    if same is not None and len(sizes) == 2 and x.is_floating_point():
        return _interpolate(x, sizes, **same)
    # integers are interpolated exactly and truncated, as a cast does: nothing says how Core ML rounds them
    resized = x if nearest or x.is_floating_point() else x.double()
    for axis, size in reversed(list(enumerate(sizes, x.ndim - len(sizes)))):
        at = _places(mode, x.shape[axis], size)
        if nearest:
            resized = resized.index_select(axis, (at + 0.5).long().clamp(max=x.shape[axis] - 1))
        else:
            resized = _linear(resized, axis, at)
    return resized.to(x.dtype)


def _scaled(x: Tensor, *factors: float) -> list[int]:
    """Return the last sizes of x times factors, rounded down, in fp32, as coremltools infers the shape."""
    sizes = x.shape[-len(factors) :]
    return [int(np.floor(np.float32(f) * np.float32(n))) for f, n in zip(factors, sizes, strict=True)]


@impl("upsample_nearest_neighbor")
def upsample_nearest_neighbor(
    x: Tensor, scale_factor_height: float = 1, scale_factor_width: float = 1
) -> Tensor:
    """Take the pixel before each place; the factors only give the size, as coremltools' tests expect."""
    return _interpolate(x, _scaled(x, scale_factor_height, scale_factor_width), mode="nearest")


@impl("upsample_bilinear")
def upsample_bilinear(
    x: Tensor,
    scale_factor_height: float = 1,
    scale_factor_width: float = 1,
    align_corners: bool = True,
    half_pixel_centers: bool | None = None,
) -> Tensor:
    """Resize by factors, interpolated; the factors only give the size."""
    align = bool(align_corners)
    half = not align if half_pixel_centers is None else bool(half_pixel_centers)
    mode = _look_up(UPSAMPLE, (align, half), "upsample_bilinear with (align_corners, half_pixel_centers)")
    return _resize(x, _scaled(x, scale_factor_height, scale_factor_width), mode, False)


@impl("torch_upsample_nearest_neighbor")
def torch_upsample_nearest_neighbor(x: Tensor, output_height: Any, output_width: Any) -> Tensor:
    """Take the pixel before each place, in a size that may be computed."""
    return _interpolate(x, [int(output_height), int(output_width)], mode="nearest")


@impl("torch_upsample_bilinear")
def torch_upsample_bilinear(
    x: Tensor, output_height: Any, output_width: Any, align_corners: bool = True
) -> Tensor:
    """Interpolate, in a size that may be computed."""
    mode = UPSAMPLE[bool(align_corners), not align_corners]
    return _resize(x, [int(output_height), int(output_width)], mode, False)


@impl("resize_nearest_neighbor")
def resize_nearest_neighbor(x: Tensor, target_size_height: int, target_size_width: int) -> Tensor:
    """Resize by the nearest pixel: `resize` in its default mode, which replaced this op."""
    return _resize(x, [int(target_size_height), int(target_size_width)], "DEFAULT", True)


@impl("resize_bilinear")
def resize_bilinear(
    x: Tensor, target_size_height: int = 1, target_size_width: int = 1, sampling_mode: str = "DEFAULT"
) -> Tensor:
    """Resize, interpolated."""
    return _resize(x, [int(target_size_height), int(target_size_width)], sampling_mode, False)


@impl("resize")
def resize(
    x: Tensor, shape: Any, resized_dims: int, interpolation_mode: str = "LINEAR", sampling_mode: str = "DEFAULT"
) -> Tensor:
    """Resize the last axes to the lengths that end `shape`; 0 keeps a length."""
    count = int(resized_dims)
    wanted = ints(shape)
    wanted = wanted[len(wanted) - count :]
    sizes = [new or old for new, old in zip(wanted, x.shape[x.ndim - count :], strict=True)]
    return _resize(x, sizes, sampling_mode, _look_up(NEAREST, interpolation_mode, "interpolation_mode"))


@impl("crop")
def crop(x: Tensor, crop_height: Any, crop_width: Any) -> Tensor:
    """Cut rows and columns off at both ends."""
    (top, bottom), (left, right) = ints(crop_height), ints(crop_width)
    return x[..., top : x.shape[-2] - bottom, left : x.shape[-1] - right]


def _corners(boxes: Tensor, mode: str) -> Tensor:
    """Return boxes as [box, start or end, height or width]."""
    order, centered = _look_up(BOXES, mode, "box_coordinate_mode")
    corners = boxes.double()[:, order].reshape(-1, 2, 2)
    if not centered:
        return corners
    center, size = corners.unbind(1)
    return torch.stack((center - size / 2, center + size / 2), 1)


def _between(start: float, end: float, count: int, mode: str, size: int) -> Tensor:
    """Return where so many samples from `start` to `end` lie; backwards, if a box ends before it starts."""
    if mode == "UNALIGN_CORNERS" and end < start:
        return _places(mode, size, count)  # coremltools' test expects the whole image of such a box
    along = _places(mode, abs(end - start) + 1, count)
    # a side of the box must not leave the image by a rounding error
    return (start + along if end >= start else start - along).clamp(min(start, end), max(start, end))


def _crops(
    x: Tensor,
    boxes: Tensor,
    of: list[slice],
    *,
    height: int,
    width: int,
    normalized: bool,
    scale: float,
    box_mode: str,
    mode: str,
    pad: float,
) -> Tensor:
    """Cut each box out of an image, or of all, and resize it: [box, image, channel, height, width]."""
    last = torch.tensor([x.shape[-2] - 1, x.shape[-1] - 1], dtype=torch.float64)
    corners = _corners(boxes, box_mode) * (last if normalized else 1.0) * float(scale)
    images = len(range(*of[0].indices(x.shape[0]))) if of else 1
    crops = x.new_empty(len(of), images, x.shape[1], height, width)
    for i, ((top, left), (bottom, right)) in enumerate(corners.tolist()):
        rows = _between(top, bottom, height, mode, x.shape[-2])
        columns = _between(left, right, width, mode, x.shape[-1])
        outside = [(at < 0) | (at > n) for at, n in zip((rows, columns), last, strict=True)]
        crops[i] = _linear(_linear(x[of[i]], 2, rows), 3, columns)
        crops[i].masked_fill_(outside[0][:, None] | outside[1], float(pad))
    return crops


@impl("crop_resize")
def crop_resize(
    x: Tensor,
    roi: Tensor | None = None,
    boxes: Tensor | None = None,
    box_indices: Any = None,
    target_height: int = 1,
    target_width: int = 1,
    normalized_coordinates: bool = False,
    spatial_scale: float = 1.0,
    box_coordinate_mode: str = "CORNERS_HEIGHT_FIRST",
    sampling_mode: str = "DEFAULT",
    pad_value: float = 0.0,
) -> Tensor:
    """Cut boxes out of images and resize them; a place outside of its image is `pad_value`.

    Before iOS 17 boxes come as `roi`: [N, 1, 4, 1, 1], cut out of every image, or [N, 1, 5, 1, 1], led by the
    index of one image. The latter gives [N, 1, ...] as documented, where coremltools infers [N, batch, ...].
    """
    if boxes is not None:
        images = range(len(boxes)) if box_indices is None else ints(box_indices)
        of = [slice(i, i + 1) for i in images]
    elif roi is not None:
        rows = roi.reshape(roi.shape[0], -1)
        boxes = rows[:, -4:]
        leads = [int(row[0]) if rows.shape[1] == 5 else None for row in rows]
        of = [slice(None) if i is None else slice(i, i + 1) for i in leads]
    else:
        raise Unsupported("crop_resize has neither roi nor boxes")
    crops = _crops(
        x,
        boxes,
        of,
        height=int(target_height),
        width=int(target_width),
        normalized=bool(normalized_coordinates),
        scale=spatial_scale,
        box_mode=box_coordinate_mode,
        mode=sampling_mode,
        pad=pad_value,
    )
    return crops if roi is not None else crops[:, 0]


def _reflect(at: Tensor, low: float, high: float) -> Tensor:
    """Mirror places at two ends, as often as needed."""
    span = high - low
    if span == 0:
        return at.clamp(low, high)
    away = (at - low).abs().remainder(2 * span)
    return away.minimum(2 * span - away) + low


def pixels(at: Tensor, size: int, mode: str, align_corners: bool) -> Tensor:
    """Return coordinates along an axis as pixels."""
    unit = _look_up(COORDINATES, mode, "coordinates_mode")
    if unit is None:
        return at
    at = at * unit[0] + unit[1]
    return at * (size - 1) if align_corners else at * size - 0.5


def _taps(at: Tensor, nearest: bool) -> list[tuple[Tensor, Tensor]]:
    """Return the pixels along an axis that a value is made of, and the weight of each."""
    at = at.nan_to_num(nan=-1.0)
    if nearest:  # a half goes to the even pixel: what coremltools' tests expect, and torch does
        return [(at.round().long(), torch.ones_like(at))]
    low = at.floor()
    index, weight = low.long(), at - low
    return [(index, 1 - weight), (index + 1, weight)]


def _sample(x: Tensor, rows: Tensor, columns: Tensor, nearest: bool, pad: float) -> Tensor:
    """Return the values of x at places [batch, height, width]; a pixel that x does not have is `pad`."""
    channels, height, width = x.shape[1:]
    flat = x.flatten(2)
    total = torch.zeros((), dtype=x.dtype)
    for (row, a), (column, b) in product(_taps(rows, nearest), _taps(columns, nearest)):
        inside = (row >= 0) & (row < height) & (column >= 0) & (column < width)
        index = row.clamp(0, height - 1) * width + column.clamp(0, width - 1)
        value = flat.gather(2, index.flatten(1)[:, None].expand(-1, channels, -1))
        value = value.reshape(*x.shape[:2], *row.shape[1:]).masked_fill_(~inside[:, None], pad)
        total = total + value.mul_((a * b).to(x.dtype)[:, None])
    return total


@impl("resample")
def resample(
    x: Tensor,
    coordinates: Tensor,
    sampling_mode: str,
    padding_mode: str,
    padding_value: float,
    coordinates_mode: str,
    align_corners: bool,
) -> Tensor:
    """Return an image sampled at places (x, y) for each pixel of the result."""
    padding, align = padding_mode.lower(), bool(align_corners)
    fold = _look_up(FOLDS, padding, "padding_mode")
    nearest = _look_up({"bilinear": False, "nearest": True}, sampling_mode.lower(), "sampling_mode")
    pad = float(padding_value) if padding == "constant" else 0.0
    same = TORCH_PADDING.get((padding, align)) if pad == 0 else None
    if same is not None and coordinates_mode.lower() == "normalized_minus_one_to_one":
        return F.grid_sample(x, coordinates.to(x.dtype), sampling_mode.lower(), same, align)
    rows, columns = (
        fold(pixels(coordinates[..., i].double(), size, coordinates_mode.lower(), align), size)
        for i, size in ((1, x.shape[2]), (0, x.shape[3]))
    )
    return _sample(x, rows, columns, nearest, pad)


@impl("affine")
def affine(
    x: Tensor,
    transform_matrix: Tensor,
    output_height: int,
    output_width: int,
    sampling_mode: str,
    padding_mode: str,
    padding_value: float,
    coordinates_mode: str,
    align_corners: bool,
) -> Tensor:
    """Return an image resampled where a matrix [a0, a1, a2, b0, b1, b2] puts each pixel of the result."""
    matrix = transform_matrix.to(x.dtype).expand(x.shape[0], 6).reshape(-1, 2, 3)
    size = [x.shape[0], x.shape[1], int(output_height), int(output_width)]
    grid = F.affine_grid(matrix, size, bool(align_corners))
    return resample(x, grid, sampling_mode, padding_mode, padding_value, coordinates_mode, align_corners)


@impl("depth_to_space")
def depth_to_space(x: Tensor, block_size: int) -> Tensor:
    """Spread channels over blocks: [n, b b c, h, w] -> [n, c, h b, w b], the block first."""
    n, c, h, w = x.shape
    b = int(block_size)
    y = x.reshape(n, b, b, c // (b * b), h, w).permute(0, 3, 4, 1, 5, 2)
    return y.reshape(n, c // (b * b), h * b, w * b)


@impl("space_to_depth")
def space_to_depth(x: Tensor, block_size: int) -> Tensor:
    """Gather blocks into channels: [n, c, h b, w b] -> [n, b b c, h, w], the block first."""
    n, c, h, w = x.shape
    b = int(block_size)
    y = x.reshape(n, c, h // b, b, w // b, b).permute(0, 3, 5, 1, 2, 4)
    return y.reshape(n, c * b * b, h // b, w // b)


@impl("pixel_shuffle")
def pixel_shuffle(x: Tensor, upscale_factor: int) -> Tensor:
    """Spread channels over blocks: [n, c b b, h, w] -> [n, c, h b, w b], the channel first."""
    n, c, h, w = x.shape
    b = int(upscale_factor)
    y = x.reshape(n, c // (b * b), b, b, h, w).permute(0, 1, 4, 2, 5, 3)
    return y.reshape(n, c // (b * b), h * b, w * b)


@impl("pixel_unshuffle")
def pixel_unshuffle(x: Tensor, downscale_factor: int) -> Tensor:
    """Gather blocks into channels: [n, c, h b, w b] -> [n, c b b, h, w], the channel first."""
    n, c, h, w = x.shape
    b = int(downscale_factor)
    y = x.reshape(n, c, h // b, b, w // b, b).permute(0, 1, 3, 5, 2, 4)
    return y.reshape(n, c * b * b, h // b, w // b)


@impl("space_to_batch")
def space_to_batch(x: Tensor, block_shape: Any, paddings: Any) -> Tensor:
    """Pad with zeros, then move the places of a block to batches: [n, c, h a, w b] -> [a b n, c, h, w]."""
    (top, bottom), (left, right) = (ints(pair) for pair in paddings)
    return to_batches(F.pad(x, [left, right, top, bottom]), *ints(block_shape))


def to_batches(x: Tensor, a: int, b: int) -> Tensor:
    """Move the places of a block to batches: [n, c, h a, w b] -> [a b n, c, h, w]."""
    n, c, h, w = x.shape
    y = x.reshape(n, c, h // a, a, w // b, b).permute(3, 5, 0, 1, 2, 4)
    return y.reshape(a * b * n, c, h // a, w // b)


@impl("batch_to_space")
def batch_to_space(x: Tensor, block_shape: Any, crops: Any) -> Tensor:
    """Move batches to the places of a block, then crop: [a b n, c, h, w] -> [n, c, h a, w b]."""
    (top, bottom), (left, right) = (ints(pair) for pair in crops)
    y = from_batches(x, *ints(block_shape))
    return y[:, :, top : y.shape[2] - bottom, left : y.shape[3] - right]


def from_batches(x: Tensor, a: int, b: int) -> Tensor:
    """Move batches to the places of a block: [a b n, c, h, w] -> [n, c, h a, w b]."""
    n, c, h, w = x.shape
    y = x.reshape(a, b, n // (a * b), c, h, w).permute(2, 3, 4, 0, 5, 1)
    return y.reshape(n // (a * b), c, h * a, w * b)
