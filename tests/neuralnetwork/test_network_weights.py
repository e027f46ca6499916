"""Weights of each storage: what is decoded, against a decoding bit by bit and coremltools' own quantization."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from closeness import assert_close
from layer_case import assert_near
from one_layer import floats, network

import anesurgery as ane
from anesurgery.files.protobuf import proto
from anesurgery.mil import Array, ct, quiet_host
from anesurgery.neuralnetwork.importing import import_network
from anesurgery.neuralnetwork.spec import weights

with quiet_host():
    from coremltools.models.neural_network import quantization_utils

Weights = proto.NeuralNetwork_pb2.WeightParams
SHAPE = (5, 3, 7)  # 105 numbers: of most bit counts, the last byte is not full
BITS = range(1, 9)


def packed(codes: list[int], bits: int) -> bytes:
    """Numbers as a string of bits, from high to low, filled up with ones that nobody may read."""
    digits = "".join(format(code, f"0{bits}b") for code in codes)
    digits += "1" * (-len(digits) % 8)
    return int(digits, 2).to_bytes(len(digits) // 8, "big")


def codes(bits: int) -> list[int]:
    """Each number at least once, in no order."""
    count = int(np.prod(SHAPE))
    found = np.random.default_rng(bits).integers(0, 2**bits, count)
    found[: min(count, 2**bits)] = np.arange(2**bits)[:count]
    return [int(n) for n in np.random.default_rng(0).permutation(found)]


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("axis", [None, 0, 1])
def test_linear_weights_are_decoded(bits: int, biased: bool, axis: int | None) -> None:
    numbers, channels = codes(bits), 1 if axis is None else SHAPE[axis]
    scales = [0.25 * (i + 1) for i in range(channels)]
    biases = [3.0 - i for i in range(channels)] if biased else []
    params = Weights(rawValue=packed(numbers, bits))
    params.quantization.numberOfBits = bits
    params.quantization.linearQuantization.scale.extend(scales)
    params.quantization.linearQuantization.bias.extend(biases)
    expected = np.empty(SHAPE, np.float32)
    for place, number in zip(np.ndindex(SHAPE), numbers, strict=True):
        channel = 0 if axis is None else place[axis]
        expected[place] = number * scales[channel] + (biases[channel] if biased else 0)
    np.testing.assert_array_equal(weights(params, SHAPE, "w", axis or 0), expected)


@pytest.mark.parametrize("bits", BITS)
def test_weights_are_looked_up(bits: int) -> None:
    numbers, table = codes(bits), floats(2**bits)
    params = Weights(rawValue=packed(numbers, bits))
    params.quantization.numberOfBits = bits
    params.quantization.lookupTableQuantization.floatValue.extend(table)
    expected = np.array([table[n] for n in numbers], np.float32).reshape(SHAPE)
    np.testing.assert_array_equal(weights(params, SHAPE, "w"), expected)


def convolutions(b: Any) -> None:
    same = {"stride_height": 1, "stride_width": 1, "border_mode": "same", "groups": 2}
    b.add_convolution(
        "c",
        2,
        6,
        3,
        3,
        W=floats(3, 3, 2, 6),
        b=floats(6, seed=1),
        has_bias=True,
        input_name="x",
        output_name="h",
        **same,
    )
    b.add_convolution(
        "d",
        6,
        4,
        2,
        2,
        W=floats(2, 2, 6, 2, seed=2),
        b=None,
        has_bias=False,
        is_deconv=True,
        input_name="h",
        output_name="y",
        **same,
    )


def by_channel(b: Any) -> None:
    b.add_batchnorm(
        "b",
        4,
        floats(4),
        floats(4, seed=1),
        floats(4, seed=2),
        np.abs(floats(4, seed=3)) + 1,
        input_name="x",
        output_name="h",
    )
    b.add_scale("s", floats(4, seed=4), floats(4, seed=5), True, "h", "i", [4], [4])
    b.add_bias("o", floats(4, seed=6), "i", "j", [4])
    b.add_activation("p", "PRELU", "j", "k", params=floats(4, seed=7))
    b.add_activation("q", "PRELU", "k", "y", params=floats(1, seed=8))


def recurrent(b: Any) -> None:
    b.add_inner_product("i", floats(6, 80), floats(6, seed=1), 80, 6, True, "x", "h")
    b.add_gru(
        "g",
        [floats(5, 5, seed=i) for i in range(3)],
        [floats(5, 6, seed=i) for i in range(3, 6)],
        [floats(5, seed=i) for i in range(3)],
        5,
        6,
        ["h"],
        ["i", "g1"],
    )
    gates = {
        name: [floats(*shape, seed=first + i) for i in range(4)]
        for first, (name, shape) in enumerate(
            {
                "W_h": (3, 3),
                "W_x": (3, 5),
                "b": (3,),
                "W_h_back": (3, 3),
                "W_x_back": (3, 5),
                "b_back": (3,),
            }.items()
        )
    }
    b.add_bidirlstm(
        "l", hidden_size=3, input_size=5, input_names=["i"], output_names=["y", "h1", "c1", "k1", "d1"], **gates
    )


def later(b: Any) -> None:
    b.add_batched_mat_mul(
        "m", ["x"], "h", weight_matrix_rows=5, weight_matrix_columns=6, W=floats(5, 6), bias=floats(6, seed=1)
    )
    b.add_load_constant_nd("k", "k", floats(4, 4, 1, seed=2), (4, 4, 1))
    b.add_multiply_broadcastable("n", ["h", "k"], "y")


NETWORKS: dict[str, tuple[Callable[[Any], None], bool, Array]] = {
    "convolutions": (convolutions, True, floats(4, 4, 5)),
    "by channel": (by_channel, True, floats(4, 4, 5)),
    "products and recurrent": (recurrent, True, floats(80)),
    "products and constants": (later, False, floats(4, 4, 5)),
}


def constants(spec: Any) -> list[Array]:
    """All weights of the program."""
    function = import_network(spec).program.functions["main"]
    found = (op.outputs[0].val for op in function.operations if op.op_type == "const")
    return [v for v in found if isinstance(v, np.ndarray) and v.dtype == np.float32]


def quantized(spec: Any, bits: int, mode: str) -> Any:
    model = ct.models.MLModel(spec, skip_model_load=True)
    made = quantization_utils.quantize_weights(model, bits, mode)
    return made.get_spec() if isinstance(made, ct.models.MLModel) else made


@pytest.mark.one_of(5)
@pytest.mark.parametrize(
    ("bits", "mode"), [*((n, m) for n in BITS for m in ("linear", "linear_lut")), (8, "linear_symmetric")]
)
@pytest.mark.parametrize("name", NETWORKS)
def test_what_coremltools_quantizes_is_decoded_as_it_does(name: str, bits: int, mode: str) -> None:
    fill, legacy, x = NETWORKS[name]
    spec = quantized(network(fill, x, legacy=legacy), bits, mode)
    assert "rawValue" in str(spec)
    plain = type(spec).FromString(spec.SerializeToString())
    quantization_utils._dequantize_nn_spec(plain.neuralNetwork)
    assert "rawValue" not in str(plain)
    ours, theirs = constants(spec), constants(plain)
    assert [v.shape for v in ours] == [v.shape for v in theirs]
    for found, expected in zip(ours, theirs, strict=True):
        assert_close(found, expected, rtol=1e-6)


def test_halves_are_decoded() -> None:
    fill, legacy, x = NETWORKS["convolutions"]
    before = network(fill, x, legacy=legacy)
    expected = [v.astype(np.float16).astype(np.float32) for v in constants(before)]
    for found, wanted in zip(constants(quantized(before, 16, "linear")), expected, strict=True):
        np.testing.assert_array_equal(found, wanted)


def test_signed_weights_of_a_product_that_quantizes_its_input() -> None:
    numbers = np.random.default_rng(0).integers(-128, 128, (6, 80)).astype(np.int8)

    def fill(b: Any) -> None:
        b.add_inner_product(
            "i",
            numbers.tobytes(),
            floats(6),
            80,
            6,
            True,
            "x",
            "y",
            int_8_dynamic_quantize=True,
            is_quantized_weight=True,
            quantization_type="linear",
            nbits=8,
            quant_scale=np.array([0.5]),
        )

    x = floats(80)
    spec = network(fill, x, legacy=True)
    assert spec.neuralNetwork.layers[0].innerProduct.weights.int8RawValue
    found = ane.run(import_network(spec), {"x": x})["y"]
    assert_near(found, numbers * 0.5 @ x + floats(6))
