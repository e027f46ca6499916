"""A sum that is made small: as a product, as a quotient, over unknown and bounded numbers; a wrong version."""

from __future__ import annotations

from typing import Any

import numpy as np
from pass_cases import Repaired, refuses, rewrites, stays, table

from anesurgery.mil import Program, Var, mb, types
from anesurgery.passes.sum_to_mean import SumToMean


def built(factor: float, divides: bool = False, dtype: Any = types.fp16, known: bool = False) -> Program:
    kind = np.float16 if dtype is types.fp16 else np.float32

    @mb.program(input_specs=[mb.TensorSpec((2, 64, 64), dtype=dtype)])
    def program(x: Var) -> Var:
        total = mb.reduce_sum(x=mb.tanh(x=x) if known else x, axes=[1, 2], keep_dims=False)
        return (
            mb.real_div(x=total, y=kind(factor), name="y")
            if divides
            else mb.mul(x=total, y=kind(factor), name="y")
        )

    return program


test_cases, test_surroundings = table(
    SumToMean(),
    refuses("is at most 4096", built, 1 / 4096, known=True),
    refuses("does not become smaller", built, 2.0),
    stays(built, 1 / 4096, dtype=types.fp32),
    *(
        rewrites(
            built,
            factor,
            divides,
            inputs={"x": np.full((2, 64, 64), x, np.float16)},
            repaired=Repaired(rtol=2e-3, broken=broken),
        )
        for factor, divides, x, broken in (
            (1 / 4096, False, 20, True),
            (4096, True, 20, True),
            (0.5, False, 60 / 4096, False),
            (100, True, 20, True),
        )
    ),
    refuses("2048 times smaller than the result", built, 0.5, step=SumToMean(most=4.0)),
    rewrites(built, 1 / 4096, step=SumToMean(most=4.0)),
)
