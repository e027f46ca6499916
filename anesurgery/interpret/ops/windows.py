"""Convolutions and pooling over one, two or three spatial axes.

With `ceil_mode` the last window of a pool may reach beyond the padding: what lies there counts as padding does
(see the table in docs/interpreter.md).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - the usual name

from anesurgery.interpret.table import Unsupported, impl, ints
from anesurgery.mil import Operation, constant

Tensor = torch.Tensor

CONV = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
CONV_TRANSPOSE = {1: F.conv_transpose1d, 2: F.conv_transpose2d, 3: F.conv_transpose3d}


def padding(
    pad_type: str,
    pad: Any,
    sizes: list[int],
    kernel: list[int],
    strides: list[int],
    dilations: list[int] | None = None,
) -> list[tuple[int, int]]:
    """Return the padding (begin, end) of each spatial axis for any `pad_type`."""
    name = str(pad_type).lower()
    if name == "custom":
        amounts = ints(pad) if pad is not None else [0] * (2 * len(sizes))
        return list(zip(amounts[::2], amounts[1::2], strict=True))
    if name == "valid":
        return [(0, 0)] * len(sizes)
    pairs = []
    spread = dilations or [1] * len(sizes)
    for size, k, s, d in zip(sizes, kernel, strides, spread, strict=True):
        total = max((math.ceil(size / s) - 1) * s + (k - 1) * d + 1 - size, 0)
        pairs.append(_halves(total, name))
    return pairs


def _halves(total: int, pad_type: str) -> tuple[int, int]:
    """Divide a padding among both ends; an odd one is larger at the end, with "same_lower" at the begin."""
    if pad_type not in ("same", "same_lower"):
        raise Unsupported(f"pad_type {pad_type!r} is not known")
    small, large = total // 2, total - total // 2
    return (small, large) if pad_type == "same" else (large, small)


def pad_axes(x: Tensor, pads: list[tuple[int, int]], value: float = 0.0) -> Tensor:
    """Return x with its last axes padded, or cropped where padding is negative; itself without any."""
    if not any(begin or end for begin, end in pads):
        return x
    return F.pad(x, [amount for pair in reversed(pads) for amount in pair], value=value)


def steps(value: Any, axes: int) -> list[int]:
    """Return the strides or dilations of each axis; 1 where none are given."""
    return [1] * axes if value is None else ints(value)


@impl("conv")
def conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    strides: Any = None,
    pad_type: str = "valid",
    pad: Any = None,
    dilations: Any = None,
    groups: int = 1,
) -> Tensor:
    """Return the convolution of [batch, channels, spatial...] with a weight [out, in / groups, kernel...].

    Both ends of an axis are padded inside torch as far as they are equal: that spares a copy of x.
    """
    n = x.ndim - 2
    s, d = steps(strides, n), steps(dilations, n)
    pads = padding(pad_type, pad, list(x.shape[2:]), list(weight.shape[2:]), s, d)
    both = [min(pair) for pair in pads]
    x = pad_axes(x, [(b - m, e - m) for (b, e), m in zip(pads, both, strict=True)])
    return CONV[n](x, weight, bias, s, both, d, int(groups))


@impl("conv_quantized")
def conv_quantized(
    x: Tensor,
    weight: Tensor,
    quantization_type: str,
    quant_scale: Tensor,
    quant_bias: Tensor,
    bias: Tensor | None = None,
    nbits: int = 8,
    **form: Any,
) -> Tensor:
    """Return the convolution with `weight * quant_scale + quant_bias`, for all or for each channel out."""
    if quantization_type != "linear":
        raise Unsupported(f"conv_quantized with quantization_type {quantization_type!r}")
    column = (-1, *(1,) * (weight.ndim - 1))
    scale, shift = (torch.as_tensor(v, dtype=torch.float32).reshape(column) for v in (quant_scale, quant_bias))
    return conv(x, weight * scale + shift, None if bias is None else bias.float(), **form)


@impl("conv_transpose")
def conv_transpose(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    pad: Any = None,
    output_shape: Any = None,
    pad_type: str = "valid",
    strides: Any = None,
    dilations: Any = None,
    groups: int = 1,
) -> Tensor:
    """Return the transposed convolution of [batch, in, spatial...] with a weight [in, out / groups, kernel...].

    The padding is cut from the full result; an `output_shape` says where it ends, be it before or after that.
    """
    n = x.ndim - 2
    s, d = steps(strides, n), steps(dilations, n)
    sizes, kernel = list(x.shape[2:]), list(weight.shape[2:])
    full = [(i - 1) * t + (k - 1) * e + 1 for i, t, k, e in zip(sizes, s, kernel, d, strict=True)]
    wanted = None if output_shape is None else ints(output_shape)[2:]
    ends = cuts(pad_type, pad, full, wanted, [i * t for i, t in zip(sizes, s, strict=True)])
    # torch cuts `begin` from both ends and gives back `more` (less than a step) at the end.
    more = [max(begin - end, 0) for begin, end in ends]
    zeros = [-(-max(m - max(t, e) + 1, 0) // t) for m, t, e in zip(more, s, d, strict=True)]
    x = pad_axes(x, [(0, z) for z in zeros])
    more = [max(m - z * t, 0) for m, z, t in zip(more, zeros, s, strict=True)]
    y = CONV_TRANSPOSE[n](x, weight, bias, s, [b for b, _ in ends], more, int(groups), d)
    for axis, (length, (begin, end)) in enumerate(zip(full, ends, strict=True)):
        y = y.narrow(2 + axis, 0, length - begin - end)
    return y


def transposed_cuts(op: Operation) -> list[tuple[int, int]]:
    """Return what a transposed convolution of static shape cuts from both ends of each axis."""
    n = len(op.x.shape) - 2
    strides, dilations, pad = (constant(op.inputs.get(name)) for name in ("strides", "dilations", "pad"))
    strides, dilations = (ints(one) if one is not None else [1] * n for one in (strides, dilations))
    sizes, kernel = op.x.shape[2:], op.weight.shape[2:]
    full = [(i - 1) * s + (k - 1) * d + 1 for i, s, k, d in zip(sizes, strides, kernel, dilations, strict=True)]
    kind = str(constant(op.inputs.get("pad_type")) or "valid")
    same = [i * s for i, s in zip(sizes, strides, strict=True)]
    return cuts(kind, pad, full, [int(d) for d in op.outputs[0].shape[2:]], same)


def cuts(
    pad_type: str, pad: Any, full: list[int], wanted: list[int] | None, same: list[int]
) -> list[tuple[int, int]]:
    """Return what to cut from both ends of the full result on each axis; negative: zeros to add."""
    name = str(pad_type).lower()
    if name in ("custom", "valid"):
        asked = padding(name, pad, full, full, full)
        if wanted is None:
            return asked
        return [(b, f - w - b) for (b, _), f, w in zip(asked, full, wanted, strict=True)]
    ends = []
    for length, size in zip(full, same if wanted is None else wanted, strict=True):
        begin = _halves(max(length - size, 0), name)[0]
        ends.append((begin, length - size - begin))
    return ends


AVERAGE = {1: F.avg_pool1d, 2: F.avg_pool2d, 3: F.avg_pool3d}
MAXIMUM = {1: F.max_pool1d, 2: F.max_pool2d, 3: F.max_pool3d}


@dataclass(frozen=True)
class Windows:
    """The windows of a pooling, and the padding around its input."""

    kernel: list[int]
    strides: list[int]
    asked: list[tuple[int, int]]
    """The padding that the op asks for, on each axis."""
    used: list[tuple[int, int]]
    """The padding with which the windows just fit; negative where the end is not read."""

    @property
    def inside(self) -> list[int] | None:
        """The padding as torch's pooling takes it, equal at both ends and at most half a window; else None."""
        pads = [begin for begin, _ in self.asked]
        fits = all(b == e and 2 * b <= k for (b, e), k in zip(self.asked, self.kernel, strict=True))
        reaches = any(u > a for (_, u), (_, a) in zip(self.used, self.asked, strict=True))
        return pads if fits and not reaches else None


