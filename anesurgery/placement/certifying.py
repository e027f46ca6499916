"""`certify`: measure the error of every op in fp16 and in the engine's arithmetic, and give a verdict.

The model runs exactly and in each arithmetic, op by op (`interpret.several_arithmetics`): once with errors
carried along, and once with exact inputs to each op, which isolates the op's own error. Errors are those of one
set of inputs; `steps` calls the model several times (`op_errors.step_errors`). `EpsilonWatch`, at the end,
measures norms whose epsilon the conversion changed.

`search` looks for inputs on which fp16 is worse, within the range of the given ones. A `Trial` proposes inputs.
For float inputs torch differentiates the interpreter (`Slopes`), and a trial follows the gradient of one of the
largest values, or of the error of the outputs in fp16. Random changes start from the inputs that came nearest
to a failure; they alone change integers.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from anesurgery import fp16
from anesurgery.checking.comparison import compare
from anesurgery.checking.exactness import repairs_of_squares
from anesurgery.checking.output_comparison import OutputComparison, compare_arrays, psnr
from anesurgery.display import Drawn, drawn, finite
from anesurgery.doors import door
from anesurgery.errors import SurgeryError
from anesurgery.facts.makeup import logits_of
from anesurgery.files import arrays
from anesurgery.files.package import Loaded
from anesurgery.interpret import Executable, Listener, Predictor, run, sampling
from anesurgery.interpret.arithmetic.fp64 import Double
from anesurgery.interpret.arithmetic.properties import CHIPS
from anesurgery.interpret.predictor import bound
from anesurgery.interpret.several_arithmetics import OpResults, SeveralArithmetics
from anesurgery.loading import load
from anesurgery.mil import Array, Function, Operation, Program, Var, function_of, np_dtype, walk_ops
from anesurgery.placement.choices import Choice, ChoiceWatch, choosing_ops, cost_in_words, exact_ops
from anesurgery.placement.evidence import Finding
from anesurgery.placement.findings_in_words import hidden_risks, report_lines
from anesurgery.placement.inspection import Inspection
from anesurgery.placement.inspector import inspect_program
from anesurgery.placement.models import inspect_other
from anesurgery.placement.op_errors import (
    OpError,
    StepErrors,
    op_error,
    step_errors,
    unmasked_size,
    with_repairs_of_neighbours,
)
from anesurgery.placement.rules.lost_in_conversion import LEAST_CHANGE, grown_epsilon
from anesurgery.placement.target import Target
from anesurgery.registry import INTERPRETER

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


def _described(values: Tensors, ranges: Ranges) -> str:
    """Return in words where the numbers of each input lie in its range."""
    words = []
    for name, (low, high) in ranges.items():
        numbers = np.asarray(values[name]).astype(np.float64)
        share = float(np.mean(np.isclose(numbers, low) | np.isclose(numbers, high)))
        words.append(f"{name} from {numbers.min():.3g} to {numbers.max():.3g}, {share:.0%} of it at an end")
    return ", ".join(words)


def _trials(program: Program, function: str | None, first: Tensors, ranges: Ranges) -> list[Trial]:
    """Return the trials that start from the first inputs: gradients for float inputs, and random changes."""
    floats = [n for n in ranges if np.asarray(first[n]).dtype.kind == "f" and ranges[n][0] < ranges[n][1]]
    by_gradient = []
    if floats:
        slopes = Slopes(program, function, floats)
        for op in slopes.largest(first):
            by_gradient.append(Trial(f"the gradient of {op.outputs[0].name}", first, partial(slopes.of, op)))
        by_gradient.append(Trial("the gradient of the error of the outputs", first, slopes.of_error))
    return [*by_gradient, Trial("random changes", first)]


class _Peaks(Listener):
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
            self.found[op] = unmasked_size(op.outputs[0], value)


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
        peaks = _Peaks()
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


Values = Mapping[str, Array]
GATE = 40.0
"""The default least PSNR in dB: it is reached by errors of a hundredth of the largest value."""
MARGIN = 4.0
"""A value is at risk if so many times of it overflows fp16. A choice: other inputs may give larger values."""


@dataclass(frozen=True)
class Certificate(Drawn):
    """The result of `certify`.

    Attributes:
        rows: a row for each op with floats, in file order.
        outputs: arithmetic -> the error of each output on the worst inputs tried.
        verdict: "holds", "at risk" or "fails".
        why: the op and the inputs behind the verdict, in words.
        samples: number of sets of inputs that were given or drawn.
        searched: number of further sets that were tried; 0 if one of the given sets fails.
        gate: PSNR in dB that every output must reach.
        worst_inputs: the inputs that miss the gate, or else with the lowest PSNR of an output, as the program
            reads them.
        choices: the ops that choose among floats, the one that changes most first.
        over: how the error grows over many calls; None where `steps` asked for one.
        notes: why the target may not load the model, and reports about its ops.
    """

    rows: tuple[OpError, ...]
    outputs: Mapping[str, tuple[OutputComparison, ...]]
    verdict: str
    why: str
    samples: int
    searched: int
    gate: float
    worst_inputs: Values = field(repr=False, default_factory=dict)
    choices: tuple[Choice, ...] = ()
    over: StepErrors | None = None
    notes: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Does it hold?"""
        return self.verdict == "holds"

    @property
    def enters(self) -> tuple[OpError, ...]:
        """The ops by the error that they add themselves, the largest first."""
        return tuple(sorted(self.rows, key=lambda row: row.worst))

    def save_html(self, path: str | os.PathLike[str]) -> Path:
        """Write the ops with their data flow, coloured by error, as one HTML file that needs no network.

        Args:
            path: of the file; an existing one is replaced.

        Returns:
            The path as written.

        Raises:
            SurgeryError: it cannot be written.
        """
        return arrays.write_text(Path(path).expanduser(), drawn(self, "page"))

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        rows = [
            vars(r)
            | {"own": finite(r.own), "grown": finite(r.grown), "histogram": r.histogram and vars(r.histogram)}
            for r in self.rows
        ]
        outputs = {a: [finite(vars(o)) for o in compared] for a, compared in self.outputs.items()}
        return {
            "verdict": self.verdict,
            "why": self.why,
            "gate_db": self.gate,
            "samples": self.samples,
            "searched": self.searched,
            "outputs": outputs,
            "ops": rows,
            "choices": [finite(vars(c) | {"margin": list(c.margin)}) for c in self.choices],
            "notes": list(self.notes),
            "over_steps": None if self.over is None else _steps_to_json(self.over),
        }


