"""A pipeline of ML Programs as one model, whose shapes can be followed from end to end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from anesurgery.errors import IsPipeline, SurgeryError
from anesurgery.files.joining import join
from anesurgery.files.package import Loaded
from anesurgery.files.sequence import members, read_pipeline
from anesurgery.loading import load


def one_program(model: Any) -> Loaded:
    """A model, or the models of a pipeline as one.

    Raises:
        LoadError: it cannot be read.
        SurgeryError: a model of the pipeline is no ML Program, or the pipeline reads pictures.
    """
    try:
        return load(model)
    except IsPipeline:
        place = getattr(model, "package_path", model)
        if place is None:
            raise
    pipeline = read_pipeline(Path(place).expanduser())
    others = [name for name, _ in members(pipeline.spec) if name not in pipeline.loaded]
    if others:
        raise SurgeryError(
            f"sizes: {others[0]} of the pipeline is no ML Program; anesurgery.upgrade makes it one"
        )
    features = pipeline.spec.description.input
    if pictures := [f.name for f in features if f.type.WhichOneof("Type") == "imageType"]:
        raise SurgeryError(f"sizes: {pictures[0]} of the pipeline is a picture; give its models one by one")
    (ends,) = pipeline.ends.values()
    return load(join(pipeline, ends.outputs))
