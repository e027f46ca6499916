"""Neural networks as ML Programs: blobs, mappings of shapes, weights, and what is wrong with a network."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import anesurgery as ane
from anesurgery.errors import LoadError
from anesurgery.files.protobuf import proto
from anesurgery.mil import Array, quiet_host
from anesurgery.neuralnetwork import spec as reading
from anesurgery.neuralnetwork.importing import import_network
from anesurgery.text import to_text

with quiet_host():
    from coremltools.models import datatypes
    from coremltools.models.neural_network import NeuralNetworkBuilder

Weights = proto.NeuralNetwork_pb2.WeightParams


def network(
    inputs: dict[str, tuple[int, ...]], outputs: list[str], fill: Callable[[Any], Any], exact: bool = False
) -> Any:
    """A builder of a network, filled with layers."""
    builder = NeuralNetworkBuilder(
        [(n, datatypes.Array(*shape)) for n, shape in inputs.items()],
        [(n, None) for n in outputs],
        disable_rank5_shape_mapping=exact,
    )
    fill(builder)
    return builder


def floats(*shape: int, seed: int = 0) -> Array:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def leaky(b: Any) -> None:
    b.add_activation("a", "LEAKYRELU", "x", "a/1", params=[0.3])
    b.add_softmax("s", "a/1", "y")


def test_a_network_reads_like_a_program() -> None:
    loaded = import_network(network({"x": (3, 4, 5)}, ["y"], leaky).spec)
    assert to_text(loaded.program) == (
        "main(%x: 3x4x5) {\n"
        "  %x_1: 1x3x4x5 = expand_dims(x=%x, axes=[0])\n"
        "  %a_1: 1x3x4x5 = leaky_relu(x=%x_1, alpha=0.3)\n"
        "  %y_1: 1x3x4x5 = softmax(x=%a_1, axis=-3)\n"
        "  %y: 3x4x5 = squeeze(x=%y_1, axes=[0])\n"
        "  return %y\n"
        "}"
    )
    assert loaded.notes == (
        "the rank 5 mapping (sequence, batch, channel, height, width) has ended; arrays have the shapes "
        "x [3, 4, 5], y [3, 4, 5]",
        "64 bit floats became 32 bit floats: x, y",
    )


@pytest.mark.parametrize(
    ("shape", "exact", "expected"),
    [
        ((3,), False, (3,)),
        ((3, 4, 5), False, (3, 4, 5)),
        ((2, 3, 4, 1, 1), False, (2, 3, 4, 1, 1)),
        ((1, 1, 4, 1, 1), False, (4,)),
        ((2, 3, 4, 5), True, (2, 3, 4, 5)),
        ((2, 3, 4), True, (2, 3, 4)),
        ((1, 2, 3, 4, 5), True, (1, 2, 3, 4, 5)),
    ],
)
def test_shapes_in_both_mappings(shape: tuple[int, ...], exact: bool, expected: tuple[int, ...]) -> None:
    loaded = import_network(network({"x": shape}, ["y"], leaky, exact).spec)
    x = floats(*shape)
    found = ane.run(loaded, {"x": x})["y"]
    assert found.shape == expected
    rank5 = x if exact or x.ndim == 5 else x.reshape(x.shape if x.ndim == 3 else (*x.shape, 1, 1))
    scores = np.exp(np.where(rank5 < 0, 0.3 * rank5, rank5))
    wanted = scores / scores.sum(-3, keepdims=True)
    np.testing.assert_allclose(found, wanted.reshape(expected), rtol=1e-5)


@pytest.mark.parametrize("bits", range(1, 9))
def test_quantized_weights_are_decoded(bits: int) -> None:
    rng = np.random.default_rng(bits)
    codes = rng.integers(0, 1 << bits, (3, 5)).astype(np.uint8)
    each = np.unpackbits(codes.reshape(-1, 1), axis=1)[:, 8 - bits :]
    scale, bias = floats(3), floats(3, seed=1)
    linear = Weights(rawValue=np.packbits(each.reshape(-1)).tobytes())
    linear.quantization.numberOfBits = bits
    linear.quantization.linearQuantization.scale.extend(scale)
    linear.quantization.linearQuantization.bias.extend(bias)
    found = reading.weights(linear, (3, 5), "w")
    np.testing.assert_allclose(found, codes * scale[:, None] + bias[:, None], rtol=1e-6)
    table = floats(1 << bits)
    linear.quantization.lookupTableQuantization.floatValue.extend(table)
    np.testing.assert_array_equal(reading.weights(linear, (3, 5), "w"), table[codes])


def test_halves_and_signed_bytes_are_decoded() -> None:
    half = floats(2, 3).astype(np.float16)
    found = reading.weights(Weights(float16Value=half.tobytes()), (2, 3), "w")
    np.testing.assert_array_equal(found, half.astype(np.float32))
    signed = Weights(int8RawValue=np.array([-128, -1, 0, 127], np.int8).tobytes())
    signed.quantization.linearQuantization.scale.append(0.5)
    np.testing.assert_array_equal(reading.weights(signed, (4,), "w"), [-64, -0.5, 0, 63.5])


@pytest.mark.parametrize(
    ("params", "words"),
    [
        (Weights(), "w has no numbers, expected 6"),
        (Weights(floatValue=[1, 2]), "w has 2 numbers, expected 6"),
        (Weights(float16Value=b"abc"), "w has 3 bytes, no multiple of 2"),
        (Weights(rawValue=b"abc"), "w has numbers of 0 bits"),
        (Weights(rawValue=b"abc", quantization={"numberOfBits": 8}), "w has 3 bytes, expected 6"),
        (Weights(rawValue=b"abcdef", quantization={"numberOfBits": 8}), "neither by a scale nor"),
        (Weights(int8RawValue=b"abcdef"), "has 0 scales, not 1"),
    ],
)
def test_damaged_weights_are_explained(params: Any, words: str) -> None:
    with pytest.raises(LoadError, match=words):
        reading.weights(params, (2, 3), "w")


def twice(b: Any) -> None:
    b.add_activation("one", "RELU", "x", "y")
    b.add_activation("two", "RELU", "x", "y")


def cycle(b: Any) -> None:
    b.add_elementwise("sum", ["x", "later"], "y", "ADD")
    b.add_activation("maker", "RELU", "y", "later")


@pytest.mark.parametrize(
    ("fill", "words"),
    [
        (twice, r"layer 'two' \(activation\): makes the blob 'y', which exists already"),
        (cycle, r"layer 'sum' \(add\): reads the blob 'later', which only a later layer makes \('maker'\)"),
        (lambda b: b.add_activation("r", "RELU", "xx", "y"), "'xx', which nothing makes; .*did you mean 'x'"),
        (lambda b: b.add_softmax("s", "x", "z"), "output 'y' is a blob that no layer makes"),
    ],
)
def test_wrong_networks_are_explained(fill: Callable[[Any], Any], words: str) -> None:
    with pytest.raises(LoadError, match=words):
        import_network(network({"x": (2, 3, 4)}, ["y"], fill).spec)


def test_a_layer_with_too_many_inputs_is_named() -> None:
    spec = network({"x": (2, 3, 4)}, ["y"], lambda b: b.add_softmax("s", "x", "y")).spec
    spec.neuralNetwork.layers[0].input.append("x")
    with pytest.raises(LoadError, match=r"layer 's' \(softmax\): has 2 inputs, takes 1"):
        import_network(spec)


def test_a_layer_of_an_unknown_type_is_named() -> None:
    spec = network({"x": (2, 3, 4)}, ["y"], lambda b: b.add_softmax("s", "x", "y")).spec
    spec.neuralNetwork.layers[0].ClearField("softmax")
    with pytest.raises(LoadError, match="layer 's': is of a type that this coremltools does not know"):
        import_network(spec)


def test_an_updatable_model_is_refused() -> None:
    spec = network({"x": (2, 3, 4)}, ["y"], leaky).spec
    spec.isUpdatable = True
    with pytest.raises(LoadError, match="the model is updatable"):
        import_network(spec)


@pytest.mark.parametrize(
    ("stated", "expected"),
    [((3, 4, 5), (3, 4, 5)), ((1, 3, 4, 5), (1, 3, 4, 5)), ((5, 4, 3), (2, 3, 4, 5)), ((), (2, 3, 4, 5))],
)
def test_an_output_has_the_stated_shape_but_for_ones(
    stated: tuple[int, ...], expected: tuple[int, ...]
) -> None:
    shape = expected if expected[0] == 2 else (1, 3, 4, 5)
    spec = network({"x": shape}, ["y"], leaky, exact=True).spec
    spec.description.output[0].type.multiArrayType.shape[:] = stated
    loaded = import_network(spec)
    assert ane.run(loaded, {"x": floats(*shape)})["y"].shape == expected
    told = any("the model stated [5, 4, 3]" in note for note in loaded.notes)
    assert told == (stated == (5, 4, 3))
