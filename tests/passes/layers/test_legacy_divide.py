"""`legacy_divide`: constant and computed divisors, what is exact, and what happens near 0."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from pass_cases import refuses, rewrites, table
from two_sided import Shape, two, with_any_batch, with_constant

from anesurgery.errors import PassError
from anesurgery.interpret import run
from anesurgery.mil import Array
from anesurgery.neuralnetwork.importing import import_network
from anesurgery.neuralnetwork.making import make_layer, make_network
from anesurgery.passes.layers.broadcasting import LARGEST, SMALLEST, LegacyDivide
from anesurgery.testing import apply_pass

KIND = "divideBroadcastable"
STEP = LegacyDivide()


def numbers(spec: Any, **inputs: Array) -> Array:
    found: Array = np.asarray(run(import_network(spec, keep_names=True).program, inputs)["y"])
    return found


def powers(shape: Shape) -> Array:
    rng = np.random.default_rng(0)
    sign = rng.choice([-1.0, 1.0], shape)
    return (sign * 2.0 ** rng.integers(-126, 127, shape)).astype(np.float32)


def test_divisors_of_any_size_keep_each_quotient() -> None:
    """Element by element, not only beside the largest one."""
    rng = np.random.default_rng(0)
    shape = (1, 3, 40, 50)
    size = 2.0 ** rng.uniform(-95, 95, shape)
    z = (rng.choice([-1.0, 1.0], shape) * size).astype(np.float32)
    x = rng.uniform(1, 9, shape).astype(np.float32)
    spec = two(KIND, shape, shape)
    after, _ = apply_pass(STEP, spec)
    np.testing.assert_allclose(numbers(after, x=x, z=z), x / z, rtol=STEP.tolerance.rtol)


def test_a_divisor_of_zero_gives_x_over_epsilon() -> None:
    shape = (1, 1, 1, 2)
    after, _ = apply_pass(STEP, two(KIND, shape, shape))
    x, z = np.array([3, 0], np.float32).reshape(shape), np.zeros(shape, np.float32)
    np.testing.assert_allclose(numbers(after, x=x, z=z).ravel(), [3 / SMALLEST, 0], rtol=1e-6)


@pytest.mark.parametrize("epsilon", [0.0, -1e-6, 1e-6, float("nan")])
def test_an_epsilon_out_of_bounds(epsilon: float) -> None:
    with pytest.raises(PassError, match="it must lie in"):
        LegacyDivide(epsilon=epsilon)


def apart(x: Shape, z: Shape) -> dict[str, Array]:
    """Divisors from 2 to 9."""
    rng = np.random.default_rng(0)
    return {"x": rng.standard_normal(x).astype(np.float32), "z": rng.uniform(2, 9, z).astype(np.float32)}


test_cases, test_surroundings = table(
    STEP,
    *(
        refuses(
            f"holds {np.float32(divisor):g}, whose reciprocal is no normal",
            with_constant,
            KIND,
            (1, 3, 4, 5),
            np.array([2, divisor, 4], np.float32).reshape(3, 1, 1),
        )
        for divisor in [0.0, 2.0**127, 1e-39, np.inf, np.nan]
    ),
    refuses("is not exact", two, KIND, (1, 3, 4, 5), (1, 3, 4, 5), step=LegacyDivide(exact=True)),
    refuses(
        "is not exact",
        with_constant,
        KIND,
        (1, 3, 4, 5),
        np.ones(1, np.float32),
        first=True,
        step=LegacyDivide(exact=True),
    ),
    *(
        refuses("not among the shapes", two, KIND, x, z)
        for x, z in [((1, 3, 4, 5), (1, 3, 4, 1)), ((1, 3, 4, 5), (3, 4, 5)), ((2, 3, 4, 5), (1, 3, 4, 5))]
    ),
    *(
        refuses(
            words,
            with_constant,
            KIND,
            x,
            np.random.default_rng(0).uniform(1, 2, shape).astype(np.float32),
            first,
        )
        for x, shape, words in [
            ((1, 3, 4, 5), (1, 1, 5), "is not one of"),
            ((3, 1, 1), (3, 4, 5), "larger than its input"),
        ]
        for first in [False, True]
    ),
    *(
        rewrites(
            with_constant,
            KIND,
            (3, 4, 5) if rank5 else (2, 3, 4, 5),
            np.random.default_rng(0).uniform(0.1, 9, shape).astype(np.float32),
            rank5=rank5,
        )
        for shape in [(1,), (3, 1, 1), (1, 4, 5), (3, 4, 5)]
        for rank5 in [False, True]
    ),
    *(
        refuses(
            "which is no power of two",
            with_constant,
            KIND,
            (3, 4, 5) if rank5 else (2, 3, 4, 5),
            np.random.default_rng(0).uniform(0.1, 9, shape).astype(np.float32),
            rank5=rank5,
            step=LegacyDivide(exact=True),
        )
        for shape in [(1,), (3, 1, 1), (1, 4, 5), (3, 4, 5)]
        for rank5 in [False, True]
    ),
    *(
        rewrites(
            with_constant,
            KIND,
            (1, 3, 4, 5),
            np.random.default_rng(0).standard_normal(shape).astype(np.float32),
            first=True,
        )
        for shape in [(1,), (3, 1, 1)]
    ),
    rewrites(with_constant, KIND, (1, 3, 4, 5), np.ones(1, np.float32), first=True),
    *(
        rewrites(with_constant, KIND, (1, 3, 4, 5), powers(shape), step=LegacyDivide(exact=exact), rtol=0)
        for shape in ((1,), (3, 1, 1), (4, 5), (3, 4, 5))
        for exact in (False, True)
    ),
    *(
        rewrites(
            two, KIND, x, z, step=LegacyDivide(epsilon=epsilon), inputs=apart(x, z), id=f"{x} {z} {epsilon}"
        )
        for x, z in [
            ((1, 3, 4, 5), (1, 3, 4, 5)),
            ((2, 3, 4, 5), (2, 3, 1, 1)),
            ((2, 3, 4, 5), (2, 1, 4, 5)),
            ((7,), (7,)),
            ((1, 3, 1, 1), (1, 3, 4, 5)),
        ]
        for epsilon in (SMALLEST, 1e-12, LARGEST)
    ),
    rewrites(
        with_any_batch,
        make_network(
            {"x": (1, 3, 4, 5)},
            [
                make_layer("activation", ["x"], ["z"], linear={"alpha": 0.5}),
                make_layer(KIND, ["x", "z"], ["y"]),
            ],
            ["y"],
        ),
    ),
    refuses("may differ where", with_any_batch, two(KIND, (1, 3, 4, 5), (1, 3, 4, 5))),
)
