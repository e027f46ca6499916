"""`certify`: measure the error of every op in fp16 and in the engine's arithmetic, and give a verdict.

The model runs exactly and in each arithmetic, op by op (`interpret.several_arithmetics`): once with errors
carried along, and once with exact inputs to each op, which isolates the op's own error. Errors are those of one
set of inputs; `steps` calls the model several times (`op_errors.step_errors`). `EpsilonWatch`
measures norms whose epsilon the conversion changed. Sections: the certificate; `certify` and its verdicts; runs
in several arithmetics; the search; norms.

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
from typing import Any, NamedTuple

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
from anesurgery.interpret.arithmetic.precision import Double
from anesurgery.interpret.arithmetic.properties import CHIPS
from anesurgery.interpret.predictor import bound
from anesurgery.interpret.several_arithmetics import OpResults, SeveralArithmetics
from anesurgery.loading import load_whole
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

Ranges = Mapping[str, tuple[float, float]]
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
        """Is the verdict "holds"?"""
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
        """Return plain data."""
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
        model: path, MLModel or MIL program. The models of a pipeline are certified as one.
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
    loaded = load_whole(model)
    arithmetics = ("fp16", arithmetic_of(target))
    predictor = Predictor(loaded, function=function)
    called_with = [predictor.sample(seed)] if inputs is None else _input_sets(inputs)
    samples = [bound(loaded, v, function) for v in called_with]
    comparer = _Comparer(loaded, function, arithmetics, gate)
    worst, tried = _worst_inputs(comparer, samples, search, seed)
    inspection = inspect_program(loaded, Target.parse(target), function=function)
    as_given = inspect_other(model, Target.parse(target), inspect_program) or inspection
    norm_repairs = _norm_repairs(loaded.program, function)
    measured = comparer.op_by_op(worst.values, _numeric_findings(inspection), norm_repairs)
    choices = _choices_with_repairs(measured.choices, comparer, worst.values, inspection)
    over = step_errors(loaded, function, arithmetics, called_with, steps, feedback) if steps > 1 else None
    findings = tuple(without_small(inspection.all_findings, measured.norms_off))
    verdict = _verdict(measured, comparer.misses(measured.outputs), worst.described, gate)
    for other in (
        _further_verdict(comparer, choices, over, worst.values, predictor.sample(seed + 1)),
        _Verdict(*hidden_risks(findings)),
        _engine_verdict(loaded, model, worst.values, function, gate, engine),
    ):
        verdict = _worse(verdict, other)
    return Certificate(
        rows=measured.rows,
        outputs=measured.outputs,
        verdict=verdict.words,
        why=verdict.why,
        samples=len(samples),
        searched=tried,
        gate=gate,
        worst_inputs=worst.values,
        choices=choices,
        over=over,
        notes=(*filter(None, [as_given.refused]), *report_lines(findings)),
    )


class _Verdict(NamedTuple):
    """What a certificate says of a model."""

    words: str
    """One of `VERDICTS`."""
    why: str = ""


VERDICTS = ("holds", "at risk", "fails")
"""The verdicts, the best first."""


def _worst_inputs(comparer: _Comparer, samples: Sequence[Values], search: int, seed: int) -> _SearchResult:
    """Return the worst of some inputs, or of those that a search finds if none of them misses the gate."""
    if len(samples) == 1 and not search:
        return _SearchResult(_TriedInputs(samples[0]), 0)
    worst = min(map(comparer.judged, samples), key=_TriedInputs.badness)
    if not search or worst.misses:
        return _SearchResult(worst, 0)
    return _search(comparer, samples, worst, search, np.random.default_rng(seed))


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
) -> _Verdict:
    """Return the verdict of another engine: "fails" if its outputs differ from those of the interpreter."""
    if engine == INTERPRETER:
        return _Verdict("holds")
    comparison = compare(loaded.program, subject, values, gate=gate, function=function, engine=engine)
    return _Verdict("holds") if comparison.ok else _Verdict("fails", f"run by {engine}: {comparison.verdict}")


def arithmetic_of(target: str | None) -> str:
    """Return the arithmetic of a target's engine: "ane:M1" if that of its chip is known, else "ane"."""
    chips = [chip for chip in Target.parse(target).chips if chip in CHIPS] if target else []
    return f"ane:{chips[0]}" if len(chips) == 1 else "ane"


