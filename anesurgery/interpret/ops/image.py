"""Images: resize, crop, resample, and exchange blocks of the spatial axes, which are the last two.

Resizing is separable: a sampling mode says where along an axis the samples lie, and each axis is interpolated
at these places in turn. Crops are resized in the same way between the sides of a box.

Blocks are traded against channels or batches; where one turns into channels, "first" names what the outer part
of the channel number counts.

`coreai` calls these functions with a `Value`, an operand of the file that it writes: it has the methods of a
tensor, and takes over by `__torch_function__` (`handle_torch_function`) where it has an op of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from itertools import product
from typing import Any, TypeVar

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 - the usual name
from torch.overrides import handle_torch_function, has_torch_function_unary

from anesurgery.interpret.table import Unsupported, enter_all, impl, ints

Tensor = torch.Tensor
V = TypeVar("V")

GRIDS: dict[str, Callable[[int | Tensor, int], tuple[Any, Any, float]]] = {
    "STRICT_ALIGN_CORNERS": lambda size, n: (0, size - 1, max(n - 1, 1)),
    "ALIGN_CORNERS": lambda size, n: (0 if n > 1 else (size - 1) / 2, size - 1, max(n - 1, 1)),
    "DEFAULT": lambda size, n: (0, size, n),
    "OFFSET_CORNERS": lambda size, n: (_least_1(size - 1) / 2, _least_1(size - 1), n),
    "UNALIGN_CORNERS": lambda size, n: ((size - n) / 2, size, n),
}
"""Sampling mode -> (a, b, c): of n samples along `size` pixels, the i-th is at (a + b i) / c. The size may be a
column of sizes, one for each box."""

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
    """Return an entry of a table; raise `Unsupported` if there is none."""
    if key not in table:
        raise Unsupported(f"{what} {key!r} is not known")
    return table[key]


def _least_1(length: Any) -> Any:
    return length.clamp(min=1) if hasattr(length, "clamp") else max(1, length)


def _grid(mode: str, size: Any, count: int) -> Tensor:
    """Return where samples of `size` pixels lie; maybe outside of the pixels."""
    a, b, c = _look_up(GRIDS, mode, "sampling_mode")(size, count)
    return (b * torch.arange(count, dtype=torch.float64) + a) / c


def _places(mode: str, size: float, count: int) -> Tensor:
    """Return where `count` samples of `size` pixels lie."""
    return _grid(mode, size, count).clamp(0, size - 1)


def _linear(x: Tensor, axis: int, at: Tensor) -> Tensor:
    """Return the values of x at places along an axis, interpolated."""
    last = x.shape[axis] - 1
    at = at.clamp(0, last)
    low = at.floor().long()
    weight = (at - low).to(x.dtype).reshape(-1, *[1] * (x.ndim - 1 - axis))
    high = (low + 1).clamp(max=last)
    return torch.lerp(x.index_select(axis, low), x.index_select(axis, high), weight)


def _pixels_before(x: Tensor, sizes: Sequence[int]) -> Tensor:
    """Resize the last axes of x by the pixel before each place, exactly: torch rounds places in fp32."""
    for axis, size in reversed(list(enumerate(sizes, x.ndim - len(sizes)))):
        x = x.index_select(axis, torch.arange(size) * x.shape[axis] // size)
    return x


def resized(x: Tensor, sizes: list[int], mode: str, nearest: bool) -> Tensor:
    """Return x with its last axes in other sizes: the nearest pixel, or an interpolation."""
    if has_torch_function_unary(x):
        return handle_torch_function(resized, (x,), x, sizes, mode, nearest)
    if nearest and mode == "DEFAULT":  # the nearest pixel centre, as coremltools' tests expect
        mode = "UNALIGN_CORNERS"
    # integers are interpolated exactly and truncated, as a cast does: nothing says how Core ML rounds them
    y = x if nearest or x.is_floating_point() else x.double()
    for axis, size in reversed(list(enumerate(sizes, x.ndim - len(sizes)))):
        at = _places(mode, x.shape[axis], size)
        if nearest:
            y = y.index_select(axis, (at + 0.5).long().clamp(max=x.shape[axis] - 1))
        else:
            y = _linear(y, axis, at)
    return y.to(x.dtype)


def _scaled(x: Tensor, *factors: float) -> list[int]:
    """Return the last sizes of x times factors, rounded down, in fp32, as coremltools infers the shape."""
    sizes = x.shape[-len(factors) :]
    return [int(np.floor(np.float32(f) * np.float32(n))) for f, n in zip(factors, sizes, strict=True)]


@impl("upsample_nearest_neighbor")
def upsample_nearest_neighbor(
    x: Tensor, scale_factor_height: float = 1, scale_factor_width: float = 1
) -> Tensor:
    """Take the pixel before each place; the factors only give the size, as coremltools' tests expect."""
    return _pixels_before(x, _scaled(x, scale_factor_height, scale_factor_width))


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
    return resized(x, _scaled(x, scale_factor_height, scale_factor_width), mode, False)


