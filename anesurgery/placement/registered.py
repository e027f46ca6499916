"""Rules of `inspect` that stand beside the tables: a file for each pass that brings its own, and a user's.

A file `rules/finds_<pass>.py` with `RULES` is found by its name, so a new pass needs no entry in any list.
"""

from __future__ import annotations

import importlib
import pkgutil
from functools import cache
from pathlib import Path

from anesurgery.doors import door
from anesurgery.errors import SurgeryError
from anesurgery.placement.evidence import Rule

FOLDER = Path(__file__).parent / "rules"
_OWN: dict[str, Rule] = {}


@door()
def register_rule(rule: Rule) -> Rule:
    """Let `inspect` ask a rule of the user's own; one with the same id is replaced.

    Name a registered pass as the `remedy`, and `auto` tries that pass where the rule finds something.

    Args:
        rule: which ops it is about, its `test`, and what it says where that finds something.

    Returns:
        The rule.

    Raises:
        SurgeryError: the rule has no test, or nothing to help with.
    """
    if rule.test is None:
        raise SurgeryError(f"rule {rule.id!r} has no test: give `test`, which returns what was found, or ''")
    if not (rule.remedy or rule.advice):
        raise SurgeryError(f"rule {rule.id!r} does not help: name a pass as `remedy`, or give `advice`")
    _OWN[rule.id] = rule
    return rule


def unregister_rule(rule_id: str) -> None:
    """Forget a rule of the user's own."""
    _OWN.pop(rule_id, None)


def rules_beside() -> tuple[Rule, ...]:
    """The rules of files named after a pass, and the user's own."""
    return (*_found(), *_OWN.values())


@cache
def _found() -> tuple[Rule, ...]:
    names = sorted(m.name for m in pkgutil.iter_modules([str(FOLDER)]) if m.name.startswith("finds_"))
    files = [importlib.import_module(f"{__package__}.rules.{name}") for name in names]
    return tuple(rule for file in files for rule in file.RULES)
