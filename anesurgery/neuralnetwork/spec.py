"""Read the specification of a neural network: its kind, its mapping of shapes, and its weights as arrays.

The meaning of the fields is that of the comments in `NeuralNetwork.proto` of coremltools.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from anesurgery.errors import LoadError
from anesurgery.files.package import PIPELINES
from anesurgery.mil import Array

NETWORKS = ("neuralNetwork", "neuralNetworkClassifier", "neuralNetworkRegressor")
"""The kinds of model that are networks of layers."""

DAMAGED = "the file is damaged, export it again"
_LARGE = ("WeightParams", "NeuralNetwork")
"""Messages within parameters that have no choices of the layer itself."""
EXACT = 1
"""`EXACT_ARRAY_MAPPING`, and `RANK4_IMAGE_MAPPING`: shapes are those of the description."""


def network_of(spec: Any) -> Any:
    """Return the network in the specification of a model that is one of `NETWORKS`."""
    return getattr(spec, spec.WhichOneof("Type"))


def networks_of(spec: Any) -> list[Any]:
    """Return the specifications that hold a network: the model itself, or models of a pipeline."""
    kind = spec.WhichOneof("Type")
    if kind in NETWORKS:
        return [spec]
    if kind not in PIPELINES:
        return []
    return [network for part in PIPELINES[kind](spec).models for network in networks_of(part)]


def nested_networks(layer: Any) -> list[Any]:
    """Return the networks inside a layer: those of a branch or a loop."""
    kind = layer.WhichOneof("layer")
    if kind == "branch":
        return [layer.branch.ifBranch, layer.branch.elseBranch]
    return [layer.loop.conditionNetwork, layer.loop.bodyNetwork] if kind == "loop" else []


def walk_layers(network: Any, depth: int = 0) -> Iterator[tuple[Any, int]]:
    """Yield (layer, depth) of a network in file order, each layer before those of the networks inside it."""
    for layer in network.layers:
        yield layer, depth
        for inner in nested_networks(layer):
            yield from walk_layers(inner, depth + 1)


def is_legacy(network: Any) -> bool:
    """Are arrays mapped to rank 5 (sequence, batch, channel, height, width)? Up to specification 3 all are."""
    return int(network.arrayInputShapeMapping) != EXACT


def weights(params: Any, shape: Sequence[int], what: str, axis: int = 0) -> Array:
    """Return the numbers of a `WeightParams` message.

    Args:
        params: floats, halves, or integers of 1 to 8 bits with scales and biases or a look-up table.
        shape: of the array; row-major.
        what: names the layer and the weight in errors.
        axis: that of the output channels, along which scales and biases of quantized numbers lie.

    Returns:
        An fp32 array.

    Raises:
        LoadError: the numbers are missing, of another count than the shape has, or wrongly quantized.
    """
    count = math.prod(shape)
    if params.floatValue:
        numbers = np.array(params.floatValue, np.float32)
    elif params.float16Value:
        numbers = _of_bytes(params.float16Value, "<f2", what).astype(np.float32)
    elif params.int8RawValue:
        numbers = _of_bytes(params.int8RawValue, np.int8, what).astype(np.float32)
        numbers *= np.float32(_factor(params.quantization, what))
    elif params.rawValue:
        codes = _codes(params, count, what)
        return _dequantize(params.quantization, codes.reshape(shape), what, axis)
    elif count == 0:
        numbers = np.zeros(0, np.float32)
    else:
        raise LoadError(f"{what} has no numbers, expected {_words(shape)}; {DAMAGED}")
    if numbers.size != count:
        raise LoadError(f"{what} has {numbers.size} numbers, expected {_words(shape)}; {DAMAGED}")
    return numbers.reshape(shape)


def unknown_choice(params: Any) -> str:
    """Return the first enumeration value without a name in a layer's parameters, as of newer formats; else "".

    Weights and the networks nested in a layer are not looked at.
    """
    for field, value in params.ListFields():
        if field.enum_type is not None:
            for choice in [value] if isinstance(value, int) else value:
                if choice not in field.enum_type.values_by_number:
                    return f"{field.name} = {choice}"
        elif field.message_type is not None and field.message_type.name not in _LARGE:
            for inner in [value] if hasattr(value, "ListFields") else value:
                if hasattr(inner, "ListFields") and (newer := unknown_choice(inner)):
                    return newer
    return ""


def _words(shape: Sequence[int]) -> str:
    return f"{math.prod(shape)} ({'x'.join(map(str, shape))})"


def _of_bytes(raw: bytes, dtype: Any, what: str) -> Array:
    size = np.dtype(dtype).itemsize
    if len(raw) % size:
        raise LoadError(f"{what} has {len(raw)} bytes, no multiple of {size}; {DAMAGED}")
    return np.frombuffer(raw, dtype)


def _factor(quantization: Any, what: str) -> float:
    linear = quantization.linearQuantization
    for name, count, wanted in (("scales", len(linear.scale), 1), ("biases", len(linear.bias), 0)):
        if count != wanted:
            raise LoadError(
                f"{what} is of 8 bit numbers with a sign, but has {count} {name}, not {wanted}; {DAMAGED}"
            )
    return float(linear.scale[0])


def _codes(params: Any, count: int, what: str) -> Array:
    """Return the unsigned integers of a packed weight; the bits of each run from high to low, without gaps."""
    bits, raw = int(params.quantization.numberOfBits), np.frombuffer(params.rawValue, np.uint8)
    if not 1 <= bits <= 8:
        raise LoadError(f"{what} has numbers of {bits} bits, expected 1 to 8; {DAMAGED}")
    if raw.size != -(-count * bits // 8):
        raise LoadError(f"{what} has {raw.size} bytes, expected {count} numbers of {bits} bits; {DAMAGED}")
    if bits == 8:
        return raw
    each = np.unpackbits(raw)[: count * bits].reshape(count, bits).astype(np.uint8)
    return each @ (1 << np.arange(bits - 1, -1, -1, dtype=np.uint8))


def _dequantize(quantization: Any, codes: Array, what: str, axis: int) -> Array:
    kind = quantization.WhichOneof("QuantizationType")
    if kind == "lookupTableQuantization":
        table = np.array(quantization.lookupTableQuantization.floatValue, np.float32)
        if table.size != 1 << quantization.numberOfBits:
            raise LoadError(
                f"{what} has a look-up table of {table.size} numbers, "
                f"expected {1 << quantization.numberOfBits}; {DAMAGED}"
            )
        return table[codes]
    if kind is None:
        raise LoadError(f"{what} is quantized, but neither by a scale nor by a look-up table; {DAMAGED}")
    linear = quantization.linearQuantization
    scale = _by_channel(linear.scale, codes, what, axis, "scales")
    bias = _by_channel(linear.bias or [0.0], codes, what, axis, "biases")
    return codes.astype(np.float32) * scale + bias


def _by_channel(values: Any, codes: Array, what: str, axis: int, name: str) -> Array:
    """Return numbers for all channels, or one for each, in a shape that the weights can be multiplied with."""
    numbers = np.array(values, np.float32)
    if numbers.size == 1:
        return numbers.reshape([1] * codes.ndim)
    shape = [1] * codes.ndim
    shape[axis] = -1
    if numbers.size != codes.shape[axis]:
        raise LoadError(f"{what} has {numbers.size} {name}, expected 1 or {codes.shape[axis]}; {DAMAGED}")
    return numbers.reshape(shape)