@impl("torch_upsample_nearest_neighbor")
def torch_upsample_nearest_neighbor(x: Tensor, output_height: Any, output_width: Any) -> Tensor:
    """Take the pixel before each place, in a size that may be computed."""
    return _pixels_before(x, [int(output_height), int(output_width)])


@impl("torch_upsample_bilinear")
def torch_upsample_bilinear(
    x: Tensor, output_height: Any, output_width: Any, align_corners: bool = True
) -> Tensor:
    """Interpolate, in a size that may be computed."""
    mode = UPSAMPLE[bool(align_corners), not align_corners]
    return resized(x, [int(output_height), int(output_width)], mode, False)


@impl("resize_nearest_neighbor")
def resize_nearest_neighbor(x: Tensor, target_size_height: int, target_size_width: int) -> Tensor:
    """Resize to a given size by the nearest pixel, as `resize` in its default mode, which replaced it."""
    return resized(x, [int(target_size_height), int(target_size_width)], "DEFAULT", True)


@impl("resize_bilinear")
def resize_bilinear(
    x: Tensor, target_size_height: int = 1, target_size_width: int = 1, sampling_mode: str = "DEFAULT"
) -> Tensor:
    """Resize to a given size, interpolated."""
    return resized(x, [int(target_size_height), int(target_size_width)], sampling_mode, False)


@impl("resize")
def resize(
    x: Tensor, shape: Any, resized_dims: int, interpolation_mode: str = "LINEAR", sampling_mode: str = "DEFAULT"
) -> Tensor:
    """Resize the last axes to the lengths that end `shape`; 0 keeps a length."""
    count = int(resized_dims)
    wanted = ints(shape)
    wanted = wanted[len(wanted) - count :]
    sizes = [new or old for new, old in zip(wanted, x.shape[x.ndim - count :], strict=True)]
    return resized(x, sizes, sampling_mode, _look_up(NEAREST, interpolation_mode, "interpolation_mode"))


@impl("crop")
def crop(x: Tensor, crop_height: Any, crop_width: Any) -> Tensor:
    """Cut rows and columns off at both ends."""
    (top, bottom), (left, right) = ints(crop_height), ints(crop_width)
    return x[..., top : x.shape[-2] - bottom, left : x.shape[-1] - right]


def _between(start: Tensor, end: Tensor, count: int, mode: str, size: int) -> Tensor:
    """Return where samples lie from each start to its end; backwards, where a box ends before it starts."""
    along, backwards = _grid(mode, (end - start).abs() + 1, count), start > end
    at = torch.where(backwards, start - along, start + along)
    # a side of the box must not leave the image by a rounding error
    at = at.maximum(start.minimum(end)).minimum(start.maximum(end))
    if mode == "UNALIGN_CORNERS":
        # coremltools' test expects the whole image of a box that ends before it starts
        at = torch.where(backwards, _places(mode, size, count), at)
    return at


def box_places(
    boxes: Tensor,
    sizes: Sequence[int],
    counts: Sequence[int],
    normalized: bool,
    scale: float,
    box_mode: str,
    mode: str,
) -> tuple[Tensor, Tensor]:
    """Return the rows [box, height] and the columns [box, width] where samples of boxes [box, 4] lie.

    Args:
        boxes: as `box_mode` says, in pixels, or in parts of the image if `normalized`; times `scale`.
        sizes: height and width of the image.
        counts: height and width of the result.
        normalized: are the boxes parts of the image?
        scale: of all coordinates.
        box_mode: a row of `BOXES`.
        mode: a row of `GRIDS`.
    """
    order, centered = _look_up(BOXES, box_mode, "box_coordinate_mode")
    columns = boxes.double().chunk(4, 1)
    places = []
    for axis, (size, count) in enumerate(zip(sizes, counts, strict=True)):
        start, end = columns[order[axis]], columns[order[axis + 2]]
        if centered:
            start, end = start - end / 2, start + end / 2
        for factor in (size - 1.0 if normalized else 1.0, float(scale)):
            start, end = (start, end) if factor == 1 else (start * factor, end * factor)
        places.append(_between(start, end, count, mode, size))
    return places[0], places[1]


