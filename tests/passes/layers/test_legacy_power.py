"""`legacy_power`: each kind of exponent, negative bases, and exponents that are no single number."""

from __future__ import annotations

import numpy as np
import pytest
from pass_cases import refuses, rewrites, table
from two_sided import layers_after, two, with_any_batch, with_constant

from anesurgery.checking.grades import EXACT
from anesurgery.mil import Array
from anesurgery.neuralnetwork.making import make_layer
from anesurgery.passes.layers.broadcasting import LegacyPower
from anesurgery.testing import apply_pass, assert_same_numbers

KIND = "powBroadcastable"
STEP = LegacyPower()
SHAPE = (1, 3, 4, 5)


def one(number: float) -> Array:
    return np.array([number], np.float32)


def base(low: float) -> dict[str, Array]:
    return {"x": np.random.default_rng(0).uniform(low, 3, SHAPE).astype(np.float32)}


@pytest.mark.one_of(2)
@pytest.mark.parametrize("low", [-3.0, 0.0])
@pytest.mark.parametrize(("exponent", "expected"), [(2, 1), (3, 2), (4, 2)])
def test_whole_exponents_are_products(exponent: int, expected: int, low: float) -> None:
    found = layers_after(STEP, with_constant(KIND, SHAPE, one(exponent)), base(low))
    assert [layer.WhichOneof("layer") for layer in found] == ["multiply"] * expected


@pytest.mark.parametrize("exponent", [2, 3, 4])
def test_products_of_whole_numbers_are_exact(exponent: int) -> None:
    spec = with_constant(KIND, SHAPE, one(exponent))
    after, _ = apply_pass(STEP, spec)
    x = np.random.default_rng(0).integers(-30, 31, SHAPE).astype(np.float32)

    class Exact(LegacyPower):
        tolerance = EXACT

    assert_same_numbers(spec, after, inputs={"x": x}, rtol=Exact().tolerance.rtol)


def test_a_root() -> None:
    (root,) = layers_after(STEP, with_constant(KIND, SHAPE, one(0.5)), base(0))
    assert root.unary.type == root.unary.SQRT


@pytest.mark.parametrize("exponent", [-1, -0.5, 0, 0.3, 1.5, 5, -2, 2.0000002])
def test_other_exponents_are_unary_powers(exponent: float) -> None:
    spec = with_constant(KIND, SHAPE, one(exponent))
    after, session = apply_pass(STEP, spec)
    (layer,) = after.neuralNetwork.layers
    assert layer.unary.type == layer.unary.POWER
    assert layer.unary.alpha == np.float32(exponent)
    (change,) = session.changes
    assert change.proof is not None
    assert change.proof.max_abs == 0
    assert_same_numbers(spec, after, inputs=base(0.1), rtol=STEP.tolerance.rtol)


def test_an_exponent_of_one_goes() -> None:
    spec = with_constant(KIND, SHAPE, one(1))
    spec.neuralNetwork.layers.append(make_layer("activation", ["y"], ["t"], tanh={}))
    spec.description.output[0].name = "t"
    (layer,) = layers_after(STEP, spec)
    assert list(layer.input) == ["x"]


def test_an_exponent_of_one_at_an_output_is_a_linear_activation() -> None:
    (layer,) = layers_after(STEP, with_constant(KIND, SHAPE, one(1)))
    assert layer.activation.linear.alpha == 1


test_cases, test_surroundings = table(
    STEP,
    *(
        refuses(words, with_constant, KIND, x, value)
        for x, value, words in [
            (SHAPE, np.arange(3, dtype=np.float32).reshape(3, 1, 1), "of shape (3, 1, 1) is not one"),
            ((3, 1, 1), np.full((3, 4, 5), 2, np.float32), "makes the result larger"),
            (SHAPE, one(np.inf), "the exponent is inf"),
            (SHAPE, one(np.nan), "is not one number"),
        ]
    ),
    refuses("the exponent is computed", two, KIND, SHAPE, SHAPE),
    refuses("the base is constant", with_constant, KIND, SHAPE, one(2), first=True),
    *(
        rewrites(with_constant, KIND, SHAPE[1:], one(exponent), rank5=True, inputs={"x": base(0.1)["x"][0]})
        for exponent in [2, 3, 0.5, -1]
    ),
    *(
        rewrites(with_any_batch, with_constant(KIND, SHAPE, one(exponent)), inputs=base(0.1))
        for exponent in [2, 3, 0.5, -1]
    ),
)
