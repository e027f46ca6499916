"""Triangular systems, which gated linear attention solves, by matrix products."""

from __future__ import annotations

from typing import Any

import numpy as np

from anesurgery.frontend.arguments import argument, inputs_of, known_value, promoted
from anesurgery.mil import Array, is_symbolic, mb, types


def solve_triangular(context: Any, node: Any) -> None:
    """`torch.linalg.solve_triangular(a, b, upper=..., left=True, unitriangular=False)` by products alone.

    The inverses of diagonal blocks are merged in pairs: [[a, 0], [c, d]] has the inverse
    [[a', 0], [-d' c a', d']]. All pairs of a size are merged by two products of whole matrices.
    """
    a, b = promoted(inputs_of(context, node)[:2])
    upper, left, unit = (
        bool(known_value(argument(context, node, i, name, default)))
        for i, name, default in ((2, "upper", False), (3, "left", True), (4, "unitriangular", False))
    )
    if is_symbolic(a.shape[-1]):
        raise NotImplementedError(f"{node.name}: solve_triangular of matrices of dynamic size {a.shape}")
    n, dtype = int(a.shape[-1]), types.nptype_from_builtin(a.dtype)
    eye = np.eye(n, dtype=dtype)
    inverse = eye if unit else mb.real_div(x=eye, y=mb.add(x=mb.mul(x=a, y=eye), y=1 - eye))
    for size in (2**k for k in range((n - 1).bit_length())):
        beside = mb.mul(x=a, y=_beside(n, size, upper=upper).astype(dtype))
        if inverse is not eye:
            beside = mb.matmul(x=mb.matmul(x=inverse, y=beside), y=inverse)
        inverse = mb.sub(x=inverse, y=beside)
    x, y = (inverse, b) if left else (b, inverse)
    context.add(mb.matmul(x=x, y=y, name=node.name))


def _beside(n: int, size: int, *, upper: bool) -> Array:
    """1 in the blocks of a size that stand beside the diagonal, between the two that are merged."""
    block = np.arange(n) // size
    one, other = (block[None], block[:, None]) if upper else (block[:, None], block[None])
    return (one // 2 == other // 2) & (one > other)