def windows(x: Tensor, kernel: Any, strides: Any, pad_type: str, pad: Any, ceil_mode: bool) -> Windows:
    """Return the windows of a pooling of `x`."""
    k, sizes = ints(kernel), list(x.shape[2:])
    s = ints(strides) if strides is not None else [1] * len(k)
    asked = padding(pad_type, pad, sizes, k, s)
    used = []
    for size, width, step, (begin, end) in zip(sizes, k, s, asked, strict=True):
        count = _count(size, width, step, begin + end, ceil_mode)
        used.append((begin, (count - 1) * step + width - size - begin))
    return Windows(k, s, asked, used)


def counted(w: Windows, sizes: list[int], exclude: bool) -> Tensor:
    """Return how many elements of each window count, [1, 1, spatial...]: all, or those that are no padding."""
    ones = torch.ones((1, 1, *sizes), dtype=torch.float64)
    inside = AVERAGE[len(w.kernel)](pad_axes(ones, w.used, 0.0 if exclude else 1.0), w.kernel, w.strides)
    return torch.round(inside * math.prod(w.kernel))


def _count(size: int, width: int, step: int, padded: int, ceil_mode: bool) -> int:
    """Return the number of windows; one that would begin after the data and its padding does not count."""
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
    """Return the maximum of each window of [batch, channels, spatial...]; padding never wins."""
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
    """Return the mean of each window of [batch, channels, spatial...]; the padding counts or not."""
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
    """Return the root of the sum of squares in each window of [batch, channels, spatial...]."""
    w = windows(x, kernel_sizes, strides, pad_type, pad, bool(ceil_mode))
    squares = AVERAGE[len(w.kernel)](pad_axes(x * x, w.used), w.kernel, w.strides)
    return torch.sqrt(squares * math.prod(w.kernel))
