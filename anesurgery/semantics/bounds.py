"""Bounds of stored and of normalised numbers, which the intervals of `rows` and `intervals` are built from.

Three subjects: the least and largest element of a constant (read once and remembered), how far rounding in a
float dtype can move a bound, and the largest Euclidean length of rows of weights and of normalised values.
"""

from __future__ import annotations

import math
import weakref
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from anesurgery.interpret.arithmetic.constant_memory import as_tensor, release_pages
from anesurgery.mil import Array, Operation, Var, constant, np_dtype, producer, static_shape
from anesurgery.semantics.reading import channels, flag, ints, number, weight

FINITE = "finite"
"""The key of `facts_of_array` that says whether all elements are finite."""
LEAST_REMEMBERED = 64
"""Arrays of fewer elements are not remembered: coremltools writes into small ones."""
_FACTS: dict[int, tuple[weakref.ref[Array], dict[Any, Any]]] = {}
"""id(array) -> (a weak reference, what is known of the array); entries go when the array does."""


def facts_of_array(array: Any) -> dict[Any, Any]:
    """Return the dict that holds what is known of an array, which callers read and extend under their own keys.

    The dict of an array below `LEAST_REMEMBERED` elements, or of anything else, is new and empty each time.
    """
    if not isinstance(array, np.ndarray) or array.size < LEAST_REMEMBERED:
        return {}
    identity = id(array)
    if identity not in _FACTS:
        _FACTS[identity] = weakref.ref(array, lambda _: _FACTS.pop(identity, None)), {}
    return _FACTS[identity][1]


Interval = tuple[float, float]

ANY: Interval = (-math.inf, math.inf)
MOST_READ = 1 << 22
"""Weights of more elements are not read: a choice, since every question would read all of them."""


def constant_range(var: Var) -> Interval:
    """Return (least, largest) number of a constant; `ANY` for large ones, and where one is NaN."""
    if producer(var, "const") is None:
        return ANY
    facts = facts_of_array(constant(var))
    if "ends" not in facts:
        facts["ends"] = _least_and_largest(var)
    ends: Interval = facts["ends"]
    return ends


def norm_gain_and_offset(norm: Operation) -> tuple[float, float]:
    """Return the largest magnitudes of the gamma and the beta of a norm op; 1 and 0 where it has none."""
    ends = ((norm.inputs.get(name), absent) for name, absent in (("gamma", 1.0), ("beta", 0.0)))
    scale, shift = (absent if var is None else max(map(abs, constant_range(var))) for var, absent in ends)
    return scale, shift


def _least_and_largest(var: Var) -> Interval:
    """Read the least and largest number of a constant; `ANY` for a large or empty one, text and NaN."""
    if math.prod(static_shape(var) or ()) > MOST_READ:
        return ANY
    value = constant(var)
    if value is None or isinstance(value, str) or np.size(value) == 0:
        return ANY
    is_fp16 = np.asarray(value).dtype == np.float16  # numpy takes sixty times as long for fp16
    low, high = map(float, torch.aminmax(as_tensor(value)) if is_fp16 else (np.min(value), np.max(value)))
    release_pages(value)
    return ANY if math.isnan(low) or math.isnan(high) else (low, high)


EXACT, CORRECT, FUNCTION = 0, 1, 4
"""How often an op rounds: never, once (the exact result), or as a library function, whose exponentials and the
like are within a few units of the last place.
"""
ROUNDINGS_OF_NORM = 12
"""Roundings between a number and its normalised form, those of the square and the root among them."""


def widened_by_rounding(ends: Interval, dtype: np.dtype[Any], roundings: float) -> Interval:
    """Return the interval in which numbers lie after roundings, given the interval of the exact results.

    Args:
        ends: (least, largest) exact result.
        dtype: the float dtype in which they are rounded.
        roundings: `EXACT`, `CORRECT`, or the number of roundings one after the other.
    """
    low, high = ends
    return -_rounded_up(-low, dtype, roundings), _rounded_up(high, dtype, roundings)


