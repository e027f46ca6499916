"""What findings say that no run shows: a part that a conversion lost, and reports about ops of a model."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from anesurgery.placement.evidence import Finding, Grade
from anesurgery.placement.rules.faulty_ops import CLAIMS, WARNINGS
from anesurgery.placement.rules.loading import ROWS

ON_ROWS = "lost-epsilon"
"""Nearly every decoder has it, and it counts on rows with a spike alone: no headline."""
FAILING_LOADS = frozenset(row.id for row in ROWS)
"""Claims about the load; warnings have other names."""


@dataclass(frozen=True)
class Said:
    """The findings of one rule, in one line."""

    first: Finding
    count: int

    def __str__(self) -> str:
        more = f" (and {self.count - 1} more)" if self.count > 1 else ""
        return f"{self.first.rule}: {self.first.message}{more}: {self.first.because} ({self.first.source})"

    @property
    def help(self) -> str:
        """What repairs it, in words."""
        by_name = f"apply {self.first.remedy}" if self.first.remedy else ""
        return " or ".join(filter(None, [by_name, self.first.advice]))


def by_rule(findings: Iterable[Finding]) -> list[Said]:
    """Findings, those of one rule together."""
    groups: dict[str, list[Finding]] = {}
    for finding in findings:
        groups.setdefault(finding.rule, []).append(finding)
    return [Said(group[0], len(group)) for group in groups.values()]


def is_lost(finding: Finding) -> bool:
    """Is it a part that conversions were reported to lose?"""
    return finding.kind == "conversion" and finding.grade is Grade.REPORTED


def is_reported(finding: Finding) -> bool:
    """Does it rest on a report about the op, on this chip or another?"""
    return finding.rule in CLAIMS or finding.rule in WARNINGS


def unseen(findings: Iterable[Finding]) -> tuple[str, str]:
    """A verdict on what no run shows: a lost part, and an op that the target computes wrong in some way."""
    said = by_rule(f for f in findings if is_lost(f) or _is_unknown_fault(f))
    return ("at risk", "; ".join(f"{one}; {one.help}" for one in said)) if said else ("holds", "")


def is_claim(finding: Finding) -> bool:
    """Was the op reported wrong on this very target?"""
    return finding.rule in CLAIMS


def _is_unknown_fault(finding: Finding) -> bool:
    """Is it a claim of which no arithmetic knows what comes out?"""
    return is_claim(finding) and CLAIMS[finding.rule].wrong is None


def in_short(findings: Iterable[Finding]) -> str:
    """The lost parts, the claims and the loads that fail, by rule, each with its repair; "" for none."""
    findings = list(findings)
    wrong = _short(
        "numbers may be wrong", (f for f in findings if (is_lost(f) and f.rule != ON_ROWS) or is_claim(f))
    )
    loads = _short("the load may hang or fail", (f for f in findings if f.rule in FAILING_LOADS))
    return "; ".join(filter(None, [wrong, loads]))


def _short(what: str, findings: Iterable[Finding]) -> str:
    """What may happen, by the rules that say so."""
    words = [
        f"{one.first.rule} ({one.first.remedy or one.first.advice or 'no pass repairs it'})"
        for one in by_rule(findings)
    ]
    return f"{what}: {', '.join(words)}" if words else ""


def reported(findings: Iterable[Finding]) -> Iterator[str]:
    """A line for each report of wrong numbers."""
    for said in by_rule(filter(is_reported, findings)):
        yield f"{said}; {said.help}"


def still_wrong(findings: Iterable[Finding]) -> Iterator[str]:
    """A line for what `auto` leaves: it keeps the results of the package, whatever other chips do."""
    for said in by_rule(f for f in findings if is_lost(f) or is_reported(f)):
        yield f"left as it is: {said}; {said.help}"
