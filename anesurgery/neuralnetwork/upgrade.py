"""Make an ML Program of a neural network: its layers as ops, its interface as it was.

Names, types, images, labels, defaults and metadata of the description are kept. What an ML Program cannot say
is changed, and told in the notes of the result: 64 bit floats become 32 bit ones, names become identifiers, an
optional input without a default gets 0.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from anesurgery.errors import LoadError
from anesurgery.mil import Function, Program, Var, ct, mb, quiet_host
from anesurgery.neuralnetwork import ports
from anesurgery.neuralnetwork.context import Context, Custom
from anesurgery.neuralnetwork.naming import identifiers, rename
from anesurgery.neuralnetwork.spec import NETWORKS, is_legacy, network_of
from anesurgery.program import PROGRAM, Loaded, load, locate, read_spec, to_mlmodel
from anesurgery.transcribe import proto

with quiet_host():
    from coremltools.converters.mil.mil import mil_list

OPSET = ct.target.iOS17
NOTES = "anesurgery.notes"
"""Where the notes stand in the metadata of an upgraded model."""


def upgrade(model: Any, custom: Custom | None = None) -> Any:
    """A neural network as an ML Program.

    Args:
        model: path of an .mlmodel, or MLModel, that holds a neural network.
        custom: class name of a custom layer -> function that builds it, called as (context, params, inputs)
            with the MIL values that it reads; it gives the MIL value of its output, or a list of values.

    Returns:
        An MLModel; what changed stands in its metadata, under `NOTES`.

    Raises:
        LoadError: it cannot be read or built; the layer is named.
    """
    loaded = _read(model, custom)
    if loaded.notes:
        loaded.spec.description.metadata.userDefined[NOTES] = "\n".join(loaded.notes)
    return to_mlmodel(loaded)


def _read(model: Any, custom: Custom | None) -> Loaded:
    source, units = model, None
    if isinstance(model, ct.models.MLModel):
        source, units, spec = model.package_path, model.compute_unit, model.get_spec()
    elif isinstance(model, (str, os.PathLike)):
        source = Path(model).expanduser()
        spec = read_spec(locate(source)[0])
    else:
        return load(model)
    if spec.WhichOneof("Type") == PROGRAM:
        return load(model)
    return import_network(
        spec, str(source or "this MLModel"), custom=custom, source=source, compute_units=units
    )


def import_network(
    spec: Any, what: str = "the model", *, custom: Custom | None = None, source: Path | None = None,
    compute_units: Any = None, keep_names: bool = False,
) -> Loaded:  # fmt: skip
    """The ML Program of a neural network.

    Args:
        spec: specification of a model, one of `NETWORKS`.
        what: the model in words, for errors.
        custom: builders of custom layers by class name.
        source: the file it came from.
        compute_units: of the MLModel that comes out.
        keep_names: keep names of inputs and outputs that MIL does not take; then it can be run, but not saved.

    Raises:
        LoadError: a layer is unknown or damaged, or the model is updatable.
    """
    kind = spec.WhichOneof("Type")
    if kind not in NETWORKS:
        how = "convert it with minimum_deployment_target=ct.target.iOS15 or later"
        raise LoadError(f"{what} is a {kind}, not an ML Program; {how}")
    if spec.isUpdatable:
        raise LoadError(
            f"{what} is updatable, which an ML Program cannot be; export it with updating switched off"
        )
    network = network_of(spec)
    ctx = Context(is_legacy(network), custom)
    features = [*spec.description.input, *spec.description.output]
    wanted = [f.name for f in features]
    names = dict(zip(wanted, wanted if keep_names else identifiers(wanted), strict=True))
    program = Program()
    program.add_function("main", _function(ctx, network, spec.description, names))
    made = proto.Model_pb2.Model(specificationVersion=OPSET.value)
    made.description.CopyFrom(spec.description)
    _describe(made.description, names, ctx.notes)
    made.mlProgram.SetInParent()
    return Loaded(program, made, source, None, compute_units, tuple(ctx.notes))


def _function(ctx: Context, network: Any, description: Any, names: dict[str, str]) -> Function:
    """The function, with its inputs and outputs called by `names`."""
    inputs = {names[f.name]: ports.placeholder(f) for f in description.input}
    with Function(inputs, opset_version=OPSET) as function:  # type: ignore[call-arg]
        for feature in description.input:
            var = function.inputs[names[feature.name]]
            ctx.env[feature.name] = ports.read(ctx, network, feature, var)
        ctx.build(network)
        outputs = _outputs(ctx, network, description)
        fixed: dict[Var, str] = {}
        for name, var in outputs.items():
            whole = var.op is not None and var.op.op_type not in ("const", "placeholder")
            own = var if whole and var not in fixed else mb.identity(x=var)
            fixed[own] = names[name]
        function.set_outputs(list(fixed))
    rename(function, {var: name for name, var in ctx.env.items()}, fixed)
    return function


def _outputs(ctx: Context, network: Any, description: Any) -> dict[str, Var]:
    """The value of each output, in the order of the description."""
    decided = _decided(ctx, network, description)
    found: dict[str, Var] = {}
    for feature in description.output:
        if feature.name in decided:
            found[feature.name] = decided[feature.name]
        elif feature.name in ctx.env:
            found[feature.name] = ports.give(ctx, feature, ctx.env[feature.name])
        else:
            raise LoadError(
                f"output {feature.name!r} is a blob that no layer makes; name one that a layer makes"
            )
    return found


def _decided(ctx: Context, network: Any, description: Any) -> dict[str, Var]:
    """The label and the probabilities of a classifier."""
    if "ClassLabels" not in network.DESCRIPTOR.oneofs_by_name:
        return {}
    kind = network.WhichOneof("ClassLabels")
    if kind is None:
        raise LoadError("the classifier has no class labels; export it again with labels")
    labels = list(getattr(network, kind).vector)
    blob = network.labelProbabilityLayerName or network.layers[-1].output[0]
    if blob not in ctx.env:
        raise LoadError(
            f"the probabilities of the classifier are the blob {blob!r}, which no layer makes; "
            "name one that a layer makes"
        )
    scores = ports.vector(ctx, ctx.env[blob], len(labels), blob)
    label, probabilities = mb.classify(probabilities=scores, classes=mb.const(val=mil_list(labels)))
    found = {description.predictedFeatureName: label}
    found[description.predictedProbabilitiesName] = probabilities
    return {name: var for name, var in found.items() if name}


def _describe(description: Any, names: dict[str, str], notes: list[str]) -> None:
    """Bring a description into the form of an ML Program's."""
    doubles = []
    for feature in [*description.input, *description.output]:
        if ports.array_type(feature) in ("DOUBLE", ""):
            doubles += [feature.name] if ports.array_type(feature) else []
            ports.set_float32(feature)
    if doubles:
        notes.append(f"64 bit floats became 32 bit floats: {', '.join(doubles)}")
    for feature in description.input:
        array = feature.type.multiArrayType
        if feature.type.isOptional and array.WhichOneof("defaultOptionalValue") is None:
            array.floatDefaultValue = 0.0
            notes.append(f"input {feature.name!r} is optional: when it is absent, it is 0")
    for feature in [*description.input, *description.output]:
        if names[feature.name] != feature.name:
            notes.append(
                f"{feature.name!r} is called {names[feature.name]!r}: MIL takes identifiers only"
            )
            feature.name = names[feature.name]
    for field in ("predictedFeatureName", "predictedProbabilitiesName"):
        old = getattr(description, field)
        setattr(description, field, names.get(old, old))