def _steps_to_json(over: StepErrors) -> dict[str, Any]:
    """Return the errors over many calls as plain data."""
    decibels = {a: [finite({"db": v})["db"] for v in row] for a, row in over.decibels.items()}
    return vars(over) | {"steps": over.count, "decibels": decibels}


@door("inputs", "seed", modules=True)
def certify(
    model: Any,
    inputs: Values | Iterable[Values] | None = None,
    *,
    target: str | None = None,
    function: str | None = None,
    gate: float = GATE,
    search: int = 0,
    steps: int = 1,
    feedback: Mapping[str, str] | None = None,
    seed: int = 0,
    engine: str = INTERPRETER,
) -> Certificate:
    """Check op by op whether a model keeps its numbers in fp16 and on the engine.

    Args:
        model: path, MLModel or MIL program.
        inputs: one set of inputs by name, or several; one sampled set when absent.
        target: chip and OS, as "M1/macOS 14", for the arithmetic and for the rules that name repairs.
        function: which function; `main` or the first by default.
        gate: the least PSNR of each output in dB, against exact arithmetic.
        search: how many further sets of inputs to try, within the range of each given input. Floats follow
            gradients of the largest values and of the error; integers change at random. There is no search if
            given inputs fail.
        steps: how many calls in a row to try, with outputs fed back to inputs. States live on, and the sets
            of inputs are used in turn.
        feedback: output -> the input that it feeds, for `steps`; found by names, else by shapes, when absent.
        seed: of the sampled inputs and of the search.
        engine: "coreai": Apple's Core AI runtime must give the same outputs too, up to the gate. It runs the
            model as it is stored.

    Returns:
        The errors of each op and of the outputs, and a verdict. "fails": a given or drawn set of inputs
        misses the gate, an output is not finite, or a choice (a class, an index) changes. "at risk": only the
        search found such inputs, a value comes near 65504, an output ignores all inputs, the conversion lost
        a part of the model, or the engine was reported wrong for an op. "holds": none of these.

    Raises:
        InterpretError: inputs that do not fit.
        SurgeryError: an empty list of inputs; or no output feeds an input, though `steps` asks for it;
            or `feedback` without `steps`.
    """
    _check_feedback(feedback, steps)
    loaded = load(model)
    both = ("fp16", arithmetic_of(target))
    first = Predictor(loaded, function=function)
    called_with = [first.sample(seed)] if inputs is None else _input_sets(inputs)
    trial = _Comparer(loaded, function, both, gate)
    samples = [bound(loaded, v, function) for v in called_with]
    one = len(samples) == 1 and not search
    worst = _TriedInputs(samples[0]) if one else min(map(trial.judged, samples), key=_TriedInputs.badness)
    walk = _WorstInputSearch(trial, loaded.program, function, samples, worst)
    if search and not worst.misses:
        worst = walk.worst_of(search, np.random.default_rng(seed))
    inspection = inspect_program(loaded, Target.parse(target), function=function)
    as_given = inspect_other(model, Target.parse(target), inspect_program) or inspection
    walked = trial.rows(worst.values, _numeric_findings(inspection), _norm_repairs(loaded.program, function))
    rows, outputs = walked.rows, walked.outputs
    choices = _choices_with_repairs(walked.choices, loaded.program, function, worst.values, inspection)
    over = step_errors(loaded, function, both, called_with, steps, feedback) if steps > 1 else None
    verdict, why = _verdict(rows, outputs, trial.misses(outputs), worst.described, gate)
    findings = tuple(without_small(inspection.all_findings, walked.norms_off))
    further = _further_verdict(trial, choices, over, worst.values, first.sample(seed + 1), gate)
    by_engine = _engine_verdict(loaded, model, worst.values, function, gate, engine)
    for other in (further, hidden_risks(findings), by_engine):
        verdict, why = _worse((verdict, why), other)
    return Certificate(
        rows,
        outputs,
        verdict,
        why,
        len(samples),
        walk.tried,
        gate,
        worst.values,
        choices,
        over,
        (*filter(None, [as_given.refused]), *report_lines(findings)),
    )


