"""Search for inputs on which fp16 is worse, within the range of the given ones, for `certify`.

A `Trial` proposes inputs. For float inputs torch differentiates the interpreter (`Slopes`), and a trial follows
the gradient of one of the largest values, or of the error of the outputs in fp16. Random changes start from the
inputs that came nearest to a failure; they alone change integers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch

from anesurgery import fp16
from anesurgery.checking.grades import psnr
from anesurgery.interpret import Executable, Listener, sampling
from anesurgery.mil import Array, Operation, Program, np_dtype

Tensors = Mapping[str, Array]
Ranges = Mapping[str, tuple[float, float]]
MOST_TARGETS = 4
"""The most values whose gradients are followed: the largest ones on the first inputs, one of each magnitude.
A choice: each is a trial of its own."""
REDRAWN_SHARE = 0.25
"""Share of the numbers that a random change replaces. A choice: a change of all would lose what the trial
found."""
LOG_FLOOR = 1e-30
"""Added to an error before its logarithm: below any error of fp16."""


@dataclass
class Trial:
    """One way to find worse inputs: along a gradient, or by random changes.

    Attributes:
        name: in words, as "the gradient of y".
        point: the inputs tried last.
        uphill: a function of the inputs that gives the number to increase, and its gradients by input; None for
            random changes.
        step: the share of the range by which inputs move; 1 at first, halved after each step without a gain.
    """

    name: str
    point: Tensors
    uphill: Callable[[Tensors], tuple[float, dict[str, Array]]] | None = None
    step: float = 1.0
    _best: tuple[float, Tensors, dict[str, Array]] | None = field(default=None, repr=False)

    def next(self, ranges: Ranges, rng: np.random.Generator) -> Tensors:
        """Return the inputs to try next.

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


def ranges_of(samples: Sequence[Tensors]) -> dict[str, tuple[float, float]]:
    """Return {input: (least, largest) of its finite numbers in all samples}, without inputs that have none."""
    ends = {}
    for name in samples[0]:
        arrays = [np.asarray(v[name]) for v in samples if name in v]
        numbers = [a[np.isfinite(a)] for a in arrays if a.dtype.kind in "iuf"]
        numbers = [a for a in numbers if a.size]
        if numbers:
            ends[name] = (float(min(a.min() for a in numbers)), float(max(a.max() for a in numbers)))
    return ends


def moved(point: Tensors, gradients: Mapping[str, Array], ranges: Ranges, step: float) -> Tensors:
    """Return inputs after a step along the signs of gradients, by a share of the range, clipped to it."""
    new = dict(point)
    for name, gradient in gradients.items():
        low, high = ranges[name]
        value = np.asarray(point[name])
        new[name] = np.clip(value + np.sign(gradient) * step * (high - low), low, high).astype(value.dtype)
    return new


def drawn_anew(point: Tensors, ranges: Ranges, rng: np.random.Generator) -> Tensors:
    """Return inputs with some numbers drawn anew, uniformly over the range."""
    new = dict(point)
    for name, (low, high) in ranges.items():
        value = np.asarray(point[name])
        fresh: Array
        if value.dtype.kind in "iu":
            fresh = rng.integers(int(low), int(high) + 1, value.shape)
        else:
            fresh = rng.uniform(low, high, value.shape)
        new[name] = np.where(rng.random(value.shape) < REDRAWN_SHARE, fresh, value).astype(value.dtype)
    return new


def described(values: Tensors, ranges: Ranges) -> str:
    """Return in words where the numbers of each input lie in its range."""
    words = []
    for name, (low, high) in ranges.items():
        numbers = np.asarray(values[name]).astype(np.float64)
        share = float(np.mean(np.isclose(numbers, low) | np.isclose(numbers, high)))
        words.append(f"{name} from {numbers.min():.3g} to {numbers.max():.3g}, {share:.0%} of it at an end")
    return ", ".join(words)


def trials(program: Program, function: str | None, first: Tensors, ranges: Ranges) -> list[Trial]:
    """Return the trials that start from the first inputs: gradients for float inputs, and random changes."""
    floats = [n for n in ranges if np.asarray(first[n]).dtype.kind == "f" and ranges[n][0] < ranges[n][1]]
    by_gradient = []
    if floats:
        slopes = Slopes(program, function, floats)
        for op in slopes.largest(first):
            by_gradient.append(Trial(f"the gradient of {op.outputs[0].name}", first, partial(slopes.of, op)))
        by_gradient.append(Trial("the gradient of the error of the outputs", first, slopes.of_error))
    return [*by_gradient, Trial("random changes", first)]