def _norm_repairs(program: Program, function: str | None) -> dict[str, str]:
    """Return {name of the square in a norm: the pass that rewrites the norm so that fp16 holds it}."""
    return {v.name: name for v, name in repairs_of_squares(function_of(program, function)).items()}


def _numeric_findings(inspection: Inspection) -> dict[str, tuple[Finding, ...]]:
    """Return {name of an op: the numeric findings of `inspect` about it}."""
    return {row.name: tuple(f for f in row.findings if f.kind == "numeric") for row in inspection.ops}


def _choices_with_repairs(
    choices: Sequence[Choice], comparer: _Comparer, values: Values, inspection: Inspection
) -> tuple[Choice, ...]:
    """Return all choices, the worst first; those that change with the ops to keep in fp32, and their cost."""
    program, function = comparer.program, comparer.function
    ops = {op.outputs[0].name: op for op in choosing_ops(function_of(program, function))}
    completed = []
    for choice in sorted(choices, key=lambda c: -c.worst):
        if choice.worst:
            arithmetic = max(choice.changed, key=lambda a: choice.changed[a])
            exact = exact_ops(program, function, values, ops[choice.name], arithmetic)
            cost = cost_in_words(inspection.ops, exact) if exact else ""
            choice = replace(choice, exact_ops=tuple(op.outputs[0].name for op in exact), cost=cost)
        completed.append(choice)
    return tuple(completed)


def _further_verdict(
    comparer: _Comparer,
    choices: Sequence[Choice],
    over: StepErrors | None,
    values: Values,
    other_values: Values,
) -> _Verdict:
    """Return the verdict on what the PSNR of one call does not show.

    Args:
        comparer: runs the model.
        choices: the ops that choose among floats: "fails" if the choice of one changes, the worst first.
        over: the errors over many calls: "fails" if they fall below the gate.
        values: the inputs.
        other_values: other ones: "at risk" if an output is the same for both.
    """
    changed = [choice for choice in choices if choice.worst]
    if changed:
        exact = changed[0].exact_ops
        words = f"; {_ops_in_words(exact)} in fp32 keep them ({changed[0].cost})" if exact else ""
        return _Verdict("fails", changed[0].words + words)
    if over is not None and (below := over.below(comparer.gate)):
        ends = ", ".join(f"below {comparer.gate:g} dB from step {k} on in {a}" for a, k in below.items())
        return _Verdict("fails", f"{ends}; {over.words}")
    if unmoved := comparer.unmoved(values, other_values):
        words = "the same whatever the inputs are, so nothing was tested"
        return _Verdict("at risk", f"{', '.join(unmoved)}: {words}")
    return _Verdict("holds", "" if over is None else over.words)


def _ops_in_words(ops: Sequence[str]) -> str:
    """Return some names of ops in words: all of up to 3, else the first and the last."""
    return ", ".join(ops) if len(ops) <= 3 else f"{len(ops)} ops, {ops[0]} to {ops[-1]},"


def _worse(first: _Verdict, second: _Verdict) -> _Verdict:
    """Return the worse of two verdicts; of equal ones, with both reasons."""
    worst = max(first, second, key=lambda verdict: VERDICTS.index(verdict.words))
    reasons = [one.why for one in (first, second) if one.words == worst.words and one.why]
    return _Verdict(worst.words, "; ".join(reasons))


def _verdict(measured: _OpByOp, missed: Sequence[str], searched: str, gate: float) -> _Verdict:
    """Return the verdict on one set of inputs.

    Args:
        measured: the errors on them.
        missed: the outputs that miss the gate, in words.
        searched: how a search found the inputs; "" if they were given or drawn.
        gate: the least PSNR of an output, in dB.
    """
    worst = min(measured.rows, key=lambda row: row.worst, default=None)
    first_nan = next((row for row in measured.rows if math.isnan(row.largest)), None)
    blamed = ""
    if first_nan is not None:
        blamed = f"; {first_nan.op_type} {first_nan.name} is NaN in fp32 too{_repairs_in_words(first_nan)}"
    elif worst is not None:
        blamed = f"; the largest error enters at {worst.op_type} {worst.name}{_repairs_in_words(worst)}"
    if missed and searched:
        found = f"on inputs that the search found {searched}"
        return _Verdict("at risk", f"{'; '.join(missed)} {found}{blamed}")
    if missed:
        return _Verdict("fails", "; ".join(missed) + blamed)
    largest = max(
        (row for row in measured.rows if math.isfinite(row.largest)), key=lambda row: row.largest, default=None
    )
    if largest is not None and largest.largest * MARGIN > fp16.LARGEST:
        reaches = f"{largest.op_type} {largest.name} reaches {largest.largest:.3g}"
        ends = f"fp16 ends at {fp16.LARGEST:.0f}{_repairs_in_words(largest)}"
        return _Verdict("at risk", f"{reaches}; {ends}")
    outputs = [output for compared in measured.outputs.values() for output in compared]
    if outputs and not any(output.compared for output in outputs):
        return _Verdict("fails", "no output holds a finite number")
    least = _lowest_psnr(measured.outputs)
    if least == math.inf:
        return _Verdict("holds", "every output is identical")
    return _Verdict("holds", f"every output agrees to {least:.1f} dB or more, and {gate:g} dB are required")


