"""Wrong rewrites are caught by default settings, and never proved."""

from __future__ import annotations

import pytest
from both_sides import checked
from wrong_rewrites import WRONG, Wrong

from anesurgery.checking.grades import Grade, SiteCheck


@pytest.mark.parametrize("wrong", WRONG, ids=lambda w: w.name)
def test_it_is_caught(wrong: Wrong) -> None:
    found = checked(wrong.old, wrong.new, *wrong.inputs, promise=wrong.promise)
    assert isinstance(found, SiteCheck), found
    assert not found.within(wrong.promise.tolerance), found
    assert found.grade is Grade.NUMBERS
    assert found.counterexample


def test_there_are_enough_of_them() -> None:
    assert len({w.name for w in WRONG}) == len(WRONG) >= 60
