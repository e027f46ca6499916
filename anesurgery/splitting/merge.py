"""Merge models into the functions of one package, which share weights, and extract one function again.

`anesurgery.merge` and `anesurgery.extract`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from anesurgery.doors import door
from anesurgery.errors import SurgeryError, UnknownName
from anesurgery.files.interface import describe, new_spec, warn_of_names
from anesurgery.files.joining import default_function
from anesurgery.files.package import Loaded, save
from anesurgery.files.protobuf import InMemoryWeights, from_proto, proto, to_proto
from anesurgery.loading import load
from anesurgery.mil import exclusive, function_of
from anesurgery.rewriting.newer_opsets import raised

FUNCTIONS = 9
"""The first specification version (iOS 18) with several functions."""


@door()
@exclusive()
def merge(
    models: Mapping[str, Any],
    path: str | os.PathLike[str],
    *,
    default: str | None = None,
    overwrite: bool = False,
) -> Path:
    """Write one package with the given models as functions. Equal weights are stored once.

    Weights are equal if their bytes are. They are copied piece by piece, and never held in memory. All
    functions are raised to the newest opset among them, at least iOS 18. Every op keeps its meaning: for
    example, a negative index is counted from the front, because lookups from iOS 17 on do not do that.

    Args:
        models: name of a function -> path, MLModel or MIL program, whose default function is taken.
        path: ends in .mlpackage.
        default: the function that runs where none is named. Default: the first.
        overwrite: may an existing package be replaced?

    Returns:
        Where the package is.

    Raises:
        LoadError: a model cannot be read, or the package cannot be written.
        SurgeryError: fewer than two models, a name that is not an identifier, no such default, or an op that
            would mean something else in the newer opset.
    """
    names = list(models)
    first = names[0] if default is None and names else default
    if len(names) < 2:
        raise SurgeryError("merge takes two models or more, by names such as prefill and decode")
    if invalid := [name for name in names if not (isinstance(name, str) and name.isidentifier())]:
        raise SurgeryError(
            f"{invalid[0]!r} is no name of a function; take letters, digits and _, as in decode_8"
        )
    if first not in names:
        raise UnknownName("default function", str(first), names)
    loaded = {name: load(model) for name, model in models.items()}
    for part in loaded.values():
        warn_of_names(part.notes)
    held = InMemoryWeights()
    whole = proto.MIL_pb2.Program(version=1)
    version = max([FUNCTIONS, *(m.version for m in loaded.values())])
    spec = proto.Model_pb2.Model(specificationVersion=version)
    for name, model in loaded.items():
        program, function = raised(model.program, version, f"function {name!r}"), default_function(model)
        source = None if model.spec is None else model.spec.mlProgram
        whole.functions[name].CopyFrom(to_proto(program, version, held.store, source).functions[function])
        stated = model.spec if model.spec is not None else new_spec(model.program, model.version)
        _copy_ports(stated.description, function, spec.description.functions.add(name=name))
        if name == first and model.spec is not None:
            spec.description.metadata.CopyFrom(model.spec.description.metadata)
    spec.description.defaultFunctionName = first
    spec.mlProgram.SetInParent()
    program = from_proto(whole, version, held.read, "the merged model")
    for model in loaded.values():
        model.check_source()
    files = tuple(m.weights for m in loaded.values() if m.weights is not None)
    return save(Loaded(program, spec, other_weights=files), path, overwrite=overwrite)


def _copy_ports(description: Any, function: str | None, to: Any) -> None:
    """Copy what a description says of the inputs, outputs and states of a function, and of its label."""
    source = next((f for f in description.functions if f.name == function), description)
    for kind in ("input", "output", "state"):
        getattr(to, kind).extend(getattr(source, kind))
    for name in ("predictedFeatureName", "predictedProbabilitiesName"):
        setattr(to, name, getattr(source, name))


@door()
@exclusive()
def extract(model: Any, function: str, path: str | os.PathLike[str], *, overwrite: bool = False) -> Path:
    """Write a package with one function of a model, as its `main`, and the weights that it reads.

    Args:
        model: path, MLModel or MIL program.
        function: the name of the function.
        path: ends in .mlpackage.
        overwrite: may an existing package be replaced?

    Returns:
        Where the package is.

    Raises:
        LoadError: the model cannot be read, or the package cannot be written.
        UnknownName: no such function.
        SurgeryError: an argument is not what the call takes.
    """
    loaded = load(model)
    warn_of_names(loaded.notes)
    function_of(loaded.program, function)
    held = InMemoryWeights()
    source = None if loaded.spec is None else loaded.spec.mlProgram
    whole = to_proto(loaded.program, loaded.version, held.store, source)
    single = proto.MIL_pb2.Program(version=1)
    single.functions["main"].CopyFrom(whole.functions[function])
    program = from_proto(single, loaded.version, held.read, f"function {function!r}")
    spec = proto.Model_pb2.Model(specificationVersion=loaded.version)
    if loaded.spec is not None:
        spec.description.metadata.CopyFrom(loaded.spec.description.metadata)
        _copy_ports(loaded.spec.description, function, spec.description)
    spec.mlProgram.SetInParent()
    describe(spec, program)
    return save(replace(loaded, program=program, spec=spec), path, overwrite=overwrite)
