"""`fold_batchnorm`: every layer whose weights can take a normalization, and those that cannot."""

from __future__ import annotations

from typing import Any

import numpy as np
from pass_cases import refuses, rewrites, table
from two_sided import with_output

import anesurgery as ane
from anesurgery.mil import Array
from anesurgery.neuralnetwork.making import make_layer, make_network, weights
from anesurgery.passes.layers.fusing import FoldBatchnorm

STEP = FoldBatchnorm()
CHANNELS = 4
Fields = dict[str, Any]


def whole(*shape: int, seed: int = 0) -> Array:
    """Whole numbers from -4 to 4."""
    return np.random.default_rng(seed).integers(-4, 5, shape).astype(np.float32)


def convolved(*shape: int, **fields: Any) -> tuple[str, Fields]:
    """A convolution with weights of a shape."""
    sizes: Fields = {"outputChannels": CHANNELS, "kernelSize": shape[2:], "valid": {}}
    sizes["kernelChannels"] = shape[0] if fields.get("isDeconvolution") else shape[1]
    return "convolution", {**sizes, "weights": weights(whole(*shape)), **fields}


def product() -> tuple[str, Fields]:
    sizes: Fields = {"inputChannels": 4, "outputChannels": CHANNELS}
    return "innerProduct", {**sizes, "weights": weights(whole(CHANNELS, 4))}


def statistics(channels: int = CHANNELS) -> Fields:
    """Exact ones: gamma / sqrt(variance + epsilon) is a power of two."""
    gamma, variance = np.array([2, -4, 8, 2]), np.array([3.75, 0.75, 15.75, 0])
    each = {"gamma": gamma, "beta": whole(channels, seed=1), "mean": whole(channels, seed=2)}
    found: Fields = {n: weights(v[:channels]) for n, v in {**each, "variance": variance}.items()}
    return {"channels": channels, "epsilon": 0.25, **found}


def network(
    before: tuple[str, Fields], shape: tuple[int, ...] = (1, 4, 5, 6), rank5: bool = False, **fields: Any
) -> Any:
    kind, own = before
    layers = [
        make_layer(kind, ["x"], ["a"], **own),
        make_layer("batchnorm", ["a"], ["y"], **{**statistics(), **fields}),
    ]
    return make_network({"x": shape[1:] if rank5 else shape}, layers, ["y"], rank5=rank5)


def quantized() -> Fields:
    linear = {"scale": [0.5], "bias": [0.0]}
    return {"rawValue": bytes(range(16)), "quantization": {"numberOfBits": 8, "linearQuantization": linear}}


HALF: Fields = {"float16Value": np.arange(16, dtype=np.float16).tobytes()}
TRAINED: Fields = {**weights(whole(4, 4)), "isUpdatable": True}


def test_behind_a_custom_layer_sums_of_what_nobody_knows_stay() -> None:
    """The wrong version ends in an error about a blob that nothing makes."""
    kind, own = convolved(4, 4, 1, 1)
    layers = [
        make_layer("custom", ["x"], ["c"], className="Own"),
        make_layer("add", ["c", "x"], ["s"]),
        make_layer(kind, ["s"], ["a"], **own),
        make_layer("batchnorm", ["a"], ["y"], **statistics()),
    ]
    done = ane.apply(make_network({"x": (1, 4, 5, 6)}, layers, ["y"]), STEP, quiet=True)
    assert not done.changes
    assert any("is not known" in refusal.reason for _, refusal in done.refusals)


