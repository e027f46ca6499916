"""Contractions of two tensors over the field, as einsum writes them."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from anesurgery.interpret.arithmetic import field
from anesurgery.interpret.arithmetic.field import Image
from anesurgery.interpret.table import Unsupported


class Axes(NamedTuple):
    """The axes of two operands and of what is made of them, a letter each."""

    first: str
    second: str
    made: str
    inner: str
    """Those that are summed over, in the order of the first operand."""


def axes_of(equation: str) -> Axes:
    """The axes that ``ab,bc->ac`` names.

    Raises:
        Unsupported: another form of an equation.
    """
    left, arrow, out = equation.replace(" ", "").partition("->")
    parts = left.split(",")
    if not arrow or len(parts) != 2 or "." in equation or any(len(set(p)) < len(p) for p in (*parts, out)):
        raise Unsupported(f"einsum {equation!r}")
    inner = "".join(c for c in parts[0] if c in parts[1] and c not in out)
    if set(out) | set(inner) != set(left) - {","}:
        raise Unsupported(f"einsum {equation!r}")
    return Axes(parts[0], parts[1], out, inner)


def contraction(values: list[Image], equation: str) -> Image:
    """Sum of products over named axes of two tensors.

    Raises:
        Unsupported: another form of an equation.
    """
    axes, (x, y) = axes_of(equation), values
    terms = math.prod(x.shape[axes.first.index(c)] for c in axes.inner)
    return field.bilinear(x, y, lambda v, w: torch.einsum(equation, v, w), terms)
