"""Lower matrix products, einsum and attention, and convolutions and pooling.

Core AI's convolutions and pools have two or three spatial axes; one axis is written as two.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from torch.nn import functional

from anesurgery.coreai.lowerings import lowers
from anesurgery.coreai.toolkit import ops, tensor
from anesurgery.coreai.values import TORCH, Value, array, call, per_channel, unsigned, where
from anesurgery.errors import NotExpressible
from anesurgery.interpret.ops.windows import Windows, counted, cuts, padding, steps, windows
from anesurgery.mil import Operation


@lowers("matmul")
def matmul(x: Value, y: Value, transpose_x: bool = False, transpose_y: bool = False) -> Value:
    """Write a product; a vector is a row on the left and a column on the right, and loses its axis again."""
    row, column = x.ndim == 1, y.ndim == 1
    x = x.expand([0]) if row else x.mT if transpose_x else x
    y = y.expand([1]) if column else y.mT if transpose_y else y
    z = x @ y
    return z.squeeze([axis for axis, gone in ((z.ndim - 2, row), (z.ndim - 1, column)) if gone])


@lowers("linear")
def linear(x: Value, weight: Value, bias: Value | None = None) -> Value:
    """Write x times the transposed weight [out, in], plus the bias."""
    z = matmul(x, weight.mT)
    return z if bias is None else call("broadcasting_add", z, bias)


TORCH[functional.linear] = linear


@lowers("softmax")
def _softmax(x: Value, axis: int = -1) -> Value:
    return Value(ops.softmax(x.node, axis % x.ndim))


@lowers("scaled_dot_product_attention")
def attention(query: Value, key: Value, value: Value, attn_mask: Value | None = None) -> Value:
    """Write softmax(query keyᵀ / sqrt(width) + mask) value; a boolean mask keeps where it is true."""
    scores = (query * (1 / math.sqrt(query.length(-1)))) @ key.mT
    if attn_mask is not None:
        boolean = attn_mask.dtype == "bool"
        scores = where(attn_mask, scores, -math.inf) if boolean else scores + attn_mask
    return _softmax(scores) @ value


def _grouped_axes(x: Value, order: str, groups: Sequence[str]) -> Value:
    """Bring the named axes of x into groups, and merge each group into one axis."""
    x = x.permute([order.index(name) for name in "".join(groups)])
    if all(len(group) == 1 for group in groups):
        return x
    lengths = dict(zip("".join(groups), x.shape, strict=True))
    return x.reshape([math.prod(lengths[name] for name in group) for group in groups])


@lowers("einsum")
def einsum(values: Sequence[Value], equation: str) -> Value:
    """Write one matrix product; axes are in four groups: batch, rows, columns and summed.

    In "bhqd,bhkd->bhqk" these are "bh", "q", "k" and "d".
    """
    inputs, out = equation.replace(" ", "").split("->")
    left, right = inputs.split(",")
    batch = "".join(name for name in left if name in right and name in out)
    summed = "".join(name for name in left if name in right and name not in out)
    rows = "".join(name for name in left if name not in right)
    columns = "".join(name for name in right if name not in left)
    x, y = values
    given = [dict(zip(names, v.fixed_lengths(), strict=True)) for names, v in ((left, x), (right, y))]
    lengths = {n: max(one.get(n, 1) for one in given) for one in given for n in one}
    x, y = (v.broadcast([lengths[n] for n in names]) for names, v in ((left, x), (right, y)))
    z = _grouped_axes(x, left, (batch, rows, summed)) @ _grouped_axes(y, right, (batch, summed, columns))
    order = batch + rows + columns
    return z.reshape([lengths[name] for name in order]).permute([order.index(name) for name in out])


def _widened(x: Value) -> Value:
    """Return a tensor with a second spatial axis, of length 1, if it has only one."""
    return x.expand([3]) if x.ndim == 3 else x


def _spatial(numbers: Sequence[int], rest: int = 1) -> Value:
    """Return a number for each spatial axis; `rest` is that of an axis that `_widened` adds."""
    return unsigned([*numbers, rest] if len(numbers) == 1 else numbers)


def _narrowed(y: Value, x: Value) -> Value:
    """Return a result for `_widened(x)` without the added axis."""
    return y.squeeze([3]) if x.ndim == 3 else y


def _spatial_call(name: str, x: Value, *more: Value) -> Value:
    """Write an op of two or three spatial axes, whose name ends with their number."""
    return _narrowed(call(f"{name}{max(x.ndim - 2, 2)}d", _widened(x), *more), x)


def _sizes(x: Value, pad_type: str) -> list[int]:
    """Return the spatial lengths; they may be dynamic where the padding does not depend on them."""
    sizes = x.shape[2:]
    if -1 in sizes and pad_type.lower() not in ("valid", "custom"):
        raise NotExpressible(f"pad_type {pad_type!r} needs the lengths, and the shape {x.shape} is dynamic")
    return sizes


def _biased(y: Value, bias: Value | None) -> Value:
    return y if bias is None else call("broadcasting_add", y, per_channel(y, bias))


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
    s, d = (steps(given, x.ndim - 2) for given in (strides, dilations))
    x = x.pad(padding(pad_type, pad, _sizes(x, pad_type), weight.fixed_lengths(2), s, d))
    y = _spatial_call("conv", x, _widened(weight), _spatial(s), _spatial(d), unsigned(groups))
    return _biased(y, bias)


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
    s, d = (steps(given, x.ndim - 2) for given in (strides, dilations))
    sizes, kernel = x.fixed_lengths()[2:], weight.fixed_lengths(2)
    full, ends = cuts(pad_type, pad, zip(sizes, kernel, s, d, strict=True), output_shape and output_shape[2:])
    none = _spatial([0] * len(s), 0)
    form = (_spatial(s), none, _spatial(d), none, unsigned(groups))
    y = _spatial_call("conv_transpose", x, _widened(weight), *form)
    y = y.pad([(0, max(-end, 0)) for _, end in ends])
    if any(begin or end > 0 for begin, end in ends):
        stop = [length - end for length, (_, end) in zip(full, ends, strict=True)]
        y = y.slice([0, 0, *(begin for begin, _ in ends)], [*y.shape[:2], *stop])
    return _biased(y, bias)


def _pooled(x: Value, w: Windows, name: str) -> Value:
    """Write the maximum or sum of each window of a padded tensor."""
    form = (_spatial(w.kernel), _spatial(w.strides), _spatial([1] * len(w.kernel)))
    if name == "sumpool":
        return _spatial_call(name, x, *form)
    wide = _widened(x)
    sizes = zip(wide.shape[2:], [*w.kernel, 1], [*w.strides, 1], strict=False)
    kind = tensor([*wide.shape[:2], *(-1 if n < 0 else (n - k) // s + 1 for n, k, s in sizes)], wide.dtype)
    nodes = (v.node for v in (wide, *form, array(False, "bool")))
    return _narrowed(Value(getattr(ops, f"{name}{wide.ndim - 2}d")(kind, *nodes)), x)


def _windows(x: Value, kernel: Any, strides: Any, pad_type: str, pad: Any, ceil_mode: bool) -> Windows:
    """Return where the windows lie; for dynamic lengths all padding counts as used."""
    if -1 not in x.shape[2:]:
        return windows(x.shape[2:], kernel, strides, pad_type, pad, ceil_mode)
    if ceil_mode:
        raise NotExpressible(f"ceil_mode needs the lengths, and the shape {x.shape} is dynamic")
    s = steps(strides, x.ndim - 2)
    asked = padding(pad_type, pad, _sizes(x, pad_type), kernel, s)
    return Windows(list(kernel), s, asked, asked)


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
