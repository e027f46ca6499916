"""Small domains are tried as a whole, and one wrong combination is found."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from both_sides import checked

from anesurgery.checking.grades import EXACT, Grade, SiteCheck
from anesurgery.mil import Var, mb, types

TABLE = np.array([[0, 1], [2, 3], [4, 5], [6, 7], [8, 9]], np.float32)


def grade(old: Any, new: Any, dtype: Any, shape: tuple[int, ...]) -> Grade | None:
    found = checked(old, new, (dtype, shape))
    assert isinstance(found, SiteCheck), found
    return found.grade if found.within(EXACT) else None


def lookup(x: Var, table: Any = TABLE) -> Var:
    made: Var = mb.gather(x=table, indices=x, axis=0)
    return made


def as_matmul(x: Var, table: Any = TABLE) -> Var:
    hot = mb.cast(x=mb.equal(x=mb.expand_dims(x=x, axes=[-1]), y=np.arange(5, dtype=np.int32)), dtype="fp32")
    made: Var = mb.matmul(x=hot, y=table)
    return made


def count(x: Var, least: float) -> Var:
    """Is more than one of them set?"""
    total = mb.reduce_sum(x=mb.cast(x=x, dtype="fp32"), axes=[0])
    made: Var = mb.greater(x=total, y=np.float32(least))
    return made


def test_ids_of_a_small_table() -> None:
    assert grade(lookup, as_matmul, types.int32, (3,)) is Grade.EXHAUSTIVE
    wrong = TABLE.copy()
    wrong[3, 1] = 6
    assert grade(lookup, lambda x: as_matmul(x, wrong), types.int32, (3,)) is None


def test_more_combinations_are_not_all_tried() -> None:
    assert grade(lookup, as_matmul, types.int32, (40,)) is Grade.NUMBERS


def test_dynamic_places_are_not_all_tried() -> None:
    """They are drawn from all that the old side takes, which is not each of them."""

    def part(x: Var, table: Any) -> Var:
        made: Var = mb.slice_by_size(x=np.array(table, np.float32), begin=x, size=[2])
        return made

    def old(x: Var) -> Var:
        return part(x, np.arange(9))

    right, wrong = (lambda x: mb.sub(x=part(x, [*range(1, 10)]), y=np.float32(1))), [0, 1, 2, 7, 7, 7, 7, 7, 7]
    assert grade(old, right, types.int32, (1,)) is Grade.NUMBERS
    assert grade(old, lambda x: part(x, wrong), types.int32, (1,)) is None


def rows_from(begin: Any) -> Any:
    made: Var = mb.slice_by_size(x=np.arange(9, dtype=np.float32), begin=begin, size=[2])
    return made


FEWER: dict[str, Any] = {
    "a minimum": lambda x: mb.minimum(x=mb.maximum(x=x, y=np.int32(0)), y=np.int32(3)),
    "a remainder": lambda x: mb.mod(x=x, y=np.int32(7)),
    "a choice": lambda x: mb.select(
        cond=mb.logical_and(x=mb.greater(x=x, y=np.int32(0)), y=mb.less(x=x, y=np.int32(5))),
        a=x,
        b=np.array([0], np.int32),
    ),
}


@pytest.mark.parametrize("name", FEWER)
def test_places_that_are_made_to_fit_may_be_any_integers(name: str) -> None:
    """What makes them fit may not go, although the old side runs on 0 and 1."""
    made_to_fit = FEWER[name]

    def otherwise(x: Any) -> Var:
        return rows_from(mb.minimum(x=mb.maximum(x=x, y=np.int32(-9)), y=np.int32(6)))

    assert grade(lambda x: rows_from(made_to_fit(x)), otherwise, types.int32, (1,)) is None
    assert grade(lambda x: rows_from(made_to_fit(x)), lambda x: rows_from(made_to_fit(x)), types.int32, (1,))


def test_conditions() -> None:
    assert grade(lambda x: count(x, 9.25), lambda x: count(x, 9.5), types.bool, (10,)) is Grade.EXHAUSTIVE
    assert grade(lambda x: count(x, 9.5), lambda x: count(x, 10), types.bool, (10,)) is None
