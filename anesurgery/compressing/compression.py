"""A smaller model that stays the model: weights in forms that the target runs fast, corrected by samples.

First the call and its options, then the plan of one call, then what each weight became, and the checks.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from anesurgery.byte_counts import byte_words, read_size
from anesurgery.compressing import activations as quantizing
from anesurgery.compressing.activations import IOS17, METHODS, Quantized, check_method, pair_names
from anesurgery.compressing.assignment import Option, Row, propose
from anesurgery.compressing.balancing import Balanced, balance_channels
from anesurgery.compressing.correcting import (
    Candidate,
    Corrected,
    Correction,
    candidates,
    plain_moments,
    takes_bias,
)
from anesurgery.compressing.costs import Cost
from anesurgery.compressing.estimating import estimated
from anesurgery.compressing.finished import Finished
from anesurgery.compressing.modes import SMALLEST
from anesurgery.compressing.peers import Point, points
from anesurgery.compressing.storing import Smaller, key_of, shift, store
from anesurgery.compressing.weight_forms import (
    BITS,
    IOS18,
    PURPOSES,
    READING,
    Choice,
    bounds_of,
    choose,
    choose_activations,
    choose_form,
    read_form,
    unknown_chips,
)
from anesurgery.compressing.weight_rows import Rows
from anesurgery.display import Drawn, drawn
from anesurgery.doors import door
from anesurgery.errors import SurgeryError, UnknownName, Unsuited, warn
from anesurgery.facts.makeup import logits_of
from anesurgery.files import arrays
from anesurgery.files.package import Loaded
from anesurgery.files.plot_files import save_picture
from anesurgery.files.protobuf import opset_version, version_of
from anesurgery.files.sharing import workers
from anesurgery.interpret.arithmetic.precision import KEPT
from anesurgery.interpret.core import Executable
from anesurgery.interpret.features import check_names
from anesurgery.interpret.forks import Forks
from anesurgery.interpret.predictor import Predictor, bound, check_ids
from anesurgery.mil import Program, Var, exclusive, is_compressed, is_weight, np_dtype, operands
from anesurgery.placement.durations import Change, change
from anesurgery.placement.inspection import Inspection
from anesurgery.placement.rules.loading import newest_for, of_version, refusal
from anesurgery.placement.score import placed
from anesurgery.placement.target import Target
from anesurgery.placement.timing import rows_of
from anesurgery.regions.reencoding import stored_bytes
from anesurgery.rewriting.ml_program import MLProgram, ProgramSequence, read_subject
from anesurgery.rewriting.newer_opsets import in_words, raised, why_not

IOS16 = 7
"""The specification version (iOS 16) in which weights can be compressed."""
MIXED = (2, 3, 4, 6, 8)
"""Bits that weights are tried with where each gets its own."""
WEIGHT, INPUTS = "weight", "inputs"
EVEN, ESTIMATED, TRIED = "even", "estimated", "tried"
LEAVES = "an op that reads it would leave the Neural Engine"
PAIR_LEAVES = "quantizing them would leave the Neural Engine on a chip of the target; name yours by target="
Progress = Callable[[int, int], None]
"""(weights done, weights in all)."""
LeftOut = dict[tuple[str, str], str]
"""(name of a weight, "weight" or "inputs" of its ops) -> why that stays as it is."""


@dataclass(frozen=True)
class CompressedWeight:
    """What one weight became."""

    weight: str
    readers: tuple[str, ...]
    """Types of the ops that read it."""
    form: str
    """"int4", "palette3", ...; "" where it stays as it is."""
    why: str
    """The evidence for the form, or the reason why it stays."""
    bytes: tuple[int, int]
    """Before and after."""
    error: float = 0.0
    """Of the products with it on the calibration samples, squared, as a share of their squares."""
    rounded: float = 0.0
    """The same if its numbers were rounded to the nearest."""
    ops: tuple[str, ...] = ()
    """Names of the ops that read it, in every function."""
    inputs: str = ""
    """What its ops read, where that was asked to be 8 bits: "int8", or the reason why not."""
    scales: tuple[float, ...] = ()
    """Of the inputs of each op, where they are 8 bits."""
    cosine: float | None = None
    """Between products with inputs of 8 bits and those without, of the op that stands it least."""
    calibration_rows: tuple[int, int] = (0, 0)
    """Rows of inputs that it was corrected by, and columns of each; (0, 0) of a table that is looked up."""

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        lists = {
            name: list(getattr(self, name))
            for name in ("readers", "bytes", "ops", "scales", "calibration_rows")
        }
        return {**vars(self), **lists}


@dataclass(frozen=True)
class Compression(Smaller, Drawn):
    """A compressed model, and its loss."""

    subject: MLProgram = field(repr=False)
    """The compressed model."""
    weights: tuple[CompressedWeight, ...]
    """A row for each weight, compressed or not."""
    target: str
    """Chips and OS whose evidence decided, in words."""
    purpose: str
    """"speed" or "size"."""
    bytes: tuple[int, int]
    """Of all weights, before and after."""
    samples: tuple[int, int]
    """For the calibration, and held out."""
    loss: Cost | None
    """On the held-out samples, against the model before; None without any."""
    time: Change | None
    """Estimated, on the target; None where nothing allows it."""
    on_engine: tuple[float, float]
    """Share of the ops expected on the Neural Engine, before and after."""
    notes: tuple[str, ...] = ()
    """What the reader must know: doubts, and chips of which nothing is known."""
    balanced: tuple[Balanced, ...] = ()
    """The values whose channels were scaled with the weights that read them, and why others were not."""
    points: tuple[Point, ...] = ()
    """The modes of coremltools that were asked for, on the same samples."""
    asked: int = 0
    """Bits of a number that were asked for; 0 where each weight has its own, or forms were asked for."""

    @property
    def wider(self) -> tuple[CompressedWeight, ...]:
        """The weights that have more bits than were asked for."""
        return tuple(
            one for one in self.compressed if self.asked and read_form(one.form or "").bits > self.asked
        )

    def save_html(self, path: str | os.PathLike[str]) -> Path:
        """Write the report as one HTML file that needs no network, atomically; an existing one is replaced.

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
        """Plain data: what `--json` prints."""
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
    """Plain data; null for KL and top-1 where the outputs choose nothing, and where no row is all finite."""
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
        for_: "speed" skips forms that were measured slower than fp16; "size" takes palettes.
        function: the function that takes the samples. Weights that other functions share are compressed there
            too.
        smallest: weights with at most this many elements stay as they are.
        work: a folder for finished weights, from which a run that was stopped goes on. It ends with the same
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
    room = None if max_bytes is None else read_size(max_bytes)
    _check_activations(bits, mixed, activations, room)
    asked = _asked(forms, activations)
    device, samples = Target.parse(target), read_samples(inputs)
    given = read_subject(model)
    name = _fitting(given, [*samples.calibration, *samples.held_out], function)
    balance = activations is not None if balance is None else balance
    estimate = mixed is None and activations is None and (len(asked) > 1 if asked else for_ == "size")
    estimate = estimate or (room is not None and not mixed)
    how = ESTIMATED if estimate else TRIED if mixed else EVEN
    before = [one for part in given.parts for one in placed(part, device)]
    left_out: LeftOut = {}
    with workers(jobs, scheduler) as those:
        finished = Finished(_folder(work), those)
        plan = _Plan(bits, device, for_, smallest, name, how, activations, balance, finished, asked, room)
        newer, raised_ = _newer(given, plan)
        while True:  # again without the weights whose form took an op off the engine
            edited = newer.clone()
            weights, scaled = _corrected(edited, samples.calibration, plan, left_out, progress)
            after = [one for part in edited.parts for one in placed(part, device)]
            if not (lost := _lost(before, after, weights)):
                break
            left_out |= lost
    short = [*samples.doubts, *_short(weights)]
    doubts = [*short, *raised_, *unknown_chips((one.form for one in weights if one.form), device)]
    for words in short:
        warn(f"compress: {words}")
    found = _result(given, edited, weights, samples, plan, (before, after), doubts)
    theirs, reasons = points(given, against, smallest, partial(_measured, given, samples, name))
    notes = (*found.notes, *reasons)
    return replace(found, balanced=tuple(scaled), points=tuple(theirs), notes=notes)


