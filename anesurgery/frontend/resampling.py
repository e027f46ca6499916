"""Convert the resampling of images to products with constant matrices: result = rows @ x @ columns.T.

Used for bicubic and smoothed bilinear resampling, which MIL has not, and for scales that give no whole size.
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

from anesurgery.frontend.arguments import Convert, argument, inputs_of, known_value
from anesurgery.mil import Array, Var, ct, is_symbolic, mb, producer, types


@dataclass(frozen=True)
class Resampled:
    """A constant that was resampled, such as position embeddings, and the result.

    Attributes:
        x: the constant, (1, channels, height, width).
        rows: the matrix for its rows, (new height, height).
        columns: the matrix for its columns, (new width, width).
        result: (1, channels, new height, new width), in the dtype of `x`.
    """

    x: Array
    rows: Array
    columns: Array
    result: Array


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
    """Return the converter of a torch resampling that treats rows and columns separately, or of columns alone.

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
        dtype, outer = types.nptype_from_builtin(x.dtype), (None,) * (x.rank - 2)
        high = mb.matmul(x=rows[0].astype(dtype)[outer], y=x) if rows else x
        result = mb.matmul(x=high, y=columns.T.astype(dtype)[outer], name=node.name)
        seen = _RECORDED.get()
        if seen is not None and rows and x.val is not None and result.val is not None:
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
    result: Var = mb.squeeze(x=made, axes=[2], name=name) if is_line else mb.identity(x=made, name=name)
    return result


def _as_list(side: Var) -> Var:
    """Return a number as a list of one integer."""
    made: Var = mb.expand_dims(x=mb.cast(x=side, dtype="int32"), axes=[0])
    return made


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
    stated = [known_value(argument(context, node, first + i, "")) for i in range(axes)]
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
