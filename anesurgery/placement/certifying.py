"""`certify`: the error of every op in fp16 and in the engine's arithmetic, what it grows to, and a verdict.

The model runs exactly and in each arithmetic, op by op (`interpret.several_arithmetics`): once with errors
carried along, and once with exact inputs to each op, which isolates the op's own error. An error is that of one
set of inputs; `search` looks for worse ones between the least and the largest number of each input.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from anesurgery import fp16
from anesurgery.checking.comparison import compare
from anesurgery.checking.exactness import nearness, repairs_of_squares
from anesurgery.checking.grades import OutputComparison, compare_arrays, psnr
from anesurgery.display import Drawn, drawn, finite
from anesurgery.doors import door
from anesurgery.errors import SurgeryError, near_matches
from anesurgery.facts.makeup import logits_of
from anesurgery.files import arrays
from anesurgery.files.package import Loaded
from anesurgery.interpret import Executable, Listener, Predictor, run, sampling
from anesurgery.interpret.arithmetic.precision import Double
from anesurgery.interpret.arithmetic.properties import CHIPS
from anesurgery.interpret.predictor import bound
from anesurgery.interpret.several_arithmetics import OpResults, SeveralArithmetics
from anesurgery.loading import load
from anesurgery.mil import (
    Array,
    Function,
    Operation,
    Program,
    Var,
    function_of,
    np_dtype,
    static_shape,
    types,
    walk_ops,
)
from anesurgery.ops import names
from anesurgery.placement.choices import Choice, ChoiceWatch, choosing_ops, cost_in_words, exact_ops
from anesurgery.placement.evidence import Finding
from anesurgery.placement.findings_in_words import reported, unseen
from anesurgery.placement.inspection import Inspection
from anesurgery.placement.inspector import inspect_program
from anesurgery.placement.models import inspect_other
from anesurgery.placement.op_errors import OpError, op_error, with_repairs_beside
from anesurgery.placement.rules.lost_in_conversion import LEAST_CHANGE, grown_epsilon
from anesurgery.placement.target import Target
from anesurgery.registry import INTERPRETER
from anesurgery.semantics.reading import in_decibels

Values = Mapping[str, Array]
GATE = 40.0
"""PSNR in dB: an error of a hundredth of the largest value."""
MARGIN = 4.0
"""A value this near to the end of fp16 is at risk: other inputs may be so many times as large."""


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
            "over_steps": None if self.over is None else _plain(self.over),
        }


def _plain(over: StepErrors) -> dict[str, Any]:
    """Errors over steps as plain data."""
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
        steps: how many calls in a row to try, with outputs fed back to inputs. States live on, and the sets of
            inputs are used in turn.
        feedback: output -> the input that it feeds, for `steps`; found by names, else by shapes, when absent.
        seed: of the sampled inputs and of the search.
        engine: "coreai": Apple's Core AI runtime must give the same outputs too, up to the gate. It runs the
            model as it is stored.

    Returns:
        The errors of each op and of the outputs, and a verdict. "fails": a given or drawn set of inputs misses
        the gate, an output is not finite, or a choice (a class, an index) changes. "at risk": only the search
        found such inputs, a value comes near 65504, an output ignores all inputs, the conversion lost a part of
        the model, or the engine was reported wrong for an op. "holds": none of these.

    Raises:
        InterpretError: inputs that do not fit.
        SurgeryError: an empty list of inputs; or no output feeds an input, though `steps` asks for it;
            or `feedback` without `steps`.
    """
    _check_feedback(feedback, steps)
    loaded = load(model)
    both = ("fp16", arithmetic_of(target))
    first = Predictor(loaded, function=function)
    samples = (
        [first.sample(seed)] if inputs is None else [inputs] if isinstance(inputs, Mapping) else list(inputs)
    )
    if not (called_with := samples):
        raise SurgeryError("certify: the list of inputs is empty; give at least one set")
    trial = _Trial(loaded, function, both, gate)
    samples = [bound(loaded, v, function) for v in samples]
    one = len(samples) == 1 and not search
    worst = _Tried(samples[0]) if one else min(map(trial.judged, samples), key=_Tried.badness)
    walk = _Walk(trial, loaded.program, function, samples, worst)
    if search and not worst.misses:
        worst = walk.worst_of(search, np.random.default_rng(seed))
    inspection = inspect_program(loaded, Target.parse(target), function=function)
    as_given = inspect_other(model, Target.parse(target), inspect_program) or inspection
    walked = trial.rows(worst.values, _findings(inspection), _norms(loaded.program, function))
    rows, outputs = walked.rows, walked.outputs
    choices = _kept(walked.choices, loaded.program, function, worst.values, inspection)
    over = step_errors(loaded, function, both, called_with, steps, feedback) if steps > 1 else None
    verdict, why = _verdict(rows, outputs, trial.misses(outputs), worst.described, gate)
    found = tuple(without_small(inspection.all_findings, walked.norms_off))
    beside = _beside(trial, choices, over, worst.values, first.sample(seed + 1), gate)
    for other in (beside, unseen(found), _judged(loaded, model, worst.values, function, gate, engine)):
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
        (*filter(None, [as_given.refused]), *reported(found)),
    )


