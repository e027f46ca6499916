"""The specification of the network that a compiled neural network was made from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from anesurgery.errors import LoadError
from anesurgery.files.compiled_interface import Described, read_container
from anesurgery.files.espresso import SHAPES, Espresso, read_files
from anesurgery.files.espresso_layers import LAYERS, Layer
from anesurgery.files.protobuf import proto
from anesurgery.files.source import SourceFile, system_failed

DATA = "coremldata.bin"
IMAGES = "image inputs are arrays of what the first layer reads: where scale and bias are is not known"
FLOAT32 = proto.FeatureTypes_pb2.ArrayFeatureType.FLOAT32
EXACT = 4
"""The first specification version in which arrays have the shapes that are stated."""
NOTES = "anesurgery.notes"
"""Where notes are in the metadata."""


def read_espresso(folder: Path) -> Any:
    """The specification of a compiled neural network.

    Args:
        folder: the `.mlmodelc`.

    Returns:
        Model protobuf with a `neuralNetwork`; a classifier comes without its labels, which are elsewhere.

    Raises:
        LoadError: it is damaged, or a layer is of a kind that no public file shows.
    """
    try:
        return _specification(read_files(folder), folder)
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise LoadError(f"{folder} is damaged: {error!r}; copy the compiled model again") from error
    except LoadError as error:
        raise LoadError(f"{folder}: {error}") from error


def _specification(model: Espresso, folder: Path) -> Any:
    described = _described(model, folder)
    spec = proto.Model_pb2.Model(specificationVersion=max(EXACT, described.version))
    spec.description.CopyFrom(described.description)
    network = spec.neuralNetwork
    network.arrayInputShapeMapping = proto.NeuralNetwork_pb2.EXACT_ARRAY_MAPPING
    network.imageInputShapeMapping = proto.NeuralNetwork_pb2.RANK4_IMAGE_MAPPING
    for number, entry in enumerate(model.layers):
        layer = Layer(model, entry, number)
        if layer.kind not in LAYERS:
            raise LoadError(f"{layer}: no public file shows what a layer of this type computes")
        network.layers.extend(LAYERS[layer.kind](layer))
    _describe(spec.description, model)
    return spec


def _described(model: Espresso, folder: Path) -> Described:
    """The description in `coremldata.bin`; where that cannot be read, one of the blobs that enter and leave."""
    try:
        container = read_container(SourceFile(folder / DATA).read())
    except LoadError as error:
        if system_failed(error):
            raise
        container = str(error)
    if isinstance(container, Described):
        return container
    results = [name for entry in model.layers for name in entry["top"].split(",")]
    read = [name for entry in model.layers for name in entry.get("bottom", "").split(",") if name]
    marked = [e["top"].split(",") for e in model.layers if e.get("attributes", {}).get("is_output")]
    leaving = [name for names in marked for name in names] or [n for n in results if n not in set(read)]
    description = proto.Model_pb2.ModelDescription()
    for name in dict.fromkeys(n for n in read if n not in set(results)):
        description.input.add(name=name).type.multiArrayType.dataType = FLOAT32
    for name in leaving:
        description.output.add(name=name).type.multiArrayType.dataType = FLOAT32
    description.metadata.userDefined[NOTES] = f"inputs and outputs are those of the layers, for {container}"
    return Described("neuralNetwork", EXACT, description)


def _describe(description: Any, model: Espresso) -> None:
    """Bring inputs and outputs in line with what the layers read and make."""
    results = {name for entry in model.layers for name in entry["top"].split(",")}
    for feature in description.input:
        kind = feature.type.WhichOneof("Type")
        if feature.name not in model.shapes:
            raise LoadError(f"the input {feature.name!r} has no shape in {SHAPES}")
        shape = model.shapes[feature.name]
        if kind == "imageType":
            description.metadata.userDefined[NOTES] = IMAGES
        if kind == "imageType" or len(feature.type.multiArrayType.shape) != len(shape):
            array = proto.FeatureTypes_pb2.ArrayFeatureType(shape=shape)
            array.dataType = FLOAT32
            feature.type.multiArrayType.CopyFrom(array)
    kept = [f for f in description.output if f.name in results]
    last = model.layers[-1]["top"].split(",")[0] if model.layers else ""
    del description.output[:]
    for feature in kept:
        description.output.add().CopyFrom(feature)
    if not kept:
        array = description.output.add(name=last).type.multiArrayType
        array.dataType = FLOAT32
    for name in ("predictedFeatureName", "predictedProbabilitiesName"):
        description.ClearField(name)
