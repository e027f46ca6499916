"""Run a whole model and its rewritten form on adversarial inputs, at several lengths: `run_trial`.

A proof is about real numbers, and one sample says nothing about other inputs: a clip whose bound the sample
does not reach, a tie, an integer that wraps around, a length that no sample has. What is found here is an input
of the model, so it counts whatever a proof says.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
import torch

from anesurgery.checking.addresses import Bounds, address_bounds, is_looked_up, largest_accepted
from anesurgery.checking.adversarial import Drawing, constants_of, rows_apart
from anesurgery.checking.aiming import aimed, crossed, targets
from anesurgery.checking.lengths import Lengths, drawn_shape, with_lengths
from anesurgery.checking.matching import closeness
from anesurgery.checking.numbers import (
    DRAWS,
    ROUNDED_OFF,
    Numbers,
    apart_at,
    as_tensor,
    made_smaller,
    row_axes,
    rows_along,
    rows_read,
    written,
)
from anesurgery.checking.trial_lengths import TrialLengths
from anesurgery.errors import InterpretError
from anesurgery.facts.loops import ops_with_run_counts
from anesurgery.files.interface import InterfaceChange, adapt_inputs, adapt_outputs
from anesurgery.interpret import Evaluator
from anesurgery.interpret.arithmetic.precision import Double, PerturbedRounding
from anesurgery.interpret.state import Box
from anesurgery.mil import Array, Function, Operation, Var, is_symbolic, is_weight, np_dtype, types, walk_ops
from anesurgery.semantics.rows import work_of

ORDINARY = 1e4
"""The magnitude of inputs up to which nothing may overflow that did not before: several such numbers still sum
up to less than 65,504.
"""
MOST_OFF = 2.0
"""The new side may be off by this many times what errors at the gate do to the old side: both sides may be off
by as much, either way.
"""
ROUNDS = (
    ("normal", math.inf),
    ("near", 8.0),
    ("near", math.inf),
    ("ties", math.inf),
    ("rows", math.inf),
    ("zeros", math.inf),
    ("offset", math.inf),
    ("small", math.inf),
    ("large", math.inf),
    ("special", ORDINARY),
    ("special", math.inf),
    ("largest", math.inf),
)
"""The kinds of rounds, each with the largest magnitude of its numbers."""
AT_LENGTHS = (("normal", math.inf), ("peak", math.inf), ("dip", math.inf))
"""The rounds at further lengths: a single large or small number in a row is where norms and softmaxes depend on
the length.
"""
AGAIN, FEWEST = 3, 2
"""How often the rounds are repeated for a small model, and the fewest rounds of a large one."""
MOST_EFFORT, OVERHEAD = 1 << 31, 1 << 16
"""The most operations and bytes moved in all rounds (seconds on one core); the least cost of an op."""
SHOWN = 8
"""The most lengths that a report lists, about what a line holds."""

Outputs = dict[str, torch.Tensor]


@dataclass(frozen=True)
class TrialResult:
    """What adversarial inputs showed about two models."""

    values: int = 0
    """Finite numbers of outputs that were compared: infinities and NaN of the first model show nothing."""
    lengths: tuple[int, ...] = ()
    """Lengths of dynamic dimensions that were tried."""
    failure: str = ""
    """How the two differ, in words; "" where they do not."""
    counterexample: str = ""
    """Inputs on which they differ, as Python."""
    finite_only: bool = False
    """Whether they differ where an input is infinite or NaN."""

    @property
    def words(self) -> str:
        """What was tried and what came out, in words."""
        listed = f"the lengths {', '.join(map(str, self.lengths))}"
        if len(self.lengths) > SHOWN:
            listed = f"{len(self.lengths)} lengths from {min(self.lengths)} to {max(self.lengths)}"
        lengths = f", at {listed}" if self.lengths else ""
        count = f"{self.values} numbers within the gate" if self.values else "no number that shows anything"
        said = self.failure or f"adversarial inputs{lengths}: {count}"
        return said + ("; they differ on infinities or NaN" if self.finite_only else "")


class _Both:
    """Two functions, ready to run on the same inputs."""

    def __init__(
        self,
        old: Function,
        new: Function,
        contract: Sequence[InterfaceChange],
        gate: float,
        assume: Mapping[str, tuple[int, int]],
    ) -> None:
        self.old, self.new, self.contract, self.gate = old, new, contract, gate
        self.inputs = [v for v in old.inputs.values() if not types.is_state(v.sym_type)]
        self.assumed: Bounds = {v: assume[v.name] for v in self.inputs if v.name in assume}
        self._plain: dict[Function, Evaluator] = {}
        """Function -> what runs it in fp32."""

    def bounds(self) -> Bounds:
        """Return the ranges of integers: what the caller assumes, and the tables and axes that they index."""
        limits = address_bounds(self.inputs, list(walk_ops(self.old)))
        for var, (low, high) in self.assumed.items():
            least, most = limits.get(var, (low, high))
            limits[var] = np.maximum(least, low), np.minimum(most, high)
        return limits

    def _run(self, function: Function, numbers: Mapping[str, Any], arithmetic: Any) -> Outputs:
        runner = self._plain.get(function) if arithmetic == "fp32" else None
        if runner is None:
            runner = Evaluator(function.operations, function.outputs, arithmetic)
        if arithmetic == "fp32":
            self._plain[function] = runner
        boxes = {v: Box(torch.zeros(_state_shape(v))) for v in _states(function)}
        tensors = {v: as_tensor(numbers[n]) for n, v in function.inputs.items() if v not in boxes}
        for var, box in boxes.items():
            if var.name in numbers:
                box.value = as_tensor(numbers[var.name]).float().clone()  # it is written to
        results = runner({**tensors, **boxes})  # type: ignore[dict-item]
        outputs = {v.name: x for v, x in zip(function.outputs, results, strict=True)}
        return _numbers(outputs) | {f"state {v.name}": box.value for v, box in boxes.items()}

    def before(self, numbers: Numbers, arithmetic: Any = "fp32") -> Outputs:
        """Return the outputs of the first function."""
        plain = {v.name: x.numpy() for v, x in numbers.items()}
        outputs = self._run(self.old, plain, arithmetic)
        if not self.contract:
            return outputs
        adapted = adapt_outputs(self.contract, {n: x.numpy() for n, x in outputs.items()}, plain)
        return {n: as_tensor(x) for n, x in adapted.items()}

    def after(self, numbers: Numbers, arithmetic: Any = "fp32") -> Outputs:
        """Return the outputs of the second function."""
        plain = adapt_inputs(self.contract, {v.name: x.numpy() for v, x in numbers.items()})
        return self._run(self.new, plain, arithmetic)

    def meaning(self, numbers: Numbers) -> Outputs | None:
        """Return the outputs of the first function; None where it cannot take these inputs."""
        try:
            return self.before(numbers)
        except InterpretError:
            return None

    def differing_outputs(self, numbers: Numbers, old: Outputs) -> list[str]:
        """Return the names of outputs that differ beyond the gate and the old ones' own rounding."""
        new = self.after(numbers)
        floats = [x for x in numbers.values() if x.is_floating_point() and x.numel()]
        strict = all(float(x.abs().max()) <= ORDINARY for x in floats)
        names = [n for n in old.keys() & new.keys() if self._differs(old[n], new[n], strict)]
        return self._beyond_rounding(numbers, names, old, new, strict) if names else []

    def _differs(self, old: torch.Tensor, new: torch.Tensor, strict: bool) -> bool:
        if old.shape != new.shape:
            return True
        return _nearness(*_defined(old, new, strict)) < self.gate

    def _beyond_rounding(
        self, numbers: Numbers, names: Sequence[str], old: Outputs, new: Outputs, strict: bool
    ) -> list[str]:
        """Return the outputs that differ in fp64 too, by more than errors at the gate change the old side."""
        share = 10 ** (-self.gate / 20)
        finer, finer_new = self.before(numbers, Double()), self.after(numbers, Double())
        moved = [self.before(numbers, PerturbedRounding(share, seed)) for seed in range(DRAWS)]
        differing = []
        for name in names:
            a, b = _defined(old[name], new[name], strict)
            if a.shape != b.shape or bool((torch.isfinite(a) & ~torch.isfinite(b)).any()):
                differing.append(name)
                continue
            if a.is_floating_point():
                a, b = _defined(finer[name], finer_new[name], strict)
            off = torch.stack([(m[name].double() - a.double()).abs() for m in moved]).amax(0).nan_to_num(0)
            excused = (a.double() - b.double()).abs() <= MOST_OFF * off
            if _nearness(a, torch.where(excused, a, b)) < self.gate:
                differing.append(name)
        return differing


