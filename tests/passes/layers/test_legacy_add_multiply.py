"""`legacy_add_multiply`: every broadcasting that the plain layers have, and those that they lack."""

from __future__ import annotations

import numpy as np
import pytest
from pass_cases import refuses, table
from two_sided import Shape, kinds_after, two, with_any_batch, with_constant

from anesurgery.neuralnetwork.making import make_layer, make_network
from anesurgery.passes.layers.legacy_add_multiply import LegacyAddMultiply
from anesurgery.testing import apply_pass, assert_refuses, assert_rewrites

KINDS = ("addBroadcastable", "multiplyBroadcastable")
STEP = LegacyAddMultiply()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("x", "z"),
    [
        ((1, 3, 4, 5), (1, 3, 4, 5)),
        ((2, 3, 4, 5), (2, 3, 1, 1)),
        ((2, 3, 4, 5), (2, 1, 4, 5)),
        ((2, 3, 4, 5), (2, 1, 1, 1)),
        ((3, 4, 5), (3, 1, 1)),
        ((7,), (7,)),
        ((1, 3, 1, 1), (1, 3, 4, 5)),  # the larger side comes first afterwards
    ],
)
def test_computed_blobs(kind: str, x: Shape, z: Shape) -> None:
    assert kinds_after(STEP, two(kind, x, z)) == [kind.removesuffix("Broadcastable")]


@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize(
    ("kind", "shape", "expected"),
    [
        ("addBroadcastable", (), "activation"),
        ("addBroadcastable", (3, 1, 1), "bias"),
        ("addBroadcastable", (1, 3, 1, 1), "bias"),
        ("addBroadcastable", (4, 5), "bias"),
        ("addBroadcastable", (3, 4, 5), "bias"),
        ("multiplyBroadcastable", (1,), "activation"),
        ("multiplyBroadcastable", (3, 1, 1), "scale"),
        ("multiplyBroadcastable", (1, 1, 4, 5), "scale"),
        ("multiplyBroadcastable", (1, 3, 4, 5), "scale"),
    ],
)
def test_constants(kind: str, shape: Shape, expected: str, first: bool) -> None:
    value = np.random.default_rng(0).standard_normal(shape or (1,)).astype(np.float32)
    assert kinds_after(STEP, with_constant(kind, (1, 3, 4, 5), value, first)) == [expected]


def test_a_constant_of_equal_numbers_is_a_linear_activation() -> None:
    spec = with_constant("multiplyBroadcastable", (1, 2, 2, 2), np.full((2, 1, 1), 3, np.float32))
    after = """
network(%x: 1x2x2x2) {
  %y: 1x2x2x2 = activation(%x, linear={alpha=3})
  return %y
}
"""
    assert_rewrites(STEP, spec, after)


def test_a_blob_with_itself_whatever_its_size() -> None:
    spec = make_network({"x": (1, 3, 4, 5)}, [make_layer("addBroadcastable", ["x", "x"], ["y"])], ["y"])
    array = spec.description.input[0].type.multiArrayType
    for low, high in ((1, 1), (3, 3), (2, 9), (2, 9)):
        array.shapeRange.sizeRanges.add(lowerBound=low, upperBound=high)
    assert kinds_after(STEP, spec) == ["add"]


def test_a_plain_layer_takes_its_constant() -> None:
    value = np.arange(3, dtype=np.float32).reshape(3, 1, 1)
    assert kinds_after(STEP, with_constant("add", (1, 3, 4, 5), value)) == ["bias"]
    assert kinds_after(STEP, with_constant("multiply", (1, 3, 4, 5), value)) == ["scale"]
    assert kinds_after(STEP, with_constant("multiply", (7,), value[1:2, 0, 0])) == ["activation"]
    words = "take 3 axes"
    assert_refuses(STEP, with_constant("multiply", (7,), np.arange(7.0)), words)


def test_does_not_apply_to_plain_layers_of_computed_blobs() -> None:
    spec = two("add", (1, 3, 4, 5), (1, 3, 4, 5))
    after, session = apply_pass(STEP, spec)
    assert after == spec
    assert not session.refusals


def test_a_constant_that_others_read_stays() -> None:
    value = np.arange(3, dtype=np.float32).reshape(3, 1, 1)
    spec = with_constant("addBroadcastable", (1, 3, 4, 5), value)
    spec.neuralNetwork.layers.append(make_layer("subtractBroadcastable", ["y", "c"], ["d"]))
    spec.description.output.add(name="d").type.multiArrayType.dataType = 65568
    assert kinds_after(STEP, spec) == ["loadConstantND", "bias", "subtractBroadcastable"]


test_cases, test_surroundings = table(
    STEP,
    *(
        refuses(words, two, kind, x, z)
        for x, z, words in [
            ((1, 3, 4, 5), (1, 3, 4, 1), "not among the shapes"),
            ((1, 3, 4, 5), (1, 1, 1, 5), "not among the shapes"),
            ((2, 3, 4, 5), (1, 3, 4, 5), "not among the shapes"),
            ((1, 3, 4, 5), (3, 4, 5), "not among the shapes"),
            ((1, 3, 1, 1), (1, 1, 4, 5), "not among the shapes"),
            ((1, 5), (4, 1), "not among the shapes"),
        ]
        for kind in KINDS
    ),
    *(
        refuses("may differ where a size is dynamic", with_any_batch, two(kind, (1, 3, 4, 5), (1, 3, 4, 5)))
        for kind in KINDS
    ),
    *(
        refuses(
            words,
            with_constant,
            "addBroadcastable",
            x,
            np.random.default_rng(0).standard_normal(shape).astype(np.float32),
        )
        for x, shape, words in [
            ((1, 3, 4, 5), (1, 1, 5), "is not one of"),
            ((2, 3, 4, 5), (2, 3, 1, 1), "varies along the batch"),
            ((3, 1, 1), (3, 4, 5), "larger than its input"),
            ((4, 5), (5,), "take 3 axes"),
        ]
    ),
)
