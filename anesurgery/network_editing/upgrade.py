"""Make an ML Program of a neural network on disk or in memory; the models of a pipeline too."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from anesurgery import fp16, registry
from anesurgery.checking.comparison import compare
from anesurgery.checking.ranges import ranges
from anesurgery.doors import door
from anesurgery.errors import LoadError, SurgeryError, warn
from anesurgery.facts.half import NAMED
from anesurgery.files.interface import warn_of_names
from anesurgery.files.package import (
    PIPELINES,
    PROGRAM,
    Loaded,
    from_spec,
    locate,
    part_names,
    read_spec,
    to_mlmodel,
)
from anesurgery.files.protobuf import proto
from anesurgery.files.sequence import ModelSequence
from anesurgery.loading import clone, load
from anesurgery.mil import Operation, ct, exclusive, walk_ops
from anesurgery.neuralnetwork.context import Custom
from anesurgery.neuralnetwork.importing import import_network
from anesurgery.neuralnetwork.ports import describe
from anesurgery.neuralnetwork.spec import NETWORKS, is_legacy, network_of
from anesurgery.rewriting.driver import remove_dead
from anesurgery.rewriting.passes import run_pass
from anesurgery.rewriting.session import Session
from anesurgery.semantics.reading import in_decibels
from anesurgery.semantics.rows import work_of

NOTES = "anesurgery.notes"
"""Where the notes are in the metadata of an upgraded model."""
GATE = 60.0
"""PSNR in dB that the fp16 form of a network must keep where nobody asked for fp16: an error of a thousandth of
the largest value."""
MOST_NAMED = 3
"""The most fp32 ops that a note names: so it stays on two lines."""
PRECISIONS = (None, "fp16", "fp32")
NO_FORM = "takes no fp16"
"""In the reason of an op that no other form of the network computes in fp16: nothing was lost."""
Observed = Mapping[str, tuple[float, float]]
"""Value -> the least and the largest number that it had in a run."""


@door()
@exclusive()
def upgrade(
    model: Any, custom: Custom | None = None, *, precision: str | None = None, sequence: int | None = None
) -> Any:
    """Make an ML Program from a neural network.

    Args:
        model: path or MLModel with a neural network, or a pipeline with some; its other models stay.
        custom: class name of a custom layer -> function that builds it, called as (context, params, inputs)
            with the MIL values that it reads; it gives the MIL value of its output, or a list of values.
        precision: "fp32", or "fp16" except for ops that `compute_fp16` keeps. None means fp16, as Core ML ran
            the network, with the fewest ops in fp32 that keep the outputs at 60 dB on a random input. Notes and
            a warning name them.
        sequence: steps of the sequence that a network of the rank 5 mapping is given at once; 1 by default. The
            inputs then have five axes (sequence, batch, channel, height, width).

    Returns:
        An MLModel; its metadata lists the changes under `NOTES`. Inputs and outputs keep their names, except
        names that an ML Program cannot have ("82", "x.1", "a/b"). A warning and the notes give the new ones.

    Raises:
        LoadError: it cannot be read or built; the layer is named.
        SurgeryError: an unknown precision.
    """
    if precision not in PRECISIONS:
        raise SurgeryError(f"precision={precision!r}; it may be {', '.join(map(repr, PRECISIONS))}")
    spec, source, units = _specification(model)
    kind = PROGRAM if spec is None else spec.WhichOneof("Type")
    if kind in PIPELINES:
        return _keep_notes(*_pipeline(spec, source, units, custom, precision))
    if kind == PROGRAM:
        loaded = load(model)
    else:
        what = str(source or "this MLModel")
        spec = spec if sequence is None else with_sequence(spec, sequence, what)
        loaded = import_network(spec, what, custom=custom, source=source, compute_units=units)
        loaded = in_precision(loaded, precision)
    return _keep_notes(to_mlmodel(loaded), loaded.notes)


def _specification(model: Any) -> tuple[Any, Path | None, Any]:
    """Specification, place and compute units of what is on disk or an MLModel; None of anything else."""
    if isinstance(model, ct.models.MLModel):
        place = None if model.package_path is None else Path(model.package_path)
        return model.get_spec(), place, model.compute_unit
    if isinstance(model, (str, os.PathLike)):
        source = Path(model).expanduser()
        return read_spec(locate(source)[0]), source, None
    return None, None, None


def _pipeline(
    spec: Any, source: Path | None, units: Any, custom: Custom | None, precision: str | None
) -> tuple[Any, Sequence[str]]:
    weights = None if source is None else locate(source)[1]

    def build(part: Any, what: str) -> Loaded:
        return in_precision(import_network(part, what, custom=custom), precision)

    models, notes = upgrade_pipeline(spec, source, weights, units, build)
    return models.mlmodel(), notes


def in_precision(loaded: Loaded, precision: str | None) -> Loaded:
    """Return an imported network in a precision, without dead ops; its notes name the ops that stay fp32.

    Args:
        loaded: the network in fp32.
        precision: "fp32", "fp16", or None for fp16 with the fewest ops in fp32 that keep the outputs near.
    """
    remove_dead(list(walk_ops(loaded.program)))
    if precision == "fp32":
        return loaded
    folded = clone(loaded)  # a variance alone may be too large for fp16, and Core ML folds it too
    run_pass(registry.make_pass("fold_batch_norm"), folded.program, Session())
    if precision == "fp16":
        return _Fp16Form.of(folded).noted("outputs were not compared")
    try:
        return _nearest_form(loaded, folded)
    except SurgeryError as error:
        return _fp32(loaded, f"it could not be run: {error}")


def _nearest_form(loaded: Loaded, folded: Loaded) -> Loaded:
    """Return the form that computes the least in fp32 and keeps `GATE`; the network in fp32 where none does.

    Forms are tried with the ranges that the intervals show, then with observed ones, with and without batch
    norms folded, and at last with a run of ops in fp32.
    """
    forms = [_Fp16Form.of(folded).measured(loaded)]
    if forms[0].psnr < GATE or forms[0].has_wide_ranges:
        observed = {r.name: (r.minimum, r.maximum) for r in ranges(folded).rows}
        forms += [_Fp16Form.of(form, observed).measured(loaded) for form in (folded, loaded)]
        if forms[1].psnr < GATE and forms[2].psnr < GATE:
            forms += _forms_with_fp32_run(loaded, folded, observed)
    if near := [form for form in forms if form.psnr >= GATE]:
        best = min(near, key=lambda form: (form.flop, len(form.fp32_ops)))
        return best.noted(f"its outputs are {in_decibels(best.psnr, 'within ')} on one sampled input")
    why = f"fp16 keeps {max(form.psnr for form in forms):.1f} dB of {GATE:g} on one sampled input"
    return _fp32(loaded, f"{why}; ask for it by precision='fp16'")


def _fp32(loaded: Loaded, why: str) -> Loaded:
    """Return the network in fp32; a warning and its notes say why, since the ANE runs no fp32."""
    warn(f"the upgraded network stays fp32, which the ANE does not run: {why}")
    return replace(loaded, notes=(*loaded.notes, f"it stays fp32: {why}"))


def _forms_with_fp32_run(loaded: Loaded, folded: Loaded, observed: Observed) -> list[_Fp16Form]:
    """Return the forms tried with one run of ops in fp32: each switch between fp16 and fp32 costs time.

    The search halves the ops to find the end of the run, and then again to find its start.
    """
    (function,) = folded.program.functions.values()
    names = [op.outputs[0].name for op in function.operations if op.op_type != "const"]
    tried: list[_Fp16Form] = []

    def is_near(start: int, end: int) -> bool:
        tried.append(_Fp16Form.of(folded, observed, names[start:end]).measured(loaded))
        return tried[-1].psnr >= GATE

    end = _least(lambda count: is_near(0, count), len(names))
    _least(lambda count: is_near(end - count, end), end)
    return tried


def _least(is_enough: Callable[[int], bool], most: int) -> int:
    """Return the least count that is enough, where more is never worse and `most` is enough."""
    low, high = 0, most
    while low + 1 < high:
        middle = (low + high) // 2
        low, high = (low, middle) if is_enough(middle) else (middle, high)
    return high


@dataclass(frozen=True)
class _Fp16Form:
    """The fp16 form of a copy of a network."""

    loaded: Loaded
    fp32_ops: tuple[tuple[str, str], ...]
    """(name of an op that stays fp32, the reason)."""
    flop: int
    """The floating point operations of these."""
    is_observed: bool
    """Does it rest on ranges that were observed?"""
    psnr: float = -math.inf
    """The PSNR in dB of its outputs against those in fp32."""

    @classmethod
    def of(cls, loaded: Loaded, observed: Observed | None = None, kept: Sequence[str] = ()) -> _Fp16Form:
        """Convert a copy of a network.

        Args:
            loaded: the network in fp32.
            observed: the ranges that decide which values fit fp16; by default those of the intervals.
            kept: values whose ops stay fp32 in any case.
        """
        converted, session = clone(loaded), Session()
        step = registry.make_pass("compute_fp16", ranges=observed or {}, keep=tuple(kept))
        run_pass(step, converted.program, session)
        refused = [(op, r.reason) for _, r in session.refusals if isinstance(op := r.where, Operation)]
        return cls(
            loaded=converted,
            fp32_ops=tuple((op.name, reason) for op, reason in refused),
            flop=sum(work_of(op).flop for op, _ in refused),
            is_observed=observed is not None,
        )

    @property
    def has_wide_ranges(self) -> bool:
        """Does an op stay fp32 for its range alone, which an observed one may refute?"""
        return any(f"above {fp16.LARGEST:g}" in reason for _, reason in self.fp32_ops)

    def measured(self, reference: Loaded) -> _Fp16Form:
        """Measure how near its outputs are to those of the network in fp32.

        The PSNR stays minus infinity where an output is undefined, or nothing was compared.
        """
        compared = compare(reference, self.loaded, precision="fp16", gate=-math.inf)
        return replace(self, psnr=compared.psnr) if compared.ok else self

    def noted(self, words: str) -> Loaded:
        """Return the model with a note about the ops that stay fp32, and warn of those that need not."""
        run = [name for name, reason in self.fp32_ops if reason == NAMED]
        named = [f"{name} ({reason})" for name, reason in self.fp32_ops if reason != NAMED]
        if run:
            named.insert(0, f"{len(run)} ops from {run[0]} to {run[-1]} (else outputs are too inexact)")
        note = "it computes in fp16"
        if named:
            more = f" and {len(named) - MOST_NAMED} more" if len(named) > MOST_NAMED else ""
            note += f", but for {', '.join(named[:MOST_NAMED])}{more}"
        if any(NO_FORM not in reason for _, reason in self.fp32_ops):
            warn(f"the upgraded network has fp32 ops, which the ANE does not run: {note}")
        seen = "; ranges observed on that input" if self.is_observed else ""
        return replace(self.loaded, notes=(*self.loaded.notes, f"{note}; {words}{seen}"))


def _keep_notes(model: Any, notes: Sequence[str]) -> Any:
    """Return an MLModel with the notes in its metadata, and warn of names that changed."""
    warn_of_names(notes)
    if notes:
        model.user_defined_metadata[NOTES] = "\n".join(notes)
    return model


Import = Callable[[Any, str], Loaded]
"""(specification of a network, what it is in words) -> the program of it."""


def upgrade_pipeline(
    spec: Any, source: Path | None, weights: Path | None, units: Any, build: Import
) -> tuple[ModelSequence, list[str]]:
    """Return the pipeline with an ML Program in the place of each network.

    Args:
        spec: specification of a pipeline, which stays as it is.
        source: where it came from.
        weights: the folder with the weights of its ML Programs.
        units: compute units of the result.
        build: makes a program of a network.

    Returns:
        The models, with the type and the description of `spec`, and what changed.

    Raises:
        LoadError: a part cannot be built, or a part reads a name that changed.
    """
    whole = proto.Model_pb2.Model()
    whole.CopyFrom(spec)
    pipeline = PIPELINES[whole.WhichOneof("Type")](whole)
    built: dict[str, Loaded] = {}
    notes: list[str] = []
    names: dict[str, str] = {}
    for i, (name, part) in enumerate(zip(part_names(pipeline), pipeline.models, strict=True)):
        what = f"model {i} of the pipeline"
        loaded = _part(part, what, source, weights, build)
        names |= _renamed(part, part if loaded is None else loaded.spec, what, names)
        if loaded is not None:
            built[name] = loaded
            notes += [f"{what}: {words}" for words in loaded.notes]
    describe(whole.description, names, [])
    return ModelSequence(whole, built, source, units), notes


def _part(part: Any, what: str, source: Path | None, weights: Path | None, build: Import) -> Loaded | None:
    """Return the program of a part that has one, or is a network; None for one that stays."""
    kind = part.WhichOneof("Type")
    if kind is None:
        raise LoadError(f"{what} is empty, or newer than this coremltools; export the pipeline again")
    if kind in PIPELINES:
        raise LoadError(f"{what} is a pipeline itself; put its models into the outer one")
    if kind == PROGRAM:
        return from_spec(part, source or Path(), weights, None)
    return build(part, what) if kind in NETWORKS else None


def _renamed(before: Any, after: Any, what: str, before_it: dict[str, str]) -> dict[str, str]:
    """Return names of inputs and outputs that changed; all parts must call a value the same."""
    changed: dict[str, str] = {}
    for field in ("input", "output"):
        olds, news = (getattr(s.description, field) for s in (before, after))
        for old, new in zip(olds, news, strict=True):
            if before_it.get(old.name, new.name) != new.name:
                raise LoadError(
                    f"{what} reads {old.name!r}, which an upgraded model must call {before_it[old.name]!r}; "
                    "rename it in the source model to letters, digits and underscores"
                )
            if old.name != new.name:
                changed[old.name] = new.name
    return changed


def with_sequence(spec: Any, length: int, what: str) -> Any:
    """Return a copy of a specification whose inputs are sequences of a length, with a batch of 1.

    Networks of specification 1 to 3 take any length, and their files state none. Optional inputs are states,
    which have no sequence; images have none either.

    Args:
        spec: of a network in the mapping of five axes (sequence, batch, channel, height, width).
        length: number of steps, at least 1.
        what: the model in words, for errors.

    Raises:
        LoadError: the length is below 1, or the network has no such mapping or no such input.
    """
    if length < 1:
        raise LoadError(f"{what}: sequence={length}; a sequence has at least 1 step")
    if not is_legacy(network_of(spec)):
        raise LoadError(
            f"{what}: its arrays have the shapes that are stated; sequence= is for the rank 5 mapping"
        )
    longer = proto.Model_pb2.Model()
    longer.CopyFrom(spec)
    arrays = [
        f.type.multiArrayType
        for f in longer.description.input
        if f.type.WhichOneof("Type") == "multiArrayType" and not f.type.isOptional
    ]
    for array in arrays:
        sizes = list(array.shape)[-3:]
        array.shape[:] = [length, 1, *sizes, *(1,) * (3 - len(sizes))]
        array.ClearField("ShapeFlexibility")
    if not arrays:
        raise LoadError(f"{what}: no input is a sequence; leave sequence= out")
    return longer