def _input_sets(inputs: Values | Iterable[Values]) -> list[Any]:
    """Return the given sets of inputs as a list; raise a SurgeryError if there are none."""
    sets = [inputs] if isinstance(inputs, Mapping) else list(inputs)
    if not sets:
        raise SurgeryError("certify: the list of inputs is empty; give at least one set")
    return sets


def _check_feedback(feedback: Mapping[str, str] | None, steps: int) -> None:
    """Raise a SurgeryError if `feedback` is given for a single call."""
    if feedback and steps == 1:
        raise SurgeryError("feedback= is for several calls in a row; give steps=2 or more")


def _engine_verdict(
    loaded: Loaded, subject: Any, values: Values, function: str | None, gate: float, engine: str
) -> tuple[str, str]:
    """Return the verdict of another engine: "fails" if its outputs differ from those of the interpreter."""
    if engine == INTERPRETER:
        return "holds", ""
    comparison = compare(loaded.program, subject, values, gate=gate, function=function, engine=engine)
    return ("holds", "") if comparison.ok else ("fails", f"run by {engine}: {comparison.verdict}")


def arithmetic_of(target: str | None) -> str:
    """Return the arithmetic of a target's engine: "ane:M1" if that of its chip is known, else "ane"."""
    chips = [chip for chip in Target.parse(target).chips if chip in CHIPS] if target else []
    return f"ane:{chips[0]}" if len(chips) == 1 else "ane"


def _norm_repairs(program: Program, function: str | None) -> dict[str, str]:
    """Return {name of the square in a norm: the pass that rewrites the norm so that fp16 holds it}."""
    return {v.name: name for v, name in repairs_of_squares(function_of(program, function)).items()}


def _numeric_findings(inspection: Inspection) -> dict[str, tuple[Any, ...]]:
    """Return {name of an op: the numeric findings of `inspect` about it}."""
    return {row.name: tuple(f for f in row.findings if f.kind == "numeric") for row in inspection.ops}


