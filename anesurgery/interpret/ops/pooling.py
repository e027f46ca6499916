"""Pooling over one, two or three spatial axes.

With `ceil_mode` the last window may reach beyond the padding: what lies there counts as padding does
(`interpret.differences`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - the usual name

from anesurgery.interpret.ops.conv import pad_axes, padding
from anesurgery.interpret.table import impl, ints

Tensor = torch.Tensor

AVERAGE = {1: F.avg_pool1d, 2: F.avg_pool2d, 3: F.avg_pool3d}
MAXIMUM = {1: F.max_pool1d, 2: F.max_pool2d, 3: F.max_pool3d}


@dataclass(frozen=True)
class Windows:
    """Where the windows of a pooling lie."""

    kernel: list[int]
    strides: list[int]
    asked: list[tuple[int, int]]
    """The padding that the op asks for, on each axis."""
    used: list[tuple[int, int]]
    """The padding with which the windows just fit; negative where the end is not read."""

    @property
    def inside(self) -> list[int] | None:
        """The padding as torch's pooling takes it: the same at both ends, at most half a window."""
        pads = [begin for begin, _ in self.asked]
        fits = all(b == e and 2 * b <= k for (b, e), k in zip(self.asked, self.kernel, strict=True))
        reaches = any(u > a for (_, u), (_, a) in zip(self.used, self.asked, strict=True))
        return pads if fits and not reaches else None


def windows(x: Tensor, kernel: Any, strides: Any, pad_type: str, pad: Any, ceil_mode: bool) -> Windows:
    """Where the windows of a pooling of `x` lie."""
    k, sizes = ints(kernel), list(x.shape[2:])
    s = ints(strides) if strides is not None else [1] * len(k)
    asked = padding(pad_type, pad, sizes, k, s)
    used = []
    for size, width, step, (begin, end) in zip(sizes, k, s, asked, strict=True):
        count = _count(size, width, step, begin + end, ceil_mode)
        used.append((begin, (count - 1) * step + width - size - begin))
    return Windows(k, s, asked, used)


def counted(w: Windows, sizes: list[int], exclude: bool) -> Tensor:
    """How many elements of each window count, [1, 1, spatial...]: all, or those that are data."""
    ones = torch.ones((1, 1, *sizes), dtype=torch.float64)
    inside = AVERAGE[len(w.kernel)](pad_axes(ones, w.used, 0.0 if exclude else 1.0), w.kernel, w.strides)
    return torch.round(inside * math.prod(w.kernel))


def _count(size: int, width: int, step: int, padded: int, ceil_mode: bool) -> int:
    """How many windows there are; one that would begin after the data and its padding is none."""
    if not ceil_mode:
        return (size + padded - width) // step + 1
    count = (size + padded - width + step - 1) // step + 1
    return count - int(padded > 0 and (count - 1) * step >= size + padded / 2)


@impl("max_pool")
def max_pool(
    x: Tensor,
    kernel_sizes: Any,
    strides: Any = None,
    pad_type: str = "valid",
    pad: Any = None,
    ceil_mode: bool = False,
) -> Tensor:
    """The maximum of each window of [batch, channels, spatial...]; padding never wins."""
    w = windows(x, kernel_sizes, strides, pad_type, pad, bool(ceil_mode))
    if (inside := w.inside) is not None:
        return MAXIMUM[len(inside)](x, w.kernel, w.strides, inside)
    return MAXIMUM[len(w.kernel)](pad_axes(x, w.used, -math.inf), w.kernel, w.strides)


@impl("avg_pool")
def avg_pool(
    x: Tensor,
    kernel_sizes: Any,
    strides: Any = None,
    pad_type: str = "valid",
    pad: Any = None,
    exclude_padding_from_average: bool = False,
    ceil_mode: bool = False,
) -> Tensor:
    """The mean of each window of [batch, channels, spatial...], with or without the padding in the count."""
    w = windows(x, kernel_sizes, strides, pad_type, pad, bool(ceil_mode))
    exclude, average = bool(exclude_padding_from_average), AVERAGE[len(w.kernel)]
    if (inside := w.inside) is not None:
        return average(x, w.kernel, w.strides, inside, False, not exclude)
    means = average(pad_axes(x, w.used), w.kernel, w.strides)
    return (
        means * (math.prod(w.kernel) / counted(w, list(x.shape[2:]), exclude)).to(means) if exclude else means
    )


@impl("l2_pool")
def l2_pool(
    x: Tensor,
    kernel_sizes: Any,
    strides: Any = None,
    pad_type: str = "valid",
    pad: Any = None,
    ceil_mode: bool = False,
) -> Tensor:
    """The root of the sum of squares in each window of [batch, channels, spatial...]."""
    w = windows(x, kernel_sizes, strides, pad_type, pad, bool(ceil_mode))
    squares = AVERAGE[len(w.kernel)](pad_axes(x * x, w.used), w.kernel, w.strides)
    return torch.sqrt(squares * math.prod(w.kernel))
