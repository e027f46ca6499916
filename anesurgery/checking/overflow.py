"""Find the magnitude from which a new side overflows in fp16, as it is stored, where the old side does not.

Both may be the same function of real numbers: a mean is a sum over n, but the sum leaves fp16 first. That is a
precondition of an edit, which its report names.
"""

from __future__ import annotations

import itertools
import math

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
MOST = 1 << 16
"""Numbers read, weights among them, up to which it is tried."""


def overflow(site: Site, drawing: Drawing, seed: int, promise: Promise) -> float:
    """The first magnitude at which only the new side overflows; infinite if there is none that was tried."""
    halves = [v for v in site.drawn if np_dtype(v) == np.float16]
    size = sum(math.prod(drawn_shape(v)) for v in site.drawn) + weights([*site.old_ops, *site.new_ops])
    if not halves or size > MOST:
        return math.inf
    old = Evaluator(site.old_ops, [*(old for old, _ in site.replaced), *site.carried], "fp16")
    new = Evaluator(site.new_ops, [new for _, new in site.replaced], "fp16")
    rng = np.random.default_rng(seed)
    for magnitude, alike in itertools.product(MAGNITUDES, (True, False)):
        numbers = drawn_numbers(site.drawn, drawing, "normal", rng)
        numbers |= {v: _of_magnitude(v, min(magnitude, promise.magnitude), alike, rng) for v in halves}
        try:
            found = old(numbers)
            inner = dict(zip(site.carried, found[len(site.replaced) :], strict=True))
            pairs = zip(found, new({**numbers, **inner}), strict=False)
        except InterpretError:
            return math.inf
        if any(_only_new(a, b) for a, b in pairs):
            return magnitude
    return math.inf


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
