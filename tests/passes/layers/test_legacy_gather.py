"""`legacy_gather`: runs of indices, channels in any order, and what the first layers lack."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from pass_cases import refuses, table

from anesurgery.mil import Array
from anesurgery.neuralnetwork.making import make_layer, make_network, weights
from anesurgery.passes.layers.cutting import LegacyGather
from anesurgery.testing import apply_pass, assert_refuses, assert_same_numbers

STEP = LegacyGather()
Shape = tuple[int, ...]


def gathered(x: Shape, indices: Array, axis: int, *, rank5: bool = False) -> Any:
    layers = [
        make_layer("loadConstantND", [], ["i"], shape=indices.shape, data=weights(indices)),
        make_layer("gather", ["x", "i"], ["g"], axis=axis),
        make_layer("activation", ["g"], ["y"], linear={"alpha": -1}),
    ]
    return make_network({"x": x}, layers, ["y"], rank5=rank5)


def kinds_after(spec: Any, step: LegacyGather = STEP) -> list[str]:
    after, session = apply_pass(step, spec)
    assert session.changes, session.refusals
    assert all(change.proof is not None for change in session.changes)
    assert_same_numbers(spec, after, rtol=step.tolerance.rtol)
    return [layer.WhichOneof("layer") for layer in after.neuralNetwork.layers][:-1]


@pytest.mark.one_of(3)
@pytest.mark.parametrize(
    ("x", "axis", "indices", "expected"),
    [
        ((1, 6, 3, 4), 1, [0, 1, 2, 3, 4, 5], []),
        ((1, 6, 3, 4), 1, [2], ["slice"]),
        ((1, 6, 3, 4), -3, [-1], ["slice"]),
        ((1, 6, 3, 4), 1, [1, 2, 3], ["slice"]),
        ((1, 6, 3, 4), 1, [0, 5], ["slice"]),
        ((2, 3, 7, 4), 2, [0, 3, 6], ["slice"]),
        ((2, 3, 7, 4), -1, [2, -1], ["slice"]),
        ((2, 1, 3, 7, 4), 4, [1, 3], ["slice"]),
        ((6, 4), 0, [1, 2], ["slice"]),
        ((6,), 0, [1, 3, 5], ["slice"]),
        ((6, 2, 3), 0, [4, 5, 0], ["slice", "slice", "concat"]),
        ((2, 6, 3, 4), 1, [0, 1, 2, 4, 5], ["slice", "slice", "concat"]),
        ((2, 6, 3, 4), 1, [3, 3, 2, 2], ["slice"] * 4 + ["concat"]),
        ((2, 6, 3, 4), 1, [5, 4, 3, 2, 1, 0], ["convolution"]),
        ((2, 3, 3, 4), 1, [0, 0, 0, 1, 1, 1, 2], ["convolution"]),
        ((2, 1, 6, 3, 4), 2, [5, 3, 3, 2, 1], ["convolution"]),
    ],
)
def test_indices(x: Shape, axis: int, indices: list[int], expected: list[str]) -> None:
    assert kinds_after(gathered(x, np.array(indices), axis)) == expected


@pytest.mark.parametrize(
    ("axis", "indices", "expected"),
    [(2, [1, 3, 5], ["slice"]), (-2, [0, 1], ["slice"]), (2, [5, 4, 3, 2, 1, 0], ["convolution"])],
)
def test_the_mapping_to_five_axes(axis: int, indices: list[int], expected: list[str]) -> None:
    assert kinds_after(gathered((6, 3, 4), np.array(indices), axis, rank5=True)) == expected


def test_a_scalar_index_takes_the_axis_away() -> None:
    spec = gathered((1, 6, 3, 4), np.array([2]), 1)
    drop = make_layer("squeeze", ["i"], ["s"], squeezeAll=True)
    spec.neuralNetwork.layers.insert(1, drop)
    spec.neuralNetwork.layers[2].input[1] = "s"
    assert_refuses(STEP, spec, "shape (), not [n]")


def test_options() -> None:
    indices = np.array([0, 2, 1, 5])
    spec = gathered((1, 6, 3, 4), indices, 1)
    assert kinds_after(spec) == ["slice", "slice", "concat"]
    assert kinds_after(spec, LegacyGather(runs=1)) == ["convolution"]
    assert_refuses(LegacyGather(runs=1, channels=5), spec, "6 channels are more than 5")


def test_other_axes_may_be_of_any_size_for_slices() -> None:
    spec = gathered((1, 6, 3, 4), np.array([5, 4, 3]), 1)
    sizes = spec.description.input[0].type.multiArrayType.shapeRange.sizeRanges
    for low, high in ((1, 1), (6, 6), (2, 9), (4, 4)):
        sizes.add(lowerBound=low, upperBound=high)
    after, session = apply_pass(STEP, spec)
    assert session.changes[0].proof is not None
    assert after.neuralNetwork.layers[0].WhichOneof("layer") == "slice"
    assert_refuses(LegacyGather(runs=2), spec, "1x6x?x4: a size is dynamic")
    # The axis itself must be known.
    sizes[1].upperBound = 9
    assert_refuses(STEP, spec, "length of the axis")


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
)
