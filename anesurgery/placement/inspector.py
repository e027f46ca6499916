"""`inspect`: predict which unit Core ML chooses for each op, say why, and name what helps.

`inspect` is the public call and `anesurgery inspect` its command. It loads any kind of model; ML Programs go
to `inspect_program`, which asks the rules (`RULES`) through `verdicts`, and adds memory, time and notes;
other models go to `models`. A package with several functions, and a folder of sizes, get one inspection for
each (`of_functions`, `of_sizes`). `why` explains one op: every rule that was asked about it, and the result.
"""

from __future__ import annotations

import difflib
import itertools
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from anesurgery import registry
from anesurgery.display import Drawn
from anesurgery.doors import THIS, door, given_words
from anesurgery.errors import LoadError, SurgeryError, UnknownName, warn
from anesurgery.files import size_index
from anesurgery.files.interface import origin_of
from anesurgery.files.package import Loaded
from anesurgery.files.size_index import is_sized
from anesurgery.interpret.features import eight_bit_images
from anesurgery.loading import load_graph
from anesurgery.mil import Function, Operation, Program, dtype_name, exclusive, function_of
from anesurgery.placement import compute_plan, memory, unit_advice
from anesurgery.placement.evidence import Finding, Rule, rules_outside_tables
from anesurgery.placement.flexible import fix_command
from anesurgery.placement.inspection import NO_TIME, Inspection, OpRow
from anesurgery.placement.models import inspect_other
from anesurgery.placement.rules import (
    faulty_ops,
    legality,
    loading,
    lost_in_conversion,
    numeric,
    sampled,
    shapes,
    slow,
    whole_model,
)
from anesurgery.placement.rules.legality import FORBIDDEN
from anesurgery.placement.rules.shapes import OF_LAYOUT
from anesurgery.placement.target import Target
from anesurgery.placement.timing import time_of_shaped
from anesurgery.placement.verdicts import (
    Judged,
    Shaped,
    choose,
    gpu_may_take_all,
    judge_shaped,
    longest_chain,
    segments_of,
    units_at_each_shape,
    with_times,
)
from anesurgery.semantics.analysis_cache import caching
from anesurgery.semantics.reading import shape_in_words, shape_of

NO_PROMISE = (
    "estimates follow Core ML's formula, as found on an M4 (macOS 27.0.1); they are not run times",
    "the compute plan on the device decides; this report promises no placement",
)
ELSEWHERE = "measurements on a base M4 with macOS 27.0.1 are extrapolated to {}"
GPU = "the GPU's share is a guess, fitted to four models on an M4 Pro (macOS 26.5.1)"
GPU_TAKES_ALL = (
    "with ALL the GPU may take all of it, so that ops have no unit: on an M4 (macOS 26.6.2) it ran two small "
    "decoders (up to 2.4 GFLOP) as a whole, and 879 of 1004 ops of one with int4 weights "
    "(Thiruloksundar/llm-inference-macOS); CPU_AND_NE leaves it out"
)
NO_GPU = (
    "what {} gives to the GPU is not known here, so that most ops have no unit: five models ran on the GPU "
    "of an M5 Max "
    "as a whole (macOS 26.6), about half on that of an M4 Pro (macOS 26.5.1; "
    "erwinzhang7/coreml-compute-placement)"
)

BY_VALUE = (*numeric.RULES, faulty_ops.SILU, *faulty_ops.RULES, *lost_in_conversion.RULES)
"""The rules that read the values of constants."""
RULES = (*slow.RULES, *BY_VALUE, *shapes.RULES, *legality.SPEED, *slow.REPAIRED, *slow.LOOPS)
"""The rules about speed, numbers and shapes; `rules_outside_tables` adds those in files of their own, and the
user's."""
TRANSLATED = (
    "this is the translation of a neural network into an ML Program; Core ML runs the network itself layer by "
    "layer, by rules of its own: give the path of its file to have the layers inspected"
)
ABSENT = "the weights are missing, so the graph alone gives the units, and numbers are not checked: {}"