def _short(weights: Sequence[CompressedWeight]) -> Iterable[str]:
    """What the samples lack for the weights with the most columns."""
    few = [one for one in weights if one.calibration_rows[0] < one.calibration_rows[1]]
    if few:
        rows, columns = min((one.calibration_rows for one in few), key=lambda met: met[0] / met[1])
        yield (
            f"{len(few)} of {len(weights)} weights have more columns than the samples have rows ({columns:,} "
            f"against {rows:,}), so their correction may not hold elsewhere; give more samples"
        )


def _measured(given: MLProgram, samples: Samples, name: str | None, other: MLProgram) -> tuple[int, Cost]:
    """Bytes of the weights of another form of a model, and its loss on the samples held out.

    Raises:
        SurgeryError: there are none.
    """
    if not samples.held_out:
        raise SurgeryError("against= compares by samples that are held out; give two or more")
    return _bytes(other), _loss(given, other, samples.held_out, name)


def _check(bits: float, purpose: str, mixed: bool | None) -> None:
    known = sorted({n for some in BITS.values() for n in some})
    if bits not in known and not (mixed and known[0] <= bits <= known[-1]):
        more = "" if mixed else "; an average of others with mixed=True"
        raise SurgeryError(f"bits={bits}; it may be {', '.join(map(str, known))}{more}")
    if purpose not in PURPOSES:
        raise SurgeryError(f"for_={purpose!r}; it may be {' or '.join(map(repr, PURPOSES))}")


