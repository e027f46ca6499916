"""`legacy_power`: each kind of exponent, negative bases, and exponents that are no single number."""

from __future__ import annotations

import numpy as np
from pass_cases import refuses, rewrites, table
from two_sided import layers_after, two, with_any_batch, with_constant

from anesurgery.mil import Array
from anesurgery.neuralnetwork.making import make_layer
from anesurgery.passes.layers.broadcasting import LegacyPower

KIND = "powBroadcastable"
STEP = LegacyPower()
SHAPE = (1, 3, 4, 5)


def one(number: float) -> Array:
    return np.array([number], np.float32)


def base(low: float) -> dict[str, Array]:
    return {"x": np.random.default_rng(0).uniform(low, 3, SHAPE).astype(np.float32)}


def test_an_exponent_of_one_goes() -> None:
    spec = with_constant(KIND, SHAPE, one(1))
    spec.neuralNetwork.layers.append(make_layer("activation", ["y"], ["t"], tanh={}))
    spec.description.output[0].name = "t"
    (layer,) = layers_after(STEP, spec)
    assert list(layer.input) == ["x"]


WHOLE = {"x": np.random.default_rng(0).integers(-30, 31, SHAPE).astype(np.float32)}
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
    *(
        rewrites(with_constant, KIND, SHAPE, one(exponent), inputs=base(low), id=f"to {exponent} from {low}")
        for exponent, low in [*((n, low) for n in (2, 3, 4) for low in (-3.0, 0.0)), (0.5, 0)]
    ),
    *(
        rewrites(
            with_constant, KIND, SHAPE, one(exponent), inputs=WHOLE, rtol=0, id=f"whole numbers to {exponent}"
        )
        for exponent in (2, 3, 4)
    ),
    *(
        rewrites(with_constant, KIND, SHAPE, one(exponent), inputs=base(0.1), id=f"to {exponent}")
        for exponent in (-1, -0.5, 0, 0.3, 1.5, 5, -2, 2.0000002)
    ),
    rewrites(with_constant, KIND, SHAPE, one(1)),
)