def _repairs_in_words(row: OpError) -> str:
    """Return the passes that may help an op, in parentheses; "" for none."""
    return f" ({', '.join(row.repairs)} may help)" if row.repairs else ""


# Runs in several arithmetics.


@dataclass(frozen=True)
class _TriedInputs:
    """A set of inputs, with the errors of the outputs on it."""

    values: Values
    """The inputs."""
    misses: Sequence[str] = ()
    """The outputs that miss the gate, in words."""
    psnr: float = math.inf
    """The lowest PSNR of an output in dB; minus infinity if an output is not finite."""
    headroom: float = math.inf
    """The distance in dB of the largest value of an op from the end of fp16."""
    described: str = ""
    """How the search found the inputs, and where they lie; "" if they were given or drawn."""

    def badness(self) -> tuple[bool, float]:
        """Return a sort key: the worst inputs come first."""
        return not self.misses, self.psnr

    def distance(self, gate: float) -> float:
        """Return the dB to the nearest failure: to the gate, or to the end of fp16."""
        return min(self.psnr - gate, self.headroom)


@dataclass(frozen=True)
class _OpByOp:
    """The errors on one set of inputs, op by op."""

    rows: tuple[OpError, ...]
    """The errors of every op."""
    outputs: dict[str, tuple[OutputComparison, ...]]
    """Arithmetic -> the error of each output."""
    choices: tuple[Choice, ...]
    """The ops that choose among floats."""
    norms_off: dict[str, float]
    """Op that adds an epsilon -> the relative change of its norm in the conversion."""


def _psnr_of_output(output: OutputComparison) -> float:
    """Return the PSNR of an output in dB; minus infinity if an element is not finite on either side."""
    return -math.inf if output.bad or output.undefined or math.isnan(output.psnr) else output.psnr


def _lowest_psnr(outputs: Mapping[str, Sequence[OutputComparison]]) -> float:
    """Return the lowest PSNR of an output in any arithmetic, in dB; infinite if there is no float output."""
    return min((_psnr_of_output(o) for compared in outputs.values() for o in compared), default=math.inf)


