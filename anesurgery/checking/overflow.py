"""Find the magnitudes at which a new side overflows or underflows in fp16, as stored, and the old one does not.

Both may be the same function of real numbers: a mean is a sum over n, but the sum leaves fp16 first, and the
root of a sum of squares is no small number, although each square is 0. That is a precondition of an edit, which
its report names.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator

import numpy as np
import torch

from anesurgery.checking.adversarial import Drawing, weights
from anesurgery.checking.both import Site
from anesurgery.checking.grades import Promise
from anesurgery.checking.lengths import drawn_shape
from anesurgery.checking.numbers import as_tensor, drawn_numbers
from anesurgery.errors import InterpretError
from anesurgery.facts.intervals import interval
from anesurgery.interpret import Evaluator
from anesurgery.mil import Var, np_dtype

MAGNITUDES = (64.0, 1024.0, 16384.0, 60000.0)
"""What is tried, the smallest first."""
SMALL = (1e-2, 1e-3, 1e-4, 1e-6)
"""What is tried for underflow, the largest first."""
LEAST_NORMAL = float(np.finfo(np.float16).tiny)
"""The smallest number that fp16 holds with all its digits."""
LOST = 1 / 8
"""Share of the largest number by which a side is off that has lost most of its digits."""
MOST = 1 << 16
"""Numbers read, weights among them, up to which it is tried."""


def overflow(site: Site, drawing: Drawing, seed: int, promise: Promise) -> float:
    """The first magnitude at which only the new side overflows; infinite if there is none that was tried."""
    tried = itertools.product(MAGNITUDES, (True, False))
    return next(_failing(site, drawing, seed, promise, tried, _only_new), math.inf)


def underflow(site: Site, drawing: Drawing, seed: int, promise: Promise) -> float:
    """The largest magnitude at which only the new side loses most of its digits; 0 if none was tried."""
    tried = itertools.product(SMALL, (True,))
    return next(_failing(site, drawing, seed, promise, tried, _lost), 0.0)


def _failing(
    site: Site,
    drawing: Drawing,
    seed: int,
    promise: Promise,
    tried: Iterable[tuple[float, bool]],
    fails: Callable[[torch.Tensor, torch.Tensor], bool],
) -> Iterator[float]:
    """The magnitudes at which both sides, in fp16 as stored, differ in some way."""
    halves = [v for v in site.drawn if np_dtype(v) == np.float16]
    size = sum(math.prod(drawn_shape(v)) for v in site.drawn) + weights([*site.old_ops, *site.new_ops])
    if not halves or size > MOST:
        return
    old = Evaluator(site.old_ops, [*(old for old, _ in site.replaced), *site.carried], "fp16")
    new = Evaluator(site.new_ops, [new for _, new in site.replaced], "fp16")
    rng = np.random.default_rng(seed)
    for magnitude, alike in tried:
        numbers = drawn_numbers(site.drawn, drawing, "normal", rng)
        numbers |= {v: _of_magnitude(v, min(magnitude, promise.magnitude), alike, rng) for v in halves}
        try:
            found = old(numbers)
            inner = dict(zip(site.carried, found[len(site.replaced) :], strict=True))
            pairs = zip(found, new({**numbers, **inner}), strict=False)
        except InterpretError:
            return
        if any(fails(a, b) for a, b in pairs):
            yield magnitude


def _of_magnitude(var: Var, magnitude: float, alike: bool, rng: np.random.Generator) -> torch.Tensor:
    """Numbers around a magnitude, of one sign or of both, inside what is known of the value."""
    shape = drawn_shape(var)
    drawn = rng.uniform(0.5, 1, shape) * magnitude
    signed = drawn if alike else drawn * rng.choice([-1, 1], shape)
    return as_tensor(np.clip(signed, *interval(var)).astype(np.float16))


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
