"""Run both sides of an edit in fp16, as stored, at every magnitude: what overflows, underflows or loses digits.

Both may be the same function of real numbers: a mean is a sum over n, but the sum leaves fp16 first, and the
root of a sum of squares is no small number, although each square is 0. That is a precondition of an edit, which
its report names. A new side that loses digits of ordinary numbers which the old one keeps is wrong.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from anesurgery.checking.adversarial import Drawing, weights
from anesurgery.checking.both import Site
from anesurgery.checking.counterexample import written
from anesurgery.checking.grades import Promise
from anesurgery.checking.lengths import drawn_shape
from anesurgery.checking.numbers import DRAWS, OWN, SLACK, Numbers, Pairs, as_tensor, drawn_numbers
from anesurgery.errors import InterpretError
from anesurgery.interpret import Evaluator
from anesurgery.interpret.arithmetic.double import Double
from anesurgery.mil import Var, np_dtype
from anesurgery.semantics.intervals import stored_interval

ORDINARY, BOTH_SIGNS, ONE_SIGN, ALIKE = 1.0, (-1.0, 1.0), (0.5, 1.0), (0.98, 1.0)
"""The magnitude at which no digits may be lost; shares of a magnitude between which numbers lie."""
TRIED = (
    *((ORDINARY, ends) for ends in (BOTH_SIGNS, ONE_SIGN, ALIKE)),
    *((64.0, ends) for ends in (ONE_SIGN, BOTH_SIGNS)),
    (250.0, BOTH_SIGNS),  # fp16 holds squares of such numbers, and not of their differences
    (1024.0, ONE_SIGN),
    *((magnitude, ends) for magnitude in (16384.0, 60000.0) for ends in (ONE_SIGN, BOTH_SIGNS)),
    *((magnitude, ONE_SIGN) for magnitude in (1e-2, 1e-3, 1e-4, 1e-6)),
)
"""Magnitudes, from ordinary numbers on to the largest and then the smallest, and where numbers lie."""
HALF_ULP = float(np.finfo(np.float16).eps) / 2
"""What fp16 rounds off, as a share."""
LEAST_NORMAL = float(np.finfo(np.float16).tiny)
"""The smallest number that fp16 holds with all its digits."""
LOST = 1 / 8
"""Share of the largest number by which a side is off that has lost most of its digits: three binary digits of
eleven are right then."""
MOST = 1 << 16
"""Numbers read, weights among them, up to which it is tried: a choice, as it runs both sides several times
more."""


@dataclass(frozen=True)
class InHalves:
    """What only the new side does in fp16."""

    overflow: float = math.inf
    """The first magnitude at which it overflows."""
    underflow: float = 0.0
    """The largest magnitude, below ordinary numbers, at which it loses most digits."""
    loses: float = 0.0
    """The first magnitude, from ordinary numbers on, at which it loses digits."""
    off: float = 0.0
    """How far off it is from ordinary numbers, as a share of the largest; 0 if it loses nothing there."""
    numbers: Numbers = field(default_factory=dict)
    """Ordinary numbers at which it does."""
    pairs: Pairs = field(default_factory=list)
    """What both sides make of these."""

    @property
    def example(self) -> str:
        """Ordinary numbers at which it loses digits, as Python; empty if it does not."""
        return f"# in fp16\n{written(self.numbers, self.pairs)}" if self.off else ""


def in_halves(site: Site, drawing: Drawing, seed: int, promise: Promise) -> InHalves:
    """What only the new side does in fp16; nothing for sites without fp16, or with more numbers than `MOST`."""
    halves = [v for v in site.drawn if np_dtype(v) == np.float16]
    size = sum(math.prod(drawn_shape(v)) for v in site.drawn) + weights([*site.old_ops, *site.new_ops])
    shown, rng = InHalves(), np.random.default_rng(seed)
    if not halves or size > MOST:
        return shown
    sides = _Stored(site)
    for magnitude, ends in TRIED:
        if shown.underflow if magnitude < ORDINARY else math.isfinite(shown.overflow):
            continue
        numbers = drawn_numbers(site.drawn, drawing, "normal", rng)
        most = {v: min(magnitude, promise.limits.get(v, promise.magnitude)) for v in halves}
        numbers |= {v: _of_magnitude(v, most[v], ends, rng) for v in halves}
        try:
            shown = _more(shown, sides, numbers, magnitude, promise)
        except InterpretError:
            return shown
        if shown.off:
            return shown
    return shown


def _more(shown: InHalves, sides: _Stored, numbers: Numbers, magnitude: float, promise: Promise) -> InHalves:
    """What one more run shows."""
    pairs = sides.run(numbers)
    if magnitude < ORDINARY:
        return replace(shown, underflow=magnitude * any(_lost(a, b) for a, b in pairs))
    if any(_only_new(a, b) for a, b in pairs):
        return replace(shown, overflow=magnitude)
    if shown.loses or not (off := sides.digits_lost(numbers, pairs, promise)):
        return shown
    if magnitude > ORDINARY:
        return replace(shown, loses=magnitude)
    return replace(shown, loses=magnitude, off=off, numbers=numbers, pairs=pairs)


class _Stored:
    """Both sides in fp16 as stored, and in fp64."""

    def __init__(self, site: Site) -> None:
        self.site = site
        self._old, self._new = self._sides("fp16")

    def _sides(self, arithmetic: str | Double) -> tuple[Evaluator, Evaluator]:
        site = self.site
        old = Evaluator(site.old_ops, [*(old for old, _ in site.replaced), *site.carried], arithmetic)
        return old, Evaluator(site.new_ops, [new for _, new in site.replaced], arithmetic)

    def run(self, numbers: Numbers) -> Pairs:
        """The pairs (old value, new value)."""
        values = self._old(numbers)
        inner = dict(zip(self.site.carried, values[len(self.site.replaced) :], strict=True))
        return list(zip(values, self._new({**numbers, **inner}), strict=False))

    def digits_lost(self, numbers: Numbers, pairs: Pairs, promise: Promise) -> float:
        """The error of the new side, as a share of the largest value, where none of the old one is near it.

        The old side errs by what it rounds, and by what half a unit in the last place of each operand does.
        """
        least = max(promise.tolerance.rtol, SLACK * HALF_ULP)
        far = [i for i, (a, b) in enumerate(pairs) if _share(a, b) > least]
        if not far or promise.tolerance.rtol == 0:
            return 0.0
        exact = self._sides(Double())[0](numbers)
        rounded = self._sides(Double(HALF_ULP))[0]
        draws = [rounded(numbers) for _ in range(DRAWS)]
        worst = 0.0
        for i in far:
            old, new = pairs[i]
            rounds = max(_share(exact[i], old), *(_share(exact[i], draw[i]) for draw in draws))
            off = _share(exact[i], new)
            worst = max(worst, off) if off > max(least, OWN * rounds) else worst
        return worst


def _of_magnitude(
    var: Var, magnitude: float, ends: tuple[float, float], rng: np.random.Generator
) -> torch.Tensor:
    """A magnitude and numbers around it, inside what is known of the value; of both signs, not near 0."""
    low, high = ends
    drawn = np.asarray(rng.uniform(max(low, 0.5), high, drawn_shape(var)) * magnitude)
    drawn.flat[:1] = magnitude
    signed = drawn * rng.choice([-1, 1], drawn.shape) if low < 0 else drawn
    return as_tensor(np.clip(signed, *stored_interval(var)).astype(np.float16))


def _only_new(old: torch.Tensor, new: torch.Tensor) -> bool:
    if old.shape != new.shape or not old.is_floating_point():
        return False
    return bool((torch.isfinite(old) & ~torch.isfinite(new)).any())


def _lost(old: torch.Tensor, new: torch.Tensor) -> bool:
    """Are numbers that fp16 holds with all digits off by a share of the largest that no rounding explains?"""
    if old.shape != new.shape or not old.is_floating_point() or not old.numel():
        return False
    most = float(old.abs().max())
    return most >= LEAST_NORMAL and bool(((old - new).abs() > LOST * most).any())


def _share(a: torch.Tensor, b: torch.Tensor) -> float:
    """The largest difference as a share of the largest number of the first; 0 where that shows nothing."""
    if a.shape != b.shape or not a.is_floating_point() or not a.numel():
        return 0.0
    most, off = float(a.abs().max()), float((a.double() - b.double()).abs().max())
    return off / most if LEAST_NORMAL <= most < math.inf and math.isfinite(off) else 0.0