@door("inputs", modules=True)
@exclusive()
def inspect(
    model: Any,
    target: Target | str | None = None,
    *,
    compute_units: str | Any = None,
    inputs: Any = None,
    function: str | None = None,
    measured: bool = False,
) -> Inspection:
    """Predict where each op of a model runs, say why, and name the pass that helps.

    For a package with several functions, and for a folder of sizes, a note describes each (`.functions`).

    Args:
        model: path (of a folder of sizes too), MLModel, MIL program, or what `load` gives. Networks of the
            older format, pipelines and other models are inspected by their own rules.
        target: chips and OS, as "M1/macOS 14", "M4+", "any" (the default: every chip).
        compute_units: CPU_AND_NE (the default), ALL, CPU_AND_GPU or CPU_ONLY; a name, or one of coremltools.
        inputs: arrays by name, or a list of such mappings. The model then runs, and each numeric finding
            gives the values that its op reaches.
        function: which function; `main` or the first by default.
        measured: ask Core ML too (macOS 14.4 or later). Elsewhere a note says that it was not asked.

    Returns:
        The `Inspection`: a row for each op in file order (units, findings, estimates in microseconds), notes,
        and the expected time in milliseconds where there is one.

    Raises:
        LoadError: the model cannot be read.
        UnknownName: an unknown chip, OS or function.
        InterpretError: inputs that do not fit.
        SurgeryError: `inputs` or `measured` for a folder of sizes.
    """
    device = Target.parse(target, compute_units)
    if isinstance(model, (str, os.PathLike)) and is_sized(folder := Path(model).expanduser()):
        if inputs is not None or measured:
            words = "inputs= and measured= are for one of them: inspect a package in it, with function="
            raise SurgeryError(f"{folder} holds several sizes; {words}")
        return of_folder(folder, device, function)
    inspection = inspect_other(model, device, inspect_program)
    if inspection is None:
        loaded = load_graph(model)
        inspection = inspect_program(loaded, device, inputs=inputs, function=function)
        inspection = replace(inspection, notes=(*inspection.notes, *loaded.notes))
        if (origin := origin_of(loaded.program)) is not None and origin.network:
            inspection = replace(inspection, notes=(*inspection.notes, TRANSLATED))
        each = {} if function else of_functions(loaded, device)
        inspection = with_functions(inspection, each)
    if not measured:
        return inspection
    return compute_plan.with_plan(inspection, compute_plan.plan(model, device, function))


def _specification_version(loaded: Loaded) -> int:
    """Return the version of the specification that a program was read from, even if given alone."""
    origin = origin_of(loaded.program)
    return loaded.version if origin is None else max(loaded.version, origin.version)


def _label_and_place(loaded: Loaded) -> tuple[str, str]:
    """Return the model's name in the report, and the path for commands that the report suggests."""
    label = "MIL program" if loaded.source is None else given_words(str(loaded.source))
    return label, "MODEL" if loaded.source is None or label == THIS else label


