"""What the docstrings of public calls, and of the classes that authors subclass, have to say."""

from __future__ import annotations

import doctest
import importlib
from pathlib import Path

import pytest

import anesurgery as ane

PACKAGE = Path(ane.__file__).parent
WITH_EXAMPLES = sorted(
    {
        ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts)
        for folder in (PACKAGE, PACKAGE / "passes", PACKAGE / "recipes")
        for path in folder.rglob("*.py")
        if ">>> " in path.read_text(encoding="utf-8")
    }
)
"""The modules whose docstrings show what a call gives."""


@pytest.mark.parametrize("name", WITH_EXAMPLES)
def test_examples_give_what_they_show(name: str) -> None:
    tried = doctest.testmod(importlib.import_module(name))
    assert tried.attempted
    assert not tried.failed
