"""Upgrade the neural networks in a pipeline; its other models stay as they are."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from anesurgery.errors import LoadError
from anesurgery.files.package import PIPELINES, PROGRAM, Loaded, from_spec, part_names
from anesurgery.files.protobuf import proto
from anesurgery.files.sequence import ModelSequence
from anesurgery.neuralnetwork.ports import describe
from anesurgery.neuralnetwork.spec import NETWORKS

Import = Callable[[Any, str], Loaded]
"""(specification of a network, what it is in words) -> the program of it."""


def upgrade_pipeline(
    spec: Any, source: Path | None, weights: Path | None, units: Any, build: Import
) -> tuple[ModelSequence, list[str]]:
    """The pipeline with an ML Program in the place of each network.

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
    """The program of a part that has one, or is a network; None for one that stays."""
    kind = part.WhichOneof("Type")
    if kind is None:
        raise LoadError(f"{what} is empty, or newer than this coremltools; export the pipeline again")
    if kind in PIPELINES:
        raise LoadError(f"{what} is a pipeline itself; put its models into the outer one")
    if kind == PROGRAM:
        return from_spec(part, source or Path(), weights, None)
    return build(part, what) if kind in NETWORKS else None


def _renamed(before: Any, after: Any, what: str, before_it: dict[str, str]) -> dict[str, str]:
    """Names of inputs and outputs that changed; all parts must call a value the same."""
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
