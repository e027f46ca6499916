"""Each pass states its grade, and its example reaches just that."""

from __future__ import annotations

import importlib
import re
from types import ModuleType

import pytest

from anesurgery import registry
from anesurgery.checking.grades import Grade
from anesurgery.testing import apply_pass

NAMES = [*registry.op_pass_names(), *(f"layers.{name}" for name in registry.layer_pass_names())]
STATED = re.compile(r"^Grade: (bit for bit|proved|exhaustive|checked|none)(?:: (.+?))?\.$", re.MULTILINE)


def module_of(name: str) -> ModuleType:
    return importlib.import_module(f"anesurgery.passes.{name}")


def stated(name: str) -> tuple[str, str]:
    """The grade and the reason in the words of a pass."""
    found = STATED.findall(module_of(name).__doc__ or "")
    assert len(found) == 1, f"{name}: {found}"
    grade, reason = found[0]
    return grade, reason


@pytest.mark.parametrize("name", NAMES)
def test_the_example_reaches_the_stated_grade(name: str) -> None:
    module, grade = module_of(name), stated(name)[0]
    step = getattr(module, registry.camel(name.rpartition(".")[2]))()
    _, session = apply_pass(step, module.example())
    checks = [change.proof for change in session.changes]
    reached = "none" if None in checks else min(c.grade for c in checks if c is not None).words
    assert reached == grade
    if grade in ("none", Grade.NUMBERS.words):
        assert stated(name)[1], f"{name}: say why it has no higher grade"
