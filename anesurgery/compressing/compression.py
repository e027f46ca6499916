"""Compress a model: weights in forms that the target runs fast, corrected with samples, and the loss measured.

`compress` is the public call. It compresses all programs of a model (`program_compression`), looks which ops
the new forms would move off the Neural Engine, and begins again without these. The result, a `Compression`, has
the model, a row for each weight, and the loss on samples that were held out.
`compress(against=["palettize-4"])` measures data-free modes of coremltools on the same samples, for its report
and plot.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from anesurgery.compressing.activations import METHODS, check_method, pair_names
from anesurgery.compressing.balancing import Balanced, balance_channels
from anesurgery.compressing.correcting import find_candidates
from anesurgery.compressing.costs import Cost
from anesurgery.compressing.finished import Finished
from anesurgery.compressing.modes import SMALLEST, apply_configs, fits, op_name, read_mode
from anesurgery.compressing.program_compression import (
    ESTIMATED,
    EVEN,
    INPUTS,
    PAIR_LEAVES,
    TRIED,
    WEIGHT,
    CompressedWeight,
    LeftOut,
    Plan,
    ProgramCompression,
    Progress,
    weight_bytes,
)
from anesurgery.compressing.running_samples import Samples, read_samples
from anesurgery.compressing.storing import Smaller, engine_share
from anesurgery.compressing.weight_forms import BITS, IOS18, PURPOSES, read_form, unknown_chips
from anesurgery.display import Drawn, drawn, read_size
from anesurgery.doors import door
from anesurgery.errors import IsPipeline, SurgeryError, UnknownName, Unsuited, warn
from anesurgery.facts.makeup import logits_of
from anesurgery.files import arrays
from anesurgery.files.package import Loaded
from anesurgery.files.plot_files import save_picture
from anesurgery.files.protobuf import version_of
from anesurgery.files.sharing import workers
from anesurgery.interpret.arithmetic.constant_memory import CACHE_LIMIT
from anesurgery.interpret.features import check_names
from anesurgery.interpret.predictor import Predictor, bound
from anesurgery.loading import load_sequence
from anesurgery.mil import Program, exclusive, function_of
from anesurgery.placement.durations import Change, change
from anesurgery.placement.inspection import Inspection
from anesurgery.placement.rules.loading import newest_for, of_version, refusal
from anesurgery.placement.score import placed
from anesurgery.placement.target import Target
from anesurgery.rewriting.ml_program import MLProgram, ProgramSequence, read_subject
from anesurgery.rewriting.newer_opsets import in_words, raised, why_not

USUAL_MODES = ("linear-8", "linear-4", "palettize-6", "palettize-4")
"""The modes that the command draws where none is named."""
ONE_FUNCTION = "coremltools.optimize takes one package with one function, so there are no points of its modes"


@dataclass(frozen=True)
class _Point:
    """A model in one mode of coremltools: a point of the plot."""

    mode: str
    bytes: int
    """The bytes of all weights."""
    loss: Cost
    """The loss on the held-out samples."""


def _measure_modes(
    model: MLProgram, modes: Sequence[str], smallest: int, measure: Callable[[MLProgram], tuple[int, Cost]]
) -> tuple[list[_Point], list[str]]:
    """Compress a model in each mode by name; return the points, and a note for each mode that has none.

    `measure` returns the bytes of the weights of a model, and its loss.
    """
    read = {name: read_mode(name) for name in modes}
    if not read:
        return [], []
    if type(model) is not MLProgram or len(model.loaded.program.functions) > 1:
        return [], [ONE_FUNCTION]
    found, _ = find_candidates(function_of(model.program, None), smallest)
    weights = [op_name(candidate.var) for candidate in found]
    points, notes = [], []
    for name, mode in read.items():
        compressed: MLProgram | str = "it needs iOS 18"
        if fits(mode, model.loaded.version):
            compressed = _compress(model, dict.fromkeys(weights, mode), smallest)
        if isinstance(compressed, str):
            notes.append(f"no point of coremltools' {name}: {compressed}")
        else:
            points.append(_Point(name, *measure(compressed)))
    return points, notes


def _compress(model: MLProgram, chosen: Mapping[str, Any], smallest: int) -> MLProgram | str:
    """Return the model as coremltools compresses it, or why it does not."""
    try:
        return MLProgram.read(apply_configs(model.clone().mlmodel(), chosen, smallest))
    except (ValueError, ModuleNotFoundError) as error:
        return str(error).splitlines()[0]


LEAVES = "an op that reads it would leave the Neural Engine"
INSTEAD = "in its place"
"""The note about a form that replaces one which the opset of the model lacks has these words."""


@dataclass(frozen=True)
class Compression(Smaller, Drawn):
    """A compressed model, what was done with each weight, and the loss."""

    subject: MLProgram = field(repr=False)
    """The compressed model."""
    weights: tuple[CompressedWeight, ...]
    """A row for each weight, compressed or not."""
    target: str
    """The chips and the OS whose published times decided, in words."""
    purpose: str
    """"speed" or "size"."""
    bytes: tuple[int, int]
    """The bytes of all weights, before and after."""
    samples: tuple[int, int]
    """The number of samples for the calibration, and of those held out."""
    loss: Cost | None
    """The loss on the held-out samples, against the model before; None without any."""
    time: Change | None
    """The estimated time on the target; None where it cannot be estimated."""
    on_engine: tuple[float, float]
    """The share of the ops expected on the Neural Engine, before and after."""
    notes: tuple[str, ...] = ()
    """Doubts that the reader must know, and chips without published times."""
    balanced: tuple[Balanced, ...] = ()
    """The values whose channels were scaled together with the weights that read them, and why others were
    not."""
    points: tuple[_Point, ...] = ()
    """The modes of coremltools that were asked for, measured on the same samples."""
    asked: int = 0
    """The bits that were asked for; 0 where each weight has its own, or forms were asked for."""

    @property
    def wider(self) -> tuple[CompressedWeight, ...]:
        """The weights that have more bits than were asked for."""
        if not self.asked:
            return ()
        return tuple(weight for weight in self.compressed if read_form(weight.form).bits > self.asked)

    def save_html(self, path: str | os.PathLike[str]) -> Path:
        """Write the report as one HTML file that needs no network, atomically; an existing file is replaced.

        Raises:
            SurgeryError: it cannot be written.
        """
        return arrays.write_text(Path(path).expanduser(), drawn(self, "page"))

    def save_plot(self, path: str | os.PathLike[str]) -> Path:
        """Draw size against loss, with the points, by matplotlib; an existing file is replaced.

        Args:
            path: ends in .png, .svg or .pdf.

        Raises:
            SurgeryError: it ends otherwise, no sample was held out, or matplotlib is not installed.
        """
        return save_picture(self, path)

    @property
    def chooses(self) -> bool:
        """Is an output a choice among classes or tokens? Only then do KL and top-1 mean something."""
        functions = self.subject.parts[-1].program.functions.values()
        return any(logits_of(function) for function in functions)

    @property
    def compressed(self) -> tuple[CompressedWeight, ...]:
        """The weights that are smaller now."""
        return tuple(one for one in self.weights if one.form)

    def to_json(self) -> dict[str, Any]:
        """Return plain data, as `--json` prints it."""
        return {
            "target": self.target,
            "for": self.purpose,
            "bytes": list(self.bytes),
            "samples": list(self.samples),
            "loss": None if self.loss is None else _loss_json(self.loss, self.chooses),
            "time": None if self.time is None else self.time.to_json(),
            "on_engine": list(self.on_engine),
            "balanced": [one.to_json() for one in self.balanced],
            "points": [
                {"mode": one.mode, "bytes": one.bytes, "loss": _loss_json(one.loss, self.chooses)}
                for one in self.points
            ],
            "notes": list(self.notes),
            "weights": [one.to_json() for one in self.weights],
        }


def _loss_json(loss: Cost, chooses: bool) -> dict[str, Any]:
    """Return a loss as plain data; KL and top-1 are null if outputs choose nothing or no row is finite."""
    kl, top1 = (loss.kl, loss.top1) if loss.rows and chooses else (None, None)
    return {"kl": kl, "top1": top1, "psnr_db": loss.psnr}


@door("inputs", "target")
@exclusive()
def compress(
    model: Any,
    bits: float = 4,
    *,
    inputs: Any = None,
    forms: str | Sequence[str] | None = None,
    mixed: bool | None = None,
    max_bytes: int | str | None = None,
    activations: str | None = None,
    balance: bool | None = None,
    target: str | None = None,
    for_: str = "speed",
    function: str | None = None,
    smallest: int = SMALLEST,
    work: str | os.PathLike[str] | None = None,
    jobs: int = 1,
    scheduler: str | Any = None,
    against: Sequence[str] = (),
    progress: Progress | None = None,
) -> Compression:
    """Compress the weights of a model, and correct each with samples.

    The samples run through the model op by op. Each weight is rounded so that its products change least (GPTQ),
    on inputs that the compressed weights before it give. A quarter of the samples is held out, and the loss is
    measured on those. The model given is not changed.

    Args:
        model: path of a package, also of a pipeline, or of a folder of chunks; MLModel, MIL program, or chain.
        bits: bits of each number: 1, 2, 3, 4, 6 or 8. For speed, a weight gets more bits if no fast form has
            so few.
        forms: a form of all weights in place of `bits`, such as "sparse-50-palette4" (docs/compression.md has
            the names). Of several, each weight gets the best one, and all take no more bytes than in the first,
            or, with `mixed=True`, `bits` on average.
        mixed: give each weight its own bits, measured at the outputs, `bits` on average. Every form of every
            weight is tried, which takes several times as long. By default the bits are estimated for size,
            and equal for speed. False: equal.
        max_bytes: the most bytes of all weights, a number or "300 MB". Each weight gets the form that loses
            least within this size, or stays.
        activations: inputs of linear and conv in 8 bits too, with 8 `bits`: "percentile" or "max". Their
            ranges hold 99.99 % of the numbers, or the largest (W8A8).
            An op whose products suffer keeps its inputs; the report says why.
        balance: move scales of channels from inputs into weights, if the weights then round better (AWQ,
            SmoothQuant). Default: with `activations`.
        inputs: samples, a list of dictionaries of arrays by input name: some dozens of real ones.
        target: chip and OS, such as "M5": for the measurements that decide. Default: every chip.
        for_: "speed" skips forms that were measured slower than fp16; "size" allows them.
        function: the function that takes the samples. Weights that other functions share are compressed there
            too.
        smallest: weights with at most this many elements stay as they are.
        work: a folder for finished weights. An interrupted run resumes from it. It ends with the same
            bytes. Files of other models and settings stay.
        jobs: number of processes. They share the forms to try, and weights with the same inputs, such as those
            of queries, keys and values.
        scheduler: address of a Dask scheduler, or a client; its workers replace the processes.
        against: modes of coremltools, such as "palettize-4", to measure on the samples held out too, for the
            report and its plot.
        progress: called after each weight with (done, total).

    Returns:
        The `Compression`: the compressed model, a row for each weight (form, bytes, error), and the loss on the
        samples held out. Its `save` writes the package.

    Raises:
        SurgeryError: no samples, NaN in a sample or behind it, wrong bits or purpose, an opset before iOS 16,
            or a file in place of `work`.
        InterpretError: samples that the function does not take.
        UnknownName: no such function or input.
        LoadError: the model cannot be read.
    """
    _check(bits, for_, mixed)
    most = None if max_bytes is None else read_size(max_bytes)
    _check_activations(bits, mixed, activations, most)
    names = _form_names(forms, activations)
    device, samples = Target.parse(target), read_samples(inputs)
    given = _read(model)
    name = _find_function(given, [*samples.calibration, *samples.held_out], function)
    balance = activations is not None if balance is None else balance
    folder = None if work is None else Path(work).expanduser().absolute()
    how = _how(mixed, activations, names, for_, most)
    before = [inspection for part in given.parts for inspection in placed(part, device)]
    with workers(jobs, scheduler) as pool:
        finished = Finished(folder, pool)
        plan = Plan(
            bits=bits,
            target=device,
            purpose=for_,
            smallest=smallest,
            function=name,
            how=how,
            activations=activations,
            balance=balance,
            finished=finished,
            forms=names,
            max_bytes=most,
        )
        newer, opset_notes = _raise_opset(given, plan)
        edited, rows, balanced, after = _compress_on_engine(newer, samples.calibration, plan, before, progress)
    doubts = [*samples.doubts, *_few_rows(rows)]
    for words in doubts:
        warn(f"compress: {words}")
    doubts += [*given.notes(given), *_kept_functions(edited, plan), *opset_notes]
    doubts += unknown_chips((row.form for row in rows if row.form), device)
    on_engine = engine_share(before), engine_share(after)
    compression = _result(given, edited, rows, samples, plan, on_engine, doubts)
    points, reasons = _measure_modes(given, against, smallest, partial(_measure, given, samples, name))
    notes = (*compression.notes, *reasons)
    return replace(compression, balanced=tuple(balanced), points=tuple(points), notes=notes)


def _few_rows(weights: Sequence[CompressedWeight]) -> Iterable[str]:
    """Yield a doubt if weights have more columns than the samples gave rows of inputs."""
    sizes = [weight.calibration_rows for weight in weights]
    few = [size for size in sizes if size.inputs < size.columns]
    if few:
        rows, columns = min(few, key=lambda size: size.inputs / size.columns)
        yield (
            f"{len(few)} of {len(weights)} weights have more columns than the samples have rows ({columns:,} "
            f"against {rows:,}), so their correction may not hold elsewhere; give more samples"
        )


def _kept_functions(edited: MLProgram, plan: Plan) -> Iterable[str]:
    """Yield a note if other functions have weights that nothing compressed."""
    for part in edited.parts:
        others = {n: f for n, f in part.program.functions.items() if n != _function_name(part.program, plan)}
        if kept := [name for name, function in others.items() if find_candidates(function, plan.smallest)[0]]:
            words = f"{plan.function} was compressed, not {', '.join(kept)}"
            yield f"{words}: compress the result, function={kept[0]}"


def _measure(given: MLProgram, samples: Samples, name: str | None, other: MLProgram) -> tuple[int, Cost]:
    """Return the bytes of the weights of another form of a model, and its loss on the samples held out.

    Raises:
        SurgeryError: there are none.
    """
    if not samples.held_out:
        raise SurgeryError("against= compares by samples that are held out; give two or more")
    return _all_weight_bytes(other), _loss(given, other, samples.held_out, name)


def _check(bits: float, purpose: str, mixed: bool | None) -> None:
    """Check the bits and the purpose."""
    known = sorted({n for counts in BITS.values() for n in counts})
    if bits not in known and not (mixed and known[0] <= bits <= known[-1]):
        more = "" if mixed else "; an average of others with mixed=True"
        raise SurgeryError(f"bits={bits:g}; it may be {', '.join(map(str, known))}{more}")
    if purpose not in PURPOSES:
        raise SurgeryError(f"for_={purpose!r}; it may be {' or '.join(map(repr, PURPOSES))}")


def _check_activations(bits: float, mixed: bool | None, method: str | None, max_bytes: int | None) -> None:
    """Check that 8-bit inputs were asked for only together with 8-bit weights."""
    check_method(method)
    if method is not None and (bits != 8 or mixed or max_bytes is not None):
        raise SurgeryError(
            "activations are quantized beside weights of 8 bits: say bits=8, without mixed and max_bytes"
        )


def _form_names(forms: str | Sequence[str] | None, activations: str | None) -> tuple[str, ...]:
    """Return the forms that were asked for by name, checked."""
    if forms is None:
        return ()
    names = (forms,) if isinstance(forms, str) else tuple(forms)
    for name in names:
        read_form(name)
    if names and activations is not None:
        raise SurgeryError("activations are quantized beside int8 weights, so forms=... is for weights alone")
    return names


def _read(model: Any) -> Any:
    """Read a model to compress; the networks of a pipeline become ML Programs, as a network does."""
    try:
        return read_subject(model)
    except IsPipeline:
        return ProgramSequence(load_sequence(getattr(model, "package_path", model)))


def _how(
    mixed: bool | None, activations: str | None, forms: Sequence[str], purpose: str, max_bytes: int | None
) -> str:
    """Return how the bits of each weight are found: `TRIED`, `ESTIMATED` or `EVEN`."""
    if mixed:
        return TRIED
    if max_bytes is not None:
        return ESTIMATED
    if mixed is None and activations is None:
        has_choice = len(forms) > 1 if forms else purpose == "size"
        if has_choice:
            return ESTIMATED
    return EVEN


def _find_function(given: MLProgram, samples: Sequence[Mapping[str, Any]], name: str | None) -> str | None:
    """Find the function that takes the samples, and check that it takes each of them.

    Args:
        given: the model.
        samples: all, held out or not.
        name: of a function; None to find the one whose inputs fit.

    Returns:
        Its name; None for a pipeline, and for chunks of one function.

    Raises:
        InterpretError: a sample is not what the model takes.
        Unsuited: several functions take the samples, or none of several.
        UnknownName: no such function or input.
    """
    functions = given.takes
    if name is not None and name not in functions:
        raise UnknownName("function", name, [each for each in functions if each])
    if name is None:
        fitting = [each for each, inputs in functions.items() if set(samples[0]) <= set(inputs)]
        if len(functions) > 1 and len(fitting) != 1:
            raise Unsuited(
                f"the samples fit {len(fitting)} of the functions {', '.join(functions)}; say function=..."
            )
        name = fitting[0] if fitting else next(iter(functions))
    for values in samples:
        if isinstance(given, ProgramSequence):
            check_names(functions[name], values)
        else:
            bound(given.loaded, values, name)
    return name or None


def _function_name(program: Program, plan: Plan) -> str:
    """Return the function of a program that runs: the one of the plan, or the only one."""
    return plan.function if plan.function in program.functions else next(iter(program.functions))


def _raise_opset(given: MLProgram, plan: Plan) -> tuple[MLProgram, list[str]]:
    """Raise programs to the opset of iOS 18 if forms that are asked for begin there, and the target has it.

    Returns:
        A copy of the model, and a note for each program that was raised, or that cannot be and so gets other
        forms.
    """
    newer, notes = given.clone(), list[str]()
    for loaded in newer.parts:
        old, name = version_of(loaded.program), _function_name(loaded.program, plan)
        if old >= IOS18:
            continue
        forms = ProgramCompression(loaded, name, plan, {}).newer_forms(IOS18)
        if not forms:
            continue
        reason = _why_not_raised(loaded.program, plan.target)
        if reason:
            forms = {
                form: now
                for form, now in forms.items()
                if not now or read_form(form).bits < read_form(now).bits
            }
        words = f"{', '.join(forms)} needs {in_words(IOS18)}, and the model is for {in_words(old)}"
        if reason and forms:
            instead = " and ".join(dict.fromkeys(now or "plain numbers" for now in forms.values()))
            notes.append(f"{words}: {instead} {INSTEAD}; {reason}")
            warn(f"compress: {notes[-1]}")
        elif not reason:
            loaded.program.functions.update(raised(loaded.program, IOS18).functions)
            notes.append(f"{words}: it was upgraded to {in_words(IOS18)}, which {plan.target.name} can load")
    return newer, list(dict.fromkeys(notes))


def _why_not_raised(program: Program, target: Target) -> str:
    """Return why a program cannot be raised to iOS 18, and what to do; empty where it can."""
    if (refused := why_not(program, IOS18)) is not None:
        return f"it cannot become one of {in_words(IOS18)}: {refused}"
    if newest_for(target) >= IOS18:
        return ""
    if findings := of_version(IOS18, target):
        return refusal(findings)
    return 'say that the target has it, as target="M2/macOS 15" or "iOS 18", or convert the model for it'


class _Edited(NamedTuple):
    """A compressed copy of the model."""

    subject: MLProgram
    weights: list[CompressedWeight]
    """A row for each weight."""
    balanced: list[Balanced]
    """A row for each value whose channels may be balanced."""
    inspections: list[Inspection]


def _compress_on_engine(
    newer: MLProgram,
    samples: Sequence[Mapping[str, Any]],
    plan: Plan,
    before: Sequence[Inspection],
    progress: Progress | None,
) -> _Edited:
    """Compress a copy of the model; begin again without the weights whose form moves an op off the engine."""
    left_out: LeftOut = {}
    while True:
        edited = newer.clone()
        rows, balanced = _compress_programs(edited, samples, plan, left_out, progress)
        after = [inspection for part in edited.parts for inspection in placed(part, plan.target)]
        off_engine = _off_engine(before, after, rows)
        if not off_engine:
            return _Edited(edited, rows, balanced, after)
        left_out |= off_engine


def _compress_programs(
    edited: MLProgram,
    samples: Sequence[Mapping[str, Any]],
    plan: Plan,
    left_out: LeftOut,
    progress: Progress | None,
) -> tuple[list[CompressedWeight], list[Balanced]]:
    """Compress all programs of a model in place, in order: the outputs of each are inputs of the next.

    Returns:
        A row for each weight, and one for each value whose channels may be balanced.
    """
    rows: list[CompressedWeight] = []
    balanced: list[Balanced] = []
    values = [dict(sample) for sample in samples]
    plain_values = [dict(sample) for sample in samples]
    parts = edited.parts
    limits = _divide_bytes([weight_bytes(loaded) for loaded in parts], plan.max_bytes)
    for loaded, max_bytes in zip(parts, limits, strict=True):
        name = _function_name(loaded.program, plan)
        inputs, plain_inputs = (
            _inputs_of(loaded, name, each, len(parts) > 1) for each in (values, plain_values)
        )
        if plan.balance:
            choices = ProgramCompression(loaded, name, plan, {}).choices
            forms = {var: choice.form for var, choice in choices.items()}
            range_of = None if plan.activations is None else METHODS[plan.activations]
            balanced += balance_channels(loaded, name, inputs, forms, range_of)
        is_last = loaded is parts[-1]
        compression = ProgramCompression(loaded, name, replace(plan, max_bytes=max_bytes), left_out)
        result = compression.run(inputs, plain_inputs, progress, needs_outputs=not is_last)
        rows += result.weights
        if not is_last:
            values = [known | new for known, new in zip(values, result.outputs, strict=True)]
            plain_values = [known | new for known, new in zip(plain_values, result.plain_outputs, strict=True)]
    return rows, balanced


def _inputs_of(
    loaded: Loaded, name: str, values: Sequence[dict[str, Any]], select: bool
) -> list[dict[str, Any]]:
    """Return the inputs of one program for each sample; `select` leaves out what the function does not take."""
    inputs = loaded.program.functions[name].inputs
    return [
        bound(loaded, {n: v for n, v in known.items() if not select or n in inputs}, name) for known in values
    ]


def _divide_bytes(sizes: Sequence[int], max_bytes: int | None) -> list[int | None]:
    """Return the bytes that the weights of each program may take, in proportion to their size."""
    return [None if max_bytes is None else max_bytes * size // max(1, sum(sizes)) for size in sizes]


def _off_engine(
    before: Sequence[Inspection], after: Sequence[Inspection], weights: Sequence[CompressedWeight]
) -> LeftOut:
    """Return the weights, or the inputs, whose new form moves ops off the Neural Engine, with the reason."""
    on_engine = {row.name for inspection in before for row in inspection.ops if row.preferred == "ane"}
    on_cpu = {row.name for inspection in after for row in inspection.ops if row.preferred == "cpu"}
    left_out: LeftOut = {}
    for weight in weights:
        ops = on_engine.intersection(weight.ops)
        pairs = {name for op in ops for name in pair_names(op)}
        if weight.scales and not on_cpu.isdisjoint(ops | pairs):
            left_out[weight.weight, INPUTS] = PAIR_LEAVES
        elif weight.form and not on_cpu.isdisjoint(ops):
            left_out[weight.weight, WEIGHT] = LEAVES
    return left_out


def _result(
    given: MLProgram,
    edited: MLProgram,
    weights: Sequence[CompressedWeight],
    samples: Samples,
    plan: Plan,
    on_engine: tuple[float, float],
    doubts: Sequence[str],
) -> Compression:
    """Return the report, with the loss on held-out samples."""
    label = plan.target.name
    old, new = given.time(label), edited.time(label)
    return Compression(
        subject=edited,
        weights=tuple(weights),
        target=label,
        purpose=plan.purpose,
        bytes=(_all_weight_bytes(given), _all_weight_bytes(edited)),
        samples=(len(samples.calibration), len(samples.held_out)),
        loss=_loss(given, edited, samples.held_out, plan.function) if samples.held_out else None,
        time=change(old, new) if old is not None and new is not None else None,
        on_engine=on_engine,
        notes=tuple(doubts),
        asked=int(plan.bits) if plan.how == EVEN and not plan.forms else 0,
    )


def _all_weight_bytes(subject: MLProgram) -> int:
    """Return the bytes of the weights of all programs."""
    return sum(map(weight_bytes, subject.parts))


def _loss(
    given: MLProgram, edited: MLProgram, samples: Sequence[Mapping[str, Any]], function: str | None
) -> Cost:
    """Measure how far the outputs of the compressed model are from those of the given one."""
    models = [Predictor(subject.runnable, function=function) for subject in (given, edited)]
    for executable in (each for model in models for each in model.executables):
        # without this limit all weights would be in memory in fp32
        executable.plan.cache_limit = min(executable.plan.cache_limit, CACHE_LIMIT)
    functions = given.parts[-1].program.functions
    last = functions[function] if function in functions else next(iter(functions.values()))
    cost = Cost(chosen=logits_of(last))
    for number, values in enumerate(samples):
        expected, outputs = (model(values) for model in models)
        _check_finite(number, expected, outputs)
        cost.add(expected, outputs)
    return cost


def _check_finite(number: int, expected: Mapping[str, Any], outputs: Mapping[str, Any]) -> None:
    """Check that outputs can be compared; infinities that the given model has too, as in masks, are fine.

    Raises:
        SurgeryError: the given model makes NaN or nothing finite, or the compressed one where the given one
            does not.
    """
    for name, array in expected.items():
        if not isinstance(array, np.ndarray) or array.dtype.kind != "f" or not array.size:
            continue
        if np.isnan(array).any() or not np.isfinite(array).any():
            raise SurgeryError(
                f"the model given makes NaN or infinity at {name!r} of held-out sample {number}, so no loss "
                "can be stated; leave that sample out, or see with `anesurgery ranges` where values overflow"
            )
        if np.isnan(outputs[name]).any() or not np.isfinite(outputs[name][np.isfinite(array)]).all():
            raise SurgeryError(
                f"the compressed model makes NaN or infinity at {name!r} of held-out sample {number}, where "
                "the given one does not; take more bits, or see with `anesurgery ranges` where values overflow"
            )
