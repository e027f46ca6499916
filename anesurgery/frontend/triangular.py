"""Triangles of matrices, by selection; triangular systems, which gated linear attention solves, by products."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from anesurgery.frontend.arguments import Convert, argument, inputs_of, known_value, promoted
from anesurgery.mil import Array, Var, is_symbolic, mb, np_dtype, types


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


def with_selected_triangle(*, upper: bool) -> Callable[[Convert], Convert]:
    """`torch.triu(x, diagonal=0)`, or `torch.tril`, of anything.

    A triangle that is no band the host writes as x less the other triangle of x: not a number where x is
    infinite, as masks are. Here the other triangle is selected away.
    """

    def wrap(host: Convert) -> Convert:
        def convert(context: Any, node: Any) -> None:
            diagonal = int(known_value(argument(context, node, 1, "diagonal", 0)))
            if (diagonal <= 0) if upper else (diagonal >= 0):
                host(context, node)
                return
            x = inputs_of(context, node)[0]
            band = {"lower": -1, "upper": diagonal - 1} if upper else {"lower": -diagonal - 1, "upper": -1}
            keep = mb.equal(x=mb.band_part(x=_filled(x, np.float32(1)), **band), y=np.float32(0))
            context.add(mb.select(cond=keep, a=x, b=_filled(x, np_dtype(x).type(0)), name=node.name))

        return convert

    return wrap


def _filled(x: Var, value: Any) -> Any:
    """One value in the shape of x."""
    if any(map(is_symbolic, x.shape)):
        return mb.fill(shape=mb.shape(x=x), value=value)
    return np.full(x.shape, value)


WRAPPERS = {"triu": with_selected_triangle(upper=True), "tril": with_selected_triangle(upper=False)}