FORMS: dict[str, tuple[tuple[str, Fields], tuple[int, ...]]] = {
    "3x3": (convolved(4, 4, 3, 3), (1, 4, 5, 6)),
    "same": (convolved(4, 4, 3, 3, same={}, stride=[2, 2]), (1, 4, 5, 6)),
    "groups": (convolved(4, 2, 3, 2, nGroups=2), (1, 4, 5, 6)),
    "depthwise": (convolved(4, 1, 1, 1, nGroups=4), (1, 4, 5, 6)),
    "deconvolution": (convolved(4, 4, 2, 3, isDeconvolution=True, stride=[2, 2]), (1, 4, 5, 6)),
    "groups back": (convolved(4, 2, 3, 3, isDeconvolution=True, nGroups=2, same={}), (1, 4, 5, 6)),
    "grown": (convolved(6, 2, 1, 1, isDeconvolution=True, nGroups=2, stride=[3, 3], same={}), (1, 6, 5, 6)),
    "product": (product(), (1, 4, 1, 1)),
}
BIAS: Fields = {"hasBias": True, "bias": weights(whole(CHANNELS, seed=3))}
ROUNDING: Fields = {
    n: weights(np.random.default_rng(i).random(4)) for i, n in enumerate(("gamma", "beta", "mean", "variance"))
}
test_cases, test_surroundings = table(
    STEP,
    refuses("are of fp16; new ones would be rounded", network, convolved(4, 4, 1, 1, weights=HALF)),
    refuses("are quantized; new ones would be rounded", network, convolved(4, 4, 1, 1, weights=quantized())),
    refuses("are trainable", network, convolved(4, 4, 1, 1, weights=TRAINED)),
    refuses("fp32 and of fp16", network, convolved(4, 4, 1, 1, hasBias=True, bias={"float16Value": bytes(8)})),
    refuses("is 0 somewhere", network, convolved(4, 4, 1, 1), variance=weights(np.array([1, -0.25, 1, 1]))),
    refuses("is -2.75 somewhere", network, convolved(4, 4, 1, 1), variance=weights(np.array([1, -3, 1, 1]))),
    refuses("is nan somewhere", network, convolved(4, 4, 1, 1), variance=weights(np.array([1, np.nan, 1, 1]))),
    refuses("beyond fp32", network, convolved(4, 4, 1, 1), gamma=weights(np.full(4, 3e38)), epsilon=1e-08),
    refuses("mean and variance are computed", network, convolved(4, 4, 1, 1), computeMeanVar=True),
    refuses(
        "variance are computed", network, convolved(4, 4, 1, 1), computeMeanVar=True, instanceNormalization=True
    ),
    refuses("it comes after a layer activation", network, ("activation", {"ReLU": {}})),
    refuses("the last axis, its own are axis -3", network, product(), (4, 4, 4)),
    refuses(
        "it comes after an input",
        make_network,
        {"x": (1, 4, 2, 2)},
        [make_layer("batchnorm", ["x"], ["y"], **statistics())],
        ["y"],
    ),
    refuses(
        "the weights of the convolution are computed",
        make_network,
        {"x": (1, 4, 2, 2), "w": (4, 4, 1, 1)},
        [
            make_layer(
                "convolution",
                ["x", "w"],
                ["a"],
                outputChannels=4,
                kernelChannels=4,
                kernelSize=[1, 1],
                valid={},
            ),
            make_layer("batchnorm", ["a"], ["y"], **statistics()),
        ],
        ["y"],
    ),
    rewrites(network, convolved(4, 4, 1, 1), epsilon=0.0, variance=weights(np.full(4, 1e-05))),
    *(
        rewrites(
            network,
            (kind, {**fields, **bias}),
            shape,
            rank5,
            rtol=0,
            inputs={"x": whole(*(shape[1:] if rank5 else shape), seed=4)},
            id=f"{name}{', bias' if bias else ''}{', rank 5' if rank5 else ''}",
        )
        for name, ((kind, fields), shape) in FORMS.items()
        for bias in ({}, BIAS)
        for rank5 in (False, True)
    ),
    rewrites(network, convolved(4, 4, 3, 3), **ROUNDING, id="statistics that round"),
    rewrites(
        network, convolved(4, 4, 1, 1), gamma={"float16Value": np.arange(1, 5, dtype=np.float16).tobytes()}
    ),
    refuses(
        "what the convolution makes is read elsewhere too", with_output, network(convolved(4, 4, 1, 1)), "a"
    ),
)