@dataclass(frozen=True)
class _TriedInputs:
    """A set of inputs, with the errors of the outputs on it.

    Attributes:
        values: the inputs.
        misses: the outputs that miss the gate, in words.
        psnr: the lowest PSNR of an output in dB; minus infinity if an output is not finite.
        headroom: the distance in dB of the largest value of an op from the end of fp16.
        described: how the search found the inputs, and where they lie; "" if they were given or drawn.
    """

    values: Values
    misses: Sequence[str] = ()
    psnr: float = math.inf
    headroom: float = math.inf
    described: str = ""

    def badness(self) -> tuple[bool, float]:
        """Return a sort key: the worst inputs come first."""
        return not self.misses, self.psnr

    def distance(self, gate: float) -> float:
        """Return the dB to the nearest failure: to the gate, or to the end of fp16."""
        return min(self.psnr - gate, self.headroom)


@dataclass(frozen=True)
class _OpByOp:
    """The errors on one set of inputs, op by op.

    Attributes:
        rows: the errors of every op.
        outputs: arithmetic -> the error of each output.
        choices: the ops that choose among floats.
        norms_off: op that adds an epsilon -> the relative change of its norm in the conversion.
    """

    rows: tuple[OpError, ...]
    outputs: dict[str, tuple[OutputComparison, ...]]
    choices: tuple[Choice, ...]
    norms_off: dict[str, float]


class _WorstInputSearch:
    """The search for worse inputs, from the worst of those that were given."""

    def __init__(
        self,
        trial: _Comparer,
        program: Program,
        function: str | None,
        samples: Sequence[Values],
        first: _TriedInputs,
    ) -> None:
        self._trial, self._program, self._function = trial, program, function
        self._ranges, self._worst, self._nearest = ranges_of(samples), first, first
        self.tried = 0

    def worst_of(self, rounds: int, rng: np.random.Generator) -> _TriedInputs:
        """Return the worst inputs after some rounds of the trials in turn.

        A trial ends if torch cannot differentiate the ops that it needs.
        """
        queue = _trials(self._program, self._function, self._worst.values, self._ranges) if self._ranges else []
        while queue and self.tried < rounds:
            trial = queue.pop(0)
            if trial.uphill is None:
                trial.point = self._nearest.values
            try:
                values = trial.next(self._ranges, rng)
            except RuntimeError:
                continue
            queue.append(trial)
            self.tried += 1
            tried = self._trial.judged(values)
            if tried.badness() < self._worst.badness():
                self._worst = replace(tried, described=f"by {trial.name}; {_described(values, self._ranges)}")
            if tried.distance(self._trial.gate) < self._nearest.distance(self._trial.gate):
                self._nearest = tried
        return self._worst


def _psnr_of_output(output: OutputComparison) -> float:
    """Return the PSNR of an output in dB; minus infinity if an element is not finite on either side."""
    return -math.inf if output.bad or output.undefined or math.isnan(output.psnr) else output.psnr


