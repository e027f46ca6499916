"""Powers that are made small: spellings, signs, refusals, a wrong version."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from pass_cases import refuses, table

from anesurgery.interpret import run
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


@pytest.mark.parametrize(("exponent", "power"), POWERS.values(), ids=POWERS)
@pytest.mark.parametrize(("factor", "divides"), [(1e-4, False), (-1e-3, False), (20000, True)])
def test_every_spelling(exponent: int, power: Power, factor: float, divides: bool) -> None:
    program = built(power, factor, divides)
    after, session = apply_pass(ScalePowers(), program)
    assert len(session.changes) == 1
    times = 1 / factor if divides else factor
    x = np.linspace(-1, 1, 32).reshape(2, 16) * (30000 / abs(times)) ** (1 / exponent)
    (wanted,) = run(program, {"x": x.astype(HALF)}, precision="fp32").values()
    (found,) = run(after, {"x": x.astype(HALF)}, precision="fp16").values()
    assert np.abs(found - wanted).max() < 4e-3 * np.abs(wanted).max()


@pytest.mark.parametrize("reduce", ["reduce_sum", "reduce_mean"])
@pytest.mark.parametrize("keep", [True, False])
def test_powers_that_are_added_up(reduce: str, keep: bool) -> None:
    program = built(lambda x: getattr(mb, reduce)(x=mb.square(x=x), axes=[-1], keep_dims=keep), 1e-3)
    after, session = apply_pass(ScalePowers(), program)
    assert len(session.changes) == 1
    x = (np.random.default_rng(0).standard_normal((2, 16)) * 400).astype(HALF)
    (wanted,) = run(program, {"x": x}, precision="fp32").values()
    (found,) = run(after, {"x": x}, precision="fp16").values()
    assert np.allclose(found, wanted, rtol=4e-3)


def squared_relu(largest: float = 0.05, bounded: bool = False) -> Program:
    """Behind it stands a linear layer, as in a feed-forward part."""
    weight = (np.random.default_rng(0).uniform(-1, 1, (8, 16)) * largest).astype(HALF)

    return mb.program(input_specs=[mb.TensorSpec((2, 16), dtype=types.fp16)])(
        lambda x: mb.linear(x=mb.square(x=mb.relu(x=mb.tanh(x=x) if bounded else x)), weight=weight, name="y")
    )


def test_a_squared_relu_in_front_of_weights() -> None:
    after, session = apply_pass(ScalePowers(), program := squared_relu())
    assert [c.proof.grade.name for c in session.changes if c.proof] == ["PROVED"]
    x = (np.random.default_rng(0).standard_normal((2, 16)) * 300).astype(HALF)
    (wanted,) = run(program, {"x": x}, precision="fp32").values()
    (old,), (new,) = (run(p, {"x": x}, precision="fp16").values() for p in (program, after))
    assert not np.isfinite(old).all()
    assert np.abs(new - wanted).max() < 2e-3 * np.abs(wanted).max()
    assert_refuses(ScalePowers(), squared_relu(bounded=True), "does not overflow")
    assert_refuses(ScalePowers(), squared_relu(0.9), "make nothing small")


def test_a_few_small_squares_stay_and_many_do_not() -> None:
    def summed(count: int) -> Program:
        @mb.program(input_specs=[mb.TensorSpec((2, count), dtype=types.fp16)])
        def program(x: Var) -> Var:
            near = mb.mul(x=mb.tanh(x=x), y=HALF(60))  # 3,600 each
            return mb.mul(x=mb.reduce_sum(x=mb.square(x=near), axes=[-1]), y=HALF(1e-3), name="y")

        return program

    assert_refuses(ScalePowers(), summed(16), "does not overflow")
    assert apply_pass(ScalePowers(), summed(32))[1].changes


test_cases, test_surroundings = table(
    ScalePowers(),
    refuses("does not overflow", built, POWERS["third"][1], known=True),
    refuses("does not become small", built, POWERS["third"][1], 0.9),
)