@caching()
def inspect_program(
    loaded: Loaded,
    target: Target,
    *,
    inputs: Any = None,
    function: str | None = None,
    advice: bool = True,
    each_shape: bool = True,
) -> Inspection:
    """Return the inspection of one function of an ML Program.

    Args:
        loaded: the model.
        target: chips, OS and compute units.
        inputs: samples on which numeric findings are checked; None for no run.
        function: which function; `main` or the first by default.
        advice: without it only legality, units and times are computed: `RULES` and the user's rules are not
        asked.
        each_shape: are the units at each enumerated shape counted, too? Each costs as much as all the rest.
    """
    chosen, rules = function_of(loaded.program, function), _rules_to_ask(loaded) if advice else ()
    shaped = judge_shaped(loaded, function, target, rules)
    budget, about_memory = memory.measure(shaped.function, target)
    slow_loads = whole_model.slow_loads(shaped.function, budget, target)
    about_load = (*loading.of_function(shaped.function, target, chosen), *slow_loads, *about_memory)
    pixels = eight_bit_images(loaded.described_features)
    about_shapes = shapes.of_model(chosen, target, shaped.flexible, advice=advice, images=pixels)
    doubts = (
        *whole_model.doubts(chosen, shaped.flexible, budget, target),
        *whole_model.failing((*about_load, *about_shapes), target),
    )
    units, path_cost = choose(shaped.judged, target, doubts)
    segments, numbers = segments_of(shaped.judged, units, shaped.function)
    timed = time_of_shaped(shaped, units, target, bool(doubts))
    rows = _op_rows(
        shaped.judged, units, numbers, timed.each, _run_on_samples(loaded, inputs, target, function)
    )
    (label, place), (of_format, format_notes) = _label_and_place(loaded), _of_format(loaded, target)
    lost = _lost(loaded, chosen) if advice else ()
    findings = tuple(dict.fromkeys((*of_format, *lost, *doubts, *about_load, *about_shapes)))
    listed = shaped.flexible if each_shape else None
    at_shapes = units_at_each_shape(loaded, function, listed, target, rules, doubts)
    advised = unit_advice.advice(shaped.function, target) if advice else None
    notes = (*_notes(target, advised, loaded.absent, shaped), *(f"estimated {one}" for one in at_shapes))
    notes += (*format_notes, *((f"{NO_TIME}{timed.why}",) if timed.why else ()))
    return Inspection(
        model=label,
        target=target,
        ops=rows,
        segments=with_times(segments, numbers, timed.each),
        findings=findings,
        memory=budget,
        notes=notes,
        cost=path_cost,
        at_shapes=at_shapes,
        advice=advised,
        time=timed.time,
        chain=longest_chain(shaped.judged),
        fixing=fix_command(shaped.flexible, place),
    )


def _lost(loaded: Loaded, function: Function) -> Iterator[Finding]:
    """Yield findings on what the conversion changed, and on what saving the model would change."""
    if loaded.absent is None:
        yield from lost_in_conversion.of_function(function)
    yield from lost_in_conversion.save_changes(loaded.program)


def _of_format(loaded: Loaded, target: Target) -> tuple[tuple[Finding, ...], tuple[str, ...]]:
    """Return findings on whether the target loads the model's format, and notes on models of that format."""
    if (own := registry.rules_of(loaded.source)) is None:
        return tuple(loading.of_version(_specification_version(loaded), target)), ()
    return own.model_findings(target), (own.NOTE,)


def _run_on_samples(
    loaded: Loaded, inputs: Any, target: Target, function: str | None
) -> sampled.SampleRun | None:
    """Return the values that a run on samples reaches; None without samples.

    Raises:
        LoadError: the weights are missing.
    """
    if inputs is None:
        return None
    if loaded.absent is not None:
        raise LoadError(f"no run without weights: {loaded.absent}")
    return sampled.ranges_on_samples(loaded, inputs, target, function)


def _rules_to_ask(loaded: Loaded) -> tuple[Rule, ...]:
    """Return the rules to ask about a model; rules that read constants are left out if weights are missing."""
    asked = RULES if loaded.absent is None else tuple(rule for rule in RULES if rule not in BY_VALUE)
    if (own := registry.rules_of(loaded.source)) is not None:
        asked = (*(own.carried(rule) for rule in asked if rule not in faulty_ops.RULES), *own.RULES)
    return (*asked, *rules_outside_tables())


def _op_rows(
    judged: Sequence[Judged],
    units: Sequence[str | None],
    segments: Sequence[int],
    times: Sequence[float],
    samples: sampled.SampleRun | None,
) -> tuple[OpRow, ...]:
    """Return the rows of ops.

    Args:
        judged: the ops.
        units: the unit of each.
        segments: the number of the segment of each.
        times: milliseconds of each; empty if no time is known.
        samples: what their values reach in a run; None without one.
    """
    known_times: Sequence[float | None] = times or [None] * len(judged)
    columns = zip(judged, units, segments, known_times, strict=True)
    return tuple(
        _op_row(index, one, unit, segment, ms, samples)
        for index, (one, unit, segment, ms) in enumerate(columns)
    )


