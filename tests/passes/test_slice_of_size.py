"""Slices of a constant size from a computed start."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from pass_cases import refuses, rewrites_each, table

import anesurgery as ane
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


def between(vector: bool) -> Program:
    """One element, whose place is a computed vector or its two numbers; the first axis counts from its end."""

    @mb.program(input_specs=[mb.TensorSpec((4, 32)), mb.TensorSpec((2,), dtype=types.int32)])
    def program(x: Var, place: Var) -> Var:
        whole = mb.maximum(x=place, y=np.int32(0))
        _, along = mb.split(x=whole, num_splits=2, axis=0)
        begin = whole if vector else mb.concat(values=[np.array([-3], np.int32), along], axis=0)
        return mb.slice_by_index(x=x, begin=begin, end=[4, 32], squeeze_mask=[True, True])

    return program


CASES = {
    "a constant place from the end": between(vector=False),
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
    refuses("the ends are not computed axis by axis", between, True),
    refuses("the slice has strides", cut, lambda at: at, more(8), stride=[1, 2]),
    *rewrites_each(CASES, rtol=0),
)


@pytest.mark.parametrize("single", [False, True])
def test_places_from_the_end_are_read_as_before(single: bool) -> None:
    """The wrong version moves a negative start to 0."""
    program = cut(lambda at: at, more(1 if single else 8), squeeze_mask=[False, single])
    edited = ane.apply(program, "slice_of_size", quiet=True).program
    x = np.random.default_rng(0).standard_normal((4, 32)).astype(np.float32)
    size, starts = (1, (-32, -1, 0, 31)) if single else (8, (-32, -20, -9, 0, 24))
    for start in starts:
        values = {"x": x, "place": np.array([start], np.int32)}
        (found,) = ane.run(edited, values).values()
        np.testing.assert_array_equal(found.reshape(4, -1), np.roll(x, -start, axis=1)[:, :size])
