"""`legacy_gather`: runs of indices, channels in any order, and what the first layers lack."""

from __future__ import annotations

from typing import Any

import numpy as np
from pass_cases import refuses, rewrites, table
from two_sided import with_sizes

from anesurgery.mil import Array
from anesurgery.neuralnetwork.making import make_layer, make_network, weights
from anesurgery.passes.layers.cutting import LegacyGather
from anesurgery.testing import assert_refuses

STEP = LegacyGather()
Shape = tuple[int, ...]


def gathered(x: Shape, indices: Array, axis: int, *, rank5: bool = False) -> Any:
    layers = [
        make_layer("loadConstantND", [], ["i"], shape=indices.shape, data=weights(indices)),
        make_layer("gather", ["x", "i"], ["g"], axis=axis),
        make_layer("activation", ["g"], ["y"], linear={"alpha": -1}),
    ]
    return make_network({"x": x}, layers, ["y"], rank5=rank5)


def test_a_scalar_index_takes_the_axis_away() -> None:
    spec = gathered((1, 6, 3, 4), np.array([2]), 1)
    drop = make_layer("squeeze", ["i"], ["s"], squeezeAll=True)
    spec.neuralNetwork.layers.insert(1, drop)
    spec.neuralNetwork.layers[2].input[1] = "s"
    assert_refuses(STEP, spec, "shape (), not [n]")


test_cases, test_surroundings = table(
    STEP,
    *(
        refuses(words, gathered, x, np.array(indices), axis)
        for x, axis, indices, words in [
            ((2, 6, 3, 4), 0, [0], "along axis -4 of 4, before the channels"),
            ((1, 6, 3, 4), 1, [[0, 1]], "shape (1, 2), not [n]"),
            ((1, 6, 3, 4), 1, [0.5], "no whole numbers"),
            ((1, 6, 3, 4), 1, [6], "index 6 lies outside of 6"),
            ((1, 6, 3, 4), 1, [-7, 0], "index -7 lies outside of 6"),
            ((1, 3, 6, 4), 2, [0, 1, 5], "3 indices along the height are 2 slices"),
            ((1, 3, 6, 4), 3, [1, 0], "along the width are 2 slices"),
            ((6, 3, 4), 0, [5, 4, 3, 2, 1], "wants 4 axes for convolution, and there are 3"),
        ]
    ),
    refuses(
        "'i' are dynamic",
        make_network,
        {"x": (1, 6, 3, 4), "i": (2,)},
        [make_layer("gather", ["x", "i"], ["y"], axis=1)],
        ["y"],
    ),
    rewrites(gathered, (1, 6, 3, 4), np.arange(6), 1, quick=True),
    *(
        rewrites(gathered, x, np.array(indices), axis)
        for x, axis, indices in [
            ((1, 6, 3, 4), 1, [2]),
            ((1, 6, 3, 4), -3, [-1]),
            ((1, 6, 3, 4), 1, [1, 2, 3]),
            ((1, 6, 3, 4), 1, [0, 5]),
            ((2, 3, 7, 4), 2, [0, 3, 6]),
            ((2, 3, 7, 4), -1, [2, -1]),
            ((2, 1, 3, 7, 4), 4, [1, 3]),
            ((6, 4), 0, [1, 2]),
            ((6,), 0, [1, 3, 5]),
            ((6, 2, 3), 0, [4, 5, 0]),
            ((2, 6, 3, 4), 1, [0, 1, 2, 4, 5]),
            ((2, 6, 3, 4), 1, [3, 3, 2, 2]),
            ((2, 6, 3, 4), 1, [5, 4, 3, 2, 1, 0]),
            ((2, 3, 3, 4), 1, [0, 0, 0, 1, 1, 1, 2]),
            ((2, 1, 6, 3, 4), 2, [5, 3, 3, 2, 1]),
        ]
    ),
    *(
        rewrites(gathered, (6, 3, 4), np.array(indices), axis, rank5=True)
        for axis, indices in [(2, [1, 3, 5]), (-2, [0, 1]), (2, [5, 4, 3, 2, 1, 0])]
    ),
    rewrites(gathered, (1, 6, 3, 4), np.array([0, 2, 1, 5]), 1),
    rewrites(gathered, (1, 6, 3, 4), np.array([0, 2, 1, 5]), 1, step=LegacyGather(runs=1)),
    refuses(
        "6 channels are more than 5",
        gathered,
        (1, 6, 3, 4),
        np.array([0, 2, 1, 5]),
        1,
        step=LegacyGather(runs=1, channels=5),
    ),
    rewrites(with_sizes, gathered((1, 6, 3, 4), np.array([5, 4, 3]), 1), (1, 1), (6, 6), (2, 9), (4, 4)),
    refuses(
        "1x6x?x4: a size is dynamic",
        with_sizes,
        gathered((1, 6, 3, 4), np.array([5, 4, 3]), 1),
        *[(1, 1), (6, 6), (2, 9), (4, 4)],
        step=LegacyGather(runs=2),
    ),
    refuses(
        "length of the axis",
        with_sizes,
        gathered((1, 6, 3, 4), np.array([5, 4, 3]), 1),
        *[(1, 1), (6, 9), (2, 9), (4, 4)],
    ),
)
