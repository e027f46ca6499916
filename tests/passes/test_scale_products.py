"""Weights whose sums may pass the ceiling: linear, conv and matmul, bias, refusals, a wrong version."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from pass_cases import Repaired, refuses, rewrites, table

from anesurgery.mil import Program, Var, mb, types
from anesurgery.passes.scale_products import ScaleProducts
from anesurgery.testing import assert_refuses

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
    *(
        rewrites(
            built,
            kind,
            inputs={"x": np.full(PRODUCTS[kind][0], 0.9, HALF)},
            repaired=Repaired("ane", rtol=2e-3),
            alone={"after the default pipeline": "coremltools folds the factor into a convolution again"}
            if kind == "conv"
            else {},
        )
        for kind in PRODUCTS
    ),
)