class _Comparer:
    """Runs one model in several arithmetics and compares the results with the exact ones."""

    def __init__(self, loaded: Loaded, function: str | None, arithmetics: Sequence[str], gate: float) -> None:
        if not math.isfinite(gate):
            raise SurgeryError(f"gate={gate}; give a PSNR in dB")
        self._all = SeveralArithmetics(loaded.program, function, arithmetics)
        self._logits = logits_of(function_of(loaded.program, function))
        self.program, self.function, self.gate = loaded.program, function, gate

    def judged(self, values: Values) -> _TriedInputs:
        """Return a set of inputs with the errors of the outputs on it; ops are not compared one by one."""
        peaks = _Peaks()
        exact = self._all.exact(values, listener=peaks)
        outputs = {a: self._compared(exact, other(values), values) for a, other in self._all.others.items()}
        return _TriedInputs(values, self.misses(outputs), _lowest_psnr(outputs), peaks.headroom)

    def _compared(
        self, exact: Mapping[str, Any], rounded: Mapping[str, Any], values: Values
    ) -> tuple[OutputComparison, ...]:
        """Compare float outputs with the exact ones; an infinity is right if fp64 gives it too."""
        arrays = {n: np.asarray(v) for n, v in exact.items() if np.asarray(v).dtype.kind == "f"}
        rows = tuple(compare_arrays(n, v, np.asarray(rounded[n])) for n, v in arrays.items())
        if any(row.undefined for row in rows):
            meant = run(self.program, values, function=self.function, precision=Double())  # type: ignore[arg-type]
            rows = tuple(compare_arrays(n, v, np.asarray(rounded[n]), meant[n]) for n, v in arrays.items())
        return rows

    def misses(self, outputs: Mapping[str, Sequence[OutputComparison]]) -> list[str]:
        """Return the outputs that miss the gate, or whose best class or token changes, in words."""
        words = []
        for arithmetic, compared in outputs.items():
            for o in compared:
                if _psnr_of_output(o) < self.gate:
                    problem = _not_finite(o) or f"agrees to only {o.psnr:.1f} dB"
                    words.append(f"{o.name} {problem} in {arithmetic} arithmetic")
                elif o.name in self._logits and o.top_k is not None and o.top_k < 1:
                    rows = f"{1 - o.top_k:.1%} of its rows"
                    words.append(f"{o.name} has another best entry in {rows} in {arithmetic} arithmetic")
        return words

    def op_by_op(
        self, values: Values, findings: Mapping[str, tuple[Finding, ...]], norm_repairs: Mapping[str, str]
    ) -> _OpByOp:
        """Return the errors of every op and output on one set of inputs, with choices and changed norms.

        Args:
            values: the inputs.
            findings: name of an op -> the numeric findings about it, whose rules and passes its row names.
            norm_repairs: name of the square in a norm -> the pass that its row names instead.
        """
        rows, choices = list[OpError](), ChoiceWatch(self._all.exact.function, values)
        norms = EpsilonWatch(self._all.exact.function)
        for results in self._all(values):
            choices.see(results)
            norms.see(results)
            row = op_error(results)
            if row is not None:
                about_op = findings.get(row.name, ())
                rules = dict.fromkeys(f.rule for f in about_op)
                repairs = dict.fromkeys(f.remedy for f in about_op if f.remedy)
                if row.name in norm_repairs:
                    repairs = {norm_repairs[row.name]: None}
                rows.append(replace(row, rules=tuple(rules), repairs=tuple(repairs)))
        exact = self._all.outputs["fp32"]
        outputs = {a: self._compared(exact, self._all.outputs[a], values) for a in self._all.others}
        return _OpByOp(with_repairs_of_neighbours(rows, self.gate), outputs, choices.choices, norms.changes)

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


class _Peaks(Listener):
    """A listener that records the largest magnitude of the first output of each op, if that is fp16."""

    def __init__(self) -> None:
        self.peaks: dict[Operation, float] = {}

    @property
    def headroom(self) -> float:
        """The distance in dB of the largest value from the end of fp16; negative beyond it."""
        if not all(map(math.isfinite, self.peaks.values())):
            return -math.inf
        return psnr(fp16.LARGEST, max(self.peaks.values(), default=0.0))

    def after(self, op: Operation, outputs: Sequence[Any]) -> None:
        """Record the largest magnitude of the first output."""
        value = outputs[0] if outputs and np_dtype(op.outputs[0]) == np.float16 else None
        if isinstance(value, torch.Tensor) and value.numel():
            self.peaks[op] = unmasked_size(op.outputs[0], value)


# The search for worse inputs.

MOST_TARGETS = 4
"""The most values whose gradients are followed: the largest ones on the first inputs, one of each magnitude.
A choice: each is a trial of its own."""
REDRAWN_SHARE = 0.25
"""Share of the numbers that a random change replaces. A choice: a change of all would lose what the trial
found."""
LOG_FLOOR = 1e-30
"""Added to an error before its logarithm: below any error of fp16."""


class Slope(NamedTuple):
    """The number that a trial increases, and its gradients by input."""

    height: float
    gradients: dict[str, Array]


class _Best(NamedTuple):
    """The inputs of a trial with the largest number so far."""

    point: Values
    slope: Slope


@dataclass
class Trial:
    """A search for worse inputs in one direction: along a gradient, or by random changes."""

    name: str
    """The name in words, as "the gradient of y"."""
    point: Values
    """The inputs tried last."""
    slope_at: Callable[[Values], Slope] | None = None
    """A function of the inputs that gives the number to increase, and its gradients; None for random
    changes."""
    step: float = 1.0
    """The share of the range by which inputs move; 1 at first, halved after each step without a gain."""
    _best: _Best | None = field(default=None, repr=False)

    def next(self, ranges: Ranges, rng: np.random.Generator) -> Values:
        """Return the inputs to try next.

        Raises:
            RuntimeError: torch cannot differentiate an op on the way.
        """
        if self.slope_at is None:
            return drawn_anew(self.point, ranges, rng)
        slope = self.slope_at(self.point)
        if self._best is None or slope.height > self._best.slope.height:
            self._best = _Best(self.point, slope)
        else:
            self.step /= 2
        self.point = moved(self._best.point, self._best.slope.gradients, ranges, self.step)
        return self.point


