"""Scores that are scaled after their product: either side, factors, refusals, a wrong version."""

from __future__ import annotations

from typing import Any

import numpy as np
from pass_cases import Repaired, refuses, rewrites, stays, table

from anesurgery.mil import Program, Var, mb, types
from anesurgery.passes.scale_scores import ScaleScores


def attention(
    factor: float = 0.125,
    queries: int = 4,
    keys: int = 32,
    divides: bool = False,
    known: bool = False,
    ends: bool = True,
) -> Program:
    specs = [mb.TensorSpec((1, n, 16), dtype=types.fp16) for n in (queries, keys)]

    @mb.program(input_specs=specs)
    def program(q: Var, k: Var) -> Any:
        q, k = (mb.tanh(x=v) if known else v for v in (q, k))
        scores = mb.matmul(x=q, y=k, transpose_y=True)
        kind = np.float16(factor)
        scaled = mb.real_div(x=scores, y=kind) if divides else mb.mul(x=scores, y=kind)
        return (
            mb.matmul(x=mb.softmax(x=scaled, axis=-1), y=k, name="y") if ends else mb.relu(x=scaled, name="y")
        )

    return program


def a_product_with_weights_stays() -> Program:
    return mb.program(input_specs=[mb.TensorSpec((1, 4, 16), dtype=types.fp16)])(
        lambda x: mb.mul(x=mb.matmul(x=x, y=np.ones((16, 8), np.float16)), y=np.float16(0.01), name="y")
    )


def covariance() -> Program:
    return mb.program(input_specs=[mb.TensorSpec((1, 4, 512), dtype=types.fp16)])(
        lambda x: mb.mul(x=mb.matmul(x=x, y=x, transpose_y=True), y=np.float16(1 / 511), name="y")
    )


test_cases, test_surroundings = table(
    ScaleScores(),
    refuses("do not become smaller", attention, 2.0),
    refuses("the scores are at most 16", attention, 0.125, known=True),
    stays(a_product_with_weights_stays),
    *(
        rewrites(attention, factor, queries, keys, divides, rtol=0)
        for queries, keys in ((4, 32), (32, 4))
        for factor, divides in ((0.125, False), (8.0, True), (-0.25, False))
    ),
    rewrites(
        attention,
        inputs={n: np.full((1, c, 16), 100, np.float16) for n, c in (("q", 4), ("k", 32))},
        repaired=Repaired(),
        id="large scores",
    ),
    rewrites(
        covariance,
        rtol=1e-5,
        inputs={
            "x": np.float16(100) * np.random.default_rng(0).standard_normal((1, 4, 512)).astype(np.float16)
        },
        repaired=Repaired(largest=1e-3),
    ),
    rewrites(attention, ends=False),
)