def _op_row(
    index: int,
    judged: Judged,
    unit: str | None,
    segment: int,
    ms: float | None,
    samples: sampled.SampleRun | None,
) -> OpRow:
    op, first, name = judged.op, judged.op.outputs[0], judged.name
    findings = judged.findings
    if unit not in ("ane", None):
        findings = tuple(finding for finding in findings if finding.rule not in OF_LAYOUT)
    if samples is not None:
        findings = (*(samples.with_magnitudes(f, op) for f in findings), *samples.findings.get(name, ()))
    return OpRow(
        index=index,
        name=name,
        op_type=op.op_type,
        shape=shape_in_words(shape_of(first)),
        dtype=dtype_name(first),
        legal=judged.legal,
        preferred=unit,
        segment=segment,
        findings=findings,
        flop=judged.work.flop,
        bytes=judged.work.moved,
        estimate=judged.estimate,
        depth=judged.depth,
        rounds=judged.rounds,
        ms=ms,
        weights=judged.work.constant,
    )


def _notes(
    target: Target, advised: unit_advice.UnitAdvice | None, absent: str | None, shaped: Shaped
) -> tuple[str, ...]:
    if absent is not None:
        warn(ABSENT.format(absent))
    notes = [*([] if absent is None else [ABSENT.format(absent)]), *NO_PROMISE]
    if target.extrapolated:
        notes.append(ELSEWHERE.format(target.extrapolated))
    if target.rates is not None:
        notes.append(f"estimates are corrected by a table learned from {', '.join(target.rates.hosts)}")
    if target.uses_gpu:
        notes.append(GPU if target.gpu_fitted else NO_GPU.format(target.compute_units))
    if target.gpu_fitted and gpu_may_take_all(shaped.judged):
        notes.append(GPU_TAKES_ALL)
    if target.uses_ane:
        notes.append(unit_advice.NO_SAFE_DEFAULT if advised is None else str(advised))
    return (*notes, *shaped.notes)


# The inspections of all functions of a package, and of all sizes in a folder of sizes.


def of_functions(loaded: Loaded, target: Target) -> dict[str, Inspection]:
    """Return {name: inspection} for a package with several functions; {} for one with a single function."""
    names = list(loaded.program.functions)
    if len(names) < 2:
        return {}
    return {name: inspect_program(loaded, target, function=name) for name in names}


def of_sizes(folder: Path, target: Target) -> dict[str, Inspection]:
    """Return {name: inspection} of each size in a folder of sizes, in rising order.

    Raises:
        LoadError: a package cannot be read, or `sizes.json` is damaged.
    """
    rows, _ = size_index.read(folder)
    packages = {name: load_graph(folder / name) for name in dict.fromkeys(row.package for row in rows)}
    return {row.name: inspect_program(packages[row.package], target, function=row.function) for row in rows}


def of_folder(folder: Path, target: Target, size: str | None = None) -> Inspection:
    """Return the inspection of one size of a folder, or that of the largest with notes on all sizes.

    Raises:
        LoadError: a package cannot be read, or `sizes.json` is damaged.
        UnknownName: no such size.
    """
    sizes = of_sizes(folder, target)
    if size is None:
        of_all = with_functions(replace(list(sizes.values())[-1], model=str(folder)), sizes)
        return replace(of_all, notes=(*_first_size_off_engine(sizes), *of_all.notes))
    if size not in sizes:
        raise UnknownName("size", size, list(sizes))
    return sizes[size]


def with_functions(inspection: Inspection, functions: Mapping[str, Inspection]) -> Inspection:
    """Return an inspection with those of all functions, and a note with the summary of each."""
    if not functions:
        return inspection
    summaries = [f"{name}: {one.summary}" for name, one in functions.items()]
    return replace(inspection, functions=dict(functions), notes=(*summaries, *inspection.notes))


