"""Ends of intervals: those of constants, looked up once, and how far rounding moves an end.

A result is rounded in any direction, sums in any order and in the dtype itself, as fp16 or in fp32. What is
subnormal may become 0, where an op computes it. No rounding changes a sign.
"""

from __future__ import annotations

import math
import weakref
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch

from anesurgery.interpret.arithmetic.precision import as_tensor, forget
from anesurgery.mil import Array, Operation, Var, constant, producer, static_shape

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
LARGEST = 65504.0
"""The largest number of fp16."""
NORMAL = 2.0**-14
"""The smallest number that fp16 holds with all its digits: what is smaller may or may not become 0."""
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
