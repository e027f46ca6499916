"""Scores that are scaled after their product: either side, factors, refusals, a wrong version."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from pass_cases import refuses, stays, table

from anesurgery.interpret import run
from anesurgery.mil import Program, Var, mb, types
from anesurgery.passes.scale_scores import ScaleScores
from anesurgery.testing import apply_pass, assert_same_numbers


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


@pytest.mark.parametrize(("queries", "keys"), [(4, 32), (32, 4)])
@pytest.mark.parametrize(("factor", "divides"), [(0.125, False), (8.0, True), (-0.25, False)])
def test_the_smaller_side_is_scaled(queries: int, keys: int, factor: float, divides: bool) -> None:
    program = attention(factor, queries, keys, divides)
    after, session = apply_pass(ScaleScores(), program)
    assert len(session.changes) == 1
    assert_same_numbers(program, after)
    (scaled,) = after.functions["main"].find_ops(op_type="mul")
    assert scaled.outputs[0].shape == (1, 4, 16)


def test_large_scores_stay_finite_in_fp16() -> None:
    program = attention(0.125)
    after, _ = apply_pass(ScaleScores(), program)
    values = {n: np.full((1, c, 16), 100, np.float16) for n, c in (("q", 4), ("k", 32))}
    (old,), (new,) = (run(p, values, precision="fp16").values() for p in (program, after))
    assert not np.isfinite(old).all()
    assert np.allclose(new, 100)


def test_a_covariance_is_a_product_of_two_smaller_sides() -> None:
    program = mb.program(input_specs=[mb.TensorSpec((1, 4, 512), dtype=types.fp16)])(
        lambda x: mb.mul(x=mb.matmul(x=x, y=x, transpose_y=True), y=np.float16(1 / 511), name="y")
    )

    after, session = apply_pass(ScaleScores(), program)
    assert len(session.changes) == 1
    assert_same_numbers(program, after, rtol=1e-5)
    x = {"x": (np.random.default_rng(0).standard_normal((1, 4, 512)) * 100).astype(np.float16)}
    (wanted,) = run(program, x, precision="fp32").values()
    (old,), (new,) = (run(p, x, precision="fp16").values() for p in (program, after))
    assert not np.isfinite(old).all()
    assert np.allclose(new, wanted, rtol=5e-3, atol=5)


def test_a_product_without_a_softmax_is_scaled_too() -> None:
    assert len(apply_pass(ScaleScores(), attention(0.125, ends=False))[1].changes) == 1


def a_product_with_weights_stays() -> Program:
    return mb.program(input_specs=[mb.TensorSpec((1, 4, 16), dtype=types.fp16)])(
        lambda x: mb.mul(x=mb.matmul(x=x, y=np.ones((16, 8), np.float16)), y=np.float16(0.01), name="y")
    )


test_cases, test_surroundings = table(
    ScaleScores(),
    refuses("do not become smaller", attention, 2.0),
    refuses("the scores are at most 16", attention, 0.125, known=True),
    stays(a_product_with_weights_stays),
)
