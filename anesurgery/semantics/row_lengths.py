"""How long rows are: of stored weights, and of values that are normalised, by an op or written out."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from anesurgery.mil import Operation, Var, constant, producer, static_shape
from anesurgery.semantics.constant_ends import MOST, gain, of_constant
from anesurgery.semantics.reading import channels, flag, ints, number, weight


@dataclass(frozen=True)
class Norms:
    """Of the weights of one output, the largest over all outputs."""

    sum: float
    """Of magnitudes."""
    length: float
    """Euclidean."""


_NORMS: WeakKeyDictionary[Operation, Norms] = WeakKeyDictionary()


def norms(op: Operation) -> Norms | None:
    """The norms of a product's weight; None where it is compressed, too large or computed."""
    var, size = weight(op), channels(op)
    maker = producer(var, "const")
    if var is None or maker is None or size is None or math.prod(size) > MOST:
        return None
    if maker not in _NORMS:
        value = np.asarray(constant(var), np.float32)
        if op.op_type == "matmul" and not flag(op, "transpose_y"):
            value = value.reshape(-1, value.shape[-1]).T
        rows = value.reshape(size[0], -1)
        length = math.sqrt(float(np.einsum("ij,ij->i", rows, rows).max()))
        _NORMS[maker] = Norms(float(np.abs(rows).sum(1).max()), length)
    return _NORMS[maker]


def row_length(var: Any) -> float:
    """The largest Euclidean length of a row (last axis) of a normalised value; infinite for others."""
    op = producer(var) if isinstance(var, Var) else None
    shape = static_shape(var) if isinstance(var, Var) else None
    if op is None or not shape:
        return math.inf
    root = math.sqrt(shape[-1])
    if op.op_type == "layer_norm" and _last_only(ints(op, "axes"), len(shape)):
        return root * sum(gain(op))
    if op.op_type == "mul":
        for one, other in ((op.x, op.y), (op.y, op.x)):
            if mean_square(other) is one:
                return root
            if producer(other, "const") is not None and math.isfinite(inner := row_length(one)):
                return inner * max(map(abs, of_constant(other)))
    return math.inf


def _last_only(axes: list[int], rank: int) -> bool:
    return axes in ([-1], [rank - 1])


def mean_square(var: Any) -> Var | None:
    """The x of `rsqrt(mean(x * x) + epsilon)` over the last axis, the factor of a root mean square norm."""
    op = producer(var, "rsqrt") if isinstance(var, Var) else None
    inner = producer(op.x) if op is not None else None
    if inner is not None and inner.op_type == "add":
        mean, added = (inner.x, inner.y) if producer(inner.x, "reduce_mean") else (inner.y, inner.x)
        inner = producer(mean) if of_constant(added)[0] >= 0 else None
    if inner is None or inner.op_type != "reduce_mean" or not spans_rows(inner):
        return None
    axes = ints(inner, "axes")
    return squared(producer(inner.x)) if _last_only(axes, inner.x.rank) else None


def spans_rows(op: Operation) -> bool:
    """Does what a reduction makes broadcast back to the very rows that it was made of?"""
    return flag(op, "keep_dims") or op.outputs[0].rank == 0


def squared(op: Operation | None) -> Var | None:
    """The x of an op that computes x * x."""
    if op is None:
        return None
    if op.op_type == "square" or (op.op_type == "mul" and op.x is op.y):
        return op.x
    return op.x if op.op_type == "pow" and number(op.y) == 2 else None