def _check_activations(bits: float, mixed: bool | None, method: str | None, room: int | None) -> None:
    check_method(method)
    if method is not None and (bits != 8 or mixed or room is not None):
        raise SurgeryError(
            "activations are quantized beside weights of 8 bits: say bits=8, without mixed and max_bytes"
        )


def _asked(forms: str | Sequence[str] | None, activations: str | None) -> tuple[str, ...]:
    """The forms that were asked for by name."""
    names = () if forms is None else (forms,) if isinstance(forms, str) else tuple(forms)
    for name in names:
        read_form(name)
    if names and activations is not None:
        raise SurgeryError("activations are quantized beside int8 weights, so forms=... is for weights alone")
    return names


def _fitting(given: MLProgram, samples: Sequence[Mapping[str, Any]], name: str | None) -> str | None:
    """The function that takes the samples; each is looked at before the work begins, held out or not.

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
        fitting = [each for each, taken in functions.items() if set(samples[0]) <= set(taken)]
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
            check_ids(given.loaded, values, name)
    return name or None


def _folder(work: str | os.PathLike[str] | None) -> Path | None:
    return None if work is None else Path(work).expanduser().absolute()


@dataclass(frozen=True)
class _Plan:
    """What is asked for."""

    bits: float
    target: Target
    purpose: str
    smallest: int
    function: str | None
    how: str
    """How the bits of each weight are found: one of `EVEN`, `ESTIMATED` and `TRIED`."""
    activations: str | None
    balance: bool
    finished: Finished
    forms: tuple[str, ...]
    """Asked for by name, in place of those that follow from the bits."""
    room: int | None = None
    """Most bytes of all weights; as many as with the first of the forms by default."""

    def choices(self, readers: Iterable[Any], version: int, rows: Rows) -> dict[str | None, Choice]:
        """The forms that a weight may have, by all ops that read it, in every function."""
        products = [op for op in readers if op.op_type != "gather"]  # which reads few rows of its table
        bounds = bounds_of(rows_of(op) for op in products) or frozenset((READING,))
        if self.activations and any(op.op_type in quantizing.READERS for op in products):
            both = choose_activations(self.target, bounds, self.purpose)
            if both.inputs:
                return {both.form: both}
        if self.forms:
            return self._asked(bounds, version, rows)
        counts = MIXED if self.how == TRIED else (int(self.bits),)
        if self.how == ESTIMATED and (self.bits < MIXED[-1] or self.room is not None):
            counts = (*counts, *(n for n in MIXED if n != self.bits))
        found = [choose(bits, self.target, bounds, version, self.purpose) for bits in counts]
        if found[0].form is None and self.how == ESTIMATED:
            return {None: found[0]}
        return {one.form: one for one in found}

    def _asked(self, bounds: frozenset[str], version: int, rows: Rows) -> dict[str | None, Choice]:
        """Those of the forms asked for that a weight can have; the first reason where it can have none."""
        found: list[Choice] = []
        for name in self.forms:
            reason = read_form(name).unfit(rows.count, rows.in_group)
            found.append(
                Choice(None, reason)
                if reason
                else choose_form(name, self.target, bounds, version, self.purpose)
            )
        kept = [one for one in found if one.form is not None] or found[:1]
        return {one.form: one for one in kept}


INSTEAD = "in its place"
"""The note of a form that replaces one that the model's opset lacks."""