def _check_feedback(feedback: Mapping[str, str] | None, steps: int) -> None:
    """See that outputs are not fed back to a model that is called once.

    Raises:
        SurgeryError: they are.
    """
    if feedback and steps == 1:
        raise SurgeryError("feedback= is for several calls in a row; give steps=2 or more")


def _judged(
    loaded: Loaded, subject: Any, values: Values, function: str | None, gate: float, engine: str
) -> tuple[str, str]:
    """What another engine makes of the model: it fails where the outputs are not those of the interpreter."""
    if engine == INTERPRETER:
        return "holds", ""
    found = compare(loaded.program, subject, values, gate=gate, function=function, engine=engine)
    return ("holds", "") if found.ok else ("fails", f"run by {engine}: {found.verdict}")


def arithmetic_of(target: str | None) -> str:
    """The arithmetic of the engine of a target, as far as one is known of its chip: "ane:M1", else "ane"."""
    chips = [chip for chip in Target.parse(target).chips if chip in CHIPS] if target else []
    return f"ane:{chips[0]}" if len(chips) == 1 else "ane"


def _norms(program: Program, function: str | None) -> dict[str, str]:
    """Name of the square in a norm -> the pass that writes the norm in a form that fp16 holds."""
    return {v.name: name for v, name in repairs_of_squares(function_of(program, function)).items()}


def _findings(inspection: Inspection) -> dict[str, tuple[Any, ...]]:
    """The numeric findings of `inspect`, by op."""
    return {row.name: tuple(f for f in row.findings if f.kind == "numeric") for row in inspection.ops}


@dataclass(frozen=True)
class _Tried:
    """A set of inputs, and what came of it.

    Attributes:
        values: the inputs.
        misses: the outputs that miss the gate, in words.
        psnr: the lowest of an output; minus infinite where one is not finite on one side only.
        headroom: dB that its values leave below the end of fp16.
        described: how the search came to it, and what it holds; empty if it was given or drawn.
    """

    values: Values
    misses: Sequence[str] = ()
    psnr: float = math.inf
    headroom: float = math.inf
    described: str = ""

    def badness(self) -> tuple[bool, float]:
        """Orders sets of inputs: the least is the worst."""
        return not self.misses, self.psnr

    def distance(self, gate: float) -> float:
        """How many dB are missing to a failure, by what is nearest to one."""
        return min(self.psnr - gate, self.headroom)


@dataclass(frozen=True)
class _Walked:
    """What one set of inputs shows, op by op.

    Attributes:
        rows: the errors of every op.
        outputs: arithmetic -> how near each output is.
        choices: the ops that choose.
        norms_off: op that adds an epsilon -> by how much of itself the conversion changed the norm.
    """

    rows: tuple[OpError, ...]
    outputs: dict[str, tuple[OutputComparison, ...]]
    choices: tuple[Choice, ...]
    norms_off: dict[str, float]


