"""Slices of a constant size from a computed start."""

from __future__ import annotations

from typing import Any

import numpy as np
from pass_cases import refuses, rewrites_each, table

from anesurgery.mil import Program, Var, mb, types
from anesurgery.passes.slice_of_size import SliceOfSize


def cut(begin: Any, end: Any, **masks: Any) -> Program:
    """A slice of 4x32 along the last axis; the ends are made from a place."""

    @mb.program(input_specs=[mb.TensorSpec((4, 32)), mb.TensorSpec((1,), dtype=types.int32)])
    def program(x: Var, place: Var) -> Var:
        start = mb.squeeze(x=place)
        ends = [mb.concat(values=[np.int32(first), f(start)], axis=0) for first, f in ((0, begin), (4, end))]
        return mb.slice_by_index(x=x, begin=ends[0], end=ends[1], **masks)

    return program


def less(n: int) -> Any:
    return lambda at: mb.sub(x=at, y=np.int32(n))


def more(n: int) -> Any:
    return lambda at: mb.add(x=np.int32(n), y=at)


CASES = {
    "from a place on": cut(lambda at: at, more(8)),
    "around a place": cut(lambda at: less(4)(more(8)(at)), more(12)),
    "one element": cut(lambda at: at, more(1), squeeze_mask=[False, True]),
    "an open axis": cut(lambda at: at, more(8), begin_mask=[True, False], end_mask=[True, False]),
}

test_cases, test_surroundings = table(
    SliceOfSize(),
    refuses(
        "the ends of axis 1 are not a constant distance apart", cut, lambda at: at, lambda at: mb.mul(x=at, y=2)
    ),
    refuses("the ends of axis 1 are not a constant distance apart", cut, lambda at: at, lambda at: 32),
    refuses("0 elements are taken of axis 1", cut, more(8), more(8)),
    refuses("33 elements are taken of axis 1, which has 32", cut, lambda at: at, more(33)),
    refuses("the slice has strides", cut, lambda at: at, more(8), stride=[1, 2]),
    *rewrites_each(CASES, rtol=0),
)
