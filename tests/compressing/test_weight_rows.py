"""Weights without rows: the reason names what is in the way."""

from __future__ import annotations

import numpy as np
import pytest

from anesurgery.compressing.weight_rows import weight_rows_of
from anesurgery.mil import Var, ct, mb, types


@pytest.mark.parametrize(
    ("shape", "axis", "reason"),
    [
        ((10, 4, 4), 0, "it is a table of 3 axes"),
        ((10, 4), 1, "it is looked up along another axis than the first"),
    ],
)
def test_a_table_without_rows(shape: tuple[int, ...], axis: int, reason: str) -> None:
    @mb.program(input_specs=[mb.TensorSpec((3,), dtype=types.int32)], opset_version=ct.target.iOS17)
    def program(x: Var) -> Var:
        return mb.gather(x=np.ones(shape, np.float16), indices=x, axis=axis, validate_indices=False)

    (op,) = (op for op in program.functions["main"].operations if op.op_type == "gather")
    assert weight_rows_of(op, "x") == reason
