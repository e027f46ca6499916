"""Scores that a constant makes large: factors of both signs, divisions, refusals, a wrong version."""

from __future__ import annotations

import numpy as np
import pytest
from pass_cases import refuses, stays, table

from anesurgery.interpret import run
from anesurgery.mil import Program, Var, mb, types
from anesurgery.numeric.products import LARGE_SCORES
from anesurgery.passes.shift_scores import ShiftScores
from anesurgery.testing import apply_pass

HALF = np.float16


def built(factor: float = 1000, divides: bool = False, axis: int = -1, bounded: bool = False) -> Program:
    @mb.program(input_specs=[mb.TensorSpec((4, 16), dtype=types.fp16)])
    def program(x: Var) -> Var:
        x = mb.tanh(x=x) if bounded else x
        scores = mb.real_div(x=x, y=HALF(factor)) if divides else mb.mul(x=HALF(factor), y=x)
        return mb.softmax(x=scores, axis=axis, name="y")

    return program


@pytest.mark.parametrize(
    ("factor", "divides", "axis"), [(1000, False, -1), (-400, False, 0), (0.002, True, 1), (-0.001, True, -1)]
)
def test_both_signs_and_axes(factor: float, divides: bool, axis: int) -> None:
    program = built(factor, divides, axis)
    after, session = apply_pass(ShiftScores(), program)
    assert len(session.changes) == 1
    x = (np.random.default_rng(0).standard_normal((4, 16)) * 300).astype(HALF)
    x[:, 3], x[3] = x[:, 4], x[2]  # two that are alike
    (wanted,) = run(program, {"x": x}, precision="fp32").values()
    (old,), (new,) = (run(p, {"x": x}, precision="fp16").values() for p in (program, after))
    assert not np.isfinite(old).all()
    assert np.abs(new - wanted).max() < 2e-3
    softmax = next(op for op in after.functions["main"].operations if op.op_type == "softmax")
    assert LARGE_SCORES.told(softmax) == ""


test_cases, test_surroundings = table(
    ShiftScores(),
    refuses("does not overflow", built, bounded=True),
    refuses("does not overflow", built, 30),
    stays(built, 0.5),
)
