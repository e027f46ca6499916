"""Matrix products, and attention in one op."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - the usual name

from anesurgery.interpret.table import impl

Tensor = torch.Tensor

LONG = 2048
"""Length of a sum from which it pays to look whether a product only picks rows. A choice: of shorter ones the
product costs little."""
WIDTH = 256
"""Numbers of a row that are looked at together, to find the few that are not 0."""


BLOCK = 1 << 20
"""Weights that are widened at a time."""
LANES = 64
"""Outputs that BLAS computes alike: of a multiple, none is summed in another order than its neighbours."""


@impl("linear")
def linear(x: Tensor, weight: Tensor, bias: Any = None) -> Tensor:
    """X times the transposed weight [out, in], plus the bias; integers exactly."""
    add = None if bias is None else torch.as_tensor(bias)
    if x.dtype == torch.int32:
        product = _integers(x, weight.T)
        return product if add is None else product + add
    add = None if add is None else add.to(x.dtype).expand(len(weight))
    if weight.dtype == x.dtype or weight.numel() <= BLOCK:
        return F.linear(x, weight.to(x.dtype), add)
    rows, whole = max(1, BLOCK // weight.shape[1] // LANES) * LANES, len(weight)
    parts = []
    for start in range(0, whole, rows):
        first = max(0, min(start, whole - rows))  # parts of one size are computed in one order
        part = slice(first, first + rows)
        product = F.linear(x, weight[part].to(x.dtype), None if add is None else add[part])
        parts.append(product[..., start - first :])
    return torch.cat(parts, -1)


@impl("matmul")
def matmul(x: Tensor, y: Tensor, transpose_x: bool = False, transpose_y: bool = False) -> Tensor:
    """The matrix product over the last two axes, each side transposed on request."""
    x = x.transpose(-1, -2) if transpose_x and x.ndim > 1 else x
    y = y.transpose(-1, -2) if transpose_y and y.ndim > 1 else y
    if x.dtype == torch.int32 and y.dtype == torch.int32:
        return _integers(x, y)
    if x.shape[-1] >= LONG and y.ndim == 2 and (rows := _picked(x, y)) is not None:
        return rows
    floats = torch.float64 if torch.float64 in (x.dtype, y.dtype) else torch.float32
    return torch.matmul(x.to(floats), y.to(floats))


def _integers(x: Tensor, y: Tensor) -> Tensor:
    """The product of int32 matrices, which wraps as sums and products of int32 do.

    In fp64, which is fast, where no sum can reach 2^53, beyond which that is not exact.
    """
    largest = [int(v.long().abs().max()) if v.numel() else 0 for v in (x, y)]
    if largest[0] * largest[1] * x.shape[-1] < 2**53:
        return torch.matmul(x.double(), y.double()).long().to(torch.int32)
    return torch.matmul(x.long(), y.long()).to(torch.int32)


def _picked(x: Tensor, y: Tensor) -> Tensor | None:
    """The product where each row of x has at most one number that is not 0: then it only picks rows of y.

    The same numbers as the whole sum, since 0 times a finite number adds nothing.
    """
    width = math.gcd(x.shape[-1], WIDTH)
    blocks = x.reshape(*x.shape[:-1], -1, width)
    busy = (blocks.amin(-1) != 0) | (blocks.amax(-1) != 0)
    if int(busy.sum(-1).max()) > 1:
        return None
    block = busy.to(torch.uint8).argmax(-1)
    inside = torch.take_along_dim(blocks, block[..., None, None], -2).squeeze(-2)
    if int(torch.count_nonzero(inside, dim=-1).max()) > 1 or not bool(torch.isfinite(y.sum())):
        return None
    place = inside.abs().argmax(-1)
    rows = y[block * width + place]
    return torch.take_along_dim(inside, place[..., None], -1) * rows + 0.0  # -0.0 + 0.0 is 0.0


@impl("einsum")
def einsum(values: list[Tensor], equation: Any) -> Tensor:
    """Sum of products over named axes."""
    return torch.einsum(str(equation), *values)


@impl("scaled_dot_product_attention")
def scaled_dot_product_attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None
) -> Tensor:
    """softmax(query keyᵀ / sqrt(width) + mask) value; a boolean mask keeps where it is true."""
    return F.scaled_dot_product_attention(query, key, value, attn_mask)
