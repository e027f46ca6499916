"""Exponentials that are made small: as a product, as a quotient, refusals, a wrong version."""

from __future__ import annotations

import numpy as np
import pytest
from pass_cases import refuses, table

from anesurgery.interpret import run
from anesurgery.mil import Program, Var, mb, types
from anesurgery.passes.halve_exponent import HalveExponent
from anesurgery.testing import apply_pass, assert_refuses

HALF = np.float16


def built(factor: float = 1e-3, divides: bool = False, known: bool = False) -> Program:
    @mb.program(input_specs=[mb.TensorSpec((2, 16), dtype=types.fp16)])
    def program(x: Var) -> Var:
        e = mb.exp(x=mb.tanh(x=x) if known else x)
        return mb.real_div(x=e, y=HALF(factor), name="y") if divides else mb.mul(x=HALF(factor), y=e, name="y")

    return program


@pytest.mark.parametrize(("factor", "divides"), [(1e-3, False), (0.25, False), (1000, True)])
def test_it_overflows_later(factor: float, divides: bool) -> None:
    program = built(factor, divides)
    after, session = apply_pass(HalveExponent(), program)
    assert len(session.changes) == 1
    x = np.linspace(-12, 12, 32).reshape(2, 16).astype(HALF)
    (wanted,) = run(program, {"x": x}, precision="fp32").values()
    (old,), (new,) = (run(p, {"x": x}, precision="fp16").values() for p in (program, after))
    assert not np.isfinite(old).all()
    assert np.abs(new - wanted).max() < 4e-3 * np.abs(wanted).max()


def likelihood(factor: float = 1.0, bounded: bool = False) -> Program:
    """`exp(-log_variance) * (x - mean)^2`, of which the first overflows where the second is small."""
    specs = [mb.TensorSpec((2, 16), dtype=types.fp16) for _ in range(2)]

    @mb.program(input_specs=specs)
    def program(x: Var, v: Var) -> Var:
        precision = mb.exp(x=mb.mul(x=mb.tanh(x=v) if bounded else v, y=HALF(-1)))
        square = mb.pow(x=mb.sub(x=x, y=HALF(0.5)), y=HALF(2))
        return mb.mul(x=square, y=precision if factor == 1 else mb.mul(x=precision, y=HALF(factor)), name="y")

    return program


@pytest.mark.parametrize("factor", [1.0, 0.5, 2.0])
def test_an_exponential_times_a_square(factor: float) -> None:
    program = likelihood(factor)
    after, session = apply_pass(HalveExponent(), program)
    assert [change.pass_name for change in session.changes] == ["halve_exponent"]
    x, v = np.linspace(0.48, 0.52, 32).reshape(2, 16).astype(HALF), np.full((2, 16), -14, HALF)
    (wanted,) = run(program, {"x": x, "v": v}, precision="fp32").values()
    (old,), (new,) = (run(p, {"x": x, "v": v}, precision="fp16").values() for p in (program, after))
    assert not np.isfinite(old).all()
    assert np.abs(new - wanted).max() < 4e-3 * np.abs(wanted).max()
    assert_refuses(HalveExponent(), likelihood(bounded=True), "nothing overflows")


test_cases, test_surroundings = table(
    HalveExponent(),
    refuses("nothing overflows", built, known=True),
    refuses("does not become small", built, 2.0),
)
