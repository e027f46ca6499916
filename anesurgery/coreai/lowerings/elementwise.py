"""Lower ops on each element by itself, reductions, running sums and sorts; and normalizations.

Normalizations compute in fp32 inside.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from anesurgery.coreai.lowerings import TABLE, Mode, as_interpreted, lowers
from anesurgery.coreai.names import BINARY, GELU, REDUCTIONS, UNARY, numpy_of
from anesurgery.coreai.toolkit import ops
from anesurgery.coreai.values import (
    Value,
    array,
    binary_op,
    call,
    known_ints,
    per_channel,
    unary_op,
    unsigned,
    where,
)
from anesurgery.mil import Operation
from anesurgery.ops import names

TABLE |= {name: unary_op(name) for name in (*UNARY, "relu")}
TABLE |= {name: binary_op(op) for name, op in BINARY.items()}
as_interpreted(*names("identity clip threshold linear_activation scaled_tanh sigmoid_hard"))


def sign(x: Value) -> Value:
    """Return -1, 0 or 1; NaN stays NaN."""
    steps = (x > 0).cast(x.dtype) - (x < 0).cast(x.dtype)
    return where(x.equal(x), steps, x) if x.is_float else steps


def softplus(x: Value) -> Value:
    """Return log(1 + exp x), without the overflow of exp in fp16 from 11.09 on (coreai-torch issue 105)."""
    return call("relu", x) + call("log", call("exp", -x.abs()) + 1)


def _truncated(x: Value) -> Value:
    """Round toward zero."""
    return where(x < 0, -(-x).floor(), x.floor())


def _in_floats(function: Callable[..., Value]) -> Callable[..., Value]:
    """Return a function that computes integers in fp32 and truncates the result."""
    return lambda x, *more: (
        function(x, *more) if x.is_float else _truncated(function(x.float(), *more)).cast(x.dtype)
    )


def _leaky(x: Value, alpha: float | Value = 0.01) -> Value:
    return where(x < 0, x * alpha, x)


def _plus_epsilon(x: Value, epsilon: float) -> Value:
    """Add epsilon, unless it is 0 in the dtype of x: 1e-45 is 0 in fp16."""
    return x + epsilon if numpy_of(x.dtype).type(epsilon) else x


TABLE |= {
    "sub": lambda x, y: x - y,
    "less": lambda x, y: x < y,
    "less_equal": lambda x, y: x <= y,
    "greater_equal": lambda x, y: x >= y,
    "mod": lambda x, y: x.fmod(y),
    "logical_not": lambda x: ~x,
    "floor": lambda x: x.floor(),
    "ceil": lambda x: -(-x).floor(),
    "sign": sign,
    "square": lambda x: x * x,
    "exp2": _in_floats(lambda x: x.like(2.0).binary("pow", x)),
    "inverse": lambda x, epsilon=1e-4: 1.0 / _plus_epsilon(x, epsilon),
    "log": lambda x, epsilon=1e-45: call("log", _plus_epsilon(x, epsilon)),
    "rsqrt": lambda x, epsilon=1e-12: call("rsqrt", _plus_epsilon(x, epsilon)),
    "select": lambda cond, a, b: where(cond.cast("bool"), a, b),
    "relu6": lambda x: call("relu", x).minimum(6.0),
    "softplus": softplus,
    "softplus_parametric": lambda x, alpha, beta: per_channel(x, alpha) * softplus(x * per_channel(x, beta)),
    "gelu": lambda x, mode="EXACT": Value(ops.gelu(x.node, approximate=GELU[mode])),
    "softsign": lambda x: x / (x.abs() + 1.0),
    "elu": lambda x, alpha=1.0: where(x < 0, (call("exp", x) - 1.0) * alpha, x),
    "leaky_relu": _leaky,
    "clamped_relu": lambda x, alpha, beta: _leaky(x, alpha).minimum(beta),
    "prelu": lambda x, alpha: _leaky(x, per_channel(x, alpha)),
    "thresholded_relu": lambda x, alpha=1.0: where(x < alpha, 0.0, x),
}


@lowers("cast")
def cast(x: Value, dtype: str, mode: Mode) -> Value:
    """Write a cast; floats are truncated first: Apple's builder removes a cast to integers and back."""
    if x.is_float and "int" in dtype:
        x = _truncated(x)
    return x.binary("not_equal", 0) if dtype == "bool" else x.cast(mode.dtype(dtype))


def _mean(x: Value, axes: Sequence[int]) -> Value:
    """Return the mean; that of integers is truncated toward zero, as Core AI divides them."""
    if x.is_float:
        return x.reduce("mean", axes)
    return x.reduce("sum", axes) / math.prod(x.length(axis) for axis in axes)


def _log_sum_exp(x: Value, axes: Sequence[int]) -> Value:
    """Return log sum exp, shifted by the largest element if that is finite (as `softplus`)."""
    top = x.reduce("max", axes)
    top = where(top.abs() < np.inf, top, 0.0)
    return call("log", call("exp", x - top).reduce("sum", axes)) + top


def _root_of_squares(x: Value, axes: Sequence[int]) -> Value:
    y = x.float()
    return call("sqrt", (y * y).reduce("sum", axes)).cast(x.dtype)


