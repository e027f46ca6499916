"""What is known of a value before any input is: an interval from the ops that make it.

The unknown is infinite: `(-inf, inf)` says nothing. Weights are read only where what they multiply is bounded,
and those of more than `MOST` elements never.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from anesurgery.interpret.table import TABLE
from anesurgery.mil import Operation, Var, constant, is_constant, np_dtype, producer, static_shape
from anesurgery.ops import INDEXING, JOINING, MONOTONE, MOVING, PRODUCTS, names
from anesurgery.semantics.constant_ends import ANY, Interval, of_constant
from anesurgery.semantics.reading import channels, flag, ints, number
from anesurgery.semantics.row_lengths import mean_square, norms, row_length, spans_rows, squared

GUARD = 1024.0
"""A value that is only known to be within more than this is guarded by a clip, and not described by it."""
STEPS = 48
"""Ops that are looked at for one interval."""

OF_TYPES: dict[str, Interval] = {"b": (0, 1), "u": (0, math.inf)}
"""What the kind of a type says: booleans are 0 or 1, and unsigned integers not negative."""

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
}
"""Ops whose results lie in a fixed interval."""

SAME = MOVING | names(
    "reduce_max reduce_min reduce_mean max_pool upsample_nearest_neighbor resize_nearest_neighbor"
)
"""Ops whose results lie in the interval of `x`."""

WRAPPING = names("abs add cast exp2 floor_div mul pow real_div reduce_sum square sub")
"""Ops whose results, in integers, start again or stop at the ends of their type."""


class _Look:
    """One question: how many ops may still be looked at, and through how many products."""

    def __init__(self, products: int) -> None:
        self.steps, self.products = STEPS, products

    def at(self, var: Any) -> Interval:
        """The interval of a value."""
        if not isinstance(var, Var):
            return ANY
        op, kind = var.op, np_dtype(var).kind
        known = OF_TYPES.get(kind, ANY)
        if op is None or self.steps <= 0 or kind == "b":
            return known
        if op.op_type == "const":
            return of_constant(var)
        self.steps -= 1
        low, high = self._made(op, var)
        if kind in "iu":  # what is computed in floats is cut off towards zero
            low, high = (math.trunc(v) if math.isfinite(v) else v for v in (low, high))
        if kind in "iu" and op.op_type in WRAPPING and not _holds(var, low, high):
            return known
        return max(low, known[0]), min(high, known[1])

    def _made(self, op: Operation, var: Var) -> Interval:
        """What an op makes, in numbers without end."""
        kind = op.op_type
        if kind in FIXED:
            return FIXED[kind]
        if kind in INDEXING or (kind == "topk" and var is op.outputs[1]):
            return 0.0, math.inf
        if kind in SAME:
            return self.at(op.inputs.get("x"))
        if kind in RULES:
            return RULES[kind](op, self)
        if kind in MONOTONE:
            return image(op, self.at(op.x)) or ANY
        if kind in PRODUCTS and self.products > 0:
            self.products -= 1
            largest = _product(op, self)
            return -largest, largest
        return ANY


def _holds(var: Var, low: float, high: float) -> bool:
    """Does the integer type of a value hold all of an interval?"""
    limits = np.iinfo(np_dtype(var))
    return bool(limits.min <= low and high <= limits.max)


def image(op: Operation, numbers: Interval) -> Interval | None:
    """What a unary op makes of two numbers; None where a parameter is dynamic, or a result is not a number."""
    found = results_at(op, {"x": numbers})
    return None if found is None or any(map(math.isnan, found)) else (found[0], found[1])


def results_at(op: Operation, numbers: Mapping[str, Sequence[float]]) -> list[float] | None:
    """What an elementwise op makes of some numbers, by its meaning; None where a parameter is dynamic."""
    given = {k: constant(v) for k, v in op.inputs.items() if v is not None and k not in numbers}
    if any(v is None for v in given.values()):
        return None
    arguments: dict[str, Any] = {k: v.tolist() if hasattr(v, "tolist") else v for k, v in given.items()}
    arguments |= {k: torch.tensor(n, dtype=torch.float64) for k, n in numbers.items()}
    found: list[float] = TABLE[op.op_type].function(**arguments).double().tolist()
    return found


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
    if top is not None and top.x is op.x and spans_rows(top):
        return -math.inf, 0.0
    (a, b), (c, d) = look.at(op.x), look.at(op.y)
    low, high = a - d, b - c
    return ANY if math.isnan(low) or math.isnan(high) else (low, high)


def _divide(op: Operation, look: _Look) -> Interval:
    """By a constant, or by no less than the largest magnitude of the same value."""
    top = producer(op.y)
    while top is not None and _is_no_less(top, look):
        top = producer(top.x)
    if top is not None and top.op_type == "reduce_max" and spans_rows(top):
        inner = producer(top.x, "abs")
        if inner is not None and inner.x is op.x:
            return -1.0, 1.0
    by = number(op.y)
    if not by:
        return ANY
    low, high = sorted(v / by for v in look.at(op.x))
    return low, high


def _is_no_less(op: Operation, look: _Look) -> bool:
    """Is what the op makes nowhere below its `x`?"""
    if op.op_type == "add":
        return look.at(op.y)[0] >= 0
    if op.op_type == "clip":
        return look.at(op.x)[1] <= (number(op.beta) or 0.0)
    return bool(op.op_type == "maximum")


def _abs(op: Operation, look: _Look) -> Interval:
    low, high = look.at(op.x)
    return (0.0 if low <= 0 <= high else min(abs(low), abs(high))), max(abs(low), abs(high))


def _maximum(op: Operation, look: _Look) -> Interval:
    (a, b), (c, d) = look.at(op.x), look.at(op.y)
    return max(a, c), max(b, d)


def _minimum(op: Operation, look: _Look) -> Interval:
    (a, b), (c, d) = look.at(op.x), look.at(op.y)
    return min(a, c), min(b, d)


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


def _cast(op: Operation, look: _Look) -> Interval:
    """To an integer, the fraction is cut off, and NaN is 0."""
    low, high = look.at(op.x)
    if np_dtype(op.outputs[0]).kind in "iu":
        low, high = (math.trunc(v) if math.isfinite(v) else v for v in (low, high))
        if np_dtype(op.x).kind == "f":
            low, high = min(low, 0.0), max(high, 0.0)
        if np_dtype(op.x).kind in "iu" and np_dtype(op.x).itemsize <= np_dtype(op.outputs[0]).itemsize:
            limits = np.iinfo(np_dtype(op.x))
            low, high = max(low, float(limits.min)), min(high, float(limits.max))
    return low, high


def _select(op: Operation, look: _Look) -> Interval:
    """Both sides; where the condition is `a >= 0` itself, `a` counts from 0 on."""
    (a, b), (c, d) = look.at(op.a), look.at(op.b)
    test = producer(op.cond, "greater_equal")
    if test is not None and test.x is op.a and is_constant(test.y, 0):
        a, b = max(a, 0.0), max(b, 0.0)
    return min(a, c), max(b, d)


def _mod(op: Operation, look: _Look) -> Interval:
    """The remainder takes the sign of the divisor, and of integers is smaller."""
    low, high = look.at(op.y)
    less = 1 if np_dtype(op.y).kind in "iu" else 0
    return min(low + less, 0.0), max(high - less, 0.0)


def _floor_div(op: Operation, look: _Look) -> Interval:
    """Of numbers that are not negative; a divisor of -0 would make -inf."""
    (a, b), (c, _) = look.at(op.x), look.at(op.y)
    least = 0.0 if np_dtype(op.y).kind in "iu" else math.ulp(0.0)
    return ANY if a < 0 or c < least else (0.0, b if c >= 1 else math.inf)


def _range(op: Operation, look: _Look) -> Interval:
    step = number(op.step)
    return (look.at(op.start)[0], look.at(op.end)[1]) if step is not None and step > 0 else ANY


def _avg_pool(op: Operation, look: _Look) -> Interval:
    """Zeros that pad an edge may count."""
    low, high = look.at(op.x)
    bare = constant(op.inputs.get("pad_type")) == "valid" or flag(op, "exclude_padding_from_average")
    return (low, high) if bare else (min(low, 0.0), max(high, 0.0))


RULES: dict[str, Callable[[Operation, _Look], Interval]] = {
    "add": _add,
    "sub": _sub,
    "mul": _mul,
    "real_div": _divide,
    "square": _square,
    "pow": _pow,
    "sqrt": _sqrt,
    "abs": _abs,
    "maximum": _maximum,
    "minimum": _minimum,
    "layer_norm": _layer_norm,
    "reduce_sum": _long_sum,
    "select": _select,
    "cast": _cast,
    "mod": _mod,
    "floor_div": _floor_div,
    "range_1d": _range,
    "avg_pool": _avg_pool,
    "one_hot": lambda op, look: _union([op.inputs["on_value"], op.inputs["off_value"]], look),
    **dict.fromkeys(JOINING, lambda op, look: _union(list(op.inputs["values"]), look)),
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