def ranges_of(samples: Sequence[Values]) -> dict[str, tuple[float, float]]:
    """Return {input: (least, largest) of its finite numbers in all samples}, without inputs that have none."""
    ends = {}
    for name in samples[0]:
        arrays = [np.asarray(v[name]) for v in samples if name in v]
        numbers = [a[np.isfinite(a)] for a in arrays if a.dtype.kind in "iuf"]
        numbers = [a for a in numbers if a.size]
        if numbers:
            ends[name] = (float(min(a.min() for a in numbers)), float(max(a.max() for a in numbers)))
    return ends


def moved(point: Values, gradients: Mapping[str, Array], ranges: Ranges, step: float) -> Values:
    """Return inputs after a step along the signs of gradients, by a share of the range, clipped to it."""
    new = dict(point)
    for name, gradient in gradients.items():
        low, high = ranges[name]
        value = np.asarray(point[name])
        new[name] = np.clip(value + np.sign(gradient) * step * (high - low), low, high).astype(value.dtype)
    return new


def drawn_anew(point: Values, ranges: Ranges, rng: np.random.Generator) -> Values:
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


def _described(values: Values, ranges: Ranges) -> str:
    """Return in words where the numbers of each input lie in its range."""
    words = []
    for name, (low, high) in ranges.items():
        numbers = np.asarray(values[name]).astype(np.float64)
        share_at_ends = float(np.mean(np.isclose(numbers, low) | np.isclose(numbers, high)))
        lowest_to_highest = f"{numbers.min():.3g} to {numbers.max():.3g}"
        words.append(f"{name} from {lowest_to_highest}, {share_at_ends:.0%} of it at an end")
    return ", ".join(words)


def _trials(program: Program, function: str | None, first: Values, ranges: Ranges) -> list[Trial]:
    """Return the trials that start from the first inputs: gradients for float inputs, and random changes."""
    floats = [n for n in ranges if np.asarray(first[n]).dtype.kind == "f" and ranges[n][0] < ranges[n][1]]
    by_gradient = []
    if floats:
        slopes = Slopes(program, function, floats)
        for op in slopes.largest(first):
            by_gradient.append(Trial(f"the gradient of {op.outputs[0].name}", first, partial(slopes.of, op)))
        by_gradient.append(Trial("the gradient of the error of the outputs", first, slopes.of_error))
    return [*by_gradient, Trial("random changes", first)]


class _SearchResult(NamedTuple):
    """The worst inputs that are known after a search, and how many it tried."""

    worst: _TriedInputs
    tried: int


def _search(
    comparer: _Comparer, samples: Sequence[Values], worst: _TriedInputs, rounds: int, rng: np.random.Generator
) -> _SearchResult:
    """Search for worse inputs by trials in turn, within the ranges of the samples.

    Args:
        comparer: runs the model on inputs.
        samples: the inputs that were given or drawn.
        worst: the worst of them, from which the trials start.
        rounds: how many inputs to try. There are fewer if every trial ends, as a trial does if torch cannot
            differentiate the ops that it needs.
        rng: draws the random changes.
    """
    ranges, nearest, tried = ranges_of(samples), worst, 0
    queue = _trials(comparer.program, comparer.function, worst.values, ranges) if ranges else []
    while queue and tried < rounds:
        trial = queue.pop(0)
        if trial.slope_at is None:
            trial.point = nearest.values
        try:
            values = trial.next(ranges, rng)
        except RuntimeError:
            continue
        queue.append(trial)
        tried += 1
        judged = comparer.judged(values)
        if judged.badness() < worst.badness():
            worst = replace(judged, described=f"by {trial.name}; {_described(values, ranges)}")
        if judged.distance(comparer.gate) < nearest.distance(comparer.gate):
            nearest = judged
    return _SearchResult(worst, tried)