def _newer(given: MLProgram, plan: _Plan) -> tuple[MLProgram, list[str]]:
    """The model in the opset of iOS 18 where forms that are asked for begin there, if the target has that.

    Returns:
        A copy, and a note for each program that was raised, or that has other forms since it cannot be.
    """
    newer, notes = given.clone(), list[str]()
    for loaded in newer.parts:
        functions, old = loaded.program.functions, version_of(loaded.program)
        name = plan.function if plan.function in functions else next(iter(functions))
        if old >= IOS18 or not (wanted := _Part(loaded, name, plan, {}).wanted(IOS18)):
            continue
        reason = _must_stay(loaded.program, plan.target)
        if reason:
            wanted = {form: now for form, now in wanted.items() if not now or _bits(form) < _bits(now)}
        words = f"{', '.join(wanted)} needs {in_words(IOS18)}, and the model is of {in_words(old)}"
        if reason and wanted:
            instead = " and ".join(dict.fromkeys(now or "plain numbers" for now in wanted.values()))
            notes.append(f"{words}: {instead} {INSTEAD}; {reason}")
            warn(f"compress: {notes[-1]}")
        elif not reason:
            functions.update(raised(loaded.program, IOS18).functions)
            notes.append(f"{words}: it was made one of {in_words(IOS18)}, which {plan.target.name} loads")
    return newer, list(dict.fromkeys(notes))


def _bits(form: str) -> int:
    return read_form(form).bits


def _must_stay(program: Program, target: Target) -> str:
    """Why a program is not made one of iOS 18, and what to do; "" where it can be."""
    if (refused := why_not(program, IOS18)) is not None:
        return f"it cannot become one of {in_words(IOS18)}: {refused}"
    if newest_for(target) >= IOS18:
        return ""
    if findings := of_version(IOS18, target):
        return refusal(findings)
    return 'say that the target has it, as target="M2/macOS 15" or "iOS 18", or convert the model for it'


def _corrected(
    edited: MLProgram,
    samples: Sequence[Mapping[str, Any]],
    plan: _Plan,
    left_out: LeftOut,
    progress: Progress | None,
) -> tuple[list[CompressedWeight], list[Balanced]]:
    """Compress the weights of all programs, one program after the other.

    Returns:
        A row for each weight, and for each value whose channels may be balanced.
    """
    found: list[CompressedWeight] = []
    scaled: list[Balanced] = []
    known = [dict(values) for values in samples]
    plain = [dict(values) for values in samples]
    parts = edited.parts
    rooms = _rooms([_bytes_of(loaded) for loaded in parts], plan.room)
    for loaded, room in zip(parts, rooms, strict=True):
        functions = loaded.program.functions
        name = plan.function if plan.function in functions else next(iter(functions))
        wanted = functions[name].inputs
        taken, plain_taken = (
            [
                bound(loaded, {n: v for n, v in values.items() if len(parts) == 1 or n in wanted}, name)
                for values in each
            ]
            for each in (known, plain)
        )
        if plan.balance:
            forms = {var: one.form for var, one in _Part(loaded, name, plan, {}).choices.items()}
            reach = None if plan.activations is None else METHODS[plan.activations]
            scaled += balance_channels(loaded, name, taken, forms, reach)
        further = loaded is not parts[-1]
        part = _Part(loaded, name, replace(plan, room=room), left_out)
        outputs, weights = part.run(taken, plain_taken, progress, further)
        found += weights
        if further:
            known, plain = (
                [values | made for values, made in zip(each, of_part, strict=True)]
                for each, of_part in zip((known, plain), outputs, strict=True)
            )
    return found, scaled


