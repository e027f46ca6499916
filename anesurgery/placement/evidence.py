"""Rules about the Neural Engine, the evidence for them (`Grade`, `Scope`), and what they find (`Finding`).

A `Rule` is a row of a table in `rules/`: its `test` returns what it found in an op, in words, and `inspect`
reports that as a `Finding`. Evidence through Core ML (`via="Core ML"`) is what an app sees; it overrides
evidence from the private compiler (`via="compiler"`) about the same op (`verdicts.Legality.forbids`).
"""

from __future__ import annotations

import enum
import importlib
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal, TypeAlias

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
    """The chips and systems for which a rule holds, and through which software that was found."""

    families: frozenset[int] = frozenset()
    """Generations of the engine (`Chip.family`) that it concerns; empty for all."""
    os: str = ""
    """Where it was seen, in words ("seen on M4, macOS 27.0.1"); "" if the source does not say."""
    until: tuple[tuple[str, int], ...] = ()
    """(platform, last major release on which it holds) pairs, as (("iOS", 17),); empty for no end."""
    since: tuple[tuple[str, int], ...] = ()
    """(platform, first major release) pairs."""
    model_type: str = "mlprogram"
    """"mlprogram", "neuralnetwork", or "any"."""
    via: str = "Core ML"
    """"Core ML", or "compiler" for the private ANE compiler."""

    def concerns(self, target: Target) -> bool:
        """Does it include any chip of the target, on its OS? A target without an OS is always concerned."""
        if self.families and not self.families & target.families:
            return False
        if target.platform is None or target.os is None:
            return True
        first, last = (dict(ends).get(target.platform) for ends in (self.since, self.until))
        return (first is None or first <= target.os) and (last is None or target.os <= last)

    def __str__(self) -> str:
        chips = [name for name, chip in CHIPS.items() if chip.family in self.families]
        unnamed = self.families - {chip.family for chip in CHIPS.values()}
        chips += [f"family {family}" for family in sorted(unnamed)]
        software = "" if self.via == "Core ML" else "compiler"
        return ", ".join(filter(None, [", ".join(chips) or "all chips", self.os, software]))


KINDS = frozenset(["load", "conversion", "legality", "speed", "memory", "numeric", "interface", "shape"])
"""The kinds of findings; `Finding` says what they mean."""


@dataclass(frozen=True)
class Finding:
    """One result of a rule, about an op, or about the model as a whole."""

    rule: str
    """Id of the rule."""
    kind: str
    """"load" (the OS refuses the model), "conversion" (what the model meant was lost), "legality", "speed",
    "memory", "numeric", "interface" or "shape"."""
    message: str
    """What was found, with the value found."""
    because: str
    """Why it matters."""
    source: str
    """Who measured or said it."""
    grade: Grade
    """How well it is supported."""
    scope: str = ""
    """The chips and OS on which it was seen, in words."""
    remedy: str | None = None
    """The name of the pass that repairs it; None if there is none."""
    advice: str = ""
    """What the user can do if there is no pass."""
    op: str = ""
    """Name of the op; "" for a finding about the model."""
    decibels: float | None = None
    """The PSNR in dB of what fp16 leaves of the op's result; None where that is not known."""

    def to_json(self) -> dict[str, Any]:
        """Return plain data."""
        return {**vars(self), "grade": self.grade.value}


RemedyFor: TypeAlias = Callable[[Any, Target], str | None]
"""A function that returns the name of the pass for an op or layer on a target; None for no pass."""


@dataclass(frozen=True)
class Rule:
    """A row of a table of rules: the ops, the condition, the verdict and its source."""

    id: str
    """A short name, cited by findings."""
    ops: frozenset[str]
    """Op types; empty for all."""
    because: str
    """Why it matters, in one sentence."""
    source: str
    """Who measured or said it."""
    legal: bool | None = None
    """False: the ANE cannot run the op; True: it can; None: a rule of the kind "legality" makes the op
    doubtful, and other kinds do not decide this."""
    test: Callable[[Any, Target], str] | None = None
    """Returns the value found, in words, if the condition holds, else ""; None for no condition. It is given an
    op, or the layer of a neural network."""
    grade: Grade = Grade.MEASURED
    """How well it is supported."""
    scope: Scope = Scope()
    """The chips and OS for which it holds."""
    kind: str = "legality"
    """The kind of its findings (see `Finding`)."""
    remedy: str | None = None
    """The name of the pass that repairs every finding; None if there is none."""
    advice: str = ""
    """What to do if there is no pass."""
    looks_beyond: Literal["", "integers", "any"] = ""
    """For which ops the test looks beyond their operands and consumers, so that its result cannot be cached:
    "any", "integers" for ops on integers, "" for none."""
    remedy_for: RemedyFor | None = None
    """Returns the pass for one op, if that depends on the op; it then replaces `remedy`."""
    decibels_for: Callable[[Any, Target], float] | None = None
    """Returns the PSNR in dB of what fp16 leaves of one op's result; None if that is not known."""

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise SurgeryError(
                f"rule {self.id!r} has the kind {self.kind!r}; it is one of {', '.join(sorted(KINDS))}"
            )

    def finding_about(self, op: Any, name: str, message: str, target: Target) -> Finding:
        """Return the finding about an op or layer, with the pass that repairs it and the size of the error."""
        finding = self.finding(message, name)
        if self.decibels_for is not None:
            finding = replace(finding, decibels=self.decibels_for(op, target))
        return finding if self.remedy_for is None else replace(finding, remedy=self.remedy_for(op, target))

    def finding(self, message: str, name: str = "") -> Finding:
        """Return a finding about the op of a name, or about the model."""
        return Finding(
            rule=self.id,
            kind=self.kind,
            message=message,
            because=self.because,
            source=self.source,
            grade=self.grade,
            scope=str(self.scope),
            remedy=self.remedy,
            advice=self.advice,
            op=name,
        )


def general(id: str, because: str, source: str, **row: Any) -> Rule:
    """Return a rule without op types: it is about every op, a function or a model.

    Args:
        id: a short name, cited by findings.
        because: why it matters, in one sentence.
        source: who measured or said it.
        row: the other fields of `Rule`.
    """
    return Rule(id, frozenset(), because, source, **row)


# Rules outside the tables: those in files `rules/finds_<pass>.py`, found by name, and the user's own.

FOLDER = Path(__file__).parent / "rules"
_OWN: dict[str, Rule] = {}


@door()
def register_rule(rule: Rule) -> Rule:
    """Add your own rule to `inspect`. A rule of yours with the same id is replaced.

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
    if rule.legal is not True and not (rule.remedy or rule.remedy_for or rule.advice):
        raise SurgeryError(f"rule {rule.id!r} does not help: name a pass as `remedy`, or give `advice`")
    _OWN[rule.id] = rule
    return rule


def unregister_rule(rule_id: str) -> None:
    """Remove one of the user's own rules, if it is registered."""
    _OWN.pop(rule_id, None)


def rules_outside_tables() -> tuple[Rule, ...]:
    """Return the rules of files named after a pass, and the user's own."""
    return (*_rules_in_files(), *_OWN.values())


@cache
def _rules_in_files() -> tuple[Rule, ...]:
    names = sorted(m.name for m in pkgutil.iter_modules([str(FOLDER)]) if m.name.startswith("finds_"))
    files = [importlib.import_module(f"{__package__}.rules.{name}") for name in names]
    return tuple(rule for file in files for rule in file.RULES)
