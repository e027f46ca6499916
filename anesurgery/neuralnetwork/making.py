"""Make layers and networks: what passes put into a specification, and small networks for their examples.

A layer of one input may be described before it is made, as a `Step`: a type with its fields, such as
("slice", {...}). `Site.put` and `Site.chain` (`network_editing.layer_pass`) make layers of these. Axes of steps
are counted from the end, as the definition of the format counts those of (sequence, batch, channel, height,
width): -3 is the channel axis of every blob.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from anesurgery.files.protobuf import proto
from anesurgery.mil import Array

OLD, EXACT = 3, 4
"""Specification versions: the last in which all arrays have rank 5, the first with exact shapes."""

Step = tuple[str, dict[str, Any]]
"""A layer type and the fields of its message: ("activation", {"linear": {"alpha": 2.0, "beta": 0.0}})."""

SEQUENCE, BATCH, CHANNEL, HEIGHT, WIDTH = -5, -4, -3, -2, -1
NAMES = {SEQUENCE: "sequence", BATCH: "batch", CHANNEL: "channel", HEIGHT: "height", WIDTH: "width"}
SLICED = {CHANNEL: "CHANNEL_AXIS", HEIGHT: "HEIGHT_AXIS", WIDTH: "WIDTH_AXIS"}
"""Axis -> its name in a `slice` layer. The blob needs no axes in front of it."""
MOST_MIXED = 512
"""The most channels for which a pass writes a matrix of C x C weights, which costs C x C products for each
pixel: 262,144 with 512 channels."""

Margins = tuple[int, int]
"""The number of elements before and after an axis."""


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


def from_end(axis: int, rank: int) -> int:
    """Return an axis counted from the end: 1 of 4 axes is -3."""
    return axis - rank if axis >= 0 else axis


def slicing(axis: int, span: range) -> Step:
    """Return the `slice` that keeps the elements of `span` along an axis of `SLICED`."""
    fields = {"startIndex": span.start, "endIndex": span.stop, "stride": span.step}
    return "slice", {"axis": SLICED[axis], **fields}


def constant_padding(height: Margins, width: Margins, value: float) -> Step:
    """Return the `padding` of height and width with one number."""
    return "padding", {"constant": {"value": value}, "paddingAmounts": border_amounts(height, width)}


def edge_padding(height: Margins, width: Margins) -> Step:
    """Return the `padding` of height and width that repeats the pixels at the edge."""
    return "padding", {"replication": {}, "paddingAmounts": border_amounts(height, width)}


def border_amounts(height: Margins, width: Margins) -> dict[str, list[dict[str, int]]]:
    """Return the fields of a `BorderAmounts` message."""
    return {"borderAmounts": [{"startEdgeSize": a, "endEdgeSize": b} for a, b in (height, width)]}


def channel_picking(picks: Sequence[int], channels: int) -> Step:
    """Return the 1x1 `convolution` whose channel i is channel picks[i] of its input.

    Each result is 1 times one number plus zeros, so it is exact for finite numbers. An infinity makes the
    other picked channels of its pixel NaN.

    Args:
        picks: the channel of the input for each channel of the result.
        channels: how many channels the input has.
    """
    matrix = np.zeros((len(picks), channels), np.float32)
    matrix[np.arange(len(picks)), list(picks)] = 1
    sizes = {"outputChannels": len(picks), "kernelChannels": channels, "kernelSize": [1, 1]}
    return "convolution", {**sizes, "valid": {}, "weights": weights(matrix)}
