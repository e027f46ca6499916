"""Activations to 8-bit integers and back; the integers run as int32 and stay in the range of their dtype."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from anesurgery.interpret.table import impl

Tensor = torch.Tensor

RANGE = {"int8": (-128, 127), "uint8": (0, 255)}
"""Dtype -> the least and the greatest number that it holds."""


def _along(value: Any, axis: int | None, rank: int) -> Tensor:
    """A scalar, or one number for each place of an axis, in a shape that broadcasts."""
    tensor = torch.as_tensor(value, dtype=torch.float32)
    if axis is None or tensor.ndim == 0:
        return tensor
    return tensor.reshape([-1 if a == int(axis) % rank else 1 for a in range(rank)])


@impl("quantize")
def quantize(
    input: Tensor, scale: Any, output_dtype: str, zero_point: Any = None, axis: int | None = None
) -> Tensor:
    """round(x / scale) + zero_point, kept inside the dtype; halves are rounded to even."""
    return codes(torch.round, input, scale, output_dtype, zero_point, axis)


def codes(
    nearest: Callable[[Tensor], Tensor],
    input: Tensor,
    scale: Any,
    output_dtype: str,
    zero_point: Any = None,
    axis: int | None = None,
) -> Tensor:
    """The codes of a value, where `nearest` says which way halves are rounded."""
    level = nearest(input / _along(scale, axis, input.ndim))
    level = level if zero_point is None else level + _along(zero_point, axis, input.ndim)
    return level.clamp(*RANGE[output_dtype])


@impl("dequantize")
def dequantize(input: Tensor, scale: Any, zero_point: Any = None, axis: int | None = None) -> Tensor:
    """Scale * (x - zero_point)."""
    x = input.float()
    x = x if zero_point is None else x - _along(zero_point, axis, input.ndim)
    return x * _along(scale, axis, input.ndim)