class _Walk:
    """The search for worse inputs, from the worst of those that were given."""

    def __init__(
        self, trial: _Trial, program: Program, function: str | None, samples: Sequence[Values], first: _Tried
    ) -> None:
        self._trial, self._program, self._function = trial, program, function
        self._ranges, self._worst, self._nearest = ranges_of(samples), first, first
        self.tried = 0

    def worst_of(self, rounds: int, rng: np.random.Generator) -> _Tried:
        """The worst inputs after some tries, each way in turn; a way that torch cannot go is left."""
        left = trials(self._program, self._function, self._worst.values, self._ranges) if self._ranges else []
        while left and self.tried < rounds:
            way = left.pop(0)
            if way.uphill is None:
                way.point = self._nearest.values
            try:
                values = way.next(self._ranges, rng)
            except RuntimeError:
                continue
            left.append(way)
            self.tried += 1
            tried = self._trial.judged(values)
            if tried.badness() < self._worst.badness():
                self._worst = replace(tried, described=f"by {way.name}; {described(values, self._ranges)}")
            if tried.distance(self._trial.gate) < self._nearest.distance(self._trial.gate):
                self._nearest = tried
        return self._worst


def _near(output: OutputComparison) -> float:
    """The PSNR of an output; minus infinite where some of it is not finite, on one side or on both."""
    return -math.inf if output.bad or output.undefined or math.isnan(output.psnr) else output.psnr


class _Trial:
    """One model in several arithmetics."""

    def __init__(self, loaded: Loaded, function: str | None, arithmetics: Sequence[str], gate: float) -> None:
        if not math.isfinite(gate):
            raise SurgeryError(f"gate={gate}; give a PSNR in dB")
        self._all = SeveralArithmetics(loaded.program, function, arithmetics)
        self._chosen, self.gate = logits_of(function_of(loaded.program, function)), gate
        self._program, self._function = loaded.program, function

    def judged(self, values: Values) -> _Tried:
        """A set of inputs, with how near the outputs are, without a look at each op."""
        peaks = Peaks()
        exact = self._all.exact(values, listener=peaks)
        outputs = {a: self._compared(exact, other(values), values) for a, other in self._all.others.items()}
        psnr = min((_near(o) for compared in outputs.values() for o in compared), default=math.inf)
        return _Tried(values, self.misses(outputs), psnr, peaks.headroom)

    def _compared(
        self, exact: Mapping[str, Any], rounded: Mapping[str, Any], values: Values
    ) -> tuple[OutputComparison, ...]:
        """The outputs of floats beside the exact ones; infinities count as meant where fp64 gives them too."""
        arrays = {n: np.asarray(v) for n, v in exact.items() if np.asarray(v).dtype.kind == "f"}
        rows = tuple(compare_arrays(n, v, np.asarray(rounded[n])) for n, v in arrays.items())
        if any(row.undefined for row in rows):
            meant = run(self._program, values, function=self._function, precision=Double())  # type: ignore[arg-type]
            rows = tuple(compare_arrays(n, v, np.asarray(rounded[n]), meant[n]) for n, v in arrays.items())
        return rows

    def misses(self, outputs: Mapping[str, Sequence[OutputComparison]]) -> list[str]:
        """The outputs that are too far, or of which another class or token is the best, in words."""
        words = []
        for arithmetic, compared in outputs.items():
            for o in compared:
                if _near(o) < self.gate:
                    far = _not_finite(o) or f"reaches {o.psnr:.1f} dB"
                    words.append(f"{o.name} {far} in {arithmetic}")
                elif o.name in self._chosen and o.top_k is not None and o.top_k < 1:
                    words.append(
                        f"{o.name} has another best entry in {arithmetic}, of {1 - o.top_k:.1%} of rows"
                    )
        return words

    def rows(
        self, values: Values, findings: Mapping[str, tuple[Any, ...]], norms: Mapping[str, str]
    ) -> _Walked:
        """The errors of every op on one set of inputs, and of the outputs; the choices, and the norms."""
        rows, watch = [], ChoiceWatch(self._all.exact.function, values)
        norms_off = EpsilonWatch(self._all.exact.function)
        for results in self._all(values):
            watch.see(results)
            norms_off.see(results)
            row = op_error(results)
            if row is not None:
                said = findings.get(row.name, ())
                rules = tuple(dict.fromkeys(f.rule for f in said))
                named = [norms[row.name]] if row.name in norms else [f.remedy for f in said if f.remedy]
                repairs = tuple(dict.fromkeys(named))
                rows.append(replace(row, rules=rules, repairs=repairs))
        exact = self._all.outputs["fp32"]
        outputs = {a: self._compared(exact, self._all.outputs[a], values) for a in self._all.others}
        return _Walked(with_repairs_beside(rows, self.gate), outputs, watch.choices, norms_off.changes)

    def unmoved(self, values: Values, others: Values) -> list[str]:
        """The outputs that neither other inputs nor the same ones in reverse order tell apart."""
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
    """How much of an output is NaN or infinite, in words; "" for nothing."""
    count = output.bad + output.undefined
    total = output.compared + count
    return f"is NaN or infinite in {count / total:.0%} of its elements" if count else ""


