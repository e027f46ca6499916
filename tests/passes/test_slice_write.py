"""A row that a mask selects is written as a slice where its place is known to lie inside."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import anesurgery as ane
from anesurgery.errors import PassError, SurgeryError
from anesurgery.mil import Program, Var, ct, mb, types, walk_ops
from anesurgery.passes.masked_write import MaskedWrite
from anesurgery.passes.slice_write import SliceWrite
from anesurgery.testing import apply_pass, assert_refuses, assert_same_numbers

INSIDE = {"at": (0, 5)}


def blended(rows: Any = None, width: int = 4, swapped: bool = False) -> Program:
    specs = [mb.TensorSpec((2, 6, 4)), mb.TensorSpec((2, 1, width)), mb.TensorSpec((1,), types.int32)]
    counted = np.arange(6, dtype=np.int32)[:, None] if rows is None else np.array(rows, np.int32)

    @mb.program(input_specs=specs, opset_version=ct.target.iOS18)
    def program(x: Var, row: Var, at: Var) -> Var:
        here = mb.equal(x=at, y=counted) if swapped else mb.equal(x=counted, y=at)
        return mb.select(cond=here, a=row, b=x, name="y")

    return program


@pytest.mark.parametrize("swapped", [False, True])
def test_every_place(swapped: bool) -> None:
    program = blended(swapped=swapped)
    after, session = apply_pass(SliceWrite(assume=INSIDE), program)
    assert "slice_update" in [op.op_type for op in walk_ops(after)]
    assert session.notes == ["assumed of the inputs: at in [0, 5]"]
    rng = np.random.default_rng(0)
    for place in range(6):
        values: dict[str, Any] = {"x": rng.standard_normal((2, 6, 4)).astype(np.float32)}
        values |= {"row": rng.standard_normal((2, 1, 4)).astype(np.float32), "at": np.array([place], np.int32)}
        assert_same_numbers(program, after, inputs=values, rtol=0)


def test_there_and_back() -> None:
    after, _ = apply_pass(SliceWrite(assume=INSIDE), blended())
    again, session = apply_pass(MaskedWrite(), after)
    assert session.changes
    assert [op.op_type for op in walk_ops(again) if op.op_type != "const"][-2:] == ["equal", "select"]


def test_what_the_surgery_assumes_counts() -> None:
    surgery = ane.apply(blended(), "slice_write", assume=INSIDE, prove="both", quiet=True)
    assert len(surgery.changes) == 1
    with pytest.raises(SurgeryError, match="place"):
        ane.apply(blended(), "slice_write", assume={"place": (0, 5)}, quiet=True)
    with pytest.raises(PassError, match=r"no input 'place'; it has at"):
        apply_pass(SliceWrite(assume={"place": (0, 5)}), blended())


def test_refusals() -> None:
    assert_refuses(SliceWrite(), blended(), "%at may lie outside of 0 to 5")
    assert_refuses(SliceWrite(assume={"at": (0, 6)}), blended(), "%at may lie outside of 0 to 5")
    rows = [[0], [1], [2], [3], [5], [4]]
    assert_refuses(SliceWrite(assume=INSIDE), blended(rows), "does not count the rows of one axis")
    assert_refuses(SliceWrite(assume=INSIDE), blended(width=1), "not that of one row")