class _Comparer:
    """Runs one model in several arithmetics and compares the results with the exact ones."""

    def __init__(self, loaded: Loaded, function: str | None, arithmetics: Sequence[str], gate: float) -> None:
        if not math.isfinite(gate):
            raise SurgeryError(f"gate={gate}; give a PSNR in dB")
        self._all = SeveralArithmetics(loaded.program, function, arithmetics)
        self._chosen, self.gate = logits_of(function_of(loaded.program, function)), gate
        self._program, self._function = loaded.program, function

    def judged(self, values: Values) -> _TriedInputs:
        """Return a set of inputs with the errors of the outputs on it; ops are not compared one by one."""
        peaks = _Peaks()
        exact = self._all.exact(values, listener=peaks)
        outputs = {a: self._compared(exact, other(values), values) for a, other in self._all.others.items()}
        psnr = min((_psnr_of_output(o) for compared in outputs.values() for o in compared), default=math.inf)
        return _TriedInputs(values, self.misses(outputs), psnr, peaks.headroom)

    def _compared(
        self, exact: Mapping[str, Any], rounded: Mapping[str, Any], values: Values
    ) -> tuple[OutputComparison, ...]:
        """Compare float outputs with the exact ones; an infinity is right if fp64 gives it too."""
        arrays = {n: np.asarray(v) for n, v in exact.items() if np.asarray(v).dtype.kind == "f"}
        rows = tuple(compare_arrays(n, v, np.asarray(rounded[n])) for n, v in arrays.items())
        if any(row.undefined for row in rows):
            meant = run(self._program, values, function=self._function, precision=Double())  # type: ignore[arg-type]
            rows = tuple(compare_arrays(n, v, np.asarray(rounded[n]), meant[n]) for n, v in arrays.items())
        return rows

    def misses(self, outputs: Mapping[str, Sequence[OutputComparison]]) -> list[str]:
        """Return the outputs that miss the gate, or whose best class or token changes, in words."""
        words = []
        for arithmetic, compared in outputs.items():
            for o in compared:
                if _psnr_of_output(o) < self.gate:
                    far = _not_finite(o) or f"agrees to only {o.psnr:.1f} dB"
                    words.append(f"{o.name} {far} in {arithmetic} arithmetic")
                elif o.name in self._chosen and o.top_k is not None and o.top_k < 1:
                    rows = f"{1 - o.top_k:.1%} of its rows"
                    words.append(f"{o.name} has another best entry in {rows} in {arithmetic} arithmetic")
        return words

    def rows(
        self, values: Values, findings: Mapping[str, tuple[Any, ...]], norms: Mapping[str, str]
    ) -> _OpByOp:
        """Return the errors of every op and output on one set of inputs, with choices and changed norms."""
        rows, watch = [], ChoiceWatch(self._all.exact.function, values)
        norms_off = EpsilonWatch(self._all.exact.function)
        for results in self._all(values):
            watch.see(results)
            norms_off.see(results)
            row = op_error(results)
            if row is not None:
                about_op = findings.get(row.name, ())
                rules = tuple(dict.fromkeys(f.rule for f in about_op))
                remedies = [norms[row.name]] if row.name in norms else [f.remedy for f in about_op if f.remedy]
                repairs = tuple(dict.fromkeys(remedies))
                rows.append(replace(row, rules=rules, repairs=repairs))
        exact = self._all.outputs["fp32"]
        outputs = {a: self._compared(exact, self._all.outputs[a], values) for a in self._all.others}
        return _OpByOp(with_repairs_of_neighbours(rows, self.gate), outputs, watch.choices, norms_off.changes)

    def unmoved(self, values: Values, others: Values) -> list[str]:
        """Return the outputs that change neither with other inputs nor with reversed ones."""
        first = {n: v for n, v in self._all.exact(values).items() if isinstance(v, np.ndarray) and v.size}
        names = list(first)
        for inputs in (others, {n: np.flip(v) for n, v in values.items()}):
            if names:
                second = self._all.exact({**values, **inputs})
                names = [
                    n
                    for n in names
                    if np.array_equal(first[n], second[n], equal_nan=first[n].dtype.kind == "f")
                ]
        return names


def _not_finite(output: OutputComparison) -> str:
    """Return the share of an output that is NaN or infinite, in words; "" for none."""
    count = output.bad + output.undefined
    total = output.compared + count
    if count and output.only_reference == count:
        return f"is NaN or infinite in {count / total:.0%} of its elements in fp32, and finite"
    return f"is NaN or infinite in {count / total:.0%} of its elements" if count else ""


def _choices_with_repairs(
    choices: Sequence[Choice], program: Program, function: str | None, values: Values, inspection: Inspection
) -> tuple[Choice, ...]:
    """Return all choices, the worst first; those that change with the ops to keep in fp32, and their cost."""
    ops = {op.outputs[0].name: op for op in choosing_ops(function_of(program, function))}
    named = []
    for choice in sorted(choices, key=lambda c: -c.worst):
        if choice.worst:
            arithmetic = max(choice.changed, key=lambda a: choice.changed[a])
            exact = exact_ops(program, function, values, ops[choice.name], arithmetic)
            cost = cost_in_words(inspection.ops, exact) if exact else ""
            choice = replace(choice, exact_ops=tuple(op.outputs[0].name for op in exact), cost=cost)
        named.append(choice)
    return tuple(named)


def _further_verdict(
    trial: _Comparer,
    choices: Sequence[Choice],
    over: StepErrors | None,
    values: Values,
    others: Values,
    gate: float,
) -> tuple[str, str]:
    """Return the verdict on what the PSNR of one call does not show.

    These are choices that change, errors over many calls, and outputs that ignore all inputs.
    """
    changed = [choice for choice in choices if choice.worst]
    if changed:
        keep = changed[0].exact_ops
        words = f"; {_ops_in_words(keep)} in fp32 keep them ({changed[0].cost})" if keep else ""
        return "fails", changed[0].words + words
    if over is not None and (below := over.below(gate)):
        ends = ", ".join(f"below {gate:g} dB from step {k} on in {a}" for a, k in below.items())
        return "fails", f"{ends}; {over.words}"
    if unmoved := trial.unmoved(values, others):
        return "at risk", f"{', '.join(unmoved)}: the same whatever the inputs are, so nothing was tested"
    return "holds", "" if over is None else over.words


