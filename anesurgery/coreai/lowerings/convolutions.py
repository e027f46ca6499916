"""Lower convolutions and pooling over one, two or three spatial axes; one axis is written as two."""

from __future__ import annotations

import math
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from anesurgery.coreai.table import lowers
from anesurgery.coreai.toolkit import ops, tensor
from anesurgery.coreai.values import Value, array, call, scalar, unsigned
from anesurgery.errors import NotExpressible
from anesurgery.interpret.ops.windows import Windows, counted, cuts, padding, steps, windows
from anesurgery.mil import Operation

LEAST_AXES = 2
"""The least number of spatial axes of Core AI's convolutions and pools."""


class _ExtraAxis:
    """Adds a spatial axis of length 1 where there is only one, and removes it again."""

    def __init__(self, axes: int) -> None:
        self.more = max(LEAST_AXES - axes, 0)
        self.axes = axes + self.more

    def widen(self, x: Value) -> Value:
        return x.expand([x.ndim] * bool(self.more))

    def narrow(self, x: Value) -> Value:
        return x.squeeze([x.ndim - 1] * bool(self.more))

    def numbers(self, numbers: Sequence[int], rest: int = 1) -> Value:
        return unsigned([*numbers, *[rest] * self.more])

    def build(self, name: str) -> Any:
        return getattr(ops, f"{name}{self.axes}d")


def _sizes(x: Value, pad_type: str) -> list[int]:
    """Return the spatial lengths; they may be dynamic where the padding does not depend on them."""
    sizes = x.shape[2:]
    if -1 in sizes and pad_type.lower() not in ("valid", "custom"):
        raise NotExpressible(f"pad_type {pad_type!r} needs the lengths, and the shape {x.shape} is dynamic")
    return sizes


def _biased(y: Value, bias: Value | None) -> Value:
    return y if bias is None else call("broadcasting_add", y, bias.reshape([1, -1, *[1] * (y.ndim - 2)]))


@lowers("conv")
def conv(
    x: Value,
    weight: Value,
    bias: Value | None = None,
    strides: Any = None,
    pad_type: str = "valid",
    pad: Any = None,
    dilations: Any = None,
    groups: int = 1,
) -> Value:
    """Write the padding, then the convolution, since Core AI's pads nothing."""
    n = x.ndim - 2
    s, d, flat = steps(strides, n), steps(dilations, n), _ExtraAxis(n)
    x = x.pad(padding(pad_type, pad, _sizes(x, pad_type), weight.fixed_lengths(2), s, d))
    operands = (flat.widen(x), flat.widen(weight), flat.numbers(s), flat.numbers(d), unsigned(groups))
    return _biased(flat.narrow(Value(flat.build("conv")(*(v.node for v in operands)))), bias)


@lowers("conv_transpose")
def conv_transpose(
    x: Value,
    weight: Value,
    bias: Value | None = None,
    pad: Any = None,
    output_shape: Any = None,
    pad_type: str = "valid",
    strides: Any = None,
    dilations: Any = None,
    groups: int = 1,
) -> Value:
    """Write the full result and cut the padding off, which may differ at both ends.

    With a dynamic batch Apple's runtime dies.
    """
    n = x.ndim - 2
    s, d, flat, sizes = steps(strides, n), steps(dilations, n), _ExtraAxis(n), x.fixed_lengths()[2:]
    kernel = weight.fixed_lengths(2)
    full = [(i - 1) * t + (k - 1) * e + 1 for i, t, k, e in zip(sizes, s, kernel, d, strict=True)]
    wanted = None if output_shape is None else [int(v) for v in output_shape][2:]
    ends = cuts(pad_type, pad, full, wanted, [i * t for i, t in zip(sizes, s, strict=True)])
    none = flat.numbers([0] * n, 0)
    form = (flat.numbers(s), none, flat.numbers(d), none, unsigned(int(groups)))
    y = Value(flat.build("conv_transpose")(*(v.node for v in (flat.widen(x), flat.widen(weight), *form))))
    y = flat.narrow(y).pad([(0, max(-end, 0)) for _, end in ends])
    begins = [0, 0, *(begin for begin, _ in ends)]
    lengths = [f - max(e, 0) if e > 0 else f - e for f, (_, e) in zip(full, ends, strict=True)]
    if any(begin or end > 0 for begin, end in ends):
        y = y.slice(begins, [*y.shape[:2], *lengths])
    return _biased(y, bias)


def _pooled(x: Value, w: Windows, name: str) -> Value:
    """Write the maximum or sum of each window of a padded tensor."""
    flat, n = _ExtraAxis(len(w.kernel)), len(w.kernel)
    kernel, strides, spread = flat.numbers(w.kernel), flat.numbers(w.strides), flat.numbers([1] * n)
    x = flat.widen(x)
    if name == "sumpool":
        return flat.narrow(call(f"sumpool{flat.axes}d", x, kernel, strides, spread))
    sizes = zip(x.shape[2:], [*w.kernel, 1], [*w.strides, 1], strict=False)
    shape = [*x.shape[:2], *(-1 if size < 0 else (size - k) // s + 1 for size, k, s in sizes)]
    floor = scalar(False, "bool")
    form = (x, kernel, strides, spread, floor)
    return flat.narrow(Value(flat.build("maxpool")(tensor(shape, x.dtype), *(v.node for v in form))))


def _windows(x: Value, kernel: Any, strides: Any, pad_type: str, pad: Any, ceil_mode: bool) -> Windows:
    """Return where the windows lie; for dynamic lengths all padding counts as used."""
    if -1 not in x.shape[2:]:
        return windows(SimpleNamespace(shape=x.shape), kernel, strides, pad_type, pad, bool(ceil_mode))  # type: ignore[arg-type]
    if ceil_mode:
        raise NotExpressible(f"ceil_mode needs the lengths, and the shape {x.shape} is dynamic")
    asked = padding(pad_type, pad, _sizes(x, pad_type), kernel, steps(strides, x.ndim - 2))
    return Windows(list(kernel), steps(strides, x.ndim - 2), asked, asked)


@lowers("max_pool", "avg_pool", "l2_pool")
def pool(
    x: Value,
    op: Operation,
    kernel_sizes: Any,
    strides: Any = None,
    pad_type: str = "valid",
    pad: Any = None,
    exclude_padding_from_average: bool = False,
    ceil_mode: bool = False,
) -> Value:
    """Pad as the windows need it, and pool: with the maximum, in which padding never wins, or a sum.

    A mean divides by how many elements count; what no window reads at the end stays.
    """
    w = _windows(x, kernel_sizes, strides, pad_type, pad, ceil_mode)
    pairs = [(begin, max(end, 0)) for begin, end in w.used]
    if op.op_type == "max_pool":
        return _pooled(x.pad(pairs, -math.inf), w, "maxpool")
    if op.op_type == "l2_pool":
        return call("sqrt", _pooled((x * x).pad(pairs), w, "sumpool"))
    total = _pooled(x.pad(pairs), w, "sumpool")
    if not (exclude_padding_from_average and any(map(any, w.used))):
        return total * (1 / math.prod(w.kernel))
    return total * array(1 / counted(w, x.fixed_lengths(2), exclude=True).numpy(), x.dtype)
