"""Guards that are subnormal: what reads them, numbers of every size, norms, refusals, wrong versions."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from narrow_arithmetics import Flushed

from anesurgery import fp16
from anesurgery.interpret import run
from anesurgery.mil import Array, Program, Var, ct, mb, types
from anesurgery.passes.hold_guards import HoldGuards
from anesurgery.testing import apply_pass, assert_refuses

HALF = np.float16
NONE = HALF(0)
ROWS = {"axes": [-1], "keep_dims": True}
Body = Callable[[Var, float], Var]


def added(x: Var, e: float) -> Var:
    total: Var = mb.add(x=mb.abs(x=x), y=HALF(e))
    return total


def at_least(x: Var, e: float) -> Var:
    least: Var = mb.maximum(x=mb.reduce_max(x=mb.abs(x=x), **ROWS), y=HALF(e))
    return least


FORMS: dict[str, Body] = {
    "log of a sum": lambda x, e: mb.log(x=added(x, e), epsilon=NONE),
    "log with an epsilon": lambda x, e: mb.log(x=mb.abs(x=x), epsilon=HALF(e)),
    "log of a maximum": lambda x, e: mb.log(x=mb.maximum(x=HALF(e), y=x), epsilon=NONE),
    "log of a clip": lambda x, e: mb.log(x=mb.clip(x=x, alpha=HALF(e), beta=HALF(1)), epsilon=NONE),
    "root": lambda x, e: mb.sqrt(x=added(x, e)),
    "reciprocal root": lambda x, e: mb.rsqrt(x=added(x, e), epsilon=NONE),
    "power": lambda x, e: mb.pow(x=added(x, e), y=HALF(-0.5)),
    "reciprocal": lambda x, e: mb.inverse(x=added(x, e), epsilon=NONE),
    "quotient": lambda x, e: mb.real_div(x=x, y=added(x, e)),
    "quotient by rows": lambda x, e: mb.real_div(x=x, y=at_least(x, e)),
    "quotient by a tile": lambda x, e: mb.real_div(x=x, y=mb.tile(x=at_least(x, e), reps=[1, 64])),
}
NO_OPERAND = {"log with an epsilon"}
"""Of an epsilon inside an op nothing is flushed."""
OVERFLOWS = {"reciprocal"}
"""Of 1e-6 it is beyond fp16."""


def built(body: Body, epsilon: float = 1e-6) -> Program:
    spec = mb.TensorSpec((2, 64), dtype=types.fp16)
    return mb.program(input_specs=[spec], opset_version=ct.target.iOS17)(lambda x: body(x, epsilon))


def only(program: Program, x: Array, precision: object) -> Array:
    (value,) = run(program, {"x": x}, precision=precision).values()  # type: ignore[arg-type]
    return np.asarray(value, np.float64)


CASES = [(form, 1e-5) for form in FORMS] + [("log of a clip", fp16.LEAST), ("quotient", fp16.LEAST)]


@pytest.mark.parametrize(("form", "epsilon"), CASES)
def test_numbers_of_every_size(form: str, epsilon: float) -> None:
    """fp16, which holds subnormal numbers, loses nothing that 60 dB show; where they count as 0, 0 is right."""
    program = built(FORMS[form], epsilon)
    after, session = apply_pass(HoldGuards(), program)
    assert len(session.changes) == 1
    normal = np.random.default_rng(0).standard_normal((2, 64))
    for size in (1e-5, 1e-3, 1.0, 300.0):
        x = (normal * size).astype(HALF)
        wanted = only(program, x, "fp32")
        holds = np.abs(wanted) < 65504
        error = np.abs(only(after, x, "fp16") - wanted)[holds]
        assert holds.any() or form in OVERFLOWS
        assert error.max(initial=0.0) <= 2.0**-8 * np.abs(wanted[holds]).max(initial=0.0)
    if form not in NO_OPERAND | OVERFLOWS:
        zeros = np.zeros((2, 64), HALF)
        wanted = only(program, zeros, "fp32")
        assert not np.allclose(only(program, zeros, Flushed()), wanted, rtol=1e-2)
        assert np.allclose(only(after, zeros, Flushed()), wanted, rtol=2e-3)


@pytest.mark.parametrize("form", [f for f in FORMS if f != "log of a clip"])
def test_what_the_guard_does_not_reach_stays_to_the_last_bit(form: str) -> None:
    program = built(FORMS[form])
    after, _ = apply_pass(HoldGuards(), program)
    x = np.abs(np.random.default_rng(1).standard_normal((2, 64)) * 50 + 200).astype(HALF)
    assert np.array_equal(only(after, x, "fp16"), only(program, x, "fp16"))


def test_an_infinite_divisor_still_gives_0() -> None:
    after, _ = apply_pass(HoldGuards(), built(lambda x, e: mb.real_div(x=x, y=added(mb.square(x=x), e))))
    assert not only(after, np.full((2, 64), 1000, HALF), "fp16").any()


def test_an_epsilon_of_0() -> None:
    """A bare reciprocal root, and a layer norm, of rows that are 0."""
    bodies: tuple[Body, ...] = (
        lambda x, e: mb.mul(x=x, y=mb.rsqrt(x=mb.reduce_mean(x=mb.square(x=x), **ROWS), epsilon=HALF(e))),
        lambda x, e: mb.layer_norm(x=x, axes=[-1], epsilon=HALF(e)),
    )
    rows = np.random.default_rng(0).standard_normal((2, 64)).astype(HALF)
    for body in bodies:
        program = built(body, 1e-12)
        after, session = apply_pass(HoldGuards(), program)
        assert len(session.changes) == 1
        assert np.isnan(only(program, np.zeros((2, 64), HALF), "fp16")).all()
        assert not only(after, np.zeros((2, 64), HALF), "fp16").any()
        assert np.array_equal(only(after, rows, "fp16"), only(program, rows, "fp16"))


def test_refusals() -> None:
    assert_refuses(
        HoldGuards(), built(lambda x, e: mb.log(x=added(mb.exp(x=mb.tanh(x=x)), e))), "needs no guard"
    )
    signed: Body = lambda x, e: mb.inverse(x=mb.add(x=x, y=HALF(e)), epsilon=NONE)  # noqa: E731
    assert_refuses(HoldGuards(), built(signed), "may be negative, and is not kept from 0")
    assert_refuses(HoldGuards(), built(FORMS["quotient by rows"], fp16.LEAST), "6e-8 keeps it from 0")


def test_a_normal_guard_stays() -> None:
    for body in FORMS.values():
        _, session = apply_pass(HoldGuards(), built(body, 1e-4))
        assert not session.changes
