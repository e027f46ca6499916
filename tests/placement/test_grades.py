"""Grades of rules: what is said to be documented by Apple names a source of Apple's first."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator
from typing import Any

import anesurgery.placement.rules
from anesurgery.placement.evidence import Grade, Rule

APPLES = ("apple/", "Apple:", "coremltools")
"""How sources of Apple's begin: its repositories, its articles, its converter and the guide to that."""


def rules_in(value: Any) -> Iterator[Rule]:
    if isinstance(value, Rule):
        yield value
    elif isinstance(value, (tuple, list)):
        for held in value:
            yield from rules_in(held)
    elif isinstance(value, dict):
        yield from rules_in(list(value.values()))


def every_rule() -> dict[str, Rule]:
    found: dict[str, Rule] = {}
    for module in pkgutil.iter_modules(anesurgery.placement.rules.__path__):
        held = vars(importlib.import_module(f"{anesurgery.placement.rules.__name__}.{module.name}"))
        found |= {rule.id: rule for rule in rules_in(list(held.values()))}
    return found


def test_what_apple_documents_is_known_from_apple() -> None:
    documented = {id: r.source for id, r in every_rule().items() if r.grade is Grade.DOCUMENTED}
    assert len(documented) > 15
    assert not {id: source for id, source in documented.items() if not source.startswith(APPLES)}
