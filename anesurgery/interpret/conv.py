"""Convolutions and pooling over one, two or three spatial axes."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - the usual name

from anesurgery.interpret.table import Unsupported, impl, ints

Tensor = torch.Tensor

CONV = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
CONV_TRANSPOSE = {1: F.conv_transpose1d, 2: F.conv_transpose2d, 3: F.conv_transpose3d}
AVERAGE = {1: F.avg_pool1d, 2: F.avg_pool2d, 3: F.avg_pool3d}
MAXIMUM = {1: F.max_pool1d, 2: F.max_pool2d, 3: F.max_pool3d}


def padding(
    pad_type: str,
    pad: Any,
    sizes: list[int],
    kernel: list[int],
    strides: list[int],
    dilations: list[int],
) -> list[int]:
    """Padding [begin, end] of each spatial axis in turn, whatever way it was asked for."""
    if pad_type == "custom":
        return ints(pad)
    if pad_type == "valid":
        return [0] * (2 * len(sizes))
    if pad_type not in ("same", "same_lower"):
        raise Unsupported(f"pad_type {pad_type!r} is not known")
    found = []
    for size, k, s, d in zip(sizes, kernel, strides, dilations, strict=True):
        total = max((math.ceil(size / s) - 1) * s + (k - 1) * d + 1 - size, 0)
        small, large = total // 2, total - total // 2
        found += [small, large] if pad_type == "same" else [large, small]
    return found


def _torch_order(pads: list[int]) -> list[int]:
    """[begin, end] of the first axis first -> of the last axis first, as torch wants them."""
    pairs = [pads[i : i + 2] for i in range(0, len(pads), 2)]
    return [p for pair in reversed(pairs) for p in pair]


@impl("conv")
def conv(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, strides: Any = None, pad_type: str = "valid",
    pad: Any = None, dilations: Any = None, groups: int = 1,
) -> Tensor:  # fmt: skip
    """Convolution of [batch, channels, spatial...] with a weight [out, in / groups, kernel...]."""
    n = x.ndim - 2
    s, d = (ints(v) if v is not None else [1] * n for v in (strides, dilations))
    pads = padding(pad_type, pad, list(x.shape[2:]), list(weight.shape[2:]), s, d)
    x = F.pad(x, _torch_order(pads)) if any(pads) else x
    return CONV[n](x, weight, bias, s, 0, d, int(groups))


@impl("conv_transpose")
def conv_transpose(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, pad: Any = None, output_shape: Any = None,
    pad_type: str = "valid", strides: Any = None, dilations: Any = None, groups: int = 1,
) -> Tensor:  # fmt: skip
    """Transposed convolution; the padding is cut from the full result."""
    n = x.ndim - 2
    s, d = (ints(v) if v is not None else [1] * n for v in (strides, dilations))
    full = CONV_TRANSPOSE[n](x, weight, bias, s, 0, 0, int(groups), d)
    if pad_type not in ("custom", "valid"):
        raise Unsupported(f"conv_transpose with pad_type {pad_type!r} is not known")
    pads = ints(pad) if pad_type == "custom" and pad is not None else [0] * (2 * n)
    wanted = ints(output_shape)[2:] if output_shape is not None else None
    for axis in range(n):
        begin = pads[2 * axis]
        end = full.shape[2 + axis] - pads[2 * axis + 1] if wanted is None else begin + wanted[axis]
        if end > full.shape[2 + axis]:
            full = F.pad(full, [0, 0] * (n - 1 - axis) + [0, end - full.shape[2 + axis]])
        full = full.narrow(2 + axis, begin, end - begin)
    return full


def _pool_padding(x: Tensor, kernel: Any, strides: Any, pad_type: str, pad: Any, ceil: bool) -> Any:
    if ceil:
        raise Unsupported("pooling with ceil_mode is not known")
    k = ints(kernel)
    s = ints(strides) if strides is not None else [1] * len(k)
    return k, s, padding(pad_type, pad, list(x.shape[2:]), k, s, [1] * len(k))


@impl("max_pool")
def max_pool(
    x: Tensor, kernel_sizes: Any, strides: Any = None, pad_type: str = "valid", pad: Any = None,
    ceil_mode: bool = False,
) -> Tensor:  # fmt: skip
    """The maximum of each window; padding never wins."""
    k, s, pads = _pool_padding(x, kernel_sizes, strides, pad_type, pad, ceil_mode)
    return MAXIMUM[len(k)](F.pad(x, _torch_order(pads), value=-math.inf), k, s)


@impl("avg_pool")
def avg_pool(
    x: Tensor, kernel_sizes: Any, strides: Any = None, pad_type: str = "valid", pad: Any = None,
    exclude_padding_from_average: bool = False, ceil_mode: bool = False,
) -> Tensor:  # fmt: skip
    """The mean of each window, with or without the padding in the count."""
    k, s, pads = _pool_padding(x, kernel_sizes, strides, pad_type, pad, ceil_mode)
    total = AVERAGE[len(k)](F.pad(x, _torch_order(pads)), k, s)
    if not exclude_padding_from_average or not any(pads):
        return total
    return total / AVERAGE[len(k)](F.pad(torch.ones_like(x), _torch_order(pads)), k, s)
