"""Weights whose sums may pass the ceiling: linear, conv and matmul, bias, refusals, a wrong version."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from pass_cases import refuses, table

from anesurgery.interpret import run
from anesurgery.mil import Program, Var, mb, types
from anesurgery.passes.scale_products import ScaleProducts
from anesurgery.testing import apply_pass, assert_refuses, assert_same_numbers

HALF = np.float16
Product = Callable[[Var, float], Var]
BIAS = np.arange(1, 5).astype(HALF) * HALF(64)

PRODUCTS: dict[str, tuple[tuple[int, ...], Product]] = {
    "linear": ((2, 64), lambda x, w: mb.linear(x=x, weight=np.full((4, 64), w, HALF), bias=BIAS)),
    "matmul": ((2, 64), lambda x, w: mb.matmul(x=x, y=np.full((64, 4), w, HALF))),
    "conv": ((1, 64, 4, 4), lambda x, w: mb.conv(x=x, weight=np.full((4, 64, 1, 1), w, HALF), bias=BIAS)),
}


def built(kind: str, weight: float = 1000.0, known: bool = True) -> Program:
    shape, product = PRODUCTS[kind]

    return mb.program(input_specs=[mb.TensorSpec(shape, dtype=types.fp16)])(
        lambda x: mb.identity(x=product(mb.tanh(x=x) if known else x, weight), name="y")
    )


@pytest.mark.parametrize("kind", PRODUCTS)
def test_no_sum_reaches_the_ceiling(kind: str) -> None:
    program = built(kind)
    after, session = apply_pass(ScaleProducts(), program)
    assert len(session.changes) == 1
    assert_same_numbers(program, after)
    x = np.full(PRODUCTS[kind][0], 0.9, HALF)
    (wanted,) = run(program, {"x": x}, precision="fp32").values()
    (old,), (new,) = (run(p, {"x": x}, precision="ane").values() for p in (program, after))
    assert not np.isfinite(old).all()
    assert np.allclose(new, wanted, rtol=2e-3)


def test_refuses_weights_that_would_lose_digits() -> None:
    weight = np.full((4, 64), 1000, HALF)
    weight[0, 0] = 2.0**-14

    program = mb.program(input_specs=[mb.TensorSpec((2, 64), dtype=types.fp16)])(
        lambda x: mb.linear(x=mb.tanh(x=x), weight=weight, name="y")
    )

    assert_refuses(ScaleProducts(), program, "1 numbers of weight would lose digits")


test_cases, test_surroundings = table(
    ScaleProducts(),
    *(refuses("the ceiling is 32768", built, kind, 1.0) for kind in PRODUCTS),
    *(refuses("a sum reaches at most inf", built, kind, known=False) for kind in PRODUCTS),
)
