"""Upgrade the neural networks in a pipeline; its other models stay as they are."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from anesurgery.errors import LoadError
from anesurgery.files.package import PIPELINES, PROGRAM, Loaded, from_spec, to_mlmodel
from anesurgery.files.protobuf import proto
from anesurgery.mil import ct, quiet_host
from anesurgery.neuralnetwork.ports import describe
from anesurgery.neuralnetwork.spec import NETWORKS

Import = Callable[[Any, str], Loaded]
"""(specification of a network, what it is in words) -> the program of it."""


def upgrade_pipeline(
    spec: Any, source: Path | None, weights: Path | None, units: Any, build: Import
) -> tuple[Any, list[str]]:
    """The pipeline with an ML Program in the place of each network.

    Args:
        spec: specification of a pipeline.
        source: where it came from.
        weights: the folder with the weights of its ML Programs.
        units: compute units of the result.
        build: makes a program of a network.

    Returns:
        An MLModel with the description of `spec`, and what changed.

    Raises:
        LoadError: a part cannot be built, a part that stays reads a name that changed, or there is one only.
    """
    parts = list(PIPELINES[spec.WhichOneof("Type")](spec).models)
    if len(parts) < 2:
        raise LoadError(f"the pipeline has {len(parts)} models, expected 2 or more; upgrade the model itself")
    built: list[Any] = []
    notes: list[str] = []
    names: dict[str, str] = {}
    for i, part in enumerate(parts):
        what = f"model {i} of the pipeline"
        member = _part(part, what, source, weights, build)
        built.append(member)
        if isinstance(member, Loaded):
            notes += [f"{what}: {words}" for words in member.notes]
            names |= _renamed(part, member.spec, what, names)
    # Only now is anything written, into temporary packages that live until the process ends.
    models = [to_mlmodel(member) if isinstance(member, Loaded) else member for member in built]
    with quiet_host():
        member = ct.utils.make_pipeline(*models, compute_units=units or ct.ComputeUnit.ALL)
    return _as_it_was(member, spec, names), notes


def _part(part: Any, what: str, source: Path | None, weights: Path | None, build: Import) -> Any:
    """The program of a part that has one, else an MLModel."""
    kind = part.WhichOneof("Type")
    if kind is None:
        raise LoadError(f"{what} is empty, or newer than this coremltools; export the pipeline again")
    if kind in NETWORKS:
        return build(part, what)
    if kind == PROGRAM and source is not None:
        return from_spec(part, source, weights, None)
    if kind in PIPELINES:
        raise LoadError(f"{what} is a pipeline itself; put its models into the outer one")
    with quiet_host():
        return ct.models.MLModel(part, skip_model_load=True)


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


def _as_it_was(rebuilt: Any, spec: Any, names: dict[str, str]) -> Any:
    """The pipeline with the type and the description that it had."""
    whole = proto.Model_pb2.Model()
    whole.CopyFrom(spec)
    built = rebuilt.get_spec()
    whole.specificationVersion = max(spec.specificationVersion, built.specificationVersion)
    pipeline = PIPELINES[spec.WhichOneof("Type")](whole)
    del pipeline.models[:]
    pipeline.models.extend(built.pipeline.models)
    describe(whole.description, names, [])
    with quiet_host():
        return ct.models.MLModel(
            whole, weights_dir=rebuilt.weights_dir, compute_units=rebuilt.compute_unit, skip_model_load=True
        )
