"""Slices that are blended in by a mask are those that were written."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from decoders import Decoder, cached

from anesurgery.interpret.decoding import generate
from anesurgery.mil import Program, Var, ct, mb, types, walk_ops
from anesurgery.passes.masked_write import MaskedWrite
from anesurgery.testing import apply_pass, assert_refuses, assert_same_numbers


@pytest.mark.slow
def test_a_decoder_writes_what_it_wrote() -> None:
    program = cached()
    after, session = apply_pass(MaskedWrite(), program)
    assert len(session.changes) == 8
    assert not [op for f in after.functions.values() for op in walk_ops(f) if op.op_type == "slice_update"]
    assert generate(after, [3, 1, 4, 1, 5], 19).written == generate(program, [3, 1, 4, 1, 5], 19).written


def written(
    shape: tuple[int, ...],
    sizes: tuple[int, ...],
    axis: int,
    at: list[int],
    by_parts: bool = False,
    **masks: Any,
) -> Program:
    """A slice update; with `by_parts`, its end is put together from numbers, as coreai-torch writes it."""
    specs = [mb.TensorSpec(shape), mb.TensorSpec(sizes), mb.TensorSpec((1,), types.int32)]

    @mb.program(input_specs=specs, opset_version=ct.target.iOS18)
    def program(x: Var, update: Var, place: Var) -> Var:
        ends = [np.array(part, np.int32) for part in (at[:axis], at[axis + 1 :])]
        values = [v for v in (ends[0], place, ends[1]) if isinstance(v, Var) or len(v)]
        begin = mb.concat(values=tuple(values), axis=0) if len(values) > 1 else place
        end = mb.add(x=begin, y=np.array(sizes, np.int32))
        if by_parts:
            last: list[Any] = [
                ends[0] + sizes[:axis],
                mb.add(x=place, y=[sizes[axis]]),
                ends[1] + sizes[axis + 1 :],
            ]
            end = mb.concat(values=[v for v in last if isinstance(v, Var) or len(v)], axis=0)
        return mb.slice_update(x=x, update=update, begin=begin, end=end, name="y", **masks)

    return program


def by_two_numbers() -> Program:
    specs = [mb.TensorSpec((6,)), *(mb.TensorSpec((1,), types.int32) for _ in range(2))]

    @mb.program(input_specs=specs, opset_version=ct.target.iOS18)
    def program(x: Var, begin: Var, end: Var) -> Var:
        return mb.slice_update(x=x, update=np.ones(2, np.float32), begin=begin, end=end, name="y")

    return program


CASES: dict[str, tuple[Program, int]] = {
    "one row of all": (written((6, 4), (1, 4), 0, [0, 0]), 5),
    "a column": (written((2, 6, 4), (2, 6, 1), 2, [0, 0, 0]), 3),
    "a layer": (written((3, 2, 9, 4), (1, 2, 1, 4), 2, [1, 0, 0, 0]), 8),
    "rows of a layer": (written((3, 2, 9, 4), (1, 2, 5, 4), 2, [2, 0, 0, 0]), 4),
    "a part of the width": (written((9, 4), (3, 2), 0, [0, 1]), 6),
    "an end of its own": (written((2, 3, 9, 4), (2, 3, 1, 4), 2, [0, 0, 0, 0], by_parts=True), 8),
    "rows with an end of their own": (written((9, 4), (3, 2), 0, [0, 1], by_parts=True), 6),
    "masked": (written((9, 4), (3, 4), 0, [0, 3], begin_mask=[False, True], end_mask=[False, True]), 2),
}


@pytest.mark.one_of(4)
@pytest.mark.parametrize("name", CASES)
def test_every_place(name: str) -> None:
    program, last = CASES[name]
    after, session = apply_pass(MaskedWrite(), program)
    assert session.changes
    rng = np.random.default_rng(0)
    shapes = {n: tuple(v.shape) for n, v in program.functions["main"].inputs.items()}
    for place in range(last + 1):
        values = {n: rng.standard_normal(s).astype(np.float32) for n, s in shapes.items() if n != "place"}
        values["place"] = np.array([place], np.int32)
        assert_same_numbers(program, after, inputs=values, rtol=0)


def test_a_mask_that_is_off_by_one_would_be_found() -> None:
    program, _ = CASES["a layer"]
    after, _ = apply_pass(MaskedWrite(), program)
    (op,) = [op for op in walk_ops(after) if op.op_type == "equal"]
    with after.functions["main"]:
        op.set_inputs(x=mb.const(val=op.x.val + 1, before_op=op), no_check_var_types=True)
    with pytest.raises(AssertionError):
        assert_same_numbers(program, after)


def test_refusals() -> None:
    assert_refuses(MaskedWrite(), written((6, 4), (1, 3), 0, [0, 2]), "along axis 1 cannot be read")
    assert_refuses(
        MaskedWrite(), written((6, 4, 2), (3, 4, 2), 0, [0, 0, 0]), "3 rows are written along axis 0"
    )
    other = "not a concat of constants and one dynamic number, or its size is not read"
    assert_refuses(MaskedWrite(), by_two_numbers(), other)
    program = written((6, 4), (1, 4), 0, [0, 0], end_mask=[True, False])
    assert_refuses(MaskedWrite(), program, "not as long as the 1 rows")
    assert not apply_pass(MaskedWrite(), Decoder().program())[1].refusals
