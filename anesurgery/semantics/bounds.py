"""Bounds of numbers: ends of constants, looked up once, how far rounding moves an end, how long rows are."""

from __future__ import annotations

import math
import weakref
from dataclasses import dataclass
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import torch

from anesurgery.interpret.arithmetic.precision import as_tensor, forget
from anesurgery.mil import Array, Operation, Var, constant, np_dtype, producer, static_shape
from anesurgery.semantics.reading import channels, flag, ints, number, weight

FINITE = "finite"
"""The key of whether all elements are."""
LEAST = 64
"""Elements of an array of which something is kept: into smaller ones coremltools writes."""
_FOUND: dict[int, tuple[weakref.ref[Array], dict[Any, Any]]] = {}
"""By identity, of arrays that are alive."""


def found_of(array: Any) -> dict[Any, Any]:
    """What is kept of an array, by keys of those who ask, to be read and written; of a small one, nothing."""
    if not isinstance(array, np.ndarray) or array.size < LEAST:
        return {}
    at = id(array)
    if at not in _FOUND:
        _FOUND[at] = weakref.ref(array, lambda _: _FOUND.pop(at, None)), {}
    return _FOUND[at][1]


Interval = tuple[float, float]

ANY: Interval = (-math.inf, math.inf)
MOST = 1 << 22
"""Weights of more elements are not read: a choice, as each question reads them all."""

_CONSTANTS: WeakKeyDictionary[Operation, Interval] = WeakKeyDictionary()


def of_constant(var: Var) -> Interval:
    """The least and the largest number of a constant; `ANY` for large ones, and where one is NaN."""
    op = producer(var, "const")
    if op is None:
        return ANY
    if op not in _CONSTANTS:
        found = found_of(constant(var))
        _CONSTANTS[op] = found["ends"] = found.get("ends") or _least_and_largest(var)
    return _CONSTANTS[op]


def gain(norm: Operation) -> tuple[float, float]:
    """The largest magnitude of the gamma of a norm, and of its beta."""
    ends = ((norm.inputs.get(name), absent) for name, absent in (("gamma", 1.0), ("beta", 0.0)))
    scale, shift = (absent if var is None else max(map(abs, of_constant(var))) for var, absent in ends)
    return scale, shift


def _least_and_largest(var: Var) -> Interval:
    if math.prod(static_shape(var) or ()) > MOST:
        return ANY
    value = constant(var)
    if value is None or isinstance(value, str) or np.size(value) == 0:
        return ANY
    halves = np.asarray(value).dtype == np.float16  # of which numpy takes sixty times as long
    low, high = map(float, torch.aminmax(as_tensor(value)) if halves else (np.min(value), np.max(value)))
    forget(value)
    return ANY if math.isnan(low) or math.isnan(high) else (low, high)


EXACT, CORRECT, FUNCTION = 0, 1, 4
"""Roundings of an op that makes none, of one that rounds the exact result, and of one that computes a function:
libraries keep exponentials and the like within a few units of the last place."""
OF_NORM = 12
"""Roundings from a number to its normalised form, the square and the root among them."""


def outwards(ends: Interval, dtype: np.dtype[Any], roundings: float) -> Interval:
    """Where numbers of an interval lie once they are rounded so often.

    Args:
        ends: of the exact results.
        dtype: a float.
        roundings: `EXACT`, `CORRECT`, or how many one after the other.
    """
    low, high = ends
    return -_up(-low, dtype, roundings), _up(high, dtype, roundings)


def _up(end: float, dtype: np.dtype[Any], roundings: float) -> float:
    """The largest number that a result up to `end` may be rounded to."""
    if not math.isfinite(end) or end == 0:
        return end
    info = np.finfo(dtype)
    unit, tiny = float(info.eps) / 2, float(info.tiny)
    if roundings > CORRECT:
        exponent = roundings if end > 0 else -roundings
        end *= math.exp(min(exponent * math.log1p(unit), math.log(2.0**200)))
    if roundings and abs(end) < tiny:  # what is above 0 may grow to normal, what is below may become 0
        end = tiny * (1 + min(roundings * unit, 2.0**64)) if end > 0 else -0.0
    with np.errstate(over="ignore"):
        near = dtype.type(end)
        return float(near if float(near) >= end else np.nextafter(near, dtype.type(np.inf)))


def norm_growth(epsilon: float, dtype: np.dtype[Any]) -> float:
    """How many times larger than that of real numbers a normalised number may be.

    Squares that become 0, or lose digits, make the divisor too small, unless the epsilon is far larger.
    Infinite where there is no epsilon, or the dtype holds none.
    """
    info = np.finfo(dtype)
    held = float(np.asarray(epsilon, dtype))
    if not held > 0:
        return math.inf
    lost = 2 * float(info.smallest_subnormal)
    return math.sqrt(max(1.0, lost / held)) * (1 + float(info.eps)) ** OF_NORM


# How long rows are: of stored weights, and of values that are normalised, by an op or written out.


