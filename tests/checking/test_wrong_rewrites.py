"""Wrong rewrites are caught by default settings, and never proved."""

from __future__ import annotations

import pytest
from both_sides import checked
from hostile_edges import EDGES
from hostile_facts import FACTS, RIGHT
from hostile_layouts import MISLAID
from hostile_rewrites import HOSTILE
from wrong_rewrites import WRONG, Wrong

from anesurgery.checking.grades import Grade, SiteCheck

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


def test_there_are_enough_of_them() -> None:
    assert len({w.name for w in WRONG}) == len(WRONG) >= 60
    assert len({w.name for w in ALL}) == len(ALL) >= 140
