"""Convolutions and pooling over one, two or three spatial axes.

With `ceil_mode` the last window of a pool may reach beyond the padding: what lies there counts as padding does
(see the table in docs/interpreter.md).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
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
    sizes: Sequence[int],
    kernel: Sequence[int],
    strides: Sequence[int],
    dilations: Sequence[int] | None = None,
) -> list[tuple[int, int]]:
    """Return the padding (begin, end) of each spatial axis for any `pad_type`."""
    if (stated := _stated_padding(pad_type, pad, len(sizes))) is not None:
        return stated
    axes = zip(sizes, kernel, strides, steps(dilations, len(sizes)), strict=True)
    totals = [max((math.ceil(n / s) - 1) * s + (k - 1) * d + 1 - n, 0) for n, k, s, d in axes]
    return [_halves(total, pad_type) for total in totals]


def _stated_padding(pad_type: str, pad: Any, axes: int) -> list[tuple[int, int]] | None:
    """Return the padding of each axis by "valid" or "custom"; None for "same" and "same_lower"."""
    name = str(pad_type).lower()
    amounts = ints(pad) if name == "custom" and pad is not None else [0] * (2 * axes)
    return list(zip(amounts[::2], amounts[1::2], strict=True)) if name in ("custom", "valid") else None


def _halves(total: int, pad_type: str) -> tuple[int, int]:
    """Divide a padding among both ends; an odd one is larger at the end, with "same_lower" at the begin."""
    name, small, large = str(pad_type).lower(), total // 2, total - total // 2
    if name not in ("same", "same_lower"):
        raise Unsupported(f"pad_type {name!r} is not known")
    return (small, large) if name == "same" else (large, small)


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
    pads = padding(pad_type, pad, x.shape[2:], weight.shape[2:], s, d)
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
    wanted = None if output_shape is None else ints(output_shape)[2:]
    full, ends = cuts(pad_type, pad, zip(x.shape[2:], weight.shape[2:], s, d, strict=True), wanted)
    # torch cuts `begin` from both ends and gives back some at the end, which must be less than a step or a
    # dilation: zeros behind x, each good for a step, give the rest
    too_much = [max(begin - end, 0) for begin, end in ends]
    zeros = [math.ceil(max(m - max(t, e) + 1, 0) / t) for m, t, e in zip(too_much, s, d, strict=True)]
    x = pad_axes(x, [(0, z) for z in zeros])
    given_back = [max(m - z * t, 0) for m, z, t in zip(too_much, zeros, s, strict=True)]
    y = CONV_TRANSPOSE[n](x, weight, bias, s, [b for b, _ in ends], given_back, int(groups), d)
    for axis, (length, (begin, end)) in enumerate(zip(full, ends, strict=True)):
        y = y.narrow(2 + axis, 0, length - begin - end)
    return y


def transposed_cuts(op: Operation) -> list[tuple[int, int]]:
    """Return what a transposed convolution of static shape cuts from both ends of each axis."""
    form = {name: constant(op.inputs.get(name)) for name in ("strides", "dilations", "pad", "pad_type")}
    s, d = (steps(form[name], len(op.x.shape) - 2) for name in ("strides", "dilations"))
    axes = zip(op.x.shape[2:], op.weight.shape[2:], s, d, strict=True)
    return cuts(form["pad_type"] or "valid", form["pad"], axes, op.outputs[0].shape[2:])[1]


def cuts(
    pad_type: str, pad: Any, axes: Iterable[tuple[int, int, int, int]], wanted: Sequence[int] | None
) -> tuple[list[int], list[tuple[int, int]]]:
    """Return the full lengths of a transposed convolution, and what to cut from both ends.

    A negative number of places is added instead. `axes` are (size, kernel, stride, dilation) of each, `wanted`
    the lengths that an `output_shape` asks for: the begin is then as stated, and the end follows.
    """
    axes = list(axes)
    full = [(n - 1) * s + (k - 1) * d + 1 for n, k, s, d in axes]
    if (stated := _stated_padding(pad_type, pad, len(full))) is None:
        surplus = [f - w for f, w in zip(full, wanted or [n * s for n, _, s, _ in axes], strict=True)]
        begins = [_halves(max(n, 0), pad_type)[0] for n in surplus]
        return full, [(b, n - b) for b, n in zip(begins, surplus, strict=True)]
    if wanted is None:
        return full, stated
    return full, [(b, f - w - b) for (b, _), f, w in zip(stated, full, wanted, strict=True)]


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
    def torch_padding(self) -> list[int] | None:
        """The padding as torch's pooling takes it, equal at both ends and at most half a window; else None."""
        pads = [begin for begin, _ in self.asked]
        fits = all(b == e and 2 * b <= k for (b, e), k in zip(self.asked, self.kernel, strict=True))
        reaches_past_the_end = any(u > a for (_, u), (_, a) in zip(self.used, self.asked, strict=True))
        return pads if fits and not reaches_past_the_end else None


def windows(
    sizes: Sequence[int], kernel: Any, strides: Any, pad_type: str, pad: Any, ceil_mode: bool
) -> Windows:
    """Return the windows of a pooling over spatial axes of some sizes."""
    k, s = ints(kernel), steps(strides, len(sizes))
    asked = padding(pad_type, pad, sizes, k, s)
    used = []
    for size, width, step, (begin, end) in zip(sizes, k, s, asked, strict=True):
        count = _count(size, width, step, begin + end, ceil_mode)
        used.append((begin, (count - 1) * step + width - size - begin))
    return Windows(k, s, asked, used)


def counted(w: Windows, sizes: Sequence[int], exclude: bool) -> Tensor:
    """Return how many elements of each window count, [1, 1, spatial...]: all, or those that are no padding."""
    ones = torch.ones((1, 1, *sizes), dtype=torch.float64)
    inside = AVERAGE[len(w.kernel)](pad_axes(ones, w.used, 0.0 if exclude else 1.0), w.kernel, w.strides)
    return torch.round(inside * math.prod(w.kernel))


def _count(size: int, width: int, step: int, padded: int, ceil_mode: bool) -> int:
    """Return the number of windows; with padding, one that would begin after the data does not count.

    So do coremltools' builder and its tests: without padding such a window counts, and is empty.
    """
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
    w = windows(x.shape[2:], kernel_sizes, strides, pad_type, pad, bool(ceil_mode))
    if (pads := w.torch_padding) is not None:
        return MAXIMUM[len(pads)](x, w.kernel, w.strides, pads)
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
    w = windows(x.shape[2:], kernel_sizes, strides, pad_type, pad, bool(ceil_mode))
    exclude, average = bool(exclude_padding_from_average), AVERAGE[len(w.kernel)]
    if (pads := w.torch_padding) is not None:
        return average(x, w.kernel, w.strides, pads, False, not exclude)
    means = average(pad_axes(x, w.used), w.kernel, w.strides)
    return means * (math.prod(w.kernel) / counted(w, x.shape[2:], exclude)).to(means) if exclude else means


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
    w = windows(x.shape[2:], kernel_sizes, strides, pad_type, pad, bool(ceil_mode))
    squares = AVERAGE[len(w.kernel)](pad_axes(x * x, w.used), w.kernel, w.strides)
    return torch.sqrt(squares * math.prod(w.kernel))