@dataclass(frozen=True)
class Norms:
    """Of the weights of one output, the largest over all outputs; read when they are asked for."""

    weight: Var
    by_columns: bool
    """Does a column hold the weights of one output?"""

    @property
    def sum(self) -> float:
        """Of magnitudes."""
        return self._largest(1)

    @property
    def length(self) -> float:
        """Euclidean."""
        return self._largest(2)

    def _largest(self, order: int) -> float:
        found, key = found_of(constant(self.weight)), ("norm", order, self.by_columns)
        if key not in found:
            found[key] = self._read(order)
            if math.isfinite(found[key]):
                found[FINITE] = True  # else no length was
        return float(found[key])

    def _read(self, order: int) -> float:
        numbers = as_tensor(constant(self.weight))
        rows = numbers.flatten(0, -2) if self.by_columns else numbers.flatten(1)
        wide = rows if rows.is_floating_point() else rows.float()
        each = torch.linalg.vector_norm(wide, order, dim=0 if self.by_columns else 1, dtype=torch.float32)
        forget(constant(self.weight))
        return float(each.max())


def norms(op: Operation) -> Norms | None:
    """The norms of a product's weight; None where it is compressed, too large or computed."""
    var, size = weight(op), channels(op)
    if var is None or producer(var, "const") is None or size is None or math.prod(size) > MOST:
        return None
    return Norms(var, op.op_type == "matmul" and not flag(op, "transpose_y"))


class RootMeanSquare(NamedTuple):
    """The factor `rsqrt(mean(x * x) + epsilon)` of a root mean square norm, over the last axis."""

    x: Var
    epsilon: float
    """The least of all that is added."""

    def largest(self, *, stored: bool) -> float:
        """The largest magnitude of a normalised number, which is also the largest length of a row."""
        return longest(self.x, (static_shape(self.x) or (math.inf,))[-1], self.epsilon, stored=stored)


def longest(x: Var, count: float, epsilon: float, *, stored: bool) -> float:
    """The largest length of numbers of x that are normalised together; infinite where nothing bounds it.

    Args:
        x: the value.
        count: how many.
        epsilon: what is added to the mean of their squares.
        stored: in the dtype of the value? Squares then become 0 where they are small, and so may the epsilon.
    """
    if epsilon < 0:
        return math.inf
    return math.sqrt(count) * (norm_growth(epsilon, np_dtype(x)) if stored else 1.0)


def row_length(var: Any, *, stored: bool = False) -> float:
    """The largest Euclidean length of a row (last axis) of a normalised value; infinite for others.

    Args:
        var: the value.
        stored: as it is computed in its dtype? Else in real numbers.
    """
    op = producer(var) if isinstance(var, Var) else None
    shape = static_shape(var) if isinstance(var, Var) else None
    if op is None or not shape:
        return math.inf
    if op.op_type == "layer_norm" and _last_only(ints(op, "axes"), len(shape)):
        scale, shift = gain(op)
        growth = 1 + 4 * float(np.finfo(np_dtype(var)).eps) if stored else 1.0  # of the scale and the shift
        normal = longest(op.x, shape[-1], epsilon_of(op), stored=stored)
        return (normal * scale + math.sqrt(shape[-1]) * shift) * growth if math.isfinite(normal) else math.inf
    if op.op_type == "mul":
        for one, other in ((op.x, op.y), (op.y, op.x)):
            factor = mean_square(other)
            if factor is not None and factor.x is one:
                return factor.largest(stored=stored)
            inner = row_length(one, stored=stored) if producer(other, "const") is not None else math.inf
            if math.isfinite(inner):
                growth = 1 + float(np.finfo(np_dtype(var)).eps) if stored else 1.0
                return inner * max(map(abs, of_constant(other))) * growth
    return math.inf


def _last_only(axes: list[int], rank: int) -> bool:
    return axes in ([-1], [rank - 1])


def mean_square(var: Any) -> RootMeanSquare | None:
    """The factor of a root mean square norm; None for other values."""
    op = producer(var, "rsqrt") if isinstance(var, Var) else None
    inner = producer(op.x) if op is not None else None
    if op is None or inner is None:
        return None
    epsilon = epsilon_of(op)
    if inner.op_type == "add":
        mean, added = (inner.x, inner.y) if producer(inner.x, "reduce_mean") else (inner.y, inner.x)
        epsilon += of_constant(added)[0]
        inner = producer(mean)
    if inner is None or inner.op_type != "reduce_mean" or not spans_rows(inner):
        return None
    x = squared(producer(inner.x)) if _last_only(ints(inner, "axes"), inner.x.rank) else None
    return RootMeanSquare(x, epsilon) if x is not None and epsilon >= 0 else None


def epsilon_of(op: Operation) -> float:
    """The epsilon of an op as the dtype of its operand holds it; 0 where it has none."""
    epsilon = number(op.inputs.get("epsilon"))
    return 0.0 if epsilon is None else float(np.asarray(epsilon, np_dtype(op.x)))


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
