"""Look for inputs on which numbers go wrong, within the range of those that were given.

Where floats come in, torch differentiates the interpreter: the steepest way up of the largest values, and of
the error of the outputs in fp16, leads to an end of the range. Integers are changed at random places, and a
change that comes nearer to a failure is kept.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch

from anesurgery.checking.grades import psnr
from anesurgery.interpret import Executable, Listener, sampling
from anesurgery.mil import Array, Operation, Program, np_dtype
from anesurgery.semantics.bounds import LARGEST

Values = Mapping[str, Array]
Ranges = Mapping[str, tuple[float, float]]
TARGETS = 4
"""Values that are made larger: those that are the largest on the first inputs, and each magnitude once. A
choice: each is one search."""
CHANGED = 0.25
"""Share of the numbers that a random change draws anew. A choice: of all, nothing of what was good would stay.
"""
SMALLEST = 1e-30
"""Added to an error before its logarithm: below any error of fp16."""


@dataclass
class Way:
    """How the next inputs follow from those before.

    Attributes:
        name: in words, as "the gradient of y".
        point: the inputs tried last.
        uphill: inputs -> what is to grow, and its gradients by input; None where numbers are drawn.
        step: how far a gradient is followed, of the range: at first to its end.
    """

    name: str
    point: Values
    uphill: Callable[[Values], tuple[float, dict[str, Array]]] | None = None
    step: float = 1.0
    _best: tuple[float, Values, dict[str, Array]] | None = field(default=None, repr=False)

    def next(self, ranges: Ranges, rng: np.random.Generator) -> Values:
        """The inputs to try next.

        Raises:
            RuntimeError: torch cannot differentiate an op on the way.
        """
        if self.uphill is None:
            return drawn_anew(self.point, ranges, rng)
        height, gradients = self.uphill(self.point)
        if self._best is None or height > self._best[0]:
            self._best = (height, self.point, gradients)
        else:
            self.step /= 2
        _, point, gradients = self._best
        self.point = moved(point, gradients, ranges, self.step)
        return self.point


def ranges_of(samples: Sequence[Values]) -> dict[str, tuple[float, float]]:
    """Input -> the least and the largest of its finite numbers in all samples, where there are any."""
    ends = {}
    for name in samples[0]:
        arrays = [np.asarray(v[name]) for v in samples if name in v]
        numbers = [a[np.isfinite(a)] for a in arrays if a.dtype.kind in "iuf"]
        numbers = [a for a in numbers if a.size]
        if numbers:
            ends[name] = (float(min(a.min() for a in numbers)), float(max(a.max() for a in numbers)))
    return ends


def moved(point: Values, gradients: Mapping[str, Array], ranges: Ranges, step: float) -> Values:
    """Inputs after a step up, each number by the same share of the range, and not beyond its ends."""
    new = dict(point)
    for name, gradient in gradients.items():
        low, high = ranges[name]
        value = np.asarray(point[name])
        new[name] = np.clip(value + np.sign(gradient) * step * (high - low), low, high).astype(value.dtype)
    return new


def drawn_anew(point: Values, ranges: Ranges, rng: np.random.Generator) -> Values:
    """Inputs with some numbers drawn anew, evenly between the ends of the range."""
    new = dict(point)
    for name, (low, high) in ranges.items():
        value = np.asarray(point[name])
        whole = value.dtype.kind in "iu"
        fresh = (
            rng.integers(int(low), int(high) + 1, value.shape) if whole else rng.uniform(low, high, value.shape)
        )
        new[name] = np.where(rng.random(value.shape) < CHANGED, fresh, value).astype(value.dtype)
    return new


def described(values: Values, ranges: Ranges) -> str:
    """What is special in some inputs, in words: where their numbers lie in the range."""
    words = []
    for name, (low, high) in ranges.items():
        numbers = np.asarray(values[name]).astype(np.float64)
        share = float(np.mean(np.isclose(numbers, low) | np.isclose(numbers, high)))
        words.append(f"{name} from {numbers.min():.3g} to {numbers.max():.3g}, {share:.0%} of it at an end")
    return ", ".join(words)


def ways(program: Program, function: str | None, first: Values, ranges: Ranges) -> list[Way]:
    """All ways from the first inputs: gradients where there are floats, and random changes."""
    floats = [n for n in ranges if np.asarray(first[n]).dtype.kind == "f" and ranges[n][0] < ranges[n][1]]
    every = []
    if floats:
        slopes = Slopes(program, function, floats)
        for op in slopes.largest(first):
            every.append(Way(f"the gradient of {op.outputs[0].name}", first, partial(slopes.of, op)))
        every.append(Way("the gradient of the error of the outputs", first, slopes.of_error))
    return [*every, Way("random changes", first)]


class Peaks(Listener):
    """The largest magnitude of the first output of each op that is stored in fp16."""

    def __init__(self) -> None:
        self.found: dict[Operation, float] = {}

    @property
    def headroom(self) -> float:
        """How many dB all of them leave below the end of fp16; negative beyond it."""
        if not all(map(math.isfinite, self.found.values())):
            return -math.inf
        return psnr(LARGEST, max(self.found.values(), default=0.0))

    def after(self, op: Operation, outputs: Sequence[Any]) -> None:
        """Look."""
        value = outputs[0] if outputs and np_dtype(op.outputs[0]) == np.float16 else None
        if isinstance(value, torch.Tensor) and value.numel():
            self.found[op] = float(torch.linalg.vector_norm(value, math.inf))


class Slopes:
    """Gradients of a function's values by its inputs of floats, in exact arithmetic and in fp16.

    Rounding counts as if it were not there when gradients are taken, as torch takes those of a cast.
    """

    def __init__(self, program: Program, function: str | None, floats: Sequence[str]) -> None:
        self._exact, self._half = (
            Executable(program, function=function, precision=p, fuse=False) for p in ("fp32", "fp16")
        )
        self._floats = floats

    def largest(self, values: Values) -> list[Operation]:
        """The ops of the function with the largest values, of those of one magnitude the first."""
        peaks = Peaks()
        self._exact(values, listener=peaks)
        by_size: dict[float, Operation] = {}
        top = set(self._exact.function.operations)
        for op, peak in peaks.found.items():
            if op in top and math.isfinite(peak):
                by_size.setdefault(float(f"{peak:.4g}"), op)
        return [by_size[size] for size in sorted(by_size, reverse=True)[:TARGETS]]

    def of(self, op: Operation, values: Values) -> tuple[float, dict[str, Array]]:
        """The largest magnitude of an op's first output, and its gradients by input."""
        leaves, env = self._bound(self._exact, values)
        with torch.enable_grad():
            for step, outputs in _walk(self._exact, env):
                if step is op:
                    return self._slope(outputs[0].abs().amax(), leaves)
        raise RuntimeError(f"{op.outputs[0].name} was not computed")

    def of_error(self, values: Values) -> tuple[float, dict[str, Array]]:
        """The logarithm of the error of the outputs in fp16 over their size, and its gradients."""
        leaves, exact = self._bound(self._exact, values)
        half = {v: leaves.get(v.name, value) for v, value in self._bound(self._half, values)[1].items()}
        with torch.enable_grad():
            for executable, env in ((self._exact, exact), (self._half, half)):
                for _ in _walk(executable, env):
                    pass
            error = torch.zeros(())
            for var in self._exact.function.outputs:
                wanted, rounded = (
                    e.plan.value(env, var) for e, env in ((self._exact, exact), (self._half, half))
                )
                if isinstance(wanted, torch.Tensor) and wanted.is_floating_point():
                    noise = (rounded - wanted).square().mean() / (wanted.detach().abs().amax() ** 2 + SMALLEST)
                    error = error + torch.log(noise + SMALLEST)
            return self._slope(error, leaves)

    def _bound(self, executable: Executable, values: Values) -> tuple[dict[str, torch.Tensor], dict[Any, Any]]:
        """The inputs of floats as leaves, by name, and the first environment."""
        env = sampling.bind(executable.function, values, None)
        leaves = {v.name: value.clone().requires_grad_() for v, value in env.items() if v.name in self._floats}
        return leaves, {v: leaves.get(v.name, value) for v, value in env.items()}

    def _slope(
        self, height: torch.Tensor, leaves: Mapping[str, torch.Tensor]
    ) -> tuple[float, dict[str, Array]]:
        slopes = torch.autograd.grad(height, list(leaves.values()), allow_unused=True)
        arrays = {
            n: np.nan_to_num(slope.numpy())
            for n, slope in zip(leaves, slopes, strict=True)
            if slope is not None
        }
        return float(height.detach()), arrays


def _walk(executable: Executable, env: dict[Any, Any]) -> Iterator[tuple[Operation, Sequence[Any]]]:
    """Each op of a function, and what it gave."""
    for step in executable.plan.steps:
        caught = _Last()
        executable.plan.take(step, env, caught)
        yield step.op, caught.outputs


class _Last(Listener):
    """What was given last: by an op, after those of its blocks."""

    def __init__(self) -> None:
        self.outputs: Sequence[Any] = ()

    def after(self, op: Operation, outputs: Sequence[Any]) -> None:
        """Keep it."""
        self.outputs = outputs
