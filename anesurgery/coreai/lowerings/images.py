"""Lower ops that resample images, at the positions that the interpreter's table `GRIDS` states."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from torch.nn import functional

from anesurgery.coreai.lowerings import as_interpreted, lowers
from anesurgery.coreai.lowerings.indexing import take
from anesurgery.coreai.toolkit import ops
from anesurgery.coreai.values import TORCH, Value, array, attribute, indices, where
from anesurgery.errors import NotExpressible
from anesurgery.interpret.ops import image
from anesurgery.interpret.ops.image import GRIDS
from anesurgery.mil import Operation, static_shape
from anesurgery.ops import names


def _sampling_line(mode: str, size: int, count: int) -> tuple[float, float]:
    """Return (a, b): the i-th of `count` samples of `size` pixels is at a i + b."""
    start, step, over = GRIDS[mode](size, count)
    return (step / over if count > 1 and step else 1.0), start / over


def _interpolate(x: Value, shape: Sequence[int], lines: Sequence[tuple[float, float]], how: str) -> Value:
    """Write Core AI's interpolation, which takes the inverse of a line, between the outer edges of pixels."""
    one = [(1.0, 0.0)] * (x.ndim - len(lines))
    scales, offsets = zip(*((1 / a, 0.5 - (b + 0.5) / a) for a, b in [*one, *lines]), strict=True)
    form = (indices(list(shape)), array(scales, "fp32"), array(offsets, "fp32"))
    return Value(ops.interpolate(x.node, *(v.node for v in form), attribute("interpolation_mode", how)))


def _linear(x: Value, shape: Sequence[int], mode: str, axes: int) -> Value:
    sizes = list(zip(x.shape, shape, strict=True))[-axes:]
    return _interpolate(x, shape, [_sampling_line(mode, size, count) for size, count in sizes], "linear")


def _nearest(x: Value, shape: Sequence[int], shift: float, axes: int = 2) -> Value:
    """Take the nearest pixel; whole factors are one op, other sizes gather rows and columns."""
    sizes = list(zip(x.shape, shape, strict=True))[-axes:]
    if all(count % size == 0 for size, count in sizes):
        lines = [(size / count, size / count / 2 - 0.5) for size, count in sizes]
        return _interpolate(x, shape, lines, "nearest_neighbor")
    for axis, (size, count) in enumerate(sizes, x.ndim - axes):
        if size != count:
            places = (2 * np.arange(count) + int(2 * shift)) * size // (2 * count)  # exact, in integers
            x = take(x, indices(places), axis)
    return x


def _resized(x: Value, sizes: Sequence[int], mode: str, nearest: bool) -> Value:
    """Resize the last axes."""
    shape = [*x.fixed_lengths()[: -len(sizes)], *sizes]
    if not nearest:
        return _linear(x, shape, mode, len(sizes))
    if mode not in ("DEFAULT", "UNALIGN_CORNERS"):
        raise NotExpressible(f"the nearest pixel by {mode}")
    return _nearest(x, shape, 0.5, len(sizes))


TORCH[image.resized] = _resized
as_interpreted(
    *names("upsample_bilinear resize_nearest_neighbor resize_bilinear resize resample affine crop_resize")
)


@lowers("upsample_nearest_neighbor")
def _upsample_nearest(x: Value, op: Operation, **factors: Any) -> Value:
    """Take the pixel before each position; the factors only make the shape."""
    shape = static_shape(op.outputs[0])
    if shape is None:
        raise NotExpressible(f"it is resized from {x.shape}, which is dynamic")
    return _nearest(x, [int(length) for length in shape], 0.0)


def _affine_grid(matrix: Value, size: Sequence[int], align_corners: bool) -> Value:
    """Return the positions of pixels under matrices [n, 2, 3], in fp32: [n, height, width, 2]."""
    y, x = (np.linspace(-1, 1, n) if align_corners else (2 * np.arange(n) + 1) / n - 1 for n in size[2:])
    grid = np.stack([*np.meshgrid(x, y), np.ones(size[2:])], -1).reshape(1, -1, 3)
    return (array(grid, "fp32") @ matrix.cast("fp32").mT).reshape([size[0], *size[2:], 2])


TORCH[functional.affine_grid] = _affine_grid


def _crops(x: Value, rows: Value, columns: Value, of: Any, pad: float) -> Value:
    """Return the pixels at rows [box, height] and columns [box, width]: [box, 1, channel, height, width]."""
    if of is None and x.shape[0] != 1:
        raise NotExpressible("each box is cut out of several images")
    n, sizes = rows.fixed_lengths()[0], x.fixed_lengths()[2:]
    grid = [n, rows.shape[1], columns.shape[1]]
    rows, columns = rows.expand([2]).broadcast(grid), columns.expand([1]).broadcast(grid)
    outside = (rows < 0) | (rows > sizes[0] - 1) | (columns < 0) | (columns > sizes[1] - 1)
    rows, columns = (at.clamp(0, size - 1) for at, size in zip((rows, columns), sizes, strict=True))
    images: Any = take(x, indices(np.zeros(n) if of is None else of), 0)
    found: Any = image.sampled(images, rows, columns, False, 0.0)  # type: ignore[arg-type]
    return where(outside.expand([1]), float(pad), found).expand([1])


TORCH[image.crops] = _crops