def _first_size_off_engine(sizes: Mapping[str, Inspection]) -> tuple[str, ...]:
    """Return a note on the first size with an op that the engine cannot run, but can at the size before."""
    for (smaller, before), (name, after) in itertools.pairwise(sizes.items()):
        legal = {place for place, row in _rows_by_place(before).items() if row.legal}
        illegal = [row for place, row in _rows_by_place(after).items() if row.legal is False and place in legal]
        if illegal:
            more = f" (and {len(illegal) - 1} more)" if len(illegal) > 1 else ""
            first = f"{illegal[0].op_type} {illegal[0].name}{more}"
            return (f"leaves the engine at {name}: {first}, which it can run at {smaller}",)
    return ()


def _rows_by_place(inspection: Inspection) -> dict[tuple[str, int], OpRow]:
    """Return the rows by (op type, number of ops of that type before it): names differ between conversions."""
    counts = Counter[str]()
    rows = dict[tuple[str, int], OpRow]()
    for row in inspection.ops:
        rows[row.op_type, counts[row.op_type]] = row
        counts[row.op_type] += 1
    return rows


NO, OTHER_TARGET = "no", "other chip or OS"


@dataclass(frozen=True)
class Consulted:
    """A rule about an op's type, and its result for the op."""

    rule: Rule
    """The rule."""
    said: str
    """What it found; "no" if its condition does not hold; "other chip or OS" if it was not asked."""
    remedy: str | None = None
    """The pass that repairs what it found in this op; None if there is none."""

    @property
    def found(self) -> bool:
        """Did it find something?"""
        return self.said not in (NO, OTHER_TARGET)

    def to_json(self) -> dict[str, Any]:
        """Return plain data."""
        rule = self.rule
        return {
            "rule": rule.id,
            "kind": rule.kind,
            "said": self.said,
            "because": rule.because,
            "source": rule.source,
            "grade": rule.grade.value,
            "scope": str(rule.scope),
            "remedy": self.remedy,
            "advice": rule.advice,
        }


@dataclass(frozen=True)
class Why(Drawn):
    """One op: its row in the report, and all rules asked about it, those that found something first."""

    row: OpRow
    rules: tuple[Consulted, ...]

    def to_json(self) -> dict[str, Any]:
        """Return plain data."""
        return {"op": self.row.to_json(), "rules": [consulted.to_json() for consulted in self.rules]}


def why(
    model: Loaded | Program, op: str, target: Target, function: str | None = None, inputs: Any = None
) -> Why:
    """Explain the placement of an op of an ML Program, with the values that it reaches on `inputs`.

    Raises:
        UnknownName: no op of that name.
    """
    loaded = Loaded.of(model)
    rules = (*RULES, *rules_outside_tables())
    inspection = inspect_program(loaded, target, inputs=inputs, function=function)
    judged = {j.name: j.op for j in judge_shaped(loaded, function, target, rules).judged}
    if op not in judged:
        raise UnknownName("op", op, difflib.get_close_matches(op, judged, 8, 0) or judged)
    chosen = judged[op]
    about = [rule for rule in (*FORBIDDEN, *rules) if not rule.ops or chosen.op_type in rule.ops]
    asked = [_consulted(rule, chosen, target) for rule in about]
    return Why(inspection.row(op), tuple(sorted(asked, key=lambda consulted: not consulted.found)))


def _consulted(rule: Rule, op: Operation, target: Target) -> Consulted:
    said = _result_of_rule(rule, op, target)
    found = said not in (NO, OTHER_TARGET)
    return Consulted(rule, said, rule.finding_about(op, op.name, said, target).remedy if found else None)


def _result_of_rule(rule: Rule, op: Operation, target: Target) -> str:
    if not rule.scope.concerns(target):
        return OTHER_TARGET
    if rule.test is None:
        return f"{op.op_type}, in every form" if rule.kind == "legality" else NO
    return rule.test(op, target) or NO