def _rounded_up(end: float, dtype: np.dtype[Any], roundings: float) -> float:
    """Return the largest number that a result up to `end` may be rounded to."""
    if not math.isfinite(end) or end == 0:
        return end
    info = np.finfo(dtype)
    unit, tiny = float(info.eps) / 2, float(info.tiny)
    if roundings > CORRECT:  # the powers of 2 only keep the bounds finite
        exponent = roundings if end > 0 else -roundings
        end *= math.exp(min(exponent * math.log1p(unit), math.log(2.0**200)))
    if roundings and abs(end) < tiny:  # what is above 0 may grow to normal, what is below may become 0
        end = tiny * (1 + min(roundings * unit, 2.0**64)) if end > 0 else -0.0
    with np.errstate(over="ignore"):
        near = dtype.type(end)
        return float(near if float(near) >= end else np.nextafter(near, dtype.type(np.inf)))


def norm_growth(epsilon: float, dtype: np.dtype[Any]) -> float:
    """Return the factor by which rounding can make a normalised number larger than in real numbers.

    Squares that become 0 or lose digits make the divisor too small, unless the epsilon is far larger.
    Infinite where there is no epsilon, or where it is 0 in the dtype.
    """
    info = np.finfo(dtype)
    stored_epsilon = float(np.asarray(epsilon, dtype))
    if not stored_epsilon > 0:
        return math.inf
    lost_square = 2 * float(info.smallest_subnormal)
    return math.sqrt(max(1.0, lost_square / stored_epsilon)) * (1 + float(info.eps)) ** ROUNDINGS_OF_NORM


# Largest lengths of rows: of stored weights, and of values that a norm (one op, or written out) made.


@dataclass(frozen=True)
class WeightNorms:
    """The largest L1 and L2 norm of the weights of one output; each is computed when it is asked for."""

    weight: Var
    by_columns: bool
    """Does a column hold the weights of one output?"""

    @property
    def sum(self) -> float:
        """The largest sum of magnitudes."""
        return self._norm(1)

    @property
    def length(self) -> float:
        """The largest Euclidean length."""
        return self._norm(2)

    def _norm(self, order: int) -> float:
        """Return the norm of an order from what is remembered of the weight, or compute it."""
        facts, key = facts_of_array(constant(self.weight)), ("norm", order, self.by_columns)
        if key not in facts:
            facts[key] = self._compute_norm(order)
            if math.isfinite(facts[key]):
                facts[FINITE] = True  # a finite norm has finite elements only
        return float(facts[key])

    def _compute_norm(self, order: int) -> float:
        numbers = as_tensor(constant(self.weight))
        rows = numbers.flatten(0, -2) if self.by_columns else numbers.flatten(1)
        floats = rows if rows.is_floating_point() else rows.float()
        lengths = torch.linalg.vector_norm(floats, order, dim=0 if self.by_columns else 1, dtype=torch.float32)
        release_pages(constant(self.weight))
        return float(lengths.max())


def weight_norms(op: Operation) -> WeightNorms | None:
    """Return the norms of a product's stored weight; None where it is compressed, too large or computed."""
    var, size = weight(op), channels(op)
    if var is None or producer(var, "const") is None or size is None or math.prod(size) > MOST_READ:
        return None
    return WeightNorms(var, op.op_type == "matmul" and not flag(op, "transpose_y"))


class RootMeanSquare(NamedTuple):
    """The factor `rsqrt(mean(x * x) + epsilon)` of a root mean square norm over the last axis."""

    x: Var
    epsilon: float
    """The sum of all epsilons that are added, each at its least."""

    def largest(self, *, stored: bool) -> float:
        """Return the largest magnitude of a normalised number, which also bounds the length of a row."""
        return normalised_length(self.x, (static_shape(self.x) or (math.inf,))[-1], self.epsilon, stored=stored)


