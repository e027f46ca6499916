"""Convert the resampling of images to products with constant matrices: result = rows @ x @ columns.T.

Used for bicubic and smoothed bilinear resampling, which MIL has not, and for scales that give no whole size.
Volumes are sampled at given points by a gather (`sample_volume`).
`resampled_constants` also records constants that are resampled, such as position embeddings, so that `sizes`
can store the original once.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import numpy as np

from anesurgery.frontend.arguments import Convert, dtype_of, inputs_of, known_value, option
from anesurgery.mil import Array, Var, ct, is_symbolic, mb, np_dtype, producer, types


@dataclass(frozen=True)
class Resampled:
    """A constant that was resampled, such as position embeddings, and the result."""

    x: Array
    """The constant, (1, channels, height, width)."""
    rows: Array
    """The matrix for its rows, (new height, height)."""
    columns: Array
    """The matrix for its columns, (new width, width)."""
    result: Array
    """(1, channels, new height, new width), in the dtype of `x`."""


NEAREST = ("upsample_nearest2d",)
"""Resamplings of torch without the argument `align_corners`."""

FIXED = "convert at fixed sizes (`anesurgery.sizes` does so with a PyTorch module)"
"""Advice in errors about dynamic sizes."""

_RECORDED: ContextVar[list[Resampled] | None] = ContextVar("resampled constants", default=None)


@contextmanager
def resampled_constants() -> Iterator[list[Resampled]]:
    """Within the context, record each constant that conversions resample."""
    seen = list[Resampled]()
    token = _RECORDED.set(seen)
    try:
        yield seen
    finally:
        _RECORDED.reset(token)


def resampling(host: str, axes: int = 2) -> Convert:
    """Return the converter of a torch resampling that treats each axis separately: of 1, 2 or 3 axes.

    torch itself computes the matrices, by resampling unit vectors. The image must have a static size.
    """

    def convert(context: Any, node: Any) -> None:
        x, size = inputs_of(context, node)[:2]
        aligned = () if host in NEAREST else (bool(known_value(inputs_of(context, node)[2])),)
        if any(is_symbolic(d) for d in x.shape[-axes:]):
            raise NotImplementedError(
                f"{node.name}: {node.kind} of a picture of dynamic size {x.shape}; {FIXED}"
            )
        scales = scales_of(context, node, 2 + len(aligned), axes)
        *rows, columns = (
            _resampling_matrix(host, before, _new_size(size, i, before, scales), *aligned, scales[i])
            for i, before in enumerate(map(int, x.shape[-axes:]))
        )
        dtype, outer = types.nptype_from_builtin(x.dtype), (None,) * (min(x.rank, 4) - 2)
        if deep := [m.astype(dtype)[outer] for m in rows[:-1]]:  # a volume: its depth, then flat pictures
            channels, depth, height, width = map(int, x.shape[1:])
            x = mb.matmul(x=deep[0], y=mb.reshape(x=x, shape=[-1, channels, depth, height * width]))
            x = mb.reshape(x=x, shape=[-1, channels * x.shape[2], height, width])
        high = mb.matmul(x=rows[-1].astype(dtype)[outer], y=x) if rows else x
        name = f"{node.name}_pictures" if deep else node.name
        result = mb.matmul(x=high, y=columns.T.astype(dtype)[outer], name=name)
        seen = _RECORDED.get()
        if deep:
            result = mb.reshape(
                x=result, shape=[-1, channels, *(len(m) for m in (*rows, columns))], name=node.name
            )
        elif seen is not None and rows and x.val is not None and result.val is not None:
            seen.append(Resampled(x.val, rows[0], columns, result.val))
        context.add(result)

    return convert


def resized(resample: str, x: Var, size: Any, aligned: bool, name: str) -> Var | None:
    """Return images resampled to a size by the mode of Core ML that samples as torch does.

    None if the host converts it: fixed sizes, and a multiple of the size of an image.

    Args:
        resample: torch's operation with the same matrices, bilinear or nearest.
        x: (batch, channels, height, width) or (batch, channels, length); the size may vary.
        size: the new size: a list, a variable or None.
        aligned: torch's `align_corners`.
        name: the name of the result.

    Raises:
        NotImplementedError: for nearest pixels; if the new size varies and the target is older than iOS 17.
    """
    stated = size if isinstance(size, (list, tuple)) else known_value(size)
    sides = [] if stated is None else [known_value(side) for side in stated]
    fixed = all(isinstance(side, (int, np.integer)) for side in sides)
    if not sides or (not any(map(is_symbolic, x.shape[2:])) if fixed else any(map(_is_multiple, stated))):
        return None
    if resample in NEAREST:
        raise NotImplementedError(
            f"{name}: to a varying size, Core ML takes other nearest pixels than torch: give a scale_factor "
            f'or mode="bilinear", or {FIXED}'
        )
    if not fixed and not _is_at_least_ios17():
        raise NotImplementedError(f"{name}: a size that varies: convert for iOS 17 or later, or {FIXED}")
    is_line, mode = len(sides) == 1, "STRICT_ALIGN_CORNERS" if aligned else "UNALIGN_CORNERS"
    image = mb.expand_dims(x=x, axes=[2]) if is_line else x
    if fixed:
        height, width = [1, *sides] if is_line else sides
        made = mb.resize_bilinear(
            x=image, target_size_height=int(height), target_size_width=int(width), sampling_mode=mode
        )
    else:
        shape = mb.concat(values=[_as_list(side) for side in stated], axis=0)
        made = mb.resize(x=image, shape=shape, resized_dims=np.uint32(len(sides)), sampling_mode=mode)
    return mb.squeeze(x=made, axes=[2], name=name) if is_line else mb.identity(x=made, name=name)


def _as_list(side: Var) -> Var:
    """Return a number as a list of one integer."""
    return mb.expand_dims(x=mb.cast(x=side, dtype="int32"), axes=[0])


def _is_multiple(side: Any) -> bool:
    """Is a side computed by a product? Casts and floor are passed over."""
    if not isinstance(side, Var):
        return False
    while (op := producer(side, "cast") or producer(side, "floor")) is not None:
        side = op.x
    return producer(side, "mul") is not None


def _is_at_least_ios17() -> bool:
    """Return whether the conversion is for iOS 17 or later."""
    from coremltools.converters.mil.mil.block import is_current_opset_version_compatible_with

    return bool(is_current_opset_version_compatible_with(ct.target.iOS17))


def scales_of(context: Any, node: Any, first: int, axes: int) -> list[float | None]:
    """Return the scale of each axis, arguments from `first` on; each is None where a size is given."""
    stated = [option(context, node, first + i, "") for i in range(axes)]
    scales = list(stated[0]) if np.ndim(stated[0]) else stated
    # coremltools holds them in fp32, whose shortest form is what was written: 1.7, and not 1.7000000477
    return [None if s is None else float(str(known_value(s))) for s in scales]


def _new_size(size: Any, i: int, before: int, scales: list[float | None]) -> int:
    """Return a side of the result: as given, or from the scale."""
    if known_value(size) is None:
        return math.floor(before * (scales[i] or 1.0))
    stated = size[i] if isinstance(size, (list, tuple)) else known_value(size)[i]
    side = known_value(stated)
    if side is None:
        raise NotImplementedError(f"%{stated.name}: the size to resample to is dynamic; {FIXED}")
    return int(side)


def _resampling_matrix(host: str, before: int, after: int, *how: bool | float | None) -> Any:
    """Return the matrix (after, before) that resamples one axis."""
    import torch

    units = torch.eye(before, dtype=torch.float64)[None, None]
    resample = getattr(torch.ops.aten, host).default
    return resample(units, [after, before], *how, None)[0, 0].numpy()


def sample_volume(context: Any, node: Any) -> None:
    """Convert `grid_sample(x, grid)` of volumes, by a gather of the neighbours of each point.

    x is (batch, channels, depth, height, width), and the grid (batch, .., .., .., 3).
    """
    x, grid, *how = inputs_of(context, node)[:5]
    mode, padding, aligned = (int(known_value(v)) for v in how)
    if any(map(is_symbolic, (*x.shape, *grid.shape))):
        raise NotImplementedError(f"{node.name}: grid_sample of a volume of dynamic shape {x.shape}; {FIXED}")
    if padding == REFLECTION:
        raise NotImplementedError(f"{node.name}: grid_sample of a volume that is reflected at its borders")
    batch, channels, *sizes = map(int, x.shape)
    points = math.prod(grid.shape[1:-1])
    place: Any = np.repeat(np.arange(batch) * math.prod(sizes), points).astype(np.int32)
    weight: Any = np_dtype(x).type(1)
    rows = mb.split(x=mb.reshape(x=grid, shape=[batch * points, 3]), num_splits=3, axis=-1)
    for axis, (size, row) in enumerate(zip(sizes, reversed(rows), strict=True)):
        shape = [2 if a == axis and mode != NEAREST_POINT else 1 for a in range(3)] + [-1]
        beside, share = _neighbours(mb.reshape(x=row, shape=[-1]), size, mode, padding, aligned)
        step = np.int32(math.prod(sizes[axis + 1 :]))
        place = mb.add(x=mb.mul(x=mb.reshape(x=beside, shape=shape), y=step), y=place)
        weight = mb.mul(x=mb.reshape(x=share, shape=shape), y=weight)
    flat = mb.reshape(x=mb.transpose(x=x, perm=[0, 2, 3, 4, 1]), shape=[-1, channels])
    found = mb.gather(x=flat, indices=mb.reshape(x=place, shape=[-1]), axis=0)
    found = mb.mul(x=found, y=mb.cast(x=mb.reshape(x=weight, shape=[-1, 1]), dtype=dtype_of(x)))
    found = mb.reduce_sum(x=mb.reshape(x=found, shape=[-1, batch * points, channels]), axes=[0])
    found = mb.transpose(x=mb.reshape(x=found, shape=[batch, points, channels]), perm=[0, 2, 1])
    context.add(mb.reshape(x=found, shape=[batch, channels, *grid.shape[1:-1]], name=node.name))


NEAREST_POINT, BORDER, REFLECTION = 1, 1, 2
"""Torch's numbers for sampling the nearest element, and for padding with the border and with reflections."""


def _neighbours(row: Var, size: int, mode: int, padding: int, aligned: int) -> tuple[Var, Var]:
    """Return the elements beside each coordinate of an axis, and the share of each: 0 outside."""
    number = np_dtype(row).type
    scale, middle = ((size - 1) / 2, (size - 1) / 2) if aligned else (size / 2, (size - 1) / 2)
    at = mb.add(x=mb.mul(x=row, y=number(scale)), y=number(middle))
    last = number(size - 1)
    if padding == BORDER:
        at = mb.clip(x=at, alpha=number(0), beta=last)
    if mode == NEAREST_POINT:
        beside, share = mb.round(x=at), number(1)
    else:
        low = mb.floor(x=at)
        above = mb.sub(x=at, y=low)
        beside = mb.concat(values=[low, mb.add(x=low, y=number(1))], axis=0)
        share = mb.concat(values=[mb.sub(x=number(1), y=above), above], axis=0)
    held = mb.clip(x=beside, alpha=number(0), beta=last)
    inside = mb.cast(x=mb.equal(x=held, y=beside), dtype=dtype_of(row))
    return mb.cast(x=held, dtype="int32"), mb.mul(x=inside, y=share)
