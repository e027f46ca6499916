"""Outputs that are NaN in fp32 too judge nothing, and the report says so."""

from __future__ import annotations

import numpy as np
import pytest

from anesurgery.checking.exactness import Yardstick
from anesurgery.mil import Program, Var, ct, mb, types

X = {"x": np.linspace(1, 2, 8, dtype=np.float16)}


def logarithm_of(sign: float) -> Program:
    """A logarithm, of negative numbers where the sign is negative."""

    @mb.program(input_specs=[mb.TensorSpec((8,), dtype=types.fp16)], opset_version=ct.target.iOS17)
    def program(x: Var) -> Var:
        return mb.log(x=mb.mul(x=x, y=np.float16(sign)), name="y")

    return program


@pytest.mark.parametrize(
    ("sign", "said"),
    [
        (-1.0, "output %y is NaN to 100%, in fp32 too"),
        (1.0, "output %y is finite now: it was NaN to 100%, in fp32 too, so that these cannot be compared"),
    ],
)
def test_an_output_that_was_nan_is_compared_with_nothing(sign: float, said: str) -> None:
    near = Yardstick(logarithm_of(-1.0), inputs=[X]).measure(logarithm_of(sign))
    assert near is not None
    assert near.blank
    assert near.notes == (f"in fp16 {said}",)
