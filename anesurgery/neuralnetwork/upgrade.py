"""Make an ML Program of a neural network on disk or in memory; the models of a pipeline too."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from anesurgery.files.package import PIPELINES, PROGRAM, Loaded, locate, read_spec, to_mlmodel
from anesurgery.loading import load
from anesurgery.mil import ct, exclusive
from anesurgery.neuralnetwork.context import Custom
from anesurgery.neuralnetwork.importing import import_network
from anesurgery.neuralnetwork.pipelines import upgrade_pipeline

NOTES = "anesurgery.notes"
"""Where the notes are in the metadata of an upgraded model."""


@exclusive
def upgrade(model: Any, custom: Custom | None = None) -> Any:
    """A neural network as an ML Program.

    Args:
        model: path or MLModel that holds a neural network, or a pipeline with some; others of its models stay.
        custom: class name of a custom layer -> function that builds it, called as (context, params, inputs)
            with the MIL values that it reads; it gives the MIL value of its output, or a list of values.

    Returns:
        An MLModel; what changed is in its metadata, under `NOTES`.

    Raises:
        LoadError: it cannot be read or built; the layer is named.
    """
    spec, source, units = _specification(model)
    kind = PROGRAM if spec is None else spec.WhichOneof("Type")
    if kind in PIPELINES:
        return _keep_notes(*_pipeline(spec, source, units, custom))
    if kind == PROGRAM:
        loaded = load(model)
    else:
        what = str(source or "this MLModel")
        loaded = import_network(spec, what, custom=custom, source=source, compute_units=units)
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


def _pipeline(spec: Any, source: Path | None, units: Any, custom: Custom | None) -> tuple[Any, Sequence[str]]:
    weights = None if source is None else locate(source)[1]

    def build(part: Any, what: str) -> Loaded:
        return import_network(part, what, custom=custom)

    return upgrade_pipeline(spec, source, weights, units, build)


def _keep_notes(model: Any, notes: Sequence[str]) -> Any:
    if notes:
        model.user_defined_metadata[NOTES] = "\n".join(notes)
    return model
