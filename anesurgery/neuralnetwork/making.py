"""Make layers and networks: what passes put into a specification, and small networks for their examples."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from anesurgery.files.protobuf import proto
from anesurgery.mil import Array

OLD, EXACT = 3, 4
"""Specification versions: the last in which all arrays have rank 5, the first with exact shapes."""


def weights(values: Array, half: bool = False) -> dict[str, Any]:
    """Return the fields of a `WeightParams` message that holds an array in fp32 or fp16 (`half`), row-major."""
    if half:
        return {"float16Value": np.ravel(values).astype("<f2").tobytes()}
    return {"floatValue": np.ravel(values).astype(np.float32).tolist()}


def make_layer(kind: str, inputs: Sequence[str], outputs: Sequence[str], name: str = "", **fields: Any) -> Any:
    """Return a `NeuralNetworkLayer`.

    Args:
        kind: field of `NeuralNetworkLayer`, as "activation".
        inputs: the blobs that it reads.
        outputs: the blobs that it makes.
        name: that of the first output by default.
        fields: of the message of the layer type; dictionaries for messages in it, names for enumerations.
    """
    name = name or next(iter(outputs), kind)
    layer = proto.NeuralNetwork_pb2.NeuralNetworkLayer(name=name, input=inputs, output=outputs)
    params = getattr(layer, kind)
    params.SetInParent()
    params.MergeFrom(type(params)(**fields))
    return layer


def make_constant(name: str, values: ArrayLike) -> Any:
    """Return the `loadConstantND` layer that holds an array in fp32; a number becomes an array [1]."""
    array = np.atleast_1d(np.asarray(values))
    return make_layer("loadConstantND", [], [name], shape=array.shape, data=weights(array))


def make_network(
    inputs: Mapping[str, Sequence[int]],
    layers: Sequence[Any],
    outputs: Sequence[str],
    *,
    rank5: bool = False,
    integers: Collection[str] = (),
) -> Any:
    """Return the specification of a neural network.

    Args:
        inputs: name -> shape of an array; (channel, height, width) where all arrays have rank 5.
        layers: in the order in which they run.
        outputs: the blobs that leave it; their shapes are not said.
        rank5: are arrays mapped to (sequence, batch, channel, height, width), as in specification 1 to 3?
        integers: the inputs that hold int32; the others hold fp32.
    """
    spec = proto.Model_pb2.Model(specificationVersion=OLD if rank5 else EXACT)
    arrays = proto.FeatureTypes_pb2.ArrayFeatureType
    for name, shape in inputs.items():
        array = spec.description.input.add(name=name).type.multiArrayType
        array.dataType = arrays.INT32 if name in integers else arrays.FLOAT32
        array.shape.extend(shape)
    for name in outputs:
        spec.description.output.add(name=name).type.multiArrayType.dataType = arrays.FLOAT32
    network = spec.neuralNetwork
    network.layers.extend(layers)
    if not rank5:
        network.arrayInputShapeMapping = proto.NeuralNetwork_pb2.EXACT_ARRAY_MAPPING
        network.imageInputShapeMapping = proto.NeuralNetwork_pb2.RANK4_IMAGE_MAPPING
    return spec