def _kept(
    choices: Sequence[Choice], program: Program, function: str | None, values: Values, inspection: Inspection
) -> tuple[Choice, ...]:
    """The choices that change, with the ops that keep them in fp32, and their cost in time."""
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


def _beside(
    trial: _Trial,
    choices: Sequence[Choice],
    over: StepErrors | None,
    values: Values,
    others: Values,
    gate: float,
) -> tuple[str, str]:
    """The verdict of what no PSNR of one call shows: choices, many calls, outputs that nothing moves."""
    changed = [choice for choice in choices if choice.worst]
    if changed:
        keep = changed[0].exact_ops
        words = f"; {_names(keep)} in fp32 keep them ({changed[0].cost})" if keep else ""
        return "fails", changed[0].words + words
    if over is not None and (below := over.below(gate)):
        ends = ", ".join(f"below {gate:g} dB from step {k} on in {a}" for a, k in below.items())
        return "fails", f"{ends}; {over.words}"
    if unmoved := trial.unmoved(values, others):
        return "at risk", f"{', '.join(unmoved)}: the same whatever the inputs are, so nothing was tested"
    return "holds", "" if over is None else over.words


def _names(ops: Sequence[str]) -> str:
    """Some ops in words."""
    return ", ".join(ops) if len(ops) <= 3 else f"{len(ops)} ops, {ops[0]} to {ops[-1]},"


def _worse(first: tuple[str, str], second: tuple[str, str]) -> tuple[str, str]:
    """The worse of two verdicts; of equal ones, both reasons."""
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
    """The verdict, and what it rests on; `searched` says how inputs were found that were not given."""
    worst = min(rows, key=lambda row: row.worst, default=None)
    blamed = "" if worst is None else f"; the largest error enters at {worst.op_type} {worst.name}"
    blamed += f" ({', '.join(worst.repairs)} may help)" if worst is not None and worst.repairs else ""
    if missed and searched:
        return "at risk", f"{'; '.join(missed)} on inputs that the search found {searched}{blamed}"
    if missed:
        return "fails", "; ".join(missed) + blamed
    near = [row for row in rows if row.largest * MARGIN > fp16.LARGEST and math.isfinite(row.largest)]
    if near:
        row = max(near, key=lambda r: r.largest)
        helps = f" ({', '.join(row.repairs)} may help)" if row.repairs else ""
        reaches = f"{row.op_type} {row.name} reaches {row.largest:.3g}"
        return "at risk", f"{reaches}; fp16 ends at {fp16.LARGEST:.0f}{helps}"
    if not any(o.compared for compared in outputs.values() for o in compared) and any(outputs.values()):
        return "fails", "no output holds a finite number"
    least = min((_near(o) for compared in outputs.values() for o in compared), default=math.inf)
    if least == math.inf:
        return "holds", "every output is identical"
    return "holds", f"every output reaches {least:.1f} dB, and {gate:g} dB are required"


# Errors over many calls: outputs that feed inputs, and states, carry them from one call to the next.

SIDES = names("in out input output new next old prev previous past present updated n t")
"""Words of a name that say on which side of a call a value is."""


