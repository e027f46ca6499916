"""`legacy_concat`: every axis in both mappings, and inputs that do not lie side by side."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from pass_cases import refuses, rewrites, table
from two_sided import Shape, kinds_after, layers_after, with_any_batch

from anesurgery.interpret import run
from anesurgery.neuralnetwork.importing import import_network
from anesurgery.neuralnetwork.making import make_layer, make_network
from anesurgery.passes.layers.cutting import LegacyConcat
from anesurgery.testing import apply_pass, assert_refuses

STEP = LegacyConcat()
PADDED = ["padding", "padding", "add"]


def joined(*shapes: Shape, axis: int, interleave: bool = False, rank5: bool = False) -> Any:
    names = [f"x{i}" for i in range(len(shapes))]
    layer = make_layer("concatND", names, ["y"], axis=axis, interleave=interleave)
    return make_network(dict(zip(names, shapes, strict=True)), [layer], ["y"], rank5=rank5)


@pytest.mark.parametrize(
    ("first", "second", "axis", "expected"),
    [
        ((1, 2, 4, 5), (1, 3, 4, 5), 1, ["concat"]),
        ((1, 2, 4, 5), (1, 3, 4, 5), -3, ["concat"]),
        ((2, 4, 5), (3, 4, 5), 0, ["concat"]),
        ((2, 3, 2, 4, 5), (2, 3, 1, 4, 5), 2, ["concat"]),
        ((2, 3, 2, 4, 5), (1, 3, 2, 4, 5), 0, ["concat"]),
        ((1, 2, 4, 5), (1, 2, 1, 5), 2, PADDED),
        ((2, 4, 5), (2, 4, 3), -1, PADDED),
        ((4, 5), (1, 5), 0, PADDED),
        ((1, 2, 2, 4, 5), (1, 2, 2, 4, 6), 4, PADDED),
    ],
)
def test_axes(first: Shape, second: Shape, axis: int, expected: list[str]) -> None:
    assert kinds_after(STEP, joined(first, second, axis=axis)) == expected


@pytest.mark.parametrize(
    ("second", "axis", "expected"),
    [((1, 4, 5), 2, ["concat"]), ((2, 4, 5), 0, ["concat"]), ((2, 1, 5), 3, PADDED), ((2, 4, 7), -1, PADDED)],
)
def test_axes_of_the_mapping_to_five(second: Shape, axis: int, expected: list[str]) -> None:
    spec = joined((2, 4, 5), second, axis=axis, rank5=True)
    assert kinds_after(STEP, spec) == expected


def test_only_the_sequence_is_a_sequence_concat() -> None:
    flags = []
    for axis in (0, 2):
        spec = joined((2, 1, 2, 4, 5), (2, 1, 2, 4, 5), axis=axis)
        (layer,) = layers_after(STEP, spec)
        flags.append(layer.concat.sequenceConcat)
    assert flags == [True, False]


def test_many_inputs_along_columns() -> None:
    spec = joined((1, 2, 3, 1), (1, 2, 3, 4), (1, 2, 3, 2), axis=3)
    assert kinds_after(STEP, spec) == ["padding"] * 3 + ["add"]


def test_infinite_numbers_stay_where_they_are_along_rows() -> None:
    spec = joined((1, 1, 2, 2), (1, 1, 1, 2), axis=2)
    after, _ = apply_pass(STEP, spec)
    program = import_network(after, keep_names=True).program
    x0 = np.array([[[[np.inf, -1], [np.nan, -np.inf]]]], np.float32)
    x1 = np.array([[[[2, np.inf]]]], np.float32)
    found = run(program, {"x0": x0, "x1": x1})["y"]
    np.testing.assert_array_equal(found, np.concatenate([x0, x1], 2))


@pytest.mark.parametrize(
    ("x", "count", "axis"), [((1, 2, 3, 4), 2, 1), ((2, 3, 2, 2), 3, 1), ((1, 2, 2, 3, 4), 2, -3)]
)
def test_channels_that_interleave(x: Shape, count: int, axis: int) -> None:
    spec = joined(*[x] * count, axis=axis, interleave=True)
    assert kinds_after(STEP, spec) == ["concat", "convolution"]


def test_rows_can_be_left_alone() -> None:
    step = LegacyConcat(spatial=False)
    assert_refuses(step, joined((1, 2, 4, 5), (1, 2, 1, 5), axis=2), "switched off")
    assert kinds_after(step, joined((1, 2, 4, 5), (1, 2, 4, 5), axis=1)) == ["concat"]


test_cases, test_surroundings = table(
    STEP,
    rewrites(with_any_batch, joined((1, 2, 4, 5), (1, 3, 4, 5), axis=1)),
    refuses("along axis -4 of 4, the batch", joined, (1, 2, 4, 5), (2, 2, 4, 5), axis=0),
    refuses("along axis -6 of 6;", joined, (1, 1, 1, 2, 2, 2), (1, 1, 1, 2, 2, 2), axis=0),
    refuses("the width of 1 axes; Core ML's own check wants 2", joined, (5,), (6,), axis=0),
    refuses("along axis -2 of 4", joined, (2, 3, 4, 5), (2, 3, 4, 5), axis=2, interleave=True),
    refuses("of 4 axes or more", joined, (3, 4, 5), (3, 4, 5), axis=0, interleave=True),
    refuses(
        "300, 300 channels, not equally many, 512",
        joined,
        (1, 300, 1, 1),
        (1, 300, 1, 1),
        axis=1,
        interleave=True,
    ),
    refuses("unknown", joined, (1, 2, 4, 5), (1, 2, 3, 5), axis=1),
    refuses("dynamic", with_any_batch, joined((1, 5), (1, 5), axis=0)),
)
