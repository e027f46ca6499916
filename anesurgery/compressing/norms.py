"""Gain and shift of a norm take up what the weights in front of it have lost, where the outputs gain by that.

Before::

    x = layer_norm(x=h, gamma=g, beta=b)
    y = linear(x=x, weight=table)

After::

    x = layer_norm(x=h, gamma=g * a, beta=b * a + c)
    y = linear(x=x, weight=table)

with one a and one c for each channel, by which what the norm makes of most samples comes nearest to what it
makes in the plain model. Less squared error there may be more loss at the outputs, so the rest of the samples
judges: they run on to the outputs with the norm as it was and as it would be, and the new one is kept if they
lose less by it.

A weight behind a norm that no other op reads is rounded from numbers that take all of that up. A table that is
looked up too, a weight that stays, a sum, an activation or an output cannot. So norms that only such weights
read are left out.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from anesurgery.compressing.correcting import Losses, Values
from anesurgery.compressing.storing import hold, key_of
from anesurgery.interpret.core import Step
from anesurgery.mil import Array, Function, Operation, Program, Var, constant, is_output, producer, static_shape
from anesurgery.regions.root_norms import root_norm

THROUGH = ("reshape", "transpose", "expand_dims", "squeeze", "quantize", "dequantize")
"""Ops behind which numbers are still those of the norm."""
AXIS = {"batch_norm": 1, "instance_norm": 1}
"""Where the channels lie that gamma and beta are of."""
NORMS = ("layer_norm", *AXIS, "mul")
"""Ops that may end a norm."""
JUDGE, MOST_JUDGES = 4, 4
"""Every n-th sample judges, and at most this many: each runs three times from each norm on."""
LEAST_GAIN = 0.01
"""The share of its squared error, and of the loss at the outputs, that a norm must take away where it is
judged: what is less may be chance."""
TINY = float(np.finfo(np.float64).tiny)


@dataclass(frozen=True)
class CorrectedNorm:
    """A norm whose gain and shift were fitted, and what that did on the samples that judged."""

    norm: str
    error: tuple[float, float]
    """Squared, behind the norm, before and after, as a share of the squares of the plain numbers."""
    loss: tuple[float, float] | None
    """At the outputs, before and after; None where the error was reason enough to leave the norm."""

    @property
    def kept(self) -> bool:
        """Do the outputs lose less by it?"""
        return self.loss is not None and self.loss[1] < (1 - LEAST_GAIN) * self.loss[0]

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        loss = None if self.loss is None else list(self.loss)
        return {"norm": self.norm, "error": list(self.error), "loss": loss, "kept": self.kept}


@dataclass(frozen=True)
class Norm:
    """A norm with constants of its own for the channels of its result."""

    op: Operation
    gain: str
    """The input that multiplies each channel."""
    shift: str | None
    """The one that is added to each; None where there is none."""
    axis: int
    """Of the result, along which the channels lie."""
    twins: tuple[Operation, ...] = ()
    """The same norm in other functions."""

    @property
    def names(self) -> list[str]:
        """The inputs that are fitted."""
        return [self.gain] if self.shift is None else [self.gain, self.shift]

    @property
    def held(self) -> list[Var]:
        """The constants."""
        return [self.op.inputs[name] for name in self.names]

    @property
    def key(self) -> tuple[Any, ...]:
        """What a norm has in common with its twins in other functions."""
        return (self.op.op_type, self.gain, self.shift, self.axis, *map(key_of, self.held))

    def sums(self, step: Step, read: Values, wanted: Values) -> _Sums:
        """Of what the norm makes of a sample, and of what it makes in the plain model."""
        return _Sums.of([self._made(step, values) for values in (read, wanted)])

    def fitted(self, factor: Array, more: Array) -> dict[str, Array]:
        """The constants, in their types and shapes."""
        old = {name: np.asarray(self.op.inputs[name].val) for name in self.names}
        new = {name: array * factor.reshape(array.shape) for name, array in old.items()}
        if self.shift is not None:
            new[self.shift] = new[self.shift] + more.reshape(new[self.shift].shape)
        with np.errstate(over="ignore"):
            return {name: array.astype(old[name].dtype) for name, array in new.items()}

    def _made(self, step: Step, values: Values) -> torch.Tensor:
        """[number, channels]: what the norm makes."""
        wide = {name: value.float() if name in step.stored else value for name, value in values.items()}
        assert step.function is not None
        result = step.function(**wide).movedim(self.axis, -1)
        return result.reshape(-1, result.shape[-1]).double()


def judging(count: int) -> list[int]:
    """The numbers of the samples that judge, of so many; none of one."""
    last = min(count, JUDGE) - 1
    return [n for n in range(count) if n % JUDGE == last][:MOST_JUDGES] if last else []


@dataclass(frozen=True)
class _Sums:
    """Of the numbers of each channel, of those of the plain model, and of their products."""

    count: int
    own: Any
    plain: Any
    squares: Any
    products: Any
    plain_squares: Any

    @classmethod
    def of(cls, both: Sequence[torch.Tensor]) -> _Sums:
        """Of what a norm made and should have made, [number, channels] each."""
        if not both:
            return cls(0, 0.0, 0.0, 0.0, 0.0, 0.0)
        own, plain = (np.asarray(each) for each in both)
        pairs = (own * own, own * plain, plain * plain)
        return cls(len(own), *(each.sum(0) for each in (own, plain, *pairs)))

    def __add__(self, other: _Sums) -> _Sums:
        return _Sums(*(a + b for a, b in zip(vars(self).values(), vars(other).values(), strict=True)))

    def best(self, shifts: bool) -> tuple[Array, Array]:
        """The factor of each channel and what is added, with the least error; 1 where all numbers are one."""
        middle = self.own / self.count if shifts else 0.0
        varies = self.squares - middle * self.own
        vary = varies > np.finfo(np.float32).eps * self.squares
        factor = np.where(vary, (self.products - middle * self.plain) / np.where(vary, varies, 1), 1.0)
        return factor, (self.plain - factor * self.own) / self.count if shifts else np.zeros_like(factor)

    def error(self, factor: Any, more: Any) -> float:
        """The squared error of all channels."""
        cross = factor * self.products + more * self.plain - factor * more * self.own
        each = self.plain_squares - 2 * cross + factor * factor * self.squares + more * more * self.count
        return float(np.sum(each))


@dataclass(frozen=True)
class Norms:
    """The norms of a function that are corrected as its weights are.

    Args:
        norms: by op.
    """

    norms: dict[Operation, Norm]
    fitted: list[CorrectedNorm] = field(default_factory=list)
    """Of each that was fitted."""
    constants: dict[Operation, dict[str, Array]] = field(default_factory=dict)
    """What those that are kept hold, by input."""

    def step(self, step: Step, read: Sequence[Values], wanted: Sequence[Values], losses: Losses) -> Step:
        """The step of a norm to take: another one where the outputs lose less by it.

        Args:
            step: of the norm.
            read: what it reads, for each sample.
            wanted: the same in the plain model.
            losses: what the outputs lose.
        """
        norm, judges = self.norms[step.op], judging(len(read))
        told, judged = _Sums.of([]), _Sums.of([])
        for number, both in enumerate(zip(read, wanted, strict=True)):
            sums = norm.sums(step, *both)
            told, judged = (told, judged + sums) if number in judges else (told + sums, judged)
        if not told.count or not judged.count or not told.error(1, 0):
            return step
        factor, more = told.best(norm.shift is not None)
        fitted, whole = norm.fitted(factor, more), max(float(np.sum(judged.plain_squares)), TINY)
        error = judged.error(1, 0) / whole, judged.error(factor, more) / whole
        finite = all(np.isfinite(array).all() for array in fitted.values())
        fixed = {name: torch.from_numpy(array).float() for name, array in fitted.items()}
        stored = [name for name in step.stored if name not in fitted]
        other = replace(step, fixed={**step.fixed, **fixed}, stored=stored)
        lower = finite and error[1] < (1 - LEAST_GAIN) * error[0]
        self.fitted.append(CorrectedNorm(norm.op.name, error, losses(judges, other) if lower else None))
        if not self.fitted[-1].kept:
            return step
        self.constants[norm.op] = fitted
        return other

    def store(self) -> None:
        """Let the norms that are kept, in every function, hold what they became."""
        for op, constants in self.constants.items():
            for each in (op, *self.norms[op].twins):
                for name, value in constants.items():
                    hold(each, name, value, f"{each.name}_{name}_corrected")


def norms_of(program: Program, name: str, alone: Collection[Operation]) -> Norms:
    """The norms of a function whose results something reads that cannot take up what they lack.

    Args:
        program: all its functions; a norm that is not found exactly once in each stays.
        name: of the function.
        alone: ops that alone read a weight, which is corrected.
    """
    others = [_by_key(function) for each, function in program.functions.items() if each != name]
    lone: dict[Operation, Norm] = {}
    for key, norms in _by_key(program.functions[name]).items():
        alike = [each.get(key, []) for each in others]
        taken_up = len(norms) > 1 or _taken_up(norms[0].op.outputs[0], alone)
        if not taken_up and all(len(each) == 1 for each in alike):
            lone[norms[0].op] = replace(norms[0], twins=tuple(each[0].op for each in alike))
    return Norms(lone)


def _by_key(function: Function) -> dict[tuple[Any, ...], list[Norm]]:
    """The norms of a function by what they have in common with their twins."""
    by_key: dict[tuple[Any, ...], list[Norm]] = {}
    for op in function.operations:
        if (norm := _norm(op)) is not None:
            by_key.setdefault(norm.key, []).append(norm)
    return by_key


def _taken_up(value: Var, alone: Collection[Operation]) -> bool:
    """Is a value read by such products alone, in another shape or quantized?"""
    return not is_output(value) and all(
        op in alone or (op.op_type in THROUGH and _taken_up(op.outputs[0], alone)) for op in value.child_ops
    )


def _norm(op: Operation) -> Norm | None:
    """A norm with a gain for each channel, by itself or written out as roots of means."""
    shape = static_shape(op.outputs[0]) if op.op_type in NORMS else None
    if not shape:
        return None
    if op.op_type == "layer_norm":
        axes = () if op.inputs.get("axes") is None else tuple(int(a) % len(shape) for a in op.axes.val)
        return _with(op, "gamma", "beta", axes[0]) if len(axes) == 1 else None
    if op.op_type in AXIS:
        return _with(op, "gamma", "beta", AXIS[op.op_type])
    for name, other in (("x", "y"), ("y", "x")) if op.op_type == "mul" else ():
        along, division = np.shape(constant(op.inputs[name])), producer(op.inputs[other], "mul", "real_div")
        if division is not None and along and along[-1] == shape[-1] and root_norm(division) is not None:
            return _with(op, name, "", len(shape) - 1)
    return None


def _with(op: Operation, gain: str, shift: str, axis: int) -> Norm | None:
    """A norm whose constants no other op reads, one number for each channel."""
    norm = Norm(op, gain, shift if op.inputs.get(shift) is not None else None, axis)
    held = [op.inputs.get(name) for name in norm.names]
    count = (static_shape(op.outputs[0]) or ())[axis]
    own = (v is not None and _is_own(v) and np.size(v.val) == count for v in held)
    return norm if all(own) else None


def _is_own(var: Var) -> bool:
    """Is it a constant that one op reads, and no block?"""
    stored = var.op is not None and var.op.op_type == "const"
    return stored and len(var.child_ops) == 1 and not var.consuming_blocks
