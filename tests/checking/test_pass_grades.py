"""Each pass states its grade, and its example reaches just that."""

from __future__ import annotations

import re

import pytest
from sketches import example_of

from anesurgery import registry
from anesurgery.checking.grades import Grade
from anesurgery.testing import apply_pass

NAMES = registry.pass_names()
STATED = re.compile(r"^Grade: (bit for bit|proved|exhaustive|checked|none)(?:: (.+?))?\.$", re.MULTILINE)


def stated(name: str) -> tuple[str, str]:
    """The grade and the reason in the words of a pass."""
    found = STATED.findall(registry.documentation(name))
    assert len(found) == 1, f'{name}: its docstring needs one line such as "Grade: proved."'
    grade, reason = found[0]
    return grade, reason


@pytest.mark.parametrize("name", NAMES)
def test_the_example_reaches_the_stated_grade(name: str) -> None:
    grade = stated(name)[0]
    _, session = apply_pass(registry.make_pass(name), example_of(name))
    checks = [change.proof for change in session.changes]
    reached = "none" if None in checks else min(c.grade for c in checks if c is not None).words
    assert reached == grade
    if grade in ("none", Grade.NUMBERS.words):
        assert stated(name)[1], f"{name}: say why it has no higher grade"
