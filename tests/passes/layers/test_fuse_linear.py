"""`fuse_linear`: rows of linear layers that round as one, weights that take a factor, and what does not."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from pass_cases import ignores, refuses, rewrites, stays, table
from two_sided import with_output

from anesurgery.mil import Array
from anesurgery.neuralnetwork.making import make_layer, make_network, weights
from anesurgery.passes.layers.fusing import FuseLinear
from anesurgery.testing import apply_pass, assert_same_numbers

STEP = FuseLinear()
Link = tuple[str, dict[str, Any]]
Fields = dict[str, Any]
ABS: Link = ("unary", {"type": "ABS"})


def line(alpha: float, beta: float = 0.0) -> Link:
    return "activation", {"linear": {"alpha": alpha, "beta": beta}}


def times(alpha: float) -> Link:
    return "multiply", {"alpha": alpha}


def plus(alpha: float) -> Link:
    return "add", {"alpha": alpha}


def row(*links: Link, rank5: bool = False) -> Any:
    """Layers in a row, from x to y."""
    blobs = ["x", *(f"b{i}" for i in range(1, len(links))), "y"]
    layers = [make_layer(kind, [blobs[i]], [blobs[i + 1]], **fields) for i, (kind, fields) in enumerate(links)]
    shape = (4, 5, 6) if rank5 else (1, 4, 5, 6)
    return make_network({"x": shape}, layers, ["y"], rank5=rank5)


def after(spec: Any) -> Any:
    found, session = apply_pass(STEP, spec)
    assert session.changes, session.refusals
    assert all(change.proof is not None for change in session.changes)
    assert_same_numbers(spec, found, rtol=STEP.tolerance.rtol)
    return found


VALUES = np.random.default_rng(0).standard_normal((4, 4, 1, 1)).astype(np.float32)
BIAS: Fields = {"hasBias": True, "bias": weights(np.arange(4) + 0.3)}


def half(values: Array) -> Fields:
    return {"float16Value": values.astype(np.float16).tobytes()}


def convolved(values: Fields, **fields: Any) -> Link:
    sizes: Fields = {"outputChannels": 4, "kernelChannels": 4, "kernelSize": [1, 1], "valid": {}}
    return "convolution", {**sizes, "weights": values, **fields}


@pytest.mark.one_of(15)
@pytest.mark.parametrize("rank5", [False, True])
@pytest.mark.parametrize("behind", [False, True])
@pytest.mark.parametrize("factor", [-1.0, 0.5, -8.0])
@pytest.mark.parametrize(
    "weighted",
    [
        convolved(weights(VALUES)),
        convolved(weights(VALUES), **BIAS),
        convolved(weights(VALUES), isDeconvolution=True, **BIAS),
        convolved(half(VALUES)),
    ],
    ids=["plain", "bias", "deconvolution", "fp16"],
)
def test_weights_take_a_factor(weighted: Link, factor: float, behind: bool, rank5: bool) -> None:
    links = [weighted, times(factor)] if behind else [line(factor), weighted]
    (layer,) = after(row(*links, rank5=rank5)).neuralNetwork.layers
    kind, fields = weighted
    assert layer.WhichOneof("layer") == kind
    params = layer.convolution
    if "floatValue" in fields["weights"]:
        np.testing.assert_array_equal(params.weights.floatValue, factor * VALUES.ravel())
    else:
        assert params.weights.float16Value == half(factor * VALUES)["float16Value"]
    if params.hasBias:
        scaled = np.float32(factor if behind else 1) * (np.arange(4) + 0.3).astype(np.float32)
        np.testing.assert_array_equal(params.bias.floatValue, scaled)


@pytest.mark.parametrize("behind", [False, True])
def test_an_inner_product_takes_a_factor(behind: bool) -> None:
    fields: Fields = {"inputChannels": 6, "outputChannels": 2, **BIAS}
    fields["bias"] = weights(np.array([0.1, 0.2]))
    own: Link = ("innerProduct", {**fields, "weights": weights(np.arange(12) / 7)})
    spec = row(*([own, line(-1)] if behind else [line(-1), own]))
    spec.description.input[0].type.multiArrayType.shape[:] = [5, 6]
    assert len(after(spec).neuralNetwork.layers) == 1


QUANTIZED: Fields = {
    "rawValue": bytes(range(16)),
    "quantization": {"numberOfBits": 8, "linearQuantization": {"scale": [0.5], "bias": [0.0]}},
}


test_cases, test_surroundings = table(
    STEP,
    *(
        refuses(words, row, *links)
        for links, words in [
            ([times(3), times(5)], "3 x + 0, then 5 x + 0: one layer would round otherwise"),
            ([plus(1), plus(2)], "1 x + 1, then 1 x + 2: one"),
            ([times(0.7), line(0.3, 1)], "0.7 x + 0, then 0.3 x + 1: one"),
            ([line(-1, 1), line(-1, 1)], "-1 x + 1, then -1 x + 1: one"),
            ([line(2, 1), times(3)], "2 x + 1, then 3 x + 0: one"),
            ([times(0), times(3)], "0 x + 0, then 3 x + 0: one"),
            ([times(1e38), times(16)], "1e+38 x + 0, then 16 x + 0: one"),
            ([times(2.0**100), times(2.0 ** (-100))], "one layer would round otherwise"),
        ]
    ),
    *(
        refuses(words, row, *([weighted, link] if behind else [link, weighted]))
        for weighted, link, words in [
            (convolved(weights(VALUES)), line(0.3), "0.3 x + 0 beside a convolution would round"),
            (convolved(weights(VALUES)), plus(1), "1 x + 1 beside a convolution would round"),
            (convolved(QUANTIZED), line(-1), "the weights of the convolution are quantized"),
            (convolved({**weights(VALUES), "isUpdatable": True}), line(-1), "are trainable"),
            (convolved(half(VALUES)), line(2.0**20), "would be rounded"),
            (convolved(half(VALUES)), line(2.0 ** (-20)), "would be rounded"),
        ]
        for behind in [False, True]
    ),
    *(
        rewrites(row, *links, rank5=rank5)
        for links in [
            [line(0.3), line(-1)],
            [line(-1), line(0.3, 0.7)],
            [line(0.3, 0.7), line(-1)],
            [line(0.3, 0.7), times(4)],
            [times(0.3), plus(0.7)],
            [times(0.3), line(1, 0.7)],
            [plus(0.7), times(-0.5)],
            [times(0.5), plus(0.7), times(2)],
            [times(0.3), times(0.125), line(0.25, 0.1)],
            [times(0.5), times(2)],
        ]
        for rank5 in [False, True]
    ),
    rewrites(row, times(-0.5), times(-2), ABS),
    rewrites(row, times(2), convolved(weights(VALUES)), line(-1)),
    rewrites(row, times(3), times(5), times(2), times(0.25)),
    *(ignores(row, *links) for links in ([times(2)], [times(2), ABS], [ABS, times(2)])),
    stays(with_output, row(times(2), times(4)), "b1"),
    refuses(
        "the weights of the convolution are computed",
        make_network,
        {"x": (1, 4, 2, 2), "w": (4, 4, 1, 1)},
        [
            make_layer("activation", ["x"], ["m"], linear={"alpha": -1.0}),
            make_layer(
                "convolution",
                ["m", "w"],
                ["c"],
                outputChannels=4,
                kernelChannels=4,
                kernelSize=[1, 1],
                valid={},
            ),
            make_layer("activation", ["c"], ["y"], linear={"alpha": -1.0}),
        ],
        ["y"],
    ),
)
