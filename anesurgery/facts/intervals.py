"""What is known of a value before any input is: an interval from the ops that make it.

The unknown is infinite: `(-inf, inf)` says nothing. Weights are read only where what they multiply is bounded,
and those of more than `MOST` elements never.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from anesurgery.facts.reading import channels, flag, ints, number, weight
from anesurgery.mil import Operation, Var, constant, dtype_name, np_dtype, producer, static_shape
from anesurgery.ops import MOVING, PRODUCTS, names

Interval = tuple[float, float]

ANY: Interval = (-math.inf, math.inf)
LARGEST = 65504.0
"""The largest number of fp16."""
MOST = 1 << 22
"""Weights of more elements are not read."""
GUARD = 1024.0
"""A value that is only known to be within more than this is guarded by a clip, and not described by it."""
STEPS = 48
"""Ops that are looked at for one interval."""

FIXED: dict[str, Interval] = {
    "sigmoid": (0, 1),
    "sigmoid_hard": (0, 1),
    "softmax": (0, 1),
    "tanh": (-1, 1),
    "erf": (-1, 1),
    "sin": (-1, 1),
    "cos": (-1, 1),
    "softsign": (-1, 1),
    "sign": (-1, 1),
    "relu6": (0, 6),
    "l2_norm": (-1, 1),
    "atan": (-1.58, 1.58),
    "one_hot": (0, 1),
}
"""Ops whose results lie in a fixed interval."""

SAME = MOVING | names(
    """
    cast reduce_max reduce_min reduce_mean max_pool upsample_nearest_neighbor resize_nearest_neighbor
    """
)
"""Ops whose results lie in the interval of `x`."""


class _Look:
    """One question: how many ops may still be looked at, and through how many products."""

    def __init__(self, products: int) -> None:
        self.steps, self.products = STEPS, products

    def at(self, var: Any) -> Interval:
        """The interval of a value."""
        if not isinstance(var, Var):
            return ANY
        op = var.op
        if op is None or self.steps <= 0:
            return (0, 1) if _is_bool(var) else ANY
        if op.op_type == "const":
            return of_constant(var)
        self.steps -= 1
        if _is_bool(var):
            return (0, 1)
        if op.op_type in FIXED:
            return FIXED[op.op_type]
        if op.op_type in SAME:
            return self.at(op.inputs.get("x"))
        if op.op_type in PRODUCTS and self.products > 0:
            self.products -= 1
            largest = _product(op, self)
            return (-largest, largest)
        rule = RULES.get(op.op_type)
        return ANY if rule is None else rule(op, self)


def interval(var: Any, products: int = 0) -> Interval:
    """Where a value lies, whatever the inputs are; `ANY` where nothing can be said.

    Args:
        var: the value.
        products: through how many products with stored weights to look.
    """
    return _Look(products).at(var)


def magnitude(var: Any, products: int = 0) -> float:
    """The largest magnitude of a value; infinite where nothing can be said."""
    low, high = interval(var, products)
    return max(abs(low), abs(high))


def product(op: Operation) -> float:
    """What a sum of a conv, linear or matmul with stored weights can reach; infinite where it is unbounded."""
    return _product(op, _Look(0))


def _is_bool(var: Var) -> bool:
    return dtype_name(var) == "bool"


_CONSTANTS: WeakKeyDictionary[Operation, Interval] = WeakKeyDictionary()


def of_constant(var: Var) -> Interval:
    """The least and the largest number of a constant; `ANY` for large ones, and where one is NaN."""
    op = producer(var, "const")
    if op is None:
        return ANY
    if op not in _CONSTANTS:
        _CONSTANTS[op] = _least_and_largest(var)
    return _CONSTANTS[op]


def _least_and_largest(var: Var) -> Interval:
    if math.prod(static_shape(var) or ()) > MOST:
        return ANY
    value = constant(var)
    if value is None or isinstance(value, str) or np.size(value) == 0:
        return ANY
    low, high = float(np.min(value)), float(np.max(value))
    return ANY if math.isnan(low) or math.isnan(high) else (low, high)


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
        value = value.reshape(-1, value.shape[-1]).T if _by_columns(op, size) else value
        rows = value.reshape(size[0], -1)
        length = math.sqrt(float(np.einsum("ij,ij->i", rows, rows).max()))
        _NORMS[maker] = Norms(float(np.abs(rows).sum(1).max()), length)
    return _NORMS[maker]


def _by_columns(op: Operation, size: tuple[int, int, int]) -> bool:
    return op.op_type == "matmul" and not flag(op, "transpose_y")


def _product(op: Operation, look: _Look) -> float:
    """The largest magnitude of a sum: by the length of what is multiplied, or by its largest element."""
    if channels(op) is None or flag(op, "transpose_x"):
        return math.inf
    x = op.inputs.get("x")
    length = row_length(x) if op.op_type != "conv" else math.inf
    low, high = look.at(x) if math.isinf(length) else (0.0, length)
    most = max(abs(low), abs(high))
    known = norms(op) if most <= GUARD else None
    if known is None:
        return math.inf
    bias = op.inputs.get("bias")
    start = 0.0 if bias is None else max(map(abs, of_constant(bias)))
    return most * (known.length if math.isfinite(length) else known.sum) + start


def row_length(var: Any) -> float:
    """The largest Euclidean length of a row (last axis) of a normalised value; infinite for others."""
    op = producer(var) if isinstance(var, Var) else None
    shape = static_shape(var) if isinstance(var, Var) else None
    if op is None or not shape:
        return math.inf
    root = math.sqrt(shape[-1])
    if op.op_type == "layer_norm" and _last_only(ints(op, "axes"), len(shape)):
        gamma, beta = op.inputs.get("gamma"), op.inputs.get("beta")
        scale = 1.0 if gamma is None else max(map(abs, of_constant(gamma)))
        shift = 0.0 if beta is None else max(map(abs, of_constant(beta)))
        return root * (scale + shift)
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
        inner = producer(inner.x, "reduce_mean") or producer(inner.y, "reduce_mean")
    if inner is None or inner.op_type != "reduce_mean":
        return None
    axes = ints(inner, "axes")
    return squared(producer(inner.x)) if _last_only(axes, inner.x.rank) else None


def squared(op: Operation | None) -> Var | None:
    """The x of an op that computes x * x."""
    if op is None:
        return None
    if op.op_type == "square" or (op.op_type == "mul" and op.x is op.y):
        return op.x
    return op.x if op.op_type == "pow" and number(op.y) == 2 else None


def _times(a: float, b: float) -> float:
    return 0.0 if a == 0 or b == 0 else a * b


def _mul(op: Operation, look: _Look) -> Interval:
    if op.x is op.y:
        return _square(op, look)
    if mean_square(op.y) is op.x or mean_square(op.x) is op.y:
        root = math.sqrt((static_shape(op.outputs[0]) or (math.inf,))[-1])
        return (-root, root)
    (a, b), (c, d) = look.at(op.x), look.at(op.y)
    ends = [_times(i, j) for i in (a, b) for j in (c, d)]
    return min(ends), max(ends)


def _square(op: Operation, look: _Look) -> Interval:
    low, high = look.at(op.x)
    return 0.0, max(low * low, high * high)


def _pow(op: Operation, look: _Look) -> Interval:
    return _square(op, look) if squared(op) is not None else ANY


def _sqrt(op: Operation, look: _Look) -> Interval:
    low, high = look.at(op.x)
    return math.sqrt(max(low, 0.0)), math.sqrt(max(high, 0.0))


def _add(op: Operation, look: _Look) -> Interval:
    (a, b), (c, d) = look.at(op.x), look.at(op.y)
    low, high = a + c, b + d
    return ANY if math.isnan(low) or math.isnan(high) else (low, high)


def _sub(op: Operation, look: _Look) -> Interval:
    top = producer(op.y, "reduce_max")
    if top is not None and top.x is op.x:
        return -math.inf, 0.0
    (a, b), (c, d) = look.at(op.x), look.at(op.y)
    low, high = a - d, b - c
    return ANY if math.isnan(low) or math.isnan(high) else (low, high)


def _divide(op: Operation, look: _Look) -> Interval:
    """By a constant, or by the largest magnitude of the same value."""
    top = producer(op.y)
    while top is not None and top.op_type in ("add", "maximum", "clip"):
        top = producer(top.x)
    if top is not None and top.op_type == "reduce_max":
        inner = producer(top.x, "abs")
        if inner is not None and inner.x is op.x:
            return -1.0, 1.0
    by = number(op.y)
    if not by:
        return ANY
    low, high = sorted(v / by for v in look.at(op.x))
    return low, high


def _clip(op: Operation, look: _Look) -> Interval:
    low, high = look.at(op.x)
    alpha, beta = number(op.inputs.get("alpha")), number(op.inputs.get("beta"))
    return max(low, -math.inf if alpha is None else alpha), min(high, math.inf if beta is None else beta)


def _relu(op: Operation, look: _Look) -> Interval:
    low, high = look.at(op.x)
    return max(low, 0.0), max(high, 0.0)


def _abs(op: Operation, look: _Look) -> Interval:
    low, high = look.at(op.x)
    return (0.0 if low <= 0 <= high else min(abs(low), abs(high))), max(abs(low), abs(high))


def _maximum(op: Operation, look: _Look) -> Interval:
    (a, b), (c, d) = look.at(op.x), look.at(op.y)
    return max(a, c), max(b, d)


def _minimum(op: Operation, look: _Look) -> Interval:
    (a, b), (c, d) = look.at(op.x), look.at(op.y)
    return min(a, c), min(b, d)


def _exp(op: Operation, look: _Look) -> Interval:
    low, high = look.at(op.x)
    return math.exp(min(low, 700)), math.exp(high) if high < 700 else math.inf


def _union(vars_: list[Any], look: _Look) -> Interval:
    found = [look.at(v) for v in vars_]
    return min(low for low, _ in found), max(high for _, high in found)


def _layer_norm(op: Operation, look: _Look) -> Interval:
    """A normalised element is at most sqrt(n - 1), for n elements."""
    shape, axes = static_shape(op.x), ints(op, "axes") or [-1]
    if shape is None:
        return ANY
    count = math.prod(shape[a] for a in axes)
    gamma, beta = op.inputs.get("gamma"), op.inputs.get("beta")
    scale = 1.0 if gamma is None else max(map(abs, of_constant(gamma)))
    shift = 0.0 if beta is None else max(map(abs, of_constant(beta)))
    most = math.sqrt(max(count - 1, 1)) * scale + shift
    return -most, most


def _long_sum(op: Operation, look: _Look) -> Interval:
    low, high = look.at(op.x)
    count = summed(op)
    return _times(low, count), _times(high, count)


def summed(op: Operation) -> float:
    """How many elements a reduction takes together; infinite where the shape is symbolic."""
    shape, axes = static_shape(op.x), ints(op, "axes")
    if shape is None:
        return math.inf
    return float(math.prod(shape[a] for a in axes) if axes else math.prod(shape))


RULES: dict[str, Callable[[Operation, _Look], Interval]] = {
    "add": _add,
    "sub": _sub,
    "mul": _mul,
    "real_div": _divide,
    "square": _square,
    "pow": _pow,
    "sqrt": _sqrt,
    "clip": _clip,
    "relu": _relu,
    "abs": _abs,
    "maximum": _maximum,
    "minimum": _minimum,
    "exp": _exp,
    "layer_norm": _layer_norm,
    "reduce_sum": _long_sum,
    "select": lambda op, look: _union([op.a, op.b], look),
    "concat": lambda op, look: _union(list(op.inputs["values"]), look),
    "pad": lambda op, look: (
        _union([op.x, op.inputs.get("constant_val")], look)
        if op.inputs.get("constant_val") is not None
        else ANY
    ),
}
"""Op type -> its interval from those of its operands."""


def is_half(var: Var) -> bool:
    """Is a value fp16?"""
    return np_dtype(var) == np.float16
