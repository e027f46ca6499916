"""Contractions of two tensors over the field, as einsum writes them."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from anesurgery.interpret.arithmetic import field
from anesurgery.interpret.arithmetic.field import Image
from anesurgery.interpret.table import Unsupported


def contraction(values: list[Image], equation: str, places: Callable[[int], Image] | None = None) -> Image:
    """Sum of products over named axes of two tensors.

    Args:
        values: the two tensors.
        equation: ``ab,bc->ac``.
        places: gives a factor for each place of the sum; none by default.

    Raises:
        Unsupported: another form of an equation.
    """
    left, arrow, out = equation.replace(" ", "").partition("->")
    parts = left.split(",")
    if not arrow or len(parts) != 2 or "." in equation or any(len(set(p)) < len(p) for p in parts):
        raise Unsupported(f"einsum {equation!r}")
    x, y = values
    size = dict(zip("".join(parts), (*x.shape, *y.shape), strict=True))
    inner = [c for c in parts[0] if c in parts[1] and c not in out]
    if any(c not in out and c not in inner for c in size):
        raise Unsupported(f"einsum {equation!r}")
    terms = math.prod(size[c] for c in inner)
    if places is not None:
        shape = [size[c] if c in inner else 1 for c in parts[0]]
        x = field.multiply(x, places(terms).map(lambda v: v.reshape(shape)))
    return field.bilinear(x, y, lambda v, w: torch.einsum(equation, v, w), terms)