def _numbers(outputs: Mapping[str, Any]) -> Outputs:
    """Return outputs as numbers: those of a dictionary by its keys; a label follows from its probabilities."""
    of_keys = {n: x for n, x in outputs.items() if isinstance(x, Mapping)}
    listed = {n: torch.tensor([float(x[key]) for key in sorted(x)]) for n, x in of_keys.items()}
    return {n: x for n, x in outputs.items() if isinstance(x, torch.Tensor)} | listed


def _defined(old: torch.Tensor, new: torch.Tensor, strict: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Return both values, made equal where the old one means nothing."""
    if old.shape != new.shape or not old.is_floating_point():
        return old, new
    undefined = torch.isnan(old) if strict else ~torch.isfinite(old) | ~torch.isfinite(new)
    return old, torch.where(undefined, old, new.to(old.dtype))


def _nearness(old: torch.Tensor, new: torch.Tensor) -> float:
    """Return the PSNR in dB of the worst row along any axis, or of all elements if that is lower.

    Rows as small as rounding are left out.
    """
    worst = closeness(old, new)
    if not math.isfinite(worst) or old.shape != new.shape:
        return worst
    are_finite = torch.isfinite(old) & torch.isfinite(new)
    a, apart = (torch.where(are_finite, x.double(), 0.0).abs() for x in (old, old - new))
    least = ROUNDED_OFF * float(a.median())
    for axis in row_axes(old):
        peaks, rms = rows_along(a, axis).amax(1), rows_along(apart, axis).square().mean(1).sqrt()
        counted = (peaks > least) & (rms > 0)
        ratios = (peaks / rms)[counted]
        if ratios.numel():
            worst = min(worst, 20 * math.log10(float(ratios.min())))
    return worst


def run_trial(
    old: Function,
    new: Function,
    sample: Mapping[str, Array],
    *,
    contract: Sequence[InterfaceChange] = (),
    gate: float = 60.0,
    assume: Mapping[str, tuple[int, int]] = MappingProxyType({}),
    seed: int = 0,
    plan: TrialLengths = TrialLengths(),  # noqa: B008
) -> TrialResult:
    """Run both functions on adversarial inputs.

    Args:
        old: the reference.
        new: the candidate.
        sample: inputs of `old`, by name; their shapes come first. Their integers are used where no others can
            be drawn.
        contract: declared interface changes.
        gate: PSNR in dB from which outputs count as equal.
        assume: name of an input -> (least, largest) integer that is given.
        seed: of the numbers.
        plan: other lengths to try.
    """
    both = _Both(old, new, contract, gate, assume)
    ops = [*walk_ops(old), *walk_ops(new)]
    compared, lengths = 0, list[int]()
    for size in (sampled_lengths(both.inputs, sample), *filter(None, plan.all)):
        with with_lengths(size):
            fewest = size in plan.others
            for numbers in _drawn_inputs(both, ops, sample, seed, fewest=fewest):
                if (wanted := both.meaning(numbers)) is None:
                    continue
                if words := _failure(both, numbers, wanted, size):
                    return TrialResult(compared, tuple(lengths), words, _counterexample(both, numbers))
                compared += sum(int(torch.isfinite(x).sum()) for x in wanted.values())
                lengths += [n for n in set(size.values()) if n not in lengths]
    return TrialResult(compared, tuple(lengths), finite_only=_differ_on_nonfinite(both, seed))


def _differ_on_nonfinite(both: _Both, seed: int) -> bool:
    """Return whether the two differ where an input is infinite or NaN."""
    rng = np.random.default_rng(seed)
    drawing = Drawing(lambda var, rng: None, (), both.bounds())
    for i in range(AGAIN):
        drawn = {v: drawing.draw(v, "nonfinite" if i % 2 == 0 else "normal", rng) for v in both.inputs}
        if i % 2:  # each input meets them where the others do, and where they do not
            drawn |= crossed(both.inputs, drawing, drawn, 0)
        numbers = {v: as_tensor(x) for v, x in drawn.items()}
        try:
            old, new = both.before(numbers), both.after(numbers)
        except InterpretError:
            return False
        if any(closeness(old[n], new[n]) < both.gate for n in old.keys() & new.keys()):
            return True
    return False


def _failure(both: _Both, numbers: Numbers, old: Outputs, size: Lengths) -> str:
    """Return how the two differ on some inputs, in words; "" where they do not."""
    try:
        names = both.differing_outputs(numbers, old)
    except InterpretError as error:
        alike = len(set(size.values())) == 1 or not size
        return f"the second model cannot be run: {str(error).splitlines()[0]}" if alike else ""
    return f"adversarial inputs give another {', '.join(names)}" if names else ""


def _drawn_inputs(
    both: _Both, ops: Sequence[Operation], sample: Mapping[str, Array], seed: int, *, fewest: bool
) -> Iterator[Numbers]:
    """Yield inputs, round by round; integers are those of the sample where the old side takes no others."""
    bounds = both.bounds()
    rng, constants = np.random.default_rng(seed), constants_of(ops)
    inside = [list(walk_ops(function)) for function in (both.old, both.new)]
    pairs = {
        v: both.new.inputs[v.name]
        for v in both.inputs
        if np_dtype(v).kind in "iu" and v.name in both.new.inputs
    }
    rows = {v: rows_apart(v, inside[0], new, inside[1]) for v, new in pairs.items()}
    rows |= {v: [*rows[v], *_apart_at(both, v, bounds, sample, ops)] for v in rows if not fewest}
    runs = [run for side in (both.old, both.new) for run in ops_with_run_counts(side) if not is_weight(run[0])]
    effort = sum(n * (OVERHEAD + (work := work_of(op)).flop + work.moved) for op, n in runs)
    count = FEWEST if fewest else max(FEWEST, min(AGAIN * len(ROUNDS), MOST_EFFORT // max(effort, 1)))
    if count > FEWEST:
        bounds |= _accepted_places(both, bounds, seed)
    whole = {v: as_tensor(sample[v.name]) for v in both.inputs if np_dtype(v).kind in "iu"}
    sampled = all(tuple(x.shape) == drawn_shape(v) for v, x in whole.items())
    aims = itertools.islice(_aimed_inputs(both, ops, bounds, rng), 0 if fewest else count)
    kinds = AT_LENGTHS if fewest else itertools.islice(itertools.cycle(ROUNDS), count)
    rounds: list[tuple[str, float, dict[Var, Array]]] = [(kind, most, {}) for kind, most in kinds]
    for kind, magnitude, aim in itertools.chain(rounds, (("normal", math.inf, aim) for aim in aims)):
        drawing = Drawing(lambda var, rng: None, constants, bounds, magnitude=magnitude, rows=rows)
        numbers = {v: as_tensor(aim[v] if v in aim else drawing.draw(v, kind, rng)) for v in both.inputs}
        half = np.dtype(np.float16)
        numbers |= {v: as_tensor(drawing.floats(_state_shape(v), half, kind, rng)) for v in _states(both.old)}
        if sampled and whole and (both.contract or both.meaning(numbers) is None):
            numbers |= whole
        yield numbers


def _accepted_places(both: _Both, bounds: Bounds, seed: int) -> Bounds:
    """Return the ranges in which the first model accepts integers that say where or how many."""

    def taken(places: Bounds) -> bool:
        drawing, rng = Drawing(lambda var, rng: None, bounds=bounds | places), np.random.default_rng(seed)
        return both.meaning({v: as_tensor(drawing.draw(v, "normal", rng)) for v in both.inputs}) is not None

    free = [v for v in bounds if not is_looked_up(v) and v not in both.assumed]
    return largest_accepted(free, taken)


def _apart_at(
    both: _Both, var: Var, bounds: Bounds, sample: Mapping[str, Array], ops: Sequence[Operation]
) -> list[int]:
    """Return the integers of an input at which the two differ, with the other inputs as in the sample."""
    low, high = bounds.get(var, (0, len(rows_read(ops)) - 1))
    if np.ndim(low) or np.ndim(high) or both.contract:
        return []
    others = {v: as_tensor(sample[v.name]) for v in both.inputs if v is not var}

    def run(index: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
        old, new = (side(others | {var: index}) for side in (both.before, both.after))
        return [(old[n], new[n]) for n in old.keys() & new.keys()]

    return apart_at(run, var, range(int(low), int(high) + 1), ops)


def _aimed_inputs(
    both: _Both, ops: Sequence[Operation], bounds: Bounds, rng: np.random.Generator
) -> Iterator[dict[Var, Array]]:
    """Yield inputs that hit each constant of both sides; see `adversarial.aimed`."""
    drawing = Drawing(lambda var, rng: None, bounds=bounds)
    return aimed(both.inputs, drawing, targets(ops), rng, apart=True)


def _counterexample(both: _Both, numbers: Numbers) -> str:
    """Return a small counterexample as Python."""

    def still(candidate: Numbers) -> bool:
        try:
            return bool(both.differing_outputs(candidate, both.before(candidate)))
        except InterpretError:
            return False

    numbers = made_smaller(numbers, still)
    try:
        old, new = both.before(numbers), both.after(numbers)
    except InterpretError:
        return written(numbers, [])
    return written(numbers, [(old[n], new[n]) for n in old.keys() & new.keys()])


def _states(function: Function) -> list[Var]:
    return [v for v in function.inputs.values() if types.is_state(v.sym_type)]


def _state_shape(var: Var) -> tuple[int, ...]:
    return tuple(int(d) for d in var.sym_type.wrapped_type().get_shape())


def sampled_lengths(inputs: Sequence[Var], sample: Mapping[str, Array]) -> Lengths:
    """Return the lengths that the sample has."""
    pairs = ((d, n) for v in inputs for d, n in zip(v.shape or (), np.shape(sample[v.name]), strict=True))
    return {d: n for d, n in pairs if is_symbolic(d) and d.is_Symbol}
