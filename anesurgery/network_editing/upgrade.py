"""Make an ML Program of a neural network on disk or in memory; the models of a pipeline too."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from anesurgery import registry
from anesurgery.checking.comparison import compare
from anesurgery.checking.ranges import ranges
from anesurgery.doors import door
from anesurgery.errors import SurgeryError
from anesurgery.files.interface_change import warn_of_names
from anesurgery.files.package import PIPELINES, PROGRAM, Loaded, locate, read_spec, to_mlmodel
from anesurgery.loading import clone, load
from anesurgery.mil import ct, exclusive, walk_ops
from anesurgery.neuralnetwork.context import Custom
from anesurgery.neuralnetwork.importing import import_network
from anesurgery.neuralnetwork.pipelines import upgrade_pipeline
from anesurgery.neuralnetwork.sequence_length import with_sequence
from anesurgery.rewriting.dead_code import remove_dead
from anesurgery.rewriting.passes import run_pass
from anesurgery.rewriting.session import Session

NOTES = "anesurgery.notes"
"""Where the notes are in the metadata of an upgraded model."""
GATE = 60.0
"""PSNR in dB that the fp16 form of a network must keep where nobody asked for fp16: an error of a thousandth of
the largest value."""
STATED = 3
"""Ops that the notes name as fp32: the sentence stays on two lines."""
PRECISIONS = (None, "fp16", "fp32")


@door()
@exclusive
def upgrade(
    model: Any, custom: Custom | None = None, *, precision: str | None = None, sequence: int | None = None
) -> Any:
    """A neural network as an ML Program.

    Args:
        model: path or MLModel that holds a neural network, or a pipeline with some; others of its models stay.
        custom: class name of a custom layer -> function that builds it, called as (context, params, inputs)
            with the MIL values that it reads; it gives the MIL value of its output, or a list of values.
        precision: what the network computes in: "fp32", or "fp16" but for the ops that `compute_fp16` keeps.
            None means fp16 if outputs keep 60 dB on a sampled input, else fp32; the notes say which, and why.
        sequence: steps of the sequence that a network of the rank 5 mapping is given at once; 1 by default. The
            inputs then have five axes (sequence, batch, channel, height, width).

    Returns:
        An MLModel; what changed is in its metadata, under `NOTES`. Inputs and outputs keep their names, but for
        those that an ML Program cannot have ("82", "x.1", "a/b"): a warning and the notes say what each became.

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
    """An imported network in fp32, or in fp16 but for some ops; its notes say which. What nobody reads goes."""
    remove_dead(list(walk_ops(loaded.program)))
    if precision == "fp32":
        return loaded
    if precision == "fp16":
        return _halved(loaded, {}, "outputs were not compared")
    try:
        half = _halved(loaded, {}, "")
        if (psnr := _psnr(loaded, half)) < GATE:
            observed = {r.name: (r.minimum, r.maximum) for r in ranges(loaded).rows}
            half = _halved(loaded, observed, "ranges observed on one sampled input")
            psnr = _psnr(loaded, half)
    except SurgeryError as error:
        return replace(loaded, notes=(*loaded.notes, f"it stays fp32, since it could not be run: {error}"))
    if psnr < GATE:
        why = f"fp16 keeps {psnr:.1f} dB of {GATE:g} on one sampled input; ask for it by precision='fp16'"
        return replace(loaded, notes=(*loaded.notes, f"it stays fp32: {why}"))
    return replace(half, notes=(*half.notes, f"fp16 keeps {psnr:.1f} dB on one sampled input"))


def _halved(loaded: Loaded, observed: dict[str, tuple[float, float]], words: str) -> Loaded:
    """The fp16 form of a copy, with what stays fp32 in its notes."""
    half, session = clone(loaded), Session()
    run_pass(registry.make_pass("compute_fp16", ranges=observed), half.program, session)
    stays = [f"{r.where.name} ({r.reason})" for _, r in session.refusals if r.where is not None]
    more = f" and {len(stays) - STATED} more" if len(stays) > STATED else ""
    note = f"it computes in fp16{', but for ' + ', '.join(stays[:STATED]) + more if stays else ''}"
    return replace(half, notes=(*loaded.notes, f"{note}; {words}" if words else note))


def _psnr(before: Loaded, after: Loaded) -> float:
    """In fp16, of the worst output; minus infinity where anything is undefined, or nothing was compared."""
    compared = compare(before, after, precision="fp16", gate=-math.inf)
    return compared.psnr if compared.ok else -math.inf


def _keep_notes(model: Any, notes: Sequence[str]) -> Any:
    warn_of_names(notes)
    if notes:
        model.user_defined_metadata[NOTES] = "\n".join(notes)
    return model
