"""Models that run one after the other as one model: what is padded for the first is followed through all."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from anesurgery.errors import SurgeryError
from anesurgery.files.joining import join
from anesurgery.files.package import Loaded
from anesurgery.files.protobuf import proto
from anesurgery.files.sequence import ModelSequence
from anesurgery.loading import load_sequence
from anesurgery.rewriting.newer_opsets import raised


def joined(place: str | os.PathLike[str]) -> Loaded:
    """The models of a pipeline or of a chain as one, which gives what the last ones give.

    Args:
        place: its package or folder.

    Raises:
        LoadError: it cannot be read, or one reads what none gives.
        SurgeryError: a picture passes between two of them, which rounds to whole numbers there, or an op would
            mean something else in the newest opset among them.
    """
    path = Path(place).expanduser()
    models = load_sequence(path)
    described = models.spec.description
    ends = {f.name for f in (*described.input, *described.output)}
    for part in models.parts:
        for feature in () if part.spec is None else part.spec.description.output:
            if feature.name not in ends and feature.type.WhichOneof("Type") == "imageType":
                raise SurgeryError(
                    f"sizes: the picture {feature.name} passes between two models of {path}, and is rounded "
                    "there to whole numbers; make each model of the pipeline at its sizes by itself"
                )
    version = max(part.version for part in models.parts)
    parts = [
        replace(part, program=raised(part.program, version, f"model {i} of {path}"))
        for i, part in enumerate(models.parts, 1)
    ]
    whole = join(ModelSequence.of_parts(models.spec, parts), [f.name for f in described.output])
    spec = proto.Model_pb2.Model(specificationVersion=version)
    spec.description.CopyFrom(described)
    spec.mlProgram.SetInParent()
    files = tuple(f for part in parts for f in (part.weights, *part.other_weights) if f is not None)
    return Loaded(whole, spec, path.resolve(), other_weights=files)