def normalised_length(x: Var, count: float, epsilon: float, *, stored: bool) -> float:
    """Return the largest length of `count` numbers of x that are normalised together; infinite where unbounded.

    Args:
        x: the value that is normalised.
        count: how many numbers share one norm.
        epsilon: the number added to the mean of their squares.
        stored: bound the numbers as computed in the dtype of x, where small squares are 0? Else real ones.
    """
    if epsilon < 0:
        return math.inf
    return math.sqrt(count) * (norm_growth(epsilon, np_dtype(x)) if stored else 1.0)


def row_length(var: Any, *, stored: bool = False, products: int = 8) -> float:
    """Return the largest Euclidean length of a row (last axis) of a normalised value; infinite for others.

    Args:
        var: the value.
        stored: bound the numbers as computed in the dtype of the value? Else as real numbers.
        products: the most products with constants behind the norm: a scale is one.
    """
    op = producer(var) if isinstance(var, Var) else None
    shape = static_shape(var) if isinstance(var, Var) else None
    if op is None or not shape:
        return math.inf
    if op.op_type == "layer_norm" and _is_last_axis(ints(op, "axes"), len(shape)):
        scale, shift = norm_gain_and_offset(op)
        growth = 1 + 4 * float(np.finfo(np_dtype(var)).eps) if stored else 1.0  # scale and shift
        normal = normalised_length(op.x, shape[-1], epsilon_of(op), stored=stored)
        return (normal * scale + math.sqrt(shape[-1]) * shift) * growth if math.isfinite(normal) else math.inf
    if op.op_type == "mul":
        for one, other in ((op.x, op.y), (op.y, op.x)):
            if (static_shape(one) or (None,))[-1] != shape[-1]:
                continue  # the other one repeats its rows, which become longer
            factor = mean_square(other)
            if factor is not None and factor.x is one:
                return factor.largest(stored=stored)
            is_scaled = products > 0 and producer(other, "const") is not None
            inner = row_length(one, stored=stored, products=products - 1) if is_scaled else math.inf
            if math.isfinite(inner):
                growth = 1 + float(np.finfo(np_dtype(var)).eps) if stored else 1.0
                return inner * max(map(abs, constant_range(other))) * growth
    return math.inf


def _is_last_axis(axes: list[int], rank: int) -> bool:
    """Do axes name the last axis alone?"""
    return axes in ([-1], [rank - 1])


def mean_square(var: Any) -> RootMeanSquare | None:
    """Return the factor of a root mean square norm that a value is; None for other values."""
    op = producer(var, "rsqrt") if isinstance(var, Var) else None
    inner = producer(op.x) if op is not None else None
    if op is None or inner is None:
        return None
    epsilon = epsilon_of(op)
    if inner.op_type == "add":
        mean, added = (inner.x, inner.y) if producer(inner.x, "reduce_mean") else (inner.y, inner.x)
        epsilon += constant_range(added)[0]
        inner = producer(mean)
    if inner is None or inner.op_type != "reduce_mean" or not broadcasts_back(inner):
        return None
    x = squared_operand(producer(inner.x)) if _is_last_axis(ints(inner, "axes"), inner.x.rank) else None
    return RootMeanSquare(x, epsilon) if x is not None and epsilon >= 0 else None


def epsilon_of(op: Operation) -> float:
    """Return the epsilon of an op as rounded to the dtype of its operand; 0 where it has none."""
    epsilon = number(op.inputs.get("epsilon"))
    return 0.0 if epsilon is None else float(np.asarray(epsilon, np_dtype(op.x)))


def broadcasts_back(op: Operation) -> bool:
    """Does the result of a reduction broadcast back to the rows that it was computed from?"""
    return flag(op, "keep_dims") or op.outputs[0].rank == 0


def squared_operand(op: Operation | None) -> Var | None:
    """Return the x of an op that computes x * x; None for other ops."""
    if op is None:
        return None
    if op.op_type == "square" or (op.op_type == "mul" and op.x is op.y):
        return op.x
    return op.x if op.op_type == "pow" and number(op.y) == 2 else None