class Peaks(Listener):
    """A listener that records the largest magnitude of the first output of each op, if that is fp16."""

    def __init__(self) -> None:
        self.found: dict[Operation, float] = {}

    @property
    def headroom(self) -> float:
        """The distance in dB of the largest value from the end of fp16; negative beyond it."""
        if not all(map(math.isfinite, self.found.values())):
            return -math.inf
        return psnr(fp16.LARGEST, max(self.found.values(), default=0.0))

    def after(self, op: Operation, outputs: Sequence[Any]) -> None:
        """Record the largest magnitude of the first output."""
        value = outputs[0] if outputs and np_dtype(op.outputs[0]) == np.float16 else None
        if isinstance(value, torch.Tensor) and value.numel():
            self.found[op] = float(torch.linalg.vector_norm(value, math.inf))


class Slopes:
    """Gradients of a function's values by its inputs of floats, in exact arithmetic and in fp16.

    Gradients ignore rounding, as those of a cast in torch do.
    """

    def __init__(self, program: Program, function: str | None, floats: Sequence[str]) -> None:
        self._exact, self._half = (
            Executable(program, function=function, precision=p, fuse=False) for p in ("fp32", "fp16")
        )
        self._floats = floats

    def largest(self, values: Tensors) -> list[Operation]:
        """Return the `MOST_TARGETS` ops with the largest values, one for each magnitude (to 4 digits)."""
        peaks = Peaks()
        self._exact(values, listener=peaks)
        by_size: dict[float, Operation] = {}
        top = set(self._exact.function.operations)
        for op, peak in peaks.found.items():
            if op in top and math.isfinite(peak):
                by_size.setdefault(float(f"{peak:.4g}"), op)
        return [by_size[size] for size in sorted(by_size, reverse=True)[:MOST_TARGETS]]

    def of(self, op: Operation, values: Tensors) -> tuple[float, dict[str, Array]]:
        """Return the largest magnitude of an op's first output, and its gradients by input."""
        leaves, env = self._leaves_and_environment(self._exact, values)
        with torch.enable_grad():
            for step, outputs in _run_steps(self._exact, env):
                if step is op:
                    return self._height_and_gradients(outputs[0].abs().amax(), leaves)
        raise RuntimeError(f"{op.outputs[0].name} was not computed")

    def of_error(self, values: Tensors) -> tuple[float, dict[str, Array]]:
        """Return the sum over outputs of the logarithm of their relative error in fp16, and its gradients."""
        leaves, exact = self._leaves_and_environment(self._exact, values)
        half = {
            v: leaves.get(v.name, value)
            for v, value in self._leaves_and_environment(self._half, values)[1].items()
        }
        with torch.enable_grad():
            for executable, env in ((self._exact, exact), (self._half, half)):
                for _ in _run_steps(executable, env):
                    pass
            error = torch.zeros(())
            for var in self._exact.function.outputs:
                exact_output, rounded = (
                    e.plan.value(env, var) for e, env in ((self._exact, exact), (self._half, half))
                )
                if isinstance(exact_output, torch.Tensor) and exact_output.is_floating_point():
                    noise = (rounded - exact_output).square().mean() / (
                        exact_output.detach().abs().amax() ** 2 + LOG_FLOOR
                    )
                    error = error + torch.log(noise + LOG_FLOOR)
            return self._height_and_gradients(error, leaves)

    def _leaves_and_environment(
        self, executable: Executable, values: Tensors
    ) -> tuple[dict[str, torch.Tensor], dict[Any, Any]]:
        """Return the float inputs as leaves of autograd, by name, and the environment of a run."""
        env = sampling.bind(executable.function, values, None)
        leaves = {v.name: value.clone().requires_grad_() for v, value in env.items() if v.name in self._floats}
        return leaves, {v: leaves.get(v.name, value) for v, value in env.items()}

    def _height_and_gradients(
        self, height: torch.Tensor, leaves: Mapping[str, torch.Tensor]
    ) -> tuple[float, dict[str, Array]]:
        slopes = torch.autograd.grad(height, list(leaves.values()), allow_unused=True)
        arrays = {
            n: np.nan_to_num(slope.numpy())
            for n, slope in zip(leaves, slopes, strict=True)
            if slope is not None
        }
        return float(height.detach()), arrays


def _run_steps(executable: Executable, env: dict[Any, Any]) -> Iterator[tuple[Operation, Sequence[Any]]]:
    """Run a function step by step; yield each op with its outputs."""
    for step in executable.plan.steps:
        caught = _LastOutputs()
        executable.plan.take(step, env, caught)
        yield step.op, caught.outputs


class _LastOutputs(Listener):
    """A listener that keeps the last outputs: those of an op come after those of the ops in its blocks."""

    def __init__(self) -> None:
        self.outputs: Sequence[Any] = ()

    def after(self, op: Operation, outputs: Sequence[Any]) -> None:
        """Keep the outputs."""
        self.outputs = outputs