class Slopes:
    """Gradients of a function's values by its inputs of floats, in exact arithmetic and in fp16.

    Gradients ignore rounding, as those of a cast in torch do.
    """

    def __init__(self, program: Program, function: str | None, floats: Sequence[str]) -> None:
        self._exact, self._half = (
            Executable(program, function=function, precision=p, fuse=False) for p in ("fp32", "fp16")
        )
        self._floats = floats

    def largest(self, values: Values) -> list[Operation]:
        """Return the `MOST_TARGETS` ops with the largest values, one for each magnitude (to 4 digits)."""
        watch = _Peaks()
        self._exact(values, listener=watch)
        by_size: dict[float, Operation] = {}
        top = set(self._exact.function.operations)
        for op, peak in watch.peaks.items():
            if op in top and math.isfinite(peak):
                by_size.setdefault(float(f"{peak:.4g}"), op)
        return [by_size[size] for size in sorted(by_size, reverse=True)[:MOST_TARGETS]]

    def of(self, op: Operation, values: Values) -> Slope:
        """Return the largest magnitude of an op's first output, with its gradients."""
        leaves = self._leaves(values)
        with torch.enable_grad():
            for step, outputs in _run_steps(self._exact, self._environment(self._exact, values, leaves)):
                if step is op:
                    return _slope(outputs[0].abs().amax(), leaves)
        raise RuntimeError(f"{op.outputs[0].name} was not computed")

    def of_error(self, values: Values) -> Slope:
        """Return the sum over outputs of the logarithm of their relative error in fp16, with its gradients."""
        leaves = self._leaves(values)
        with torch.enable_grad():
            exact, half = (self._outputs(one, values, leaves) for one in (self._exact, self._half))
            height = torch.zeros(())
            for true, rounded in zip(exact, half, strict=True):
                if isinstance(true, torch.Tensor) and true.is_floating_point():
                    peak = true.detach().abs().amax()
                    noise = (rounded - true).square().mean() / (peak**2 + LOG_FLOOR)
                    height = height + torch.log(noise + LOG_FLOOR)
            return _slope(height, leaves)

    def _leaves(self, values: Values) -> dict[str, torch.Tensor]:
        """Return the float inputs by name, as leaves for which torch computes gradients."""
        bound_values = sampling.bind(self._exact.function, values, None)
        return {v.name: x.clone().requires_grad_() for v, x in bound_values.items() if v.name in self._floats}

    def _environment(
        self, executable: Executable, values: Values, leaves: Mapping[str, torch.Tensor]
    ) -> dict[Any, Any]:
        """Return the values from which a run starts, with the leaves as its float inputs."""
        bound_values = sampling.bind(executable.function, values, None)
        return {v: leaves.get(v.name, value) for v, value in bound_values.items()}

    def _outputs(self, executable: Executable, values: Values, leaves: Mapping[str, torch.Tensor]) -> list[Any]:
        """Return the outputs of a run on the leaves."""
        env = self._environment(executable, values, leaves)
        for _ in _run_steps(executable, env):
            pass
        return [executable.plan.value(env, var) for var in executable.function.outputs]


def _slope(height: torch.Tensor, leaves: Mapping[str, torch.Tensor]) -> Slope:
    """Return a number with its gradients by the leaves that it depends on."""
    gradients = torch.autograd.grad(height, list(leaves.values()), allow_unused=True)
    by_input = {
        name: np.nan_to_num(gradient.numpy())
        for name, gradient in zip(leaves, gradients, strict=True)
        if gradient is not None
    }
    return Slope(float(height.detach()), by_input)


def _run_steps(executable: Executable, env: dict[Any, Any]) -> Iterator[tuple[Operation, Sequence[Any]]]:
    """Run a function step by step; yield each op with its outputs."""
    for step in executable.plan.steps:
        last = _LastOutputs()
        executable.plan.take(step, env, last)
        yield step.op, last.outputs


class _LastOutputs(Listener):
    """A listener that records the last outputs: those of an op come after those of the ops in its blocks."""

    def __init__(self) -> None:
        self.outputs: Sequence[Any] = ()

    def after(self, op: Operation, outputs: Sequence[Any]) -> None:
        """Record the outputs."""
        self.outputs = outputs


# The error of norms whose epsilon grew in the conversion, on the inputs of a run.

EPSILON_RULE = "lost-epsilon"


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
        if finding.rule != EPSILON_RULE or not changes.get(finding.op, 1.0) < LEAST_CHANGE:
            yield finding
