"""A sum that is made small: as a product, as a quotient, over unknown and bounded numbers; a wrong version."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from pass_cases import refuses, stays, table

from anesurgery.interpret import run
from anesurgery.mil import Program, Var, mb, types
from anesurgery.passes.sum_to_mean import SumToMean
from anesurgery.testing import apply_pass, assert_refuses


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


@pytest.mark.parametrize(("factor", "divides"), [(1 / 4096, False), (4096, True), (0.5, False), (100, True)])
def test_the_sum_does_not_overflow(factor: float, divides: bool) -> None:
    program = built(factor, divides)
    after, session = apply_pass(SumToMean(), program)
    assert len(session.changes) == 1
    x = np.full((2, 64, 64), 30 / (factor if not divides else 1) / 4096 if factor == 0.5 else 20, np.float16)
    (wanted,) = run(program, {"x": x}, precision="fp32").values()
    (found,) = run(after, {"x": x}, precision="fp16").values()
    assert np.allclose(found, wanted, rtol=2e-3)


def test_one_op_is_left_where_the_factor_is_the_mean_s() -> None:
    after, _ = apply_pass(SumToMean(), built(1 / 4096))
    assert [op.op_type for op in after.functions["main"].operations if op.op_type != "const"] == ["reduce_mean"]


def test_a_mean_much_smaller_than_the_result_can_be_refused() -> None:
    assert_refuses(SumToMean(most=4.0), built(0.5), "2048 times smaller than the result")
    assert apply_pass(SumToMean(most=4.0), built(1 / 4096))[1].changes


test_cases, test_surroundings = table(
    SumToMean(),
    refuses("is at most 4096", built, 1 / 4096, known=True),
    refuses("does not become smaller", built, 2.0),
    stays(built, 1 / 4096, dtype=types.fp32),
)