def crops(x: Tensor, rows: Tensor, columns: Tensor, image_of_box: Any, pad: float) -> Tensor:
    """Return the pixels at rows [box, height] and columns [box, width]: [box, image, channel, height, width].

    Where `image_of_box` is None, each box is cut out of every image; `pad` stands for pixels outside of it.
    """
    if has_torch_function_unary(x):
        return handle_torch_function(crops, (x,), x, rows, columns, image_of_box, pad)
    every = image_of_box is None
    chosen = [slice(None)] * len(rows) if every else [slice(i, i + 1) for i in ints(image_of_box)]
    images = x.shape[0] if every else 1
    pixels = x.new_empty(len(chosen), images, x.shape[1], rows.shape[1], columns.shape[1])
    for crop, image, row, column in zip(pixels, chosen, rows, columns, strict=True):
        outside = [(at < 0) | (at > n - 1) for at, n in zip((row, column), x.shape[2:], strict=True)]
        crop.copy_(_linear(_linear(x[image], 2, row), 3, column))
        crop.masked_fill_(outside[0][:, None] | outside[1], float(pad))
    return pixels


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
    image_of_box = box_indices
    if boxes is not None:
        image_of_box = torch.arange(boxes.shape[0]) if box_indices is None else box_indices
    elif roi is not None:
        table = roi.reshape(roi.shape[0], -1)
        boxes = table[:, -4:]
        image_of_box = table[:, :1].reshape([-1]).long() if table.shape[1] == 5 else None
    else:
        raise Unsupported("crop_resize has neither roi nor boxes")
    counts, normalized = (int(target_height), int(target_width)), bool(normalized_coordinates)
    rows, columns = box_places(
        boxes, x.shape[2:], counts, normalized, spatial_scale, box_coordinate_mode, sampling_mode
    )
    cut = crops(x, rows, columns, image_of_box, pad_value)
    return cut if roi is not None else cut.squeeze(1)


def _reflect(at: Tensor, low: float, high: float) -> Tensor:
    """Mirror places at two ends, as often as needed."""
    span = high - low
    if span == 0:
        return at.clamp(low, high)
    away = (at - low).abs().fmod(2 * span)
    return away.minimum(2 * span - away) + low


def to_pixels(at: Tensor, size: int, form: str, align_corners: bool) -> Tensor:
    """Return coordinates along an axis as pixels."""
    factor_and_offset = _look_up(COORDINATES, form, "coordinates_mode")
    if factor_and_offset is None:
        return at
    at = at * factor_and_offset[0] + factor_and_offset[1]
    return at * (size - 1) if align_corners else at * size - 0.5


def _numbers(at: Tensor) -> Tensor:
    """Return places with -1, which is before the first pixel, for NaN."""
    return torch.where(torch.isnan(at), -1.0, at)


def _taps(at: Tensor, nearest: bool) -> list[tuple[Tensor, Tensor]]:
    """Return the pixels along an axis that make a value, and the share of each."""
    at = _numbers(at)  # an infinite place has no mirror image
    if nearest:  # a half goes to the even pixel: what coremltools' tests expect, and torch does
        return [(at.round().long(), torch.ones_like(at))]
    low = at.floor()
    index, weight = low.long(), at - low
    return [(index, 1 - weight), (index + 1, weight)]


