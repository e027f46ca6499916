"""`legacy_pad`: borders, channels, sizes of the result, and what cannot be padded."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from pass_cases import refuses, rewrites, table
from two_sided import Shape, kinds_after, with_any_batch

from anesurgery.interpret import run
from anesurgery.neuralnetwork.importing import import_network
from anesurgery.neuralnetwork.making import make_layer, make_network, weights
from anesurgery.passes.layers.cutting import LegacyPad
from anesurgery.testing import apply_pass

STEP = LegacyPad()
ONE = ["slice", "activation"]


def padded(
    x: Shape,
    amounts: list[int],
    value: float = 0.0,
    to_size: bool = False,
    rank5: bool = False,
    read: str = "y",
) -> Any:
    layers = [
        make_layer(
            "constantPad", ["x"], ["y"], padAmounts=amounts, value=value, padToGivenOutputSizeMode=to_size
        ),
        make_layer("unary", ["y"], ["z"], type="ABS"),
    ]
    return make_network({"x": x}, layers, [read], rank5=rank5)


@pytest.mark.one_of(5)
@pytest.mark.parametrize("value", [0.0, -1.5])
@pytest.mark.parametrize(
    ("x", "amounts", "expected"),
    [
        ((2, 3, 4, 5), [0, 0, 0, 0, 1, 2, 3, 4], ["padding"]),
        ((2, 3, 4, 5), [0, 0, 0, 0, 0, 0, 3, 0], ["padding"]),
        ((4, 5), [1, 0, 0, 2], ["padding"]),
        ((2, 2, 3, 4, 5), [0] * 6 + [1, 1, 0, 1], ["padding"]),
        ((2, 3, 4, 5), [0, 0, 0, 2, 0, 0, 0, 0], [*ONE, "concat"]),
        ((2, 3, 4, 5), [0, 0, 2, 1, 0, 0, 0, 0], [*ONE, *ONE, "concat"]),
        ((3, 4, 5), [0, 3, 0, 0, 0, 0], ["activation", "concat"]),
        ((3, 4, 5), [0, 7, 0, 0, 0, 0], ["activation", "activation", *ONE, "concat"]),
        ((2, 3, 4, 5), [0, 0, 1, 0, 0, 1, 2, 0], [*ONE, "concat", "padding"]),
    ],
)
def test_amounts(x: Shape, amounts: list[int], value: float, expected: list[str]) -> None:
    spec = padded(x, amounts, value)
    assert kinds_after(STEP, spec) == [*expected, "unary"]
    after, _ = apply_pass(STEP, spec)
    numbers = np.random.default_rng(0).standard_normal(x).astype(np.float32)
    found = run(import_network(after, keep_names=True).program, {"x": numbers})["y"]
    margins = list(zip(amounts[::2], amounts[1::2], strict=True))
    np.testing.assert_array_equal(found, np.pad(numbers, margins, constant_values=value))


def test_amounts_from_a_constant() -> None:
    spec = padded((2, 3, 4, 5), [])
    amounts = np.array([0, 0, 0, 0, 1, 0, 0, 2])
    constant = make_layer("loadConstantND", [], ["a"], shape=[8], data=weights(amounts))
    spec.neuralNetwork.layers.insert(0, constant)
    spec.neuralNetwork.layers[1].input.append("a")
    assert kinds_after(STEP, spec) == ["padding", "unary"]


def test_channels_that_are_there_stay_whatever_they_are() -> None:
    after, _ = apply_pass(STEP, padded((1, 2, 1, 2), [0, 0, 0, 1, 0, 0, 0, 0]))
    x = np.array([[[[1, 2]], [[np.inf, np.nan]]]], np.float32)
    found = run(import_network(after, keep_names=True).program, {"x": x})["y"]
    np.testing.assert_array_equal(found, np.pad(x, [(0, 0), (0, 1), (0, 0), (0, 0)]))


def _from_an_input() -> Any:
    layer = make_layer("constantPad", ["x", "a"], ["y"])
    return make_network({"x": (3, 4), "a": (4,)}, [layer], ["y"])


test_cases, test_surroundings = table(
    STEP,
    rewrites(with_any_batch, padded((2, 3, 4, 5), [0, 0, 0, 0, 1, 1, 1, 1])),
    refuses("it pads axis -4 of 4", padded, (2, 3, 4, 5), [1, 0] + [0] * 6),
    refuses("it pads axis -5 of 5", padded, (1, 2, 3, 4, 5), [0, 1] + [0] * 8),
    refuses("the blob has 1 axis; Core ML's own check wants 2", padded, (5,), [1, 1]),
    refuses("states 6 amounts for a blob of 4", padded, (1, 3, 4, 5), [0, 1, 0, 0, 0, 0]),
    refuses("it adds 9 channels to 1, more than 8", padded, (1, 1, 4, 5), [0, 0, 0, 9, 0, 0, 0, 0]),
    refuses("dynamic", with_any_batch, padded((1, 4), [0, 0, 0, 9], to_size=True)),
    refuses("its amounts are dynamic", _from_an_input),
    *(
        rewrites(padded, (3, 4, 5), amounts, rank5=True)
        for amounts in [[0] * 6 + [1, 0, 0, 1], [0] * 4 + [0, 1] + [0] * 4]
    ),
    rewrites(padded, (2, 3, 4, 5), [0] * 8, read="z"),
    *(
        rewrites(padded, (2, 3, 4, 5), sizes, to_size=True)
        for sizes in ([0, 0, 0, 0, 0, 6, 7, 0], [0, 2, 0, 3, 0, 6, 0, 0], [0, 0, 0, 5, 0, 1, 0, 5])
    ),
    refuses("switched off", padded, (2, 3, 4, 5), [0, 0, 0, 2, 0, 0, 1, 1], step=LegacyPad(channels=False)),
    rewrites(padded, (2, 3, 4, 5), [0, 0, 0, 0, 0, 0, 1, 1], step=LegacyPad(channels=False)),
)