@dataclass(frozen=True)
class StepErrors:
    """How near the outputs stay to the exact ones while they feed themselves.

    Attributes:
        feedback: output -> the input that it is given to in the next call.
        guessed: were the pairs found by their shapes, and not by their names or by the caller?
        states: names of the states that live on from call to call.
        decibels: arithmetic -> PSNR in dB of the worst output of each call.
    """

    feedback: Mapping[str, str]
    guessed: bool
    states: tuple[str, ...]
    decibels: Mapping[str, tuple[float, ...]]

    @property
    def count(self) -> int:
        """The number of calls."""
        return len(next(iter(self.decibels.values())))

    def below(self, gate: float) -> dict[str, int]:
        """Arithmetic -> the first call, from 1, whose outputs miss the gate; only those that do."""
        first = {a: next((k for k, v in enumerate(row, 1) if v < gate), 0) for a, row in self.decibels.items()}
        return {a: k for a, k in first.items() if k}

    @property
    def words(self) -> str:
        """What feeds what, and the error of the first and of the last call."""
        fed = ", ".join(f"{out} -> {name}" for out, name in self.feedback.items())
        fed += " (guessed from equal shapes; feedback= changes it)" if self.guessed else ""
        fed = "; ".join(filter(None, (fed, f"states {', '.join(self.states)}" if self.states else "")))
        ends = ", ".join(
            f"{in_decibels(v[0], digits=0)} -> {in_decibels(v[-1], digits=0)} in {a}"
            for a, v in self.decibels.items()
        )
        return f"{self.count} steps, fed back: {fed}: {ends}"


def step_errors(
    loaded: Loaded,
    function: str | None,
    arithmetics: Sequence[str],
    samples: Sequence[Mapping[str, Any]],
    steps: int,
    feedback: Mapping[str, str] | None,
) -> StepErrors:
    """Call a model again and again in each arithmetic, each with its own states and its own outputs.

    Args:
        loaded: the model.
        function: which function; `main` or the first by default.
        arithmetics: those beside the exact one.
        samples: sets of inputs, used in turn; of an input that is fed back the first set counts.
        steps: how many calls.
        feedback: output -> input; found by names, and else by shapes, when absent.

    Raises:
        SurgeryError: no output feeds an input, or the pairs that were given do not fit.
    """
    predictors = {
        a: Predictor(loaded, function=function, precision=a, fuse=False) for a in ("fp32", *arithmetics)
    }
    entries, exits = predictors["fp32"].ports
    states = tuple(n for n, v in entries.items() if types.is_state(v.sym_type))
    pairs, guessed = (dict(feedback), False) if feedback else pairs_of(entries, exits, bool(states))
    _check(pairs, entries, exits, states)
    runs = [_calls(predictor, samples, pairs, steps) for predictor in predictors.values()]
    rows: list[list[float]] = [[] for _ in arithmetics]
    for exact, *others in zip(*runs, strict=True):
        for row, outputs in zip(rows, others, strict=True):
            row.append(nearness(exact, outputs))
    decibels = {a: tuple(row) for a, row in zip(arithmetics, rows, strict=True)}
    return StepErrors(pairs, guessed, states, decibels)


def _calls(
    predictor: Predictor, samples: Sequence[Mapping[str, Any]], pairs: Mapping[str, str], steps: int
) -> Iterator[Mapping[str, Any]]:
    """The outputs of each call."""
    states = predictor.make_state() or None
    fed: dict[str, Array] = {}
    for k in range(steps):
        values = {**samples[k % len(samples)], **fed} if k else dict(samples[0])
        outputs = predictor(values, state=states)
        fed = {name: np.asarray(outputs[out]).astype(values[name].dtype) for out, name in pairs.items()}
        yield outputs


def pairs_of(
    entries: Mapping[str, Var], exits: Mapping[str, Var], has_states: bool = False
) -> tuple[dict[str, str], bool]:
    """Which output feeds which input, and whether that was guessed from shapes.

    Names that differ only in words such as in and out are pairs. Where there are none, and no states, an input
    and an output of the same shape are, if they are the only ones of that shape.
    """
    plain = {n: v for n, v in entries.items() if _is_array(v)}
    by_stem = {_stem(name): name for name in plain}
    named = {
        out: by_stem[_stem(out)]
        for out, var in exits.items()
        if _is_array(var) and _stem(out) in by_stem and _like(var, plain[by_stem[_stem(out)]])
    }
    if named or has_states:
        return named, False
    alike = {
        out: [n for n, v in plain.items() if _like(var, v)] for out, var in exits.items() if _is_array(var)
    }
    single = {out: fitting[0] for out, fitting in alike.items() if len(fitting) == 1}
    taken = list(single.values())
    return {out: name for out, name in single.items() if taken.count(name) == 1}, True