def sampled(x: Tensor, rows: Tensor, columns: Tensor, nearest: bool, pad: float) -> Tensor:
    """Return the values of x at places [batch, height, width]; a pixel that x does not have is `pad`."""
    images, channels, height, width = x.shape
    parts = []
    for (row, a), (column, b) in product(_taps(rows, nearest), _taps(columns, nearest)):
        inside = (row >= 0) & (row < height) & (column >= 0) & (column < width)
        index = (row.clamp(0, height - 1) * width + column.clamp(0, width - 1)).reshape(images, 1, -1)
        index = torch.broadcast_to(index, [images, channels, index.shape[2]])
        value = torch.gather(x.flatten(2), 2, index).reshape(*x.shape[:2], *row.shape[1:])
        value = torch.where(inside.unsqueeze(1), value, pad)
        parts.append(value * (a * b).to(x.dtype).unsqueeze(1))
    return reduce(torch.add, parts)


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
    form = coordinates_mode.lower()
    # a `Value` of `coreai` has no `grid_sample`
    same = TORCH_PADDING.get((padding, align)) if pad == 0 and isinstance(x, Tensor) else None
    if same is not None and form == "normalized_minus_one_to_one":
        return F.grid_sample(x, coordinates.to(x.dtype), sampling_mode.lower(), same, align)
    columns, rows = (
        fold(_numbers(to_pixels(at.reshape(at.shape[:3]).double(), size, form, align)), size)
        for at, size in zip(coordinates.chunk(2, -1), (x.shape[3], x.shape[2]), strict=True)
    )
    return sampled(x, rows, columns, nearest, pad)


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
    matrix = torch.broadcast_to(transform_matrix.to(x.dtype), [x.shape[0], 6]).reshape(-1, 2, 3)
    size = [x.shape[0], x.shape[1], int(output_height), int(output_width)]
    grid = F.affine_grid(matrix, size, bool(align_corners))
    return resample(x, grid, sampling_mode, padding_mode, padding_value, coordinates_mode, align_corners)


def _spread_channels(x: Tensor, block: Any, block_first: bool) -> Tensor:
    """Spread channels over blocks: [n, b b c, h, w] (`block_first`) or [n, c b b, h, w] -> [n, c, h b, w b]."""
    b = int(block)
    n, c, h, w = x.shape[0], x.shape[1] // (b * b), *x.shape[2:]
    if block_first:
        places = x.reshape(n, b, b, c, h, w).permute(0, 3, 4, 1, 5, 2)
    else:
        places = x.reshape(n, c, b, b, h, w).permute(0, 1, 4, 2, 5, 3)
    return places.reshape(n, c, h * b, w * b)


def _gather_blocks(x: Tensor, block: Any, block_first: bool) -> Tensor:
    """Gather blocks into channels: [n, c, h b, w b] -> [n, b b c, h, w] (`block_first`) or [n, c b b, h, w]."""
    b = int(block)
    n, c, h, w = *x.shape[:2], x.shape[2] // b, x.shape[3] // b
    order = (0, 3, 5, 1, 2, 4) if block_first else (0, 1, 3, 5, 2, 4)
    return x.reshape(n, c, h, b, w, b).permute(order).reshape(n, c * b * b, h, w)


BLOCKS: dict[str, Callable[..., Tensor]] = {
    "depth_to_space": lambda x, block_size: _spread_channels(x, block_size, True),
    "space_to_depth": lambda x, block_size: _gather_blocks(x, block_size, True),
    "pixel_shuffle": lambda x, upscale_factor: _spread_channels(x, upscale_factor, False),
    "pixel_unshuffle": lambda x, downscale_factor: _gather_blocks(x, downscale_factor, False),
}
"""Op type -> function of its parameters."""
enter_all(BLOCKS)


@impl("space_to_batch")
def space_to_batch(x: Tensor, block_shape: Any, paddings: Any) -> Tensor:
    """Pad with zeros, then move the places of a block to batches: [n, c, h a, w b] -> [a b n, c, h, w]."""
    (top, bottom), (left, right) = (ints(pair) for pair in paddings)
    a, b = ints(block_shape)
    x = F.pad(x, [left, right, top, bottom])
    n, c, h, w = x.shape
    y = x.reshape(n, c, h // a, a, w // b, b).permute(3, 5, 0, 1, 2, 4)
    return y.reshape(a * b * n, c, h // a, w // b)


@impl("batch_to_space")
def batch_to_space(x: Tensor, block_shape: Any, crops: Any) -> Tensor:
    """Move batches to the places of a block, then crop: [a b n, c, h, w] -> [n, c, h a, w b]."""
    (top, bottom), (left, right) = (ints(pair) for pair in crops)
    a, b = ints(block_shape)
    n, c, h, w = x.shape
    y = x.reshape(a, b, n // (a * b), c, h, w).permute(2, 3, 4, 0, 5, 1)
    y = y.reshape(n // (a * b), c, h * a, w * b)
    return y[:, :, top : h * a - bottom, left : w * b - right]
