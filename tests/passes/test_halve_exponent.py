"""Exponentials that are made small: as a product, as a quotient, refusals, a wrong version."""

from __future__ import annotations

import numpy as np
from pass_cases import Repaired, refuses, rewrites, table

from anesurgery.mil import Program, Var, mb, types
from anesurgery.passes.halve_exponent import HalveExponent

HALF = np.float16


def built(factor: float = 1e-3, divides: bool = False, known: bool = False) -> Program:
    @mb.program(input_specs=[mb.TensorSpec((2, 16), dtype=types.fp16)])
    def program(x: Var) -> Var:
        e = mb.exp(x=mb.tanh(x=x) if known else x)
        return mb.real_div(x=e, y=HALF(factor), name="y") if divides else mb.mul(x=HALF(factor), y=e, name="y")

    return program


def likelihood(factor: float = 1.0, bounded: bool = False) -> Program:
    """`exp(-log_variance) * (x - mean)^2`, of which the first overflows where the second is small."""
    specs = [mb.TensorSpec((2, 16), dtype=types.fp16) for _ in range(2)]

    @mb.program(input_specs=specs)
    def program(x: Var, v: Var) -> Var:
        precision = mb.exp(x=mb.mul(x=mb.tanh(x=v) if bounded else v, y=HALF(-1)))
        square = mb.pow(x=mb.sub(x=x, y=HALF(0.5)), y=HALF(2))
        return mb.mul(x=square, y=precision if factor == 1 else mb.mul(x=precision, y=HALF(factor)), name="y")

    return program


RISING = {"x": np.linspace(-12, 12, 32).reshape(2, 16).astype(HALF)}
NEAR = {"x": np.linspace(0.48, 0.52, 32).reshape(2, 16).astype(HALF), "v": np.full((2, 16), -14, HALF)}
test_cases, test_surroundings = table(
    HalveExponent(),
    refuses("nothing overflows", built, known=True),
    refuses("does not become small", built, 2.0),
    *(
        rewrites(built, factor, divides, inputs=RISING, repaired=Repaired(largest=4e-3))
        for factor, divides in ((1e-3, False), (0.25, False), (1000, True))
    ),
    *(rewrites(likelihood, factor, inputs=NEAR, repaired=Repaired(largest=4e-3)) for factor in (1.0, 0.5, 2.0)),
    refuses("nothing overflows", likelihood, bounded=True),
)