def _stem(name: str) -> str:
    """A name without the words that say on which side of a call it is."""
    words = re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])|\d+", name)
    return "_".join(w.lower() for w in words if w.lower() not in SIDES) or name


def _is_array(var: Var) -> bool:
    return types.is_tensor(var.sym_type) and np_dtype(var).kind in "fiu"


def _like(a: Var, b: Var) -> bool:
    """Have two values the same static shape and kind?"""
    shape = static_shape(a)
    return shape is not None and shape == static_shape(b) and np_dtype(a).kind == np_dtype(b).kind


def _check(
    pairs: Mapping[str, str], entries: Mapping[str, Var], exits: Mapping[str, Var], states: Sequence[str]
) -> None:
    """See that outputs feed inputs.

    Raises:
        SurgeryError: none does, one of a pair is unknown, or their shapes differ.
    """
    if not pairs and not states:
        raise SurgeryError(
            "steps= feeds outputs back, and none is like an input by name or shape; "
            'give feedback={"output": "input"}'
        )
    for out, name in pairs.items():
        for side, wanted, there in (("output", out, exits), ("input", name, entries)):
            if wanted not in there:
                raise SurgeryError(f"feedback: no {side} {wanted!r}; {near_matches(wanted, there)}")
        if not _like(exits[out], entries[name]):
            shapes = [tuple(v.shape or ()) for v in (exits[out], entries[name])]
            raise SurgeryError(f"feedback: {out} is {shapes[0]}, and {name} is {shapes[1]}")


# Look for inputs on which numbers go wrong, within the range of those that were given.
#
# Where floats come in, torch differentiates the interpreter: the steepest way up of the largest values, and of
# the error of the outputs in fp16, leads to an end of the range. Integers are changed at random places, and a
# change that comes nearer to a failure is kept.

Tensors = Mapping[str, Array]
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
class Trial:
    """How the next inputs follow from those before.

    Attributes:
        name: in words, as "the gradient of y".
        point: the inputs tried last.
        uphill: inputs -> what is to grow, and its gradients by input; None where numbers are drawn.
        step: how far a gradient is followed, of the range: at first to its end.
    """

    name: str
    point: Tensors
    uphill: Callable[[Tensors], tuple[float, dict[str, Array]]] | None = None
    step: float = 1.0
    _best: tuple[float, Tensors, dict[str, Array]] | None = field(default=None, repr=False)

    def next(self, ranges: Ranges, rng: np.random.Generator) -> Tensors:
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


def ranges_of(samples: Sequence[Tensors]) -> dict[str, tuple[float, float]]:
    """Input -> the least and the largest of its finite numbers in all samples, where there are any."""
    ends = {}
    for name in samples[0]:
        arrays = [np.asarray(v[name]) for v in samples if name in v]
        numbers = [a[np.isfinite(a)] for a in arrays if a.dtype.kind in "iuf"]
        numbers = [a for a in numbers if a.size]
        if numbers:
            ends[name] = (float(min(a.min() for a in numbers)), float(max(a.max() for a in numbers)))
    return ends


def moved(point: Tensors, gradients: Mapping[str, Array], ranges: Ranges, step: float) -> Tensors:
    """Inputs after a step up, each number by the same share of the range, and not beyond its ends."""
    new = dict(point)
    for name, gradient in gradients.items():
        low, high = ranges[name]
        value = np.asarray(point[name])
        new[name] = np.clip(value + np.sign(gradient) * step * (high - low), low, high).astype(value.dtype)
    return new


def drawn_anew(point: Tensors, ranges: Ranges, rng: np.random.Generator) -> Tensors:
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


