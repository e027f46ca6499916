"""See what only the new side of an edit does in fp16 (`fp16_behavior`): overflow, underflow, or lose digits.

Two sides can be the same function of real numbers and behave differently in fp16: a mean may be a sum divided
by n, but the sum overflows first; the root of a sum of squares is not 0 although each square underflows. Such a
magnitude is a precondition of the edit, which its report names. But a new side that loses digits of ordinary
numbers, where the old side keeps them, is wrong.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch

from anesurgery import fp16
from anesurgery.checking.adversarial import Drawing
from anesurgery.checking.grades import Promise
from anesurgery.checking.lengths import drawn_shape
from anesurgery.checking.numbers import OWN, SLACK, BothSides, Numbers, Pairs, as_tensor, drawn_numbers, written
from anesurgery.errors import InterpretError
from anesurgery.interpret.arithmetic.precision import Double
from anesurgery.mil import Var, np_dtype
from anesurgery.semantics.intervals import stored_interval

ORDINARY_MAGNITUDE = 1.0
"""The magnitude at which no digits may be lost."""


class _Spread(NamedTuple):
    """How numbers are drawn around a magnitude."""

    least: float
    """The least number, as a share of the magnitude; the largest is the magnitude itself."""
    signed: bool


BOTH_SIGNS, ONE_SIGN, NEARLY_EQUAL = _Spread(0.5, True), _Spread(0.5, False), _Spread(0.98, False)
TRIED = (
    *((ORDINARY_MAGNITUDE, spread) for spread in (BOTH_SIGNS, ONE_SIGN, NEARLY_EQUAL)),
    *((64.0, spread) for spread in (ONE_SIGN, BOTH_SIGNS)),
    (250.0, BOTH_SIGNS),  # fp16 holds squares of such numbers, and not of their differences
    (1024.0, ONE_SIGN),
    *((magnitude, spread) for magnitude in (16384.0, 60000.0) for spread in (ONE_SIGN, BOTH_SIGNS)),
    *((magnitude, ONE_SIGN) for magnitude in (1e-2, 1e-3, 1e-4, 1e-6)),
)
"""Magnitudes to try, from ordinary numbers up, then small ones, each with its spread."""
LOST = 1 / 8
"""Error, as a share of the largest number, at which most digits are lost: 3 of 11 bits are right then."""
FEW_NUMBERS = 1 << 16
"""The most numbers read, weights included, of a site that is tried. A choice: both sides run several times."""


@dataclass(frozen=True)
class Fp16Behavior:
    """What only the new side does in fp16."""

    overflow: float = math.inf
    """The first magnitude at which it overflows."""
    underflow: float = 0.0
    """The largest magnitude, below ordinary numbers, at which it loses most digits."""
    loses_digits_at: float = 0.0
    """The first magnitude, from ordinary numbers on, at which it loses digits."""
    error_on_ordinary: float = 0.0
    """Its error on ordinary numbers, as a share of the largest; 0 if it loses nothing there."""
    example: str = ""
    """Ordinary inputs on which it loses digits, as Python; "" if it does not."""


def fp16_behavior(sides: BothSides, drawing: Drawing, seed: int, promise: Promise) -> Fp16Behavior:
    """Return what only the new side does in fp16; nothing for sites without fp16 inputs, or large ones."""
    fp16_inputs = [v for v in sides.drawn if np_dtype(v) == np.float16]
    behavior, rng = Fp16Behavior(), np.random.default_rng(seed)
    if not fp16_inputs or sides.numbers_read > FEW_NUMBERS:
        return behavior
    as_stored = replace(sides, precision="fp16")
    for magnitude, spread in TRIED:
        if magnitude < ORDINARY_MAGNITUDE and behavior.underflow > 0:
            continue  # the first of the small magnitudes is the largest
        if magnitude >= ORDINARY_MAGNITUDE and math.isfinite(behavior.overflow):
            continue
        numbers = drawn_numbers(sides.drawn, drawing, "normal", rng)
        most = {v: min(magnitude, promise.limits.get(v, promise.magnitude)) for v in fp16_inputs}
        numbers |= {v: _numbers_of_magnitude(v, most[v], spread, rng) for v in fp16_inputs}
        try:
            behavior = _after_run(behavior, as_stored, numbers, magnitude, promise)
        except InterpretError:
            return behavior
        if behavior.error_on_ordinary:
            return behavior
    return behavior


def _after_run(
    behavior: Fp16Behavior, sides: BothSides, numbers: Numbers, magnitude: float, promise: Promise
) -> Fp16Behavior:
    """Return the behavior with what one more run shows."""
    pairs = sides.run(numbers)
    if magnitude < ORDINARY_MAGNITUDE:
        underflows = any(_loses_most_digits(old, new) for old, new in pairs)
        return replace(behavior, underflow=magnitude if underflows else 0.0)
    if any(_only_new_overflows(old, new) for old, new in pairs):
        return replace(behavior, overflow=magnitude)
    if behavior.loses_digits_at or not (error := _error_of_new_side(sides, numbers, pairs, promise)):
        return behavior
    if magnitude > ORDINARY_MAGNITUDE:
        return replace(behavior, loses_digits_at=magnitude)
    example = f"# in fp16\n{written(numbers, pairs)}"
    return replace(behavior, loses_digits_at=magnitude, error_on_ordinary=error, example=example)


def _error_of_new_side(sides: BothSides, numbers: Numbers, pairs: Pairs, promise: Promise) -> float:
    """Return the new side's error, as a share of the largest value, where the old side has no such error.

    The old side's error is that of its roundings, and that of half a unit in the last place of each operand.
    """
    least = max(promise.tolerance.rtol, SLACK * fp16.HALF_STEP)
    differing = [i for i, (old, new) in enumerate(pairs) if _relative_error(old, new) > least]
    if not differing or promise.tolerance.is_exact:
        return 0.0
    exact = sides.evaluators(Double())[0](numbers)
    draws = sides.spread(numbers, fp16.HALF_STEP)
    worst = 0.0
    for i in differing:
        old, new = pairs[i]
        error_of_old = max(_relative_error(exact[i], value) for value in (old, *(draw[i] for draw in draws)))
        error_of_new = _relative_error(exact[i], new)
        if error_of_new > max(least, OWN * error_of_old):
            worst = max(worst, error_of_new)
    return worst


def _numbers_of_magnitude(
    var: Var, magnitude: float, spread: _Spread, rng: np.random.Generator
) -> torch.Tensor:
    """Return numbers around a magnitude within a value's range: the magnitude itself first, none near 0."""
    drawn = np.asarray(rng.uniform(spread.least, 1.0, drawn_shape(var)) * magnitude)
    drawn.flat[:1] = magnitude
    signed = drawn * rng.choice([-1, 1], drawn.shape) if spread.signed else drawn
    return as_tensor(np.clip(signed, *stored_interval(var)).astype(np.float16))


def _are_floats_alike(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return whether two values are floats of one shape that has elements."""
    return a.shape == b.shape and a.is_floating_point() and a.numel() > 0


def _only_new_overflows(old: torch.Tensor, new: torch.Tensor) -> bool:
    return _are_floats_alike(old, new) and bool((torch.isfinite(old) & ~torch.isfinite(new)).any())


def _loses_most_digits(old: torch.Tensor, new: torch.Tensor) -> bool:
    """Return whether numbers in the normal range of fp16 are off by more than rounding explains."""
    if not _are_floats_alike(old, new):
        return False
    most = float(old.abs().max())
    return most >= fp16.NORMAL and bool(((old - new).abs() > LOST * most).any())


def _relative_error(exact: torch.Tensor, value: torch.Tensor) -> float:
    """Return the largest difference as a share of the largest number of `exact`; 0 where that shows nothing."""
    if not _are_floats_alike(exact, value):
        return 0.0
    most, error = float(exact.abs().max()), float((exact.double() - value.double()).abs().max())
    return error / most if fp16.NORMAL <= most < math.inf and math.isfinite(error) else 0.0
