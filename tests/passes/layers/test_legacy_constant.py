"""`legacy_constant`: the one shape that the plain layer makes, and all others."""

from __future__ import annotations

from typing import Any

import numpy as np
from pass_cases import refuses, rewrites, table
from two_sided import Shape, kinds_after, layers_after

from anesurgery.neuralnetwork.making import make_layer, make_network, weights
from anesurgery.passes.layers.cutting import LegacyConstant

STEP = LegacyConstant()


def read_by(kind: str, shape: Shape, rank5: bool = False, outputs: tuple[str, ...] = ("y",)) -> Any:
    value = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    x = (3, 4, 5) if rank5 else (2, 1, 3, 4, 5)
    layers = [
        make_layer("loadConstantND", [], ["c"], shape=shape, data=weights(value)),
        make_layer(kind, ["x", "c"], ["y"]),
    ]
    return make_network({"x": x}, layers, outputs, rank5=rank5)


def test_half_precision_stays() -> None:
    spec = read_by("maxBroadcastable", (1, 1, 3, 1, 1))
    data = spec.neuralNetwork.layers[0].loadConstantND.data
    stored = np.array([1, 2, 3], np.float16).tobytes()
    data.Clear()
    data.float16Value = stored
    first, _ = layers_after(STEP, spec)
    assert first.loadConstant.data.float16Value == stored


def test_two_constants() -> None:
    spec = read_by("maxBroadcastable", (1, 1, 3, 1, 1))
    more = make_layer("loadConstantND", [], ["d"], shape=[3], data=weights(np.arange(3)))
    spec.neuralNetwork.layers.append(more)
    assert kinds_after(STEP, spec) == ["loadConstant", "maxBroadcastable", "loadConstantND"]


test_cases, test_surroundings = table(
    STEP,
    *(
        refuses(words, read_by, "maxBroadcastable", shape, rank5)
        for shape, words in [
            ((1,), "it has 1 axes; loadConstant makes 5"),
            ((3, 1, 1), "it has 3 axes"),
            ((1, 3, 1, 1), "it has 4 axes"),
            ((1, 2, 3, 1, 1), "its sequence and batch are 1 and 2"),
            ((2, 1, 3, 1, 1), "its sequence and batch are 2 and 1"),
        ]
        for rank5 in [False, True]
    ),
    refuses("it is an output of the network", read_by, "maxBroadcastable", (1, 1, 3, 1, 1), outputs=("y", "c")),
    *(
        rewrites(read_by, kind, (1, 1, *last), rank5)
        for last in [(3, 4, 5), (3, 1, 1), (1, 4, 5), (1, 1, 1)]
        for kind in ("maxBroadcastable", "subtractBroadcastable")
        for rank5 in (False, True)
    ),
)