def _ops_in_words(ops: Sequence[str]) -> str:
    """Return some names of ops in words: all of up to 3, else the first and the last."""
    return ", ".join(ops) if len(ops) <= 3 else f"{len(ops)} ops, {ops[0]} to {ops[-1]},"


def _worse(first: tuple[str, str], second: tuple[str, str]) -> tuple[str, str]:
    """Return the worse of two (verdict, reason) pairs; of equal verdicts, with both reasons."""
    order = ("holds", "at risk", "fails")
    worst = max(first, second, key=lambda pair: order.index(pair[0]))
    both = [why for verdict, why in (first, second) if verdict == worst[0] and why]
    return worst[0], "; ".join(both)


def _verdict(
    rows: Sequence[OpError],
    outputs: Mapping[str, Sequence[OutputComparison]],
    missed: Sequence[str],
    searched: str,
    gate: float,
) -> tuple[str, str]:
    """Return the verdict on one set of inputs and the reason; `searched` says how a search found them."""
    worst = min(rows, key=lambda row: row.worst, default=None)
    blamed = "" if worst is None else f"; the largest error enters at {worst.op_type} {worst.name}"
    first_nan = next((row for row in rows if math.isnan(row.largest)), None)
    if first_nan is not None:
        worst, blamed = first_nan, f"; {first_nan.op_type} {first_nan.name} is NaN in fp32 too"
    blamed += f" ({', '.join(worst.repairs)} may help)" if worst is not None and worst.repairs else ""
    if missed and searched:
        return "at risk", f"{'; '.join(missed)} on inputs that the search found {searched}{blamed}"
    if missed:
        return "fails", "; ".join(missed) + blamed
    near_overflow = [row for row in rows if row.largest * MARGIN > fp16.LARGEST and math.isfinite(row.largest)]
    if near_overflow:
        row = max(near_overflow, key=lambda r: r.largest)
        helps = f" ({', '.join(row.repairs)} may help)" if row.repairs else ""
        reaches = f"{row.op_type} {row.name} reaches {row.largest:.3g}"
        return "at risk", f"{reaches}; fp16 ends at {fp16.LARGEST:.0f}{helps}"
    if not any(o.compared for compared in outputs.values() for o in compared) and any(outputs.values()):
        return "fails", "no output holds a finite number"
    least = min((_psnr_of_output(o) for compared in outputs.values() for o in compared), default=math.inf)
    if least == math.inf:
        return "holds", "every output is identical"
    return "holds", f"every output agrees to {least:.1f} dB or more, and {gate:g} dB are required"


# The error of norms whose epsilon grew in the conversion, on the inputs of a run.

RULE = "lost-epsilon"


class EpsilonWatch:
    """Records, while ops run one by one, what is needed for the error of norms whose epsilon grew."""

    def __init__(self, function: Function) -> None:
        found = ((op.outputs[0].name, grown_epsilon(op)) for op in walk_ops(function))
        self._grown = {name: grown for name, grown in found if grown is not None}
        self._wanted = {v for grown in self._grown.values() for v in (grown.scale, grown.mean)}
        self._seen: dict[Var, Any] = {}

    def see(self, results: OpResults) -> None:
        """Record the exact scale and mean of a norm."""
        self._seen |= {
            var: value
            for var, value in zip(results.op.outputs, results.exact, strict=True)
            if var in self._wanted
        }

    @property
    def changes(self) -> dict[str, float]:
        """{op that adds the epsilon: the relative change of the norm}."""
        return {
            name: grown.change(self._seen[grown.scale], self._seen[grown.mean])
            for name, grown in self._grown.items()
            if grown.scale in self._seen and grown.mean in self._seen
        }


def without_small(findings: Iterable[Finding], changes: dict[str, float]) -> Iterator[Finding]:
    """Yield the findings, without those about norms that hardly change on these inputs."""
    for finding in findings:
        if finding.rule != RULE or not changes.get(finding.op, 1.0) < LEAST_CHANGE:
            yield finding
