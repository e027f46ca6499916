"""Products, attention in one op, reductions, softmax and running sums, and normalizations."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - the usual name

from anesurgery.interpret.table import TABLE, Implementation, enter_all, impl, ints

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
    wide = weight.new_empty((min(rows, whole), weight.shape[1]), dtype=x.dtype)  # new memory for each is slow
    parts = []
    for start in range(0, whole, rows):
        first = max(0, min(start, whole - rows))  # parts of one size are computed in one order
        part = slice(first, first + rows)
        product = F.linear(x, wide.copy_(weight[part]), None if add is None else add[part])
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


def _sum(x: Tensor, axes: list[int], keep: bool) -> Tensor:
    return torch.sum(x, dim=axes, keepdim=keep)


def _mean(x: Tensor, axes: list[int], keep: bool) -> Tensor:
    """The mean; of integers truncated toward zero, and exact, which fp32 is not beyond 2^24."""
    if x.is_floating_point():
        return torch.mean(x.float() if x.dtype == torch.float16 else x, dim=axes, keepdim=keep)
    count = math.prod(x.shape[axis] for axis in axes) or 1
    total = torch.sum(x.long(), dim=axes, keepdim=keep)
    return torch.div(total, count, rounding_mode="trunc").to(torch.int32)


def _prod(x: Tensor, axes: list[int], keep: bool) -> Tensor:
    for axis in sorted((a % x.ndim for a in axes), reverse=True):
        x = torch.prod(x, dim=axis, keepdim=keep)
    return x


REDUCTIONS: dict[str, Callable[[Tensor, list[int], bool], Tensor]] = {
    "reduce_sum": _sum,
    "reduce_mean": _mean,
    "reduce_max": torch.amax,
    "reduce_min": torch.amin,
    "reduce_prod": _prod,
    "reduce_l1_norm": lambda x, axes, keep: _sum(x.abs(), axes, keep),
    "reduce_l2_norm": lambda x, axes, keep: torch.sqrt(_sum(x * x, axes, keep)),
    "reduce_sum_square": lambda x, axes, keep: _sum(x * x, axes, keep),
    "reduce_log_sum": lambda x, axes, keep: torch.log(_sum(x, axes, keep)),
    "reduce_log_sum_exp": lambda x, axes, keep: torch.logsumexp(x, axes, keep),
}
"""Op type -> function of (x, axes, keep_dims)."""


def _reduction(function: Callable[[Tensor, list[int], bool], Tensor]) -> Callable[..., Tensor]:
    def reduce(x: Tensor, axes: Any = None, keep_dims: bool = False) -> Tensor:
        chosen = list(range(x.ndim)) if axes is None else ints(axes)
        return function(x, chosen, bool(keep_dims)) if x.ndim else function(x.reshape(1), [0], False)

    return reduce


TABLE.update({name: Implementation(_reduction(f), False) for name, f in REDUCTIONS.items()})


@impl("cumsum")
def cumsum(x: Tensor, axis: int = 0, exclusive: bool = False, reverse: bool = False) -> Tensor:
    """The running sum along an axis, from either end, with or without the element itself."""
    x = x.flip(axis) if reverse else x
    total = torch.cumsum(x, dim=axis).to(x.dtype)
    if exclusive and total.ndim:
        zero = torch.zeros_like(total.narrow(axis, 0, min(1, total.shape[axis])))
        total = torch.cat([zero, total], axis).narrow(axis, 0, total.shape[axis])
    return total.flip(axis) if reverse else total


WRITTEN: dict[str, Callable[..., Any]] = {  # output_dtype is what the result is cast to by whoever runs the op
    "reduce_argmax": lambda x, axis=-1, keep_dims=False, output_dtype="": torch.argmax(x, axis, keep_dims),
    "reduce_argmin": lambda x, axis=-1, keep_dims=False, output_dtype="": torch.argmin(x, axis, keep_dims),
    "softmax": lambda x, axis=-1: torch.softmax(x, dim=int(axis)),
}
"""Op type -> function of its parameters; of equal numbers the place of the first."""
enter_all(WRITTEN)


@impl("layer_norm")
def layer_norm(
    x: Tensor, axes: Any = None, gamma: Tensor | None = None, beta: Tensor | None = None, epsilon: float = 1e-5
) -> Tensor:
    """Zero mean and unit variance over `axes`, then times gamma plus beta (of the axes' shape)."""
    chosen = sorted(a % x.ndim for a in (range(x.ndim) if axes is None else ints(axes)))
    if chosen == list(range(x.ndim - len(chosen), x.ndim)):
        return F.layer_norm(x, [x.shape[a] for a in chosen], gamma, beta, float(epsilon))
    shape = [x.shape[a] if a in chosen else 1 for a in range(x.ndim)]
    mean = x.mean(chosen, keepdim=True)
    variance = ((x - mean) ** 2).mean(chosen, keepdim=True)
    y = (x - mean) / torch.sqrt(variance + epsilon)
    y = y if gamma is None else y * gamma.reshape(shape)
    return y if beta is None else y + beta.reshape(shape)


@impl("batch_norm")
def batch_norm(
    x: Tensor,
    mean: Tensor,
    variance: Tensor,
    gamma: Tensor | None = None,
    beta: Tensor | None = None,
    epsilon: float = 1e-5,
) -> Tensor:
    """Each channel (axis 1) by its stored mean and variance."""
    return F.batch_norm(x, mean, variance, gamma, beta, False, 0.0, float(epsilon))


@impl("instance_norm")
def instance_norm(
    x: Tensor, gamma: Tensor | None = None, beta: Tensor | None = None, epsilon: float = 1e-5
) -> Tensor:
    """Each channel of each sample by its own mean and variance."""
    axes, shape = tuple(range(2, x.ndim)), (-1, *(1,) * (x.ndim - 2))
    variance, mean = torch.var_mean(x, axes, correction=0, keepdim=True)
    y = (x - mean) * torch.rsqrt(variance + epsilon)
    y = y if gamma is None else y * gamma.reshape(shape)
    return y if beta is None else y + beta.reshape(shape)


@impl("l2_norm")
def l2_norm(x: Tensor, epsilon: float = 1e-6) -> Tensor:
    """X over the root of its sum of squares (plus epsilon) over the last three axes."""
    axes = tuple(range(-min(3, x.ndim), 0))
    return x / torch.sqrt((x * x).sum(axes, keepdim=True) + epsilon)


@impl("local_response_norm")
def local_response_norm(
    x: Tensor, size: int, alpha: float = 1e-4, beta: float = 0.75, k: float = 1.0
) -> Tensor:
    """X over (k + alpha / size * the sum of squares of `size` neighbours on axis -3) ** beta."""
    flat = x.reshape(-1, *x.shape[-3:])
    return F.local_response_norm(flat, int(size), float(alpha), float(beta), float(k)).reshape(x.shape)
