"""Powers that are made small: spellings, signs, refusals, a wrong version."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from pass_cases import Repaired, refuses, rewrites, table

from anesurgery.mil import Program, Var, mb, types
from anesurgery.passes.scale_powers import ScalePowers
from anesurgery.testing import apply_pass, assert_refuses

HALF = np.float16
Power = Callable[[Var], Var]
POWERS: dict[str, tuple[int, Power]] = {
    "square": (2, lambda x: mb.square(x=x)),
    "product": (2, lambda x: mb.mul(x=x, y=x)),
    "third": (3, lambda x: mb.mul(x=x, y=mb.mul(x=x, y=x))),
    "scaled twice": (2, lambda x: mb.mul(x=mb.square(x=x), y=HALF(64 / 63))),
    "fourth": (4, lambda x: mb.pow(x=x, y=HALF(4))),
}


def built(power: Power, factor: float = 1e-4, divides: bool = False, known: bool = False) -> Program:
    @mb.program(input_specs=[mb.TensorSpec((2, 16), dtype=types.fp16)])
    def program(x: Var) -> Var:
        y = power(mb.tanh(x=x) if known else x)
        return mb.real_div(x=y, y=HALF(factor), name="y") if divides else mb.mul(x=y, y=HALF(factor), name="y")

    return program


def squared_relu(largest: float = 0.05, bounded: bool = False) -> Program:
    """Behind it stands a linear layer, as in a feed-forward part."""
    weight = (np.random.default_rng(0).uniform(-1, 1, (8, 16)) * largest).astype(HALF)

    return mb.program(input_specs=[mb.TensorSpec((2, 16), dtype=types.fp16)])(
        lambda x: mb.linear(x=mb.square(x=mb.relu(x=mb.tanh(x=x) if bounded else x)), weight=weight, name="y")
    )


def test_a_few_small_squares_stay_and_many_do_not() -> None:
    def summed(count: int) -> Program:
        @mb.program(input_specs=[mb.TensorSpec((2, count), dtype=types.fp16)])
        def program(x: Var) -> Var:
            near = mb.mul(x=mb.tanh(x=x), y=HALF(60))  # 3,600 each
            return mb.mul(x=mb.reduce_sum(x=mb.square(x=near), axes=[-1]), y=HALF(1e-3), name="y")

        return program

    assert_refuses(ScalePowers(), summed(16), "does not overflow")
    assert apply_pass(ScalePowers(), summed(32))[1].changes


def added_up(reduce: str, keep: bool) -> Power:
    return lambda x: getattr(mb, reduce)(x=mb.square(x=x), axes=[-1], keep_dims=keep)


LINE = np.linspace(-1, 1, 32).reshape(2, 16)
NORMAL = np.random.default_rng(0).standard_normal((2, 16)).astype(HALF)
test_cases, test_surroundings = table(
    ScalePowers(),
    refuses("does not overflow", built, POWERS["third"][1], known=True),
    refuses("does not become small", built, POWERS["third"][1], 0.9),
    *(
        rewrites(
            built,
            power,
            factor,
            divides,
            inputs={
                "x": (LINE * (30000 / abs(1 / factor if divides else factor)) ** (1 / exponent)).astype(HALF)
            },
            repaired=Repaired(largest=4e-3),
            id=f"{name}, {'over' if divides else 'times'} {factor}",
        )
        for name, (exponent, power) in POWERS.items()
        for factor, divides in ((1e-4, False), (-1e-3, False), (20000, True))
    ),
    *(
        rewrites(
            built,
            added_up(reduce, keep),
            1e-3,
            inputs={"x": HALF(400) * NORMAL},
            repaired=Repaired(rtol=4e-3),
            id=f"{reduce}, {keep}",
        )
        for reduce in ("reduce_sum", "reduce_mean")
        for keep in (True, False)
    ),
    rewrites(squared_relu, inputs={"x": HALF(300) * NORMAL}, repaired=Repaired(largest=2e-3)),
    refuses("does not overflow", squared_relu, bounded=True),
    refuses("make nothing small", squared_relu, 0.9),
)
