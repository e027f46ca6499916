"""`legacy_softmax`: the channel in every rank, other axes of five, and those out of reach."""

from __future__ import annotations

from typing import Any

import numpy as np
from pass_cases import refuses, rewrites, table
from two_sided import Shape, with_any_batch

from anesurgery.neuralnetwork.making import make_layer, make_network
from anesurgery.passes.layers.cutting import LegacySoftmax

STEP = LegacySoftmax()


def over(x: Shape, axis: int, rank5: bool = False) -> Any:
    return make_network({"x": x}, [make_layer("softmaxND", ["x"], ["y"], axis=axis)], ["y"], rank5=rank5)


ZEROS = {"x": np.where(np.random.default_rng(0).random((3, 2, 7, 4, 5)) < 0.5, 0, -200).astype(np.float32)}
test_cases, test_surroundings = table(
    STEP,
    *(
        refuses(words, over, x, axis)
        for x, axis, words in [
            ((5,), 0, "has 1 axes; Core ML's own check wants 3 or more"),
            ((4, 5), -1, "has 2 axes"),
            ((1, 7, 4, 5), 3, "axis -1 (width) of 4; Core ML's own check wants 5 axes for permute"),
            ((1, 7, 4, 5), 0, "axis -4 (batch) of 4"),
            ((1, 1, 1, 7, 4, 5), 0, "axis -6 (in front of the sequence) of 6"),
            ((1, 3, 7, 4, 5), 1, "it normalizes the batch, which permute leaves"),
        ]
    ),
    *(
        rewrites(over, x, axis, rank5, rtol=0)
        for x, axis, rank5 in [
            ((2, 7, 4, 5), 1, False),
            ((2, 7, 4, 5), -3, False),
            ((7, 4, 5), 0, False),
            ((2, 3, 7, 4, 5), 2, False),
            ((2, 3, 2, 7, 4, 5), 3, False),
            ((7, 4, 5), 2, True),
            ((7, 4, 5), -3, True),
        ]
    ),
    *(
        rewrites(over, x, axis, rank5)
        for x, axis, rank5 in [
            ((3, 2, 7, 4, 5), 0, False),
            ((3, 2, 7, 4, 5), 3, False),
            ((3, 2, 7, 4, 5), -1, False),
            ((1, 1, 1, 1, 300), -1, False),
            ((7, 4, 5), -2, True),
            ((7, 4, 5), 4, True),
        ]
    ),
    rewrites(with_any_batch, over((1, 7, 4, 5), 1)),
    *(
        # exp(-200) is 0 in fp32: each sum counts the zeros of x.
        rewrites(over, (3, 2, 7, 4, 5), axis, inputs=ZEROS, rtol=0, id=f"sums of ones along {axis}")
        for axis in (0, 3, 4)
    ),
)
