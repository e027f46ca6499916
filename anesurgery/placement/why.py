"""Every rule that was asked about one op, and what it said: what `inspect --why` shows."""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from typing import Any

from anesurgery.display import Drawn
from anesurgery.errors import UnknownName
from anesurgery.files.package import Loaded
from anesurgery.mil import Operation, Program
from anesurgery.placement.evidence import Rule, rules_beside
from anesurgery.placement.inspection import OpRow
from anesurgery.placement.inspector import RULES, inspect_program
from anesurgery.placement.rules.legality import FORBIDDEN
from anesurgery.placement.target import Target
from anesurgery.placement.verdicts import judge_shaped

NO, OTHER_TARGET = "no", "other chip or OS"


@dataclass(frozen=True)
class Consulted:
    """A rule that speaks about an op's type.

    Attributes:
        rule: the row of the table.
        said: what it found; "no" where its condition does not hold; "other chip or OS" where it was not asked.
    """

    rule: Rule
    said: str

    @property
    def found(self) -> bool:
        """Did it find something?"""
        return self.said not in (NO, OTHER_TARGET)

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        rule = self.rule
        return {
            "rule": rule.id,
            "kind": rule.kind,
            "said": self.said,
            "because": rule.because,
            "source": rule.source,
            "grade": rule.grade.value,
            "scope": str(rule.scope),
            "remedy": rule.remedy,
            "advice": rule.advice,
        }


@dataclass(frozen=True)
class Why(Drawn):
    """One op: its row in the report, and all rules asked about it, those that found something first."""

    row: OpRow
    rules: tuple[Consulted, ...]

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {"op": self.row.to_json(), "rules": [consulted.to_json() for consulted in self.rules]}


def why(model: Loaded | Program, op: str, target: Target, function: str | None = None) -> Why:
    """Why an op of an ML Program is placed as it is.

    Raises:
        UnknownName: no op of that name.
    """
    loaded = Loaded.of(model)
    rules = (*RULES, *rules_beside())
    inspection = inspect_program(loaded, target, function=function)
    judged = {j.name: j.op for j in judge_shaped(loaded, function, target, rules).judged}
    if op not in judged:
        raise UnknownName("op", op, difflib.get_close_matches(op, judged, 8, 0) or judged)
    chosen = judged[op]
    about = [rule for rule in (*FORBIDDEN, *rules) if not rule.ops or chosen.op_type in rule.ops]
    asked = [Consulted(rule, _said(rule, chosen, target)) for rule in about]
    return Why(inspection.row(op), tuple(sorted(asked, key=lambda consulted: not consulted.found)))


def _said(rule: Rule, op: Operation, target: Target) -> str:
    if not rule.scope.concerns(target):
        return OTHER_TARGET
    if rule.test is None:
        return f"{op.op_type}, in every form" if rule.kind == "legality" else NO
    return rule.test(op, target) or NO
