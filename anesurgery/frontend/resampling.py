"""Resampling of pictures as products with constant matrices."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from anesurgery.frontend.arguments import Convert, argument, inputs_of, known_value
from anesurgery.mil import Var, is_symbolic, mb, types


def resampled(host: str) -> Convert:
    """The converter of a resampling that works on rows and columns apart: a product with a matrix for each.

    torch itself makes the matrices, from pictures of one. The picture's sides must be static.
    """

    def convert(context: Any, node: Any) -> None:
        x, size, align = inputs_of(context, node)[:3]
        if any(is_symbolic(d) for d in x.shape[-2:]):
            raise NotImplementedError(f"{node.name}: {node.kind} of a picture of dynamic size {x.shape}")
        stated = [known_value(argument(context, node, i, "")) for i in (3, 4)]
        scales = list(stated[0]) if np.ndim(stated[0]) else stated
        scales = [None if s is None else float(known_value(s)) for s in scales]
        sizes = [_sides(size, i, x, scales) for i in (0, 1)]
        rows, columns = (
            _matrix(host, int(x.shape[i - 2]), sizes[i], bool(known_value(align)), scales[i]) for i in (0, 1)
        )
        dtype = types.nptype_from_builtin(x.dtype)
        high = mb.matmul(x=rows.astype(dtype)[None, None], y=x)
        context.add(mb.matmul(x=high, y=columns.T.astype(dtype)[None, None], name=node.name))

    return convert


def _sides(size: Any, i: int, x: Var, scales: list[float | None]) -> int:
    """A side of the result: as given, or as the scale makes it."""
    if known_value(size) is None:
        return math.floor(int(x.shape[i - 2]) * (scales[i] or 1.0))
    side = known_value(size[i] if isinstance(size, (list, tuple)) else known_value(size)[i])
    if isinstance(side, Var):
        raise NotImplementedError(f"%{side.name}: the size to resample to is dynamic")
    return int(side)


def _matrix(host: str, before: int, after: int, align: bool, scale: float | None) -> Any:
    """What resampling makes of each unit vector: (after, before)."""
    import torch

    units = torch.eye(before, dtype=torch.float64)[None, None]
    resample = getattr(torch.ops.aten, host).default
    return resample(units, [after, before], align, scale, None)[0, 0].numpy()
