"""What coremltools makes of ops that depend on no input: a second computation of what is folded."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from anesurgery.checking.grades import Grade, SiteCheck
from anesurgery.errors import Refusal
from anesurgery.mil import Array, Var

ROUNDING = 1e-2
"""An element that differs by more than this share of itself is no rounding, even of long sums in fp16."""


def is_inferred(var: Var) -> bool:
    """Does coremltools infer the numbers of a value?"""
    return var.val is not None and np.asarray(var.val).dtype.kind in "biuf"


def against_host(vars_: Sequence[Var], values: Sequence[Array], seed: int = 0) -> SiteCheck | Refusal:
    """Hold the values of ops that depend on no input against those that coremltools infers.

    Args:
        vars_: what the ops make, all of it inferred.
        values: the same as the interpreter computed it.
        seed: of the session, for the report.

    Returns:
        How near they are: of equal bits nothing is left to try, as there is nothing to vary. A refusal with
        both numbers where they differ by more than rounding.
    """
    worst, relative, count = 0.0, 0.0, 0
    for var, value in zip(vars_, values, strict=True):
        other = np.asarray(var.val)
        if other.shape != value.shape:
            return Refusal(f"%{var.name} has the shape {value.shape}, and {other.shape} by coremltools", var.op)
        count += value.size
        if same_bits(value, other):
            continue
        apart, share = _apart(value, other)
        if np.any(share > (ROUNDING if value.dtype.kind == "f" else 0)):
            at = np.unravel_index(int(np.argmax(share)), value.shape)
            return Refusal(f"%{var.name} holds {value[at]}, and {other[at]} by coremltools", var.op)
        worst, relative = max(worst, np.max(apart, initial=0)), max(relative, np.max(share, initial=0))
    grade = Grade.NUMBERS if worst else Grade.EXHAUSTIVE
    return SiteCheck(float(worst), float(relative), count, grade, None, seed)


def same_bits(value: Array, other: Array) -> bool:
    """Are two arrays of one shape of the same type, and equal bit for bit?"""
    words = f"u{value.dtype.itemsize}"
    if value.dtype != other.dtype:
        return False
    one, two = (np.asarray(x, order="C").view(words) for x in (value, other))
    return np.array_equal(one, two)


def _apart(value: Array, other: Array) -> tuple[Array, Array]:
    """By how much each element differs, and by which share of itself; infinite where one is no number."""
    wide, others = value.astype(np.float64), other.astype(np.float64)
    same = (wide == others) | (np.isnan(wide) & np.isnan(others))
    with np.errstate(all="ignore"):
        apart = np.where(same, 0.0, np.abs(wide - others))
        share = np.where(same, 0.0, apart / np.abs(others))
    return apart, np.nan_to_num(share, nan=np.inf, posinf=np.inf)
