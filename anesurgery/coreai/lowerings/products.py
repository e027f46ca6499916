"""Lower matrix products, attention, softmax and einsum."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch.nn import functional

from anesurgery.coreai.table import lowers
from anesurgery.coreai.toolkit import ops
from anesurgery.coreai.values import TORCH, Value, call, where


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


@lowers("scaled_dot_product_attention")
def attention(query: Value, key: Value, value: Value, attn_mask: Value | None = None) -> Value:
    """Write softmax(query keyᵀ / sqrt(width) + mask) value; a boolean mask keeps where it is true."""
    scores = (query * (1 / math.sqrt(query.length(-1)))) @ key.mT
    if attn_mask is not None:
        boolean = attn_mask.dtype == "bool"
        scores = where(attn_mask, scores, -math.inf) if boolean else scores + attn_mask
    return softmax(scores) @ value


@lowers("softmax")
def softmax(x: Value, axis: int = -1) -> Value:
    """Write Core AI's softmax."""
    return Value(ops.softmax(x.node, axis % x.ndim))


def _grouped_axes(x: Value, order: str, groups: Sequence[str]) -> Value:
    """Bring the named axes of x into groups, and merge each group into one axis."""
    x = x.permute([order.index(name) for name in "".join(groups)])
    if all(len(group) == 1 for group in groups):
        return x
    lengths = dict(zip("".join(groups), x.shape, strict=True))
    return x.reshape([math.prod(lengths[name] for name in group) for group in groups])


@lowers("einsum")
def einsum(values: Sequence[Value], equation: str) -> Value:
    """Write one matrix product; axes are in four groups: batch, rows, columns and summed."""
    inputs, out = equation.replace(" ", "").split("->")
    left, right = inputs.split(",")
    both = [name for name in left if name in right]
    batch, summed = ("".join(n for n in both if (n in out) is kept) for kept in (True, False))
    rows, columns = ("".join(n for n in one if n not in both) for one in (left, right))
    x, y = values
    given = [dict(zip(names, v.fixed_lengths(), strict=True)) for names, v in ((left, x), (right, y))]
    lengths = {n: max(one.get(n, 1) for one in given) for one in given for n in one}
    x, y = (v.broadcast([lengths[n] for n in names]) for names, v in ((left, x), (right, y)))
    z = _grouped_axes(x, left, (batch, rows, summed)) @ _grouped_axes(y, right, (batch, summed, columns))
    order = batch + rows + columns
    return z.reshape([lengths[name] for name in order]).permute([order.index(name) for name in out])