def described(values: Tensors, ranges: Ranges) -> str:
    """What is special in some inputs, in words: where their numbers lie in the range."""
    words = []
    for name, (low, high) in ranges.items():
        numbers = np.asarray(values[name]).astype(np.float64)
        share = float(np.mean(np.isclose(numbers, low) | np.isclose(numbers, high)))
        words.append(f"{name} from {numbers.min():.3g} to {numbers.max():.3g}, {share:.0%} of it at an end")
    return ", ".join(words)


def trials(program: Program, function: str | None, first: Tensors, ranges: Ranges) -> list[Trial]:
    """All ways from the first inputs: gradients where there are floats, and random changes."""
    floats = [n for n in ranges if np.asarray(first[n]).dtype.kind == "f" and ranges[n][0] < ranges[n][1]]
    every = []
    if floats:
        slopes = Slopes(program, function, floats)
        for op in slopes.largest(first):
            every.append(Trial(f"the gradient of {op.outputs[0].name}", first, partial(slopes.of, op)))
        every.append(Trial("the gradient of the error of the outputs", first, slopes.of_error))
    return [*every, Trial("random changes", first)]


class Peaks(Listener):
    """The largest magnitude of the first output of each op that is stored in fp16."""

    def __init__(self) -> None:
        self.found: dict[Operation, float] = {}

    @property
    def headroom(self) -> float:
        """How many dB all of them leave below the end of fp16; negative beyond it."""
        if not all(map(math.isfinite, self.found.values())):
            return -math.inf
        return psnr(fp16.LARGEST, max(self.found.values(), default=0.0))

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

    def largest(self, values: Tensors) -> list[Operation]:
        """The ops of the function with the largest values, of those of one magnitude the first."""
        peaks = Peaks()
        self._exact(values, listener=peaks)
        by_size: dict[float, Operation] = {}
        top = set(self._exact.function.operations)
        for op, peak in peaks.found.items():
            if op in top and math.isfinite(peak):
                by_size.setdefault(float(f"{peak:.4g}"), op)
        return [by_size[size] for size in sorted(by_size, reverse=True)[:TARGETS]]

    def of(self, op: Operation, values: Tensors) -> tuple[float, dict[str, Array]]:
        """The largest magnitude of an op's first output, and its gradients by input."""
        leaves, env = self._bound(self._exact, values)
        with torch.enable_grad():
            for step, outputs in _walk(self._exact, env):
                if step is op:
                    return self._slope(outputs[0].abs().amax(), leaves)
        raise RuntimeError(f"{op.outputs[0].name} was not computed")

    def of_error(self, values: Tensors) -> tuple[float, dict[str, Array]]:
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

    def _bound(self, executable: Executable, values: Tensors) -> tuple[dict[str, torch.Tensor], dict[Any, Any]]:
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


# By how much norms are off whose epsilon grew in the conversion, on the inputs of a run.

RULE = "lost-epsilon"


class EpsilonWatch:
    """What a walk shows of the norms of a function."""

    def __init__(self, function: Function) -> None:
        found = ((op.outputs[0].name, grown_epsilon(op)) for op in walk_ops(function))
        self._grown = {name: grown for name, grown in found if grown is not None}
        self._wanted = {v for grown in self._grown.values() for v in (grown.scale, grown.mean)}
        self._seen: dict[Var, Any] = {}

    def see(self, results: OpResults) -> None:
        """Keep what a norm is off by."""
        self._seen |= {
            var: value
            for var, value in zip(results.op.outputs, results.exact, strict=True)
            if var in self._wanted
        }

    @property
    def changes(self) -> dict[str, float]:
        """The op that adds the epsilon -> by how much of itself the norm is off."""
        return {
            name: grown.change(self._seen[grown.scale], self._seen[grown.mean])
            for name, grown in self._grown.items()
            if grown.scale in self._seen and grown.mean in self._seen
        }


def without_small(findings: Iterable[Finding], changes: dict[str, float]) -> Iterator[Finding]:
    """The findings, but for those of norms that are right on the inputs at hand."""
    for finding in findings:
        if finding.rule != RULE or not changes.get(finding.op, 1.0) < LEAST_CHANGE:
            yield finding
