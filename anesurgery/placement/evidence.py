"""What a statement about the Neural Engine rests on: grades, scopes, rules and findings.

A statement through Core ML (`via="Core ML"`) is what an app sees. Those made through the private compiler
(`via="compiler"`) are graded below: where both speak about one op, only Core ML's counts.
"""

from __future__ import annotations

import enum
import importlib
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, TypeAlias

from anesurgery.doors import door
from anesurgery.errors import SurgeryError
from anesurgery.placement.target import CHIPS, Target


class Grade(enum.Enum):
    """How well a statement is supported; the value is what reports print."""

    MEASURED = "measured"
    DOCUMENTED = "documented by Apple"
    REPORTED = "reported"
    GUESS = "guess"


@dataclass(frozen=True)
class Scope:
    """The chips, systems and ways on which a statement was found to hold.

    Attributes:
        families: generations of the engine (`Chip.family`) that it concerns; empty for all.
        os: where it was seen, in words ("seen on M4, macOS 27.0.1"); empty when not said.
        until: per platform, the last major release on which it holds; empty for no end.
        since: per platform, the first one; a target without an OS may be on it.
        model_type: "mlprogram", "neuralnetwork", or "any".
        via: "Core ML", or "compiler" for the private ANE compiler.
    """

    families: frozenset[int] = frozenset()
    os: str = ""
    until: tuple[tuple[str, int], ...] = ()
    since: tuple[tuple[str, int], ...] = ()
    model_type: str = "mlprogram"
    via: str = "Core ML"

    def concerns(self, target: Target) -> bool:
        """Does it speak about any chip of the target, on its OS?"""
        if self.families and not self.families & target.families:
            return False
        if target.platform is None or target.os is None:
            return True
        first, last = (dict(ends).get(target.platform) for ends in (self.since, self.until))
        return (first is None or first <= target.os) and (last is None or target.os <= last)

    def __str__(self) -> str:
        chips = [n for n, c in CHIPS.items() if c.family in self.families]
        where = [", ".join(chips) if chips else "all chips", self.os, "compiler" * (self.via != "Core ML")]
        return ", ".join(filter(None, where))


@dataclass(frozen=True)
class Finding:
    """What is to be said about one op, or about the model (`op` is empty then).

    Attributes:
        rule: id of the rule.
        kind: "load" (the OS refuses the model), "conversion" (what the model meant was lost), "legality",
            "speed", "memory", "numeric", "interface" or "shape".
        message: what was found, with the value found.
        because: why it matters.
        source: where that is known from.
        grade: how well it is supported.
        scope: chips, OS and way on which it was seen, in words.
        remedy: the name of the pass that repairs it; None where none exists.
        advice: what the user can do where no pass exists.
        op: name of the op.
    """

    rule: str
    kind: str
    message: str
    because: str
    source: str
    grade: Grade
    scope: str = ""
    remedy: str | None = None
    advice: str = ""
    op: str = ""

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {**vars(self), "grade": self.grade.value}


RemedyFor: TypeAlias = Callable[[Any, Target], str | None]
"""The pass for an op or layer on a target, by name."""


@dataclass(frozen=True)
class Rule:
    """A row of a table: which ops, on which condition, with which verdict, known from where.

    Attributes:
        id: a short name, cited by findings.
        ops: op types; empty for all.
        because: one sentence.
        source: who measured or said it.
        legal: False: the ANE cannot run it; True: it can; None: nothing is decided; a row of legality then
            makes it doubtful, others speak about speed or numbers only.
        test: the value found in words where the condition holds, else ""; None for no condition.
        grade: how well it is supported.
        scope: where it was seen.
        kind: of the findings it makes.
        remedy: a pass by name.
        remedy_for: the pass that changes an op which the test finds; absent where `remedy` does for all.
        advice: what to do where no pass exists.
        far: at which ops its test looks further than at what they read and what reads their results: "any",
            "integers" for those that compute with integers, "" for none.
    """

    id: str
    ops: frozenset[str]
    because: str
    source: str
    legal: bool | None = None
    test: Callable[[Any, Target], str] | None = None
    grade: Grade = Grade.MEASURED
    scope: Scope = Scope()
    kind: str = "legality"
    remedy: str | None = None
    advice: str = ""
    far: str = ""
    remedy_for: RemedyFor | None = None

    def finding_of(self, op: Any, name: str, message: str, target: Target) -> Finding:
        """What the rule says about an op (or layer), with the pass that changes it."""
        found = self.finding(message, name)
        return found if self.remedy_for is None else replace(found, remedy=self.remedy_for(op, target))

    def finding(self, message: str, op: str = "") -> Finding:
        """What the rule says about an op."""
        return Finding(
            self.id,
            self.kind,
            message,
            self.because,
            self.source,
            self.grade,
            str(self.scope),
            self.remedy,
            self.advice,
            op,
        )


def general(id: str, because: str, source: str, **row: Any) -> Rule:
    """A rule that names no op types: it is about every op, a function or a model.

    Args:
        id: a short name, cited by findings.
        because: one sentence.
        source: who measured or said it.
        row: the other fields of `Rule`.
    """
    return Rule(id, frozenset(), because, source, **row)


# Rules of `inspect` that stand beside the tables: a file for each pass that brings its own, and a user's.
#
# A file `rules/finds_<pass>.py` with `RULES` is found by its name, so a new pass needs no entry in any list.

FOLDER = Path(__file__).parent / "rules"
_OWN: dict[str, Rule] = {}


@door()
def register_rule(rule: Rule) -> Rule:
    """Add your own rule to `inspect`. A rule with the same id is replaced.

    If its `remedy` names a registered pass, `auto` tries that pass when the rule finds something.

    Args:
        rule: its ops, its `test`, and its message.

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
