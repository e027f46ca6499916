"""Ops that reduce axes to one number each, and the softmax and running sum beside them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

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
