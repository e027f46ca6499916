"""What leaves the range of fp16 is clipped, and nothing else changes."""

from __future__ import annotations

import numpy as np
import pytest

from anesurgery.errors import PassError
from anesurgery.interpret import run
from anesurgery.mil import Program, Var, ct, mb, types
from anesurgery.passes.clamp_values import ClampValues
from anesurgery.testing import apply_pass, assert_refuses, assert_same_numbers


def normalised(factor: float = 300.0) -> Program:
    """A squared value that overflows, and a difference of two that is NaN then."""

    @mb.program(input_specs=[mb.TensorSpec((2, 4), types.fp16)], opset_version=ct.target.iOS18)
    def program(x: Var) -> Var:
        large = mb.square(x=mb.mul(x=x, y=np.float16(factor)), name="large")
        mean = mb.reduce_max(x=large, axes=[-1], keep_dims=True)
        return mb.exp(x=mb.sub(x=large, y=mean), name="y")

    return program


X = {"x": np.array([[1.0, 0.5, 0.25, 0.1], [0.1, 0.2, 0.3, 0.0]], np.float16)}


def test_what_was_nan_is_finite() -> None:
    program = normalised()
    assert np.isnan(run(program, X, precision="fp16")["y"]).any()
    after, session = apply_pass(ClampValues(inputs=X), program)
    assert [c.where for c in session.changes] == ["large"]
    assert session.notes == ["clamp_values: large reached 9e+04, and is clipped at 60000"]
    assert np.isfinite(run(after, X, precision="fp16")["y"]).all()


def test_values_inside_stay_bit_for_bit() -> None:
    program = normalised()
    after, _ = apply_pass(ClampValues(inputs=X), program)
    inside = {"x": np.array([[0.5, -0.5, 0.25, 0.1]] * 2, np.float16)}
    assert_same_numbers(program, after, inputs=inside, rtol=0)


def test_an_output_that_is_clipped_keeps_its_name() -> None:
    @mb.program(input_specs=[mb.TensorSpec((2, 4), types.fp16)], opset_version=ct.target.iOS18)
    def program(x: Var) -> Var:
        return mb.mul(x=x, y=np.float16(61000), name="y")

    inputs = {"x": np.full((2, 4), 1.5, np.float16)}
    after, _ = apply_pass(ClampValues(inputs=[inputs]), program)
    assert run(after, inputs)["y"].max() == 60000


def test_refusals() -> None:
    assert_refuses(
        ClampValues(inputs=X), normalised(2.0), "no finite value is beyond 60000 on the calibration data"
    )
    with pytest.raises(PassError, match="limit=70000; it must be above 0 and at most 65504"):
        ClampValues(limit=70000)