def _rooms(sizes: Sequence[int], room: int | None) -> list[int | None]:
    """The bytes that the weights of each program may take, each by its share."""
    return [None if room is None else room * size // max(1, sum(sizes)) for size in sizes]


class _Part:
    """One program: its weights, their forms, and what they became."""

    def __init__(self, loaded: Loaded, name: str, plan: _Plan, left_out: LeftOut) -> None:
        self.loaded, self.name = loaded, name
        function = loaded.program.functions[name]
        self.version = min(opset_version(f) for f in loaded.program.functions.values())
        if self.version < IOS16:
            raise Unsuited("weights can be compressed from iOS 16 on; convert the model for that or newer")
        if plan.activations and self.version < IOS17:
            raise SurgeryError("activations of 8 bits begin at iOS 17; convert the model for that or newer")
        self.found, self.stay = candidates(function, plan.smallest)
        readers = _readers(loaded.program, self.found)
        self.plan = plan
        self.readers, self.left_out = readers, left_out
        self.ops = {var: tuple(dict.fromkeys(op.name for op in ops)) for var, ops in readers.items()}
        self.possible = {
            one.var: plan.choices(readers[one.var], self.version, one.readers[0]) for one in self.found
        }
        for one in self.found:
            if (reason := left_out.get((one.var.name, WEIGHT))) is not None:
                self.possible[one.var] = {None: Choice(None, reason)}
        self.choices = {var: next(iter(each.values())) for var, each in self.possible.items()}

    def wanted(self, version: int) -> dict[str, str]:
        """The other forms that weights would have in another opset, and what they have now, "" where none."""
        wanted: dict[str, str] = {}
        for one in self.found:
            then = next(iter(self.plan.choices(self.readers[one.var], version, one.readers[0]).values()))
            now = self.choices[one.var]
            if then.form and then.form != now.form:
                wanted[then.form] = now.form or ""
        return wanted

    def run(
        self,
        samples: Sequence[Mapping[str, Any]],
        plain: Sequence[Mapping[str, Any]],
        progress: Progress | None,
        wanted: bool,
    ) -> tuple[tuple[list[dict[str, Any]], list[dict[str, Any]]], list[CompressedWeight]]:
        """Compress, and let the program hold what came out.

        Returns:
            What it makes of the samples, and the plain program of the plain ones, where that is wanted; a row
            for each weight.
        """
        if self.plan.how != EVEN:
            self._mix(samples)
        chosen = [one for one in self.found if self.choices[one.var].form]
        quantized = self._quantize(chosen, samples)
        work = Correction(self.loaded, self.name, samples, chosen, lambda one: self.choices[one.var].form)
        if progress is not None:
            work.progress = lambda done: progress(done, len(chosen))
        work.biased, work.correct, work.plain = self._biased, self.plan.finished.hand_in, plain
        work.ahead, work.arrays, work.outputs = self.plan.finished.workers.count, False, wanted
        work.folder = self.plan.finished.folder
        before = {one.var: stored_bytes(one.var) for one in self.found}
        outputs = work.run()
        made = {one.candidate.var: one for one in work.made}
        rows = [self._row(one, before[one.var], made.get(one.var)) for one in self.found]
        rows = [_with_inputs(row, quantized.get(one.var)) for row, one in zip(rows, self.found, strict=True)]
        for made_one in work.made:
            shift(made_one, self.readers[made_one.candidate.var])
        store([self.loaded.program], work.made)
        return (outputs, work.plain_outputs), [
            *rows,
            *(CompressedWeight(n, (), "", why, (0, 0)) for n, why in self.stay.items()),
        ]

    def _biased(self, one: Candidate) -> bool:
        """Can the ops of other functions take what the biases of this one gain?"""
        here = {r.op for r in one.readers}
        others = [op for op in self.readers[one.var] if op not in here and op.op_type != "gather"]
        return all(map(takes_bias, others))

    def _quantize(
        self, chosen: Sequence[Candidate], samples: Sequence[Mapping[str, Any]]
    ) -> dict[Var, list[Quantized]]:
        """Let linear and conv read 8 bits, in every function by the scales of the one that ran."""
        if self.plan.activations is None:
            return {}
        kept = {name for name, part in self.left_out if part == INPUTS}
        wide = [one for one in chosen if self.choices[one.var].inputs]
        asked = [one for one in wide if one.var.name not in kept]
        found = quantizing.measured(self.loaded, self.name, samples, asked, self.plan.activations)
        judged: dict[Var, list[Quantized]] = {one.var: [Quantized(0.0, 1.0, PAIR_LEAVES)] for one in wide}
        scales: dict[Any, float] = {}
        for one in asked:
            judged[one.var] = [found[r.op] for r in one.readers if r.op in found]
            most = max((each.scale for each in judged[one.var]), default=0.0)
            ops = [op for op in self.readers[one.var] if op.op_type in quantizing.READERS]
            scales |= {op: found[op].scale if op in found else most for op in ops}
        quantizing.insert(self.loaded.program, {op: scale for op, scale in scales.items() if scale})
        quantizing.clip_products(self.loaded.program)
        return judged

    def _mix(self, samples: Sequence[Mapping[str, Any]]) -> None:
        """Choose among the possible forms by what they cost at the outputs."""
        kinds = {one: [f for f in self.possible[one.var] if f is not None] for one in self.found}
        kinds = {one: forms for one, forms in kinds.items() if forms}
        if not kinds or (self.plan.room is None and all(len(forms) == 1 for forms in kinds.values())):
            return
        room, plan = self._room(kinds), self.plan
        if plan.how == ESTIMATED:
            modes = estimated(self.loaded, self.name, samples, kinds, plan.finished, room)
        else:
            modes = assigned(
                self.loaded, self.name, samples, kinds, plan.bits, self.version, plan.finished, room
            )
        goal = f"{plan.bits:g} bits are the average" if room is None else "there is room for it"
        for one in kinds:
            form = modes.get(one.var)
            plain = Choice(None, f"it costs most at the outputs, and {goal}")
            self.choices[one.var] = plain if form is None else self.possible[one.var][form]

    def _room(self, kinds: Iterable[Candidate]) -> int | None:
        """The bytes that weights with a choice may take, when all else has its own, and each op a bias.

        Raises:
            SurgeryError: all else takes that much.
        """
        if self.plan.room is None:
            return None
        weights = list(kinds)
        biased = {r.op: r for one in weights for r in one.readers if takes_bias(r.op)}
        held = {key_of(op.bias): stored_bytes(op.bias) for op in biased if op.inputs.get("bias") is not None}
        gained = sum(r.outputs.size * np.dtype(np_dtype(op.x)).itemsize for op, r in biased.items())
        replaced = sum(stored_bytes(one.var) for one in weights) + sum(held.values())
        kept = _bytes_of(self.loaded) - replaced + gained
        if kept >= self.plan.room:
            raise SurgeryError(
                f"max_bytes leaves {byte_words(self.plan.room)} to a program, but {byte_words(kept)} of it "
                "cannot be compressed; give more"
            )
        return self.plan.room - kept

    def _row(self, one: Candidate, size: int, made: Corrected | None) -> CompressedWeight:
        kinds = tuple(dict.fromkeys(r.op.op_type for r in one.readers))
        why = self.choices[one.var].why
        if made is None:
            return CompressedWeight(one.var.name, kinds, "", why, (size, size))
        return CompressedWeight(
            one.var.name,
            kinds,
            made.kind,
            why,
            (size, made.bytes),
            made.error,
            made.rounded,
            self.ops[one.var],
            calibration_rows=made.calibration_rows,
        )


def _readers(program: Program, found: Sequence[Candidate]) -> dict[Var, list[Any]]:
    """The ops of all functions that read the numbers of each weight."""
    made = {one.var: [r.op for r in one.readers] for one in found}
    if len(program.functions) == 1:
        return made
    by_key = {key_of(one.var): one.var for one in found}
    shapes = {key[0] for key in by_key}
    for function in program.functions.values():
        for op in function.operations:
            for _, var in operands(op):
                alike = var.op is not None and var.op.op_type == "const" and tuple(var.shape or ()) in shapes
                held = by_key.get(key_of(var)) if alike else None
                if held is not None and op not in made[held]:
                    made[held].append(op)
    return made


def _with_inputs(row: CompressedWeight, judged: Sequence[Quantized] | None) -> CompressedWeight:
    """What the ops of a weight read, in the words of the report."""
    if not judged:
        return row
    worst = min(judged, key=lambda one: one.cosine)
    scales = tuple(one.scale for one in judged if one.scale)
    inputs = "int8" if scales else worst.why
    return replace(row, inputs=inputs, scales=scales, cosine=worst.cosine)


def _lost(
    before: Sequence[Inspection], after: Sequence[Inspection], weights: Sequence[CompressedWeight]
) -> LeftOut:
    """The weights of ops that leave the Neural Engine by their new form, or whose inputs do, and why."""
    were = {row.name for one in before for row in one.ops if row.preferred == "ane"}
    left = {row.name for one in after for row in one.ops if row.preferred == "cpu"}
    lost: LeftOut = {}
    for one in weights:
        ops = were.intersection(one.ops)
        pairs = {name for op in ops for name in pair_names(op)}
        if one.scales and not left.isdisjoint(ops | pairs):
            lost[one.weight, INPUTS] = PAIR_LEAVES
        elif one.form and not left.isdisjoint(ops):
            lost[one.weight, WEIGHT] = LEAVES
    return lost


def _result(
    given: MLProgram,
    edited: MLProgram,
    weights: Sequence[CompressedWeight],
    samples: Samples,
    plan: _Plan,
    placed_: tuple[Sequence[Inspection], Sequence[Inspection]],
    doubts: Sequence[str],
) -> Compression:
    """What was done, and what it costs on samples that were held out."""
    loss = _loss(given, edited, samples.held_out, plan.function) if samples.held_out else None
    label = plan.target.name
    old, new = given.time(label), edited.time(label)
    return Compression(
        edited,
        tuple(weights),
        label,
        plan.purpose,
        (_bytes(given), _bytes(edited)),
        (len(samples.calibration), len(samples.held_out)),
        loss,
        change(old, new) if old is not None and new is not None else None,
        (_share(placed_[0]), _share(placed_[1])),
        tuple(doubts),
        asked=int(plan.bits) if plan.how == EVEN and not plan.forms else 0,
    )


def _share(inspections: Sequence[Inspection]) -> float:
    ops = [row for one in inspections for row in one.ops]
    return sum(row.preferred == "ane" for row in ops) / max(1, len(ops))


def _bytes(subject: MLProgram) -> int:
    """Count the bytes of all weights."""
    return sum(map(_bytes_of, subject.parts))


def _bytes_of(part: Loaded) -> int:
    """Count those of the weights of a program; equal ones, which are stored once, count once."""
    seen: dict[Any, int] = {}
    for function in part.program.functions.values():
        for op in function.operations:
            for _, var in () if is_weight(op) else operands(op):
                if is_compressed(var):
                    seen[_stored_key(var)] = stored_bytes(var)
                elif var.op is not None and var.op.op_type == "const" and isinstance(var.val, np.ndarray):
                    seen[key_of(var)] = stored_bytes(var)
    return sum(seen.values())


def _stored_key(var: Var) -> Any:
    assert var.op is not None
    return tuple(key_of(v) if not is_compressed(v) else _stored_key(v) for _, v in operands(var.op))


def _loss(
    given: MLProgram, edited: MLProgram, samples: Sequence[Mapping[str, Any]], function: str | None
) -> Cost:
    """How far the compressed model is from the given one."""
    both = [Predictor(subject.runnable, function=function) for subject in (given, edited)]
    for executable in (one for model in both for one in model.executables):
        executable.plan.room = min(executable.plan.room, KEPT)  # else all weights are there in fp32
    functions = given.parts[-1].program.functions
    last = functions[function] if function in functions else next(iter(functions.values()))
    cost = Cost(chosen=logits_of(last))
    for number, values in enumerate(samples):
        expected, outputs = (model(values) for model in both)
        _check_finite(number, expected, outputs)
        cost.add(expected, outputs)
    return cost


def _check_finite(number: int, expected: Mapping[str, Any], outputs: Mapping[str, Any]) -> None:
    """See that outputs are numbers that can be compared; infinities of masks stay where they are.

    Raises:
        SurgeryError: the model itself makes no number, or the compressed one no finite one where it does.
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


# How many bits each weight gets: its forms are corrected and measured at the outputs, one by one.
#
# Each weight is tried alone, in the plain model, on the calibration samples; `assignment` then takes the forms
# with the least damage for the average that is asked for.


def assigned(
    loaded: Loaded,
    name: str,
    samples: Sequence[Mapping[str, Any]],
    kinds: Mapping[Candidate, Sequence[str]],
    bits: float,
    version: int,
    finished: Finished,
    room: int | None = None,
) -> dict[Var, str]:
    """The form of each weight for an average number of bits.

    Args:
        loaded: the model.
        name: of the function.
        samples: as it takes them.
        kinds: the forms that each weight may have.
        bits: of a number, on average.
        version: of the specification.
        finished: corrects weights.
        room: bytes that all may take, in place of those bits.

    Raises:
        SurgeryError: even the smallest forms have more bits.
    """
    met = plain_moments(loaded, name, samples, list(kinds))
    executable = Executable(loaded.program, function=name, fuse=False)
    by_var, chosen = {one.var: one for one in kinds}, logits_of(executable.function)
    runs = [Forks(executable, values, list(by_var)) for values in samples]
    expected = [run.whole() for run in runs]
    rows = []
    for number, forks in enumerate(zip(*runs, strict=True)):
        one = by_var[forks[0].weight]
        options = {}
        due = {kind: finished.hand_in(one, kind, met[one.var], version) for kind in kinds[one]}
        for kind, waiting in due.items():
            made, cost = waiting(), Cost(chosen=chosen)
            for fork, outputs in zip(forks, expected, strict=True):
                cost.add(outputs, fork(made.array))
            options[kind] = Option(made.bytes, cost.psnr, cost.kl, cost.top1)
        types = tuple(r.op.op_type for r in one.readers)
        size = int(np.prod(one.var.shape))
        rows.append(Row(number, one.var.name, types, size, stored_bytes(one.var), options, {}))
    modes = propose(rows, bits=bits if room is None else None, max_bytes=room, smallest=0).modes
    return {var: modes[var.name] for var in by_var if var.name in modes}


# See that calibration samples say something, and keep some of them apart to judge by.

HELD_OUT = 4
"""One sample in so many is kept out of the calibration: with eight samples, two remain to judge by."""
FEW = 8
"""Samples below which a calibration is doubted. A choice: of fewer, one unusual sample decides ranges."""

Values = Mapping[str, Any]


@dataclass(frozen=True)
class Samples:
    """The samples that correct the weights, and those that judge the result."""

    calibration: Sequence[Values]
    held_out: Sequence[Values]
    doubts: tuple[str, ...]
    """What the samples lack, in words."""


def read_samples(inputs: Any) -> Samples:
    """Samples shared out: every fourth, at least one, is held out.

    Raises:
        SurgeryError: there are none, or one is no sample, or holds NaN or infinity.
    """
    if inputs is None:
        raise SurgeryError(
            "compress corrects weights with samples: give inputs=[{name: array}, ...], some dozens of "
            "real samples; random ones say little about a trained model"
        )
    if isinstance(inputs, (str, bytes, os.PathLike, np.ndarray)) or not isinstance(inputs, Iterable):
        raise SurgeryError(
            f"inputs is a {type(inputs).__name__}; give a list of samples, each a dictionary of arrays by name"
        )
    given = [_read(*each) for each in enumerate([inputs] if isinstance(inputs, Mapping) else inputs)]
    if not given:
        raise SurgeryError("inputs has no sample; give some dozens of real ones")
    if len(given) == 1:
        return Samples(
            given, (), ("only one sample: none is held out, so the loss is not measured; give some dozens",)
        )
    apart = [i % HELD_OUT == HELD_OUT - 1 or len(given) - 1 == i < HELD_OUT - 1 for i in range(len(given))]
    rest, held = ([v for v, out in zip(given, apart, strict=True) if out == side] for side in (False, True))
    return Samples(rest, held, (*_doubts(given), *_seen(rest, held)))


def _read(number: int, values: Any) -> Values:
    """A sample that was looked at.

    Raises:
        SurgeryError: it is no dictionary of arrays, or one holds NaN or infinity, or numbers that are masked.
    """
    if not isinstance(values, Mapping):
        raise SurgeryError(
            f"sample {number} is a {type(values).__name__}; give a dictionary of arrays by input name"
        )
    read = {name: value.detach() if hasattr(value, "detach") else value for name, value in values.items()}
    for name, value in read.items():
        try:
            array = np.asarray(value)
        except (ValueError, TypeError, RuntimeError) as error:
            raise SurgeryError(f"sample {number}: {name!r} is no array: {error}") from error
        if np.ma.is_masked(value):
            raise SurgeryError(f"sample {number}: {name!r} holds masked numbers; fill them in, or leave it out")
        if array.dtype.kind == "f" and not np.isfinite(array).all():
            raise SurgeryError(
                f"sample {number}: {name!r} holds NaN or infinity; leave it out or mend what made it"
            )
    return read


def _seen(calibration: Sequence[Values], held_out: Sequence[Values]) -> Iterable[str]:
    """Samples held out that are in the calibration too, by which nothing can be judged."""
    seen = set(map(_digest, calibration))
    count = sum(_digest(values) in seen for values in held_out)
    if count:
        yield (
            f"{count} of the {len(held_out)} samples held out are in the calibration too, so the loss on them "
            "is less than on others; give each sample once"
        )


def _digest(values: Values) -> frozenset[tuple[str, tuple[int, ...], bytes]]:
    """What equal samples have in common."""
    arrays = {name: np.asarray(value) for name, value in values.items()}
    return frozenset(
        (name, array.shape, hashlib.blake2b(array.tobytes(), digest_size=16).digest())
        for name, array in arrays.items()
    )


def _doubts(given: Sequence[Values]) -> Iterable[str]:
    """What is missing in samples."""
    if len(given) < FEW:
        yield f"{len(given)} samples only: give some dozens, which differ as real inputs do"
    for name in given[0]:
        arrays = [np.asarray(values[name]) for values in given if name in values]
        if all(np.array_equal(arrays[0], other) for other in arrays[1:]):
            yield f"the input {name!r} is the same in all samples; give it as it varies in use"
