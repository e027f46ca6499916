"""Lookups at dynamic places as products: gathers, slices of a size, slices of one row."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from pass_cases import refuses, rewrites, table

from anesurgery.mil import Program, Var, ct, mb, types
from anesurgery.passes.one_hot_lookup import OneHotLookup
from anesurgery.testing import assert_refuses

SHAPE = (2, 5, 3)


def gathered(axis: int = 1, places: tuple[int, ...] = (2,), shape: tuple[int, ...] = SHAPE) -> Program:
    return mb.program(input_specs=[mb.TensorSpec(shape), mb.TensorSpec(places, dtype=types.int32)])(
        lambda x, k: mb.gather(x=x, indices=k, axis=axis)
    )


def sized(*size: int) -> Program:
    return mb.program(input_specs=[mb.TensorSpec(SHAPE), mb.TensorSpec((3,), dtype=types.int32)])(
        lambda x, k: mb.slice_by_size(x=x, begin=k, size=list(size))
    )


def row(whole: tuple[bool, ...] = (True, False, True)) -> Program:
    @mb.program(input_specs=[mb.TensorSpec(SHAPE), mb.TensorSpec((3,), dtype=types.int32)])
    def program(x: Var, k: Var) -> Any:
        one = [not w for w in whole]
        end = mb.add(x=k, y=np.int32(1))
        masks = {"begin_mask": list(whole), "end_mask": list(whole), "squeeze_mask": one}
        return mb.slice_by_index(x=x, begin=k, end=end, **masks)

    return program


CASES: dict[str, tuple[Program, Any]] = {
    "first axis": (gathered(0), [1, 0]),
    "middle axis": (gathered(1), [4, -1]),
    "last axis": (gathered(2), [0, -3]),
    "places of two axes": (gathered(1, (2, 2)), [[0, 1], [4, 2]]),
    "one axis": (gathered(0, (3,), (7,)), [6, 0, 2]),
    "a window": (sized(2, 2, 3), [0, 3, 0]),
    "a window of two axes": (sized(2, 3, 2), [0, 2, 1]),
    "a row": (row(), [0, 3, 0]),
    "the last row": (row(), [0, -1, 0]),
}


@pytest.mark.parametrize("stride", [-1, 2])
def test_an_axis_that_is_taken_with_a_stride_is_not_taken_whole(stride: int) -> None:
    @mb.program(input_specs=[mb.TensorSpec(SHAPE), mb.TensorSpec((3,), dtype=types.int32)])
    def program(x: Var, k: Var) -> Any:
        whole = [False, True, True]
        masks = {"begin_mask": whole, "end_mask": whole, "squeeze_mask": [True, False, False]}
        return mb.slice_by_index(x=x, begin=k, end=mb.add(x=k, y=np.int32(1)), stride=[1, stride, 1], **masks)

    assert_refuses(OneHotLookup(), program, "where axis 1 begins and ends is dynamic, or it has a stride")


test_cases, test_surroundings = table(
    OneHotLookup(),
    refuses("axis 1 has 513 rows, above 512", gathered, 1, (2,), (1, 513, 1)),
    refuses("which read 256 kB instead of 205 kB; the limit is 16777216", gathered, 1, (400,), (1, 500, 128)),
    refuses("symbolic shape", sized, 2, -1, 3),
    refuses(
        "it reads a table, which embedding_matmul does",
        mb.program(input_specs=[mb.TensorSpec((2,), dtype=types.int32)], opset_version=ct.target.iOS16),
        lambda k: mb.gather(x=np.ones((4, 3), np.float32), indices=k, axis=0),
    ),
    *(
        rewrites(CASES[name].__getitem__, 0, inputs={"k": np.array(CASES[name][1], np.int32)}, rtol=0, id=name)
        for name in CASES
    ),
)
