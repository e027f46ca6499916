"""Ops that reduce axes to one number each, the softmax and running sum beside them, and normalizations."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - the usual name

from anesurgery.interpret.table import TABLE, Meaning, impl, ints, written

Tensor = torch.Tensor


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


TABLE.update({name: Meaning(_reduction(f), False) for name, f in REDUCTIONS.items()})


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
written(WRITTEN)


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
