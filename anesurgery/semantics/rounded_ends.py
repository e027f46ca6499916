"""How far rounding moves the ends of an interval, in the dtype of a value.

A result is rounded in any direction, sums in any order and in the dtype itself, as fp16 or in fp32. What is
subnormal may become 0, where an op computes it. No rounding changes a sign.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from anesurgery.semantics.constant_ends import Interval

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
