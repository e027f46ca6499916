"""A bound from a lookup holds for the numbers that are looked up, and for no others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from both_sides import side_by_side

from anesurgery.checking.addresses import address_bounds
from anesurgery.checking.grades import EXACT, Grade, SiteCheck
from anesurgery.checking.site import check_site
from anesurgery.mil import Var, ct, mb, types

ROWS = 61
TABLE = np.arange(2 * ROWS, dtype=np.float32).reshape(ROWS, 2)
LOW, HIGH = -(2**31), 2**31 - 1
Body = Callable[[Var], Any]


def picked(ids: Var) -> Var:
    made: Var = mb.gather(x=TABLE, indices=ids, axis=0, validate_indices=False)
    return made


def part(ids: Var, begin: int, end: int) -> Var:
    made: Var = mb.slice_by_index(x=ids, begin=[0, begin], end=[2, end])
    return made


def found(looks_up: Body, old: Body, new: Body) -> SiteCheck:
    """The check of an edit of ids, some of which a program looks up."""

    def both(ids: Var) -> Any:
        looked_up = looks_up(ids)
        return [old(ids), *(looked_up if isinstance(looked_up, list) else [looked_up])]

    _, olds, news, made = side_by_side(both, new, (types.int32, (2, 4)))
    check = check_site([(olds[0], news[0])], made, lambda v, rng: None)
    assert isinstance(check, SiteCheck)
    return check


def least(ids: Var) -> Any:
    return mb.minimum(x=ids, y=np.int32(ROWS - 1))


def first(ids: Var) -> Var:
    made: Var = mb.slice_by_size(x=ids, begin=np.zeros(2, np.int32), size=np.array([2, 1], np.int32))
    return made


def from_front(ids: Var) -> Any:
    """Count negative ids from the end of the table."""
    later = mb.add(x=ids, y=np.int32(ROWS))
    return mb.select(cond=mb.greater_equal(x=ids, y=np.int32(0)), a=ids, b=later)


def same(ids: Var) -> Any:
    return mb.add(x=ids, y=np.int32(0))


ALL: dict[str, Body] = {
    "as they are": picked,
    "reshaped": lambda ids: picked(mb.reshape(x=ids, shape=[8])),
    "turned": lambda ids: picked(mb.transpose(x=ids, perm=[1, 0])),
    "cast, with an axis more": lambda ids: picked(
        mb.cast(x=mb.cast(x=mb.expand_dims(x=ids, axes=[0]), dtype="int16"), dtype="int32")
    ),
    "beside others": lambda ids: picked(mb.concat(values=[ids, np.zeros((2, 1), np.int32)], axis=1)),
    "in two halves": lambda ids: [picked(v) for v in mb.split(x=ids, num_splits=2, axis=1)],
}
SOME: dict[str, Body] = {
    "the first column": lambda ids: picked(part(ids, 0, 1)),
    "all but one": lambda ids: picked(part(ids, 1, 4)),
    "chosen columns": lambda ids: picked(mb.gather(x=ids, indices=np.array([2, 0], np.int32), axis=1)),
    "one half": lambda ids: picked(mb.split(x=ids, num_splits=2, axis=1)[0]),
    "clipped": lambda ids: picked(mb.minimum(x=ids, y=np.int32(ROWS - 1))),
    "the largest": lambda ids: picked(mb.reduce_max(x=ids, axes=[1])),
    "a remainder": lambda ids: picked(mb.mod(x=ids, y=np.int32(ROWS))),
    "where told": lambda ids: picked(
        mb.select(cond=mb.less(x=ids, y=np.int32(9)), a=ids, b=np.zeros((2, 4), np.int32))
    ),
    "halves": lambda ids: picked(mb.floor_div(x=ids, y=np.int32(2))),
    "in a branch": lambda ids: mb.cond(
        pred=mb.squeeze(x=mb.greater(x=mb.reduce_max(x=ids, axes=[0, 1], keep_dims=True), y=np.int32(3))),
        _true_fn=lambda: picked(ids),
        _false_fn=lambda: mb.fill(shape=[2, 4, 2], value=np.float32(0)),
    ),
}


@pytest.mark.parametrize("name", ALL)
def test_a_guard_of_ids_that_are_all_looked_up_may_go(name: str) -> None:
    check = found(ALL[name], least, same)
    assert check.within(EXACT), check
    assert check.grade is Grade.NUMBERS  # eight ids of 61 rows are too many to try them all


@pytest.mark.parametrize("name", SOME)
def test_a_guard_of_ids_that_are_not_all_looked_up_stays(name: str) -> None:
    check = found(SOME[name], least, same)
    assert not check.within(EXACT), check


@pytest.mark.parametrize(
    ("looks_up", "bounds"),
    [
        (ALL["turned"], (0, ROWS - 1)),
        (lambda ids: picked(mb.add(x=ids, y=np.int32(2))), (-2, ROWS - 3)),
        (SOME["the first column"], ([[0, LOW, LOW, LOW]] * 2, [[ROWS - 1, HIGH, HIGH, HIGH]] * 2)),
        (SOME["chosen columns"], ([[0, LOW, 0, LOW]] * 2, [[ROWS - 1, HIGH, ROWS - 1, HIGH]] * 2)),
        (SOME["clipped"], None),
        (lambda ids: picked(mb.concat(values=[np.full((2, 1), 50, np.int32), ids], axis=1)), (0, ROWS - 1)),
        (lambda ids: picked(first(mb.concat(values=[np.ones((2, 1), np.int32), ids], axis=1))), (LOW, HIGH)),
        (lambda ids: picked(from_front(mb.add(x=ids, y=np.int32(2)))), (-ROWS - 2, ROWS - 3)),
        (lambda ids: picked(mb.add(x=from_front(ids), y=np.int32(2))), None),
        (
            lambda ids: mb.gather_nd(
                x=np.zeros((5, 9), np.float32), indices=part(ids, 1, 3), batch_dims=0, validate_indices=False
            ),
            ([[LOW, 0, 0, LOW]] * 2, [[HIGH, 4, 8, HIGH]] * 2),
        ),
    ],
)
def test_where_ids_lie(looks_up: Body, bounds: Any) -> None:
    made = mb.program(input_specs=[mb.TensorSpec((2, 4), types.int32)], opset_version=ct.target.iOS17)(looks_up)
    function = made.functions["main"]
    (ids,) = function.inputs.values()
    known = address_bounds([ids], function.operations)
    assert (ids in known) == (bounds is not None)
    for end, wanted in zip(known.get(ids, ()), bounds or (), strict=True):
        np.testing.assert_array_equal(end, wanted)
