"""Wrong rewrites are caught by default settings, and never proved."""

from __future__ import annotations

import numpy as np
import pytest
from both_sides import Body, checked
from hostile_edges import EDGES
from hostile_facts import FACTS, RIGHT
from hostile_layouts import MISLAID
from hostile_rewrites import HOSTILE
from wrong_rewrites import WRONG, Wrong

from anesurgery.checking.grades import Grade, SiteCheck
from anesurgery.mil import ct, mb

ALL = [*WRONG, *HOSTILE, *MISLAID, *FACTS, *EDGES]


@pytest.mark.parametrize("wrong", ALL, ids=lambda w: w.name)
def test_it_is_caught(wrong: Wrong) -> None:
    found = checked(wrong.old, wrong.new, *wrong.inputs, promise=wrong.promise, opset=wrong.opset)
    assert isinstance(found, SiteCheck), found
    assert not found.within(wrong.promise.tolerance), found
    assert found.grade is Grade.NUMBERS
    assert found.counterexample


@pytest.mark.parametrize("right", RIGHT, ids=lambda w: w.name)
def test_a_right_one_passes(right: Wrong) -> None:
    found = checked(right.old, right.new, *right.inputs, promise=right.promise, opset=right.opset)
    assert isinstance(found, SiteCheck), found
    assert found.within(right.promise.tolerance), found


@pytest.mark.parametrize("op", ["gather", "gather_along_axis"])
def test_an_undefined_lookup_is_no_known_one(op: str) -> None:
    """From iOS 17 on nothing says what is read at -1."""

    def at(place: int) -> Body:
        indices = np.full((2, 4), place, np.int32)
        return lambda x: getattr(mb, op)(x=x, indices=indices, axis=1)

    for place, grade in ((-1, Grade.BITS), (0, Grade.NUMBERS)):
        found = checked(at(-1), at(place))
        assert isinstance(found, SiteCheck), found
        assert found.grade is grade
    known = checked(at(-1), at(3), opset=ct.target.iOS16)
    assert isinstance(known, SiteCheck), known
    assert known.grade is Grade.BITS


def test_there_are_enough_of_them() -> None:
    assert len({w.name for w in WRONG}) == len(WRONG) >= 60
    assert len({w.name for w in ALL}) == len(ALL) >= 140