REDUCED: dict[str, Callable[..., Value]] = {
    **{name: lambda x, axes, kind=kind: x.reduce(kind, axes) for name, kind in REDUCTIONS.items()},
    "reduce_mean": _mean,
    "reduce_l1_norm": lambda x, axes: x.abs().reduce("sum", axes),
    "reduce_l2_norm": _in_floats(_root_of_squares),
    "reduce_sum_square": lambda x, axes: (x * x).reduce("sum", axes),
    "reduce_log_sum": _in_floats(lambda x, axes: call("log", x.reduce("sum", axes))),
    "reduce_log_sum_exp": _in_floats(_log_sum_exp),
}
"""Op type -> function of (x, axes), which stay with length 1."""


def _axes(x: Value, axes: Any) -> list[int]:
    return sorted(axis % x.ndim for axis in (range(x.ndim) if axes is None else axes))


def _reduction(function: Callable[..., Value]) -> Callable[..., Value]:
    def reduce(x: Value, axes: Any = None, keep_dims: bool = False) -> Value:
        if not x.ndim:
            return function(x.expand([0]), [0]).squeeze([0])
        over = _axes(x, axes)
        reduced = function(x, over)
        return reduced if keep_dims else reduced.squeeze(over)

    return reduce


TABLE |= {op_type: _reduction(function) for op_type, function in REDUCED.items()}
TABLE["classify"] = lambda probabilities, classes: (None, probabilities)  # a program holds no label


@lowers("reduce_argmax", "reduce_argmin")
def position(
    x: Value, op: Operation, mode: Mode, axis: int = -1, keep_dims: bool = False, output_dtype: str = ""
) -> Value:
    """Write the position of the first largest element; for the smallest, of the negated numbers.

    Integers are negated as -1 - x, which stays in range.
    """
    if op.op_type == "reduce_argmin":
        x = -x if x.is_float else -1 - x
    if x.is_float and mode.has("take argmax in fp32"):
        x = x.float()
    place = Value(ops.argmax(x.node, axis % x.ndim))
    return place if keep_dims else place.squeeze([axis % x.ndim])


@lowers("cumsum")
def cumsum(x: Value, axis: int = 0, exclusive: bool = False, reverse: bool = False) -> Value:
    """Write a running sum; an exclusive one is moved by one position."""
    along = axis % x.ndim
    total = Value(ops.scan(x.node, unsigned(along).node, array(bool(reverse), "bool").node, "sum"))
    if not exclusive:
        return total
    pairs = [(0, 0)] * x.ndim
    pairs[along] = (0, 1) if reverse else (1, 0)
    moved, length = total.pad(pairs, 0), total.length(along)
    return moved.along(along, int(reverse), length + int(reverse))


@lowers("argsort")
def _argsort(x: Value, axis: int = -1, ascending: bool = False) -> Value:
    return Value(ops.argsort(x.node, axis % x.ndim, not ascending, True))  # the last flag: equal ones in order


@lowers("topk")
def _topk(x: Value, k: Any = 1, axis: int = -1, ascending: bool = False, return_indices: bool = True) -> Any:
    along, (count,) = axis % x.ndim, known_ints(k, "k")
    count = x.shape[along] if count < 0 else count
    values = Value(ops.sort(x.node, along, not ascending, True)).along(along, 0, count)
    return (values, _argsort(x, along, ascending).along(along, 0, count)) if return_indices else values


@lowers("layer_norm", "instance_norm", "batch_norm")
def normalized(
    x: Value,
    op: Operation,
    axes: Any = None,
    mean: Value | None = None,
    variance: Value | None = None,
    gamma: Value | None = None,
    beta: Value | None = None,
    epsilon: float = 1e-5,
) -> Value:
    """Write zero mean and unit variance: over axes, over the pixels of a channel, or with stored statistics."""
    y = x.float()
    if op.op_type == "layer_norm":
        over = _axes(x, axes)
        shape = [length if axis in over else 1 for axis, length in enumerate(x.shape)]
    else:
        over, shape = list(range(2, x.ndim)), [1, -1, *[1] * (x.ndim - 2)]
    parts = (p if p is None else p.reshape(shape).cast(y.dtype) for p in (mean, variance, gamma, beta))
    mean, variance, gamma, beta = parts
    centered = y - (y.reduce("mean", over) if mean is None else mean)
    var = (centered * centered).reduce("mean", over) if variance is None else variance
    y = centered * call("rsqrt", var + epsilon)
    y = y if gamma is None else y * gamma
    return (y if beta is None else y + beta).cast(x.dtype)


@lowers("l2_norm")
def _l2_norm(x: Value, epsilon: float = 1e-6) -> Value:
    y = x.float()
    squares = (y * y).reduce("sum", list(range(max(x.ndim - 3, 0), x.ndim)))
    return (y / call("sqrt", squares + epsilon)).cast(x.dtype)


@lowers("local_response_norm")
def local_response_norm(x: Value, size: int, alpha: float = 1e-4, beta: float = 0.75, k: float = 1.0) -> Value:
    """Write the sum of squares of `size` neighbours on axis -3 as a sum of slices."""
    y, axis, size = x.float(), x.ndim - 3, int(size)
    padded = (y * y).pad([(size // 2, size - 1 - size // 2), (0, 0), (0, 0)])
    channels = x.length(axis)
    total = padded.along(axis, 0, channels)
    for i in range(1, size):
        total = total + padded.along(axis, i, i + channels)
    return (y / (total * (alpha / size) + k).binary("pow", beta)).cast(x.dtype)
