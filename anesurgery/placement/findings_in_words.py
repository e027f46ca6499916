"""Lines about findings that no numeric check shows: parts that a conversion lost, and ops reported to be wrong.

`certify` takes its verdict "at risk" from `hidden_risks`, the first line of `inspect` uses `in_short`, and
`auto` prints `unrepaired`. A line stands for all findings of one rule.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from anesurgery.ops import names
from anesurgery.placement.evidence import Finding, Grade
from anesurgery.placement.rules.faulty_ops import CLAIMS, WARNINGS
from anesurgery.placement.rules.layer_rules import LONG_AXIS
from anesurgery.placement.rules.loading import EMPTY_SLICE, REPORTS, STATE_IN_RANGE

ON_ROWS = "lost-epsilon"
"""Nearly every decoder has this finding, and it matters only on rows with a spike, so no headline names it."""
ALWAYS_NAN = "num-mask-product"
"""The rule about masks that make every row NaN; other risks of numbers depend on the inputs."""
NAN_TEST = "num-nan-test"
"""The rule about tests for NaN, which fail on the engine alone."""
UNREPAIRED = "no pass repairs it"
NOT_FINITE = names(
    "num-mac-32768 num-square num-gate num-scale-after num-scores num-mask-causal num-mask num-mask-rows "
    "num-reduce num-mask-product num-constant num-eps num-eps-subnormal num-quotient num-slice-q4 num-softmax "
    "num-exp num-root num-folded-cast num-spectrum num-cosine num-log-softmax num-between num-exp-range "
    "num-atan sdpa-os26"
)
"""Rules under which results are infinite or NaN; under other rules about numbers they lose digits."""
CORE_AI_ABORTS = ("coreai-computed-place", "coreai-empty", "coreai-uneven-heads")
"""Rules of Core AI about forms that end the process at load or at the first run."""
FAILING_LOADS = frozenset(
    (
        STATE_IN_RANGE.id,
        EMPTY_SLICE.id,
        LONG_AXIS.id,
        *CORE_AI_ABORTS,
        *(r.id if r.makes_claims else f"{r.id}-elsewhere" for r in REPORTS),
    )
)
"""Ids of claims about the load, and of warnings whose reports name neither a chip nor an OS."""
WARNED_LOADS = frozenset(("compile-late-cut", *(f"{report.id}-elsewhere" for report in REPORTS)))
"""Ids of warnings about the load, whose reports are about another chip or OS, or about another form."""


@dataclass(frozen=True)
class RuleFindings:
    """The findings of one rule, shown in one line by the first of them."""

    first: Finding
    count: int

    def __str__(self) -> str:
        more = f" (and {self.count - 1} more)" if self.count > 1 else ""
        return f"{self.first.rule}: {self.first.message}{more}: {self.first.because} ({self.first.source})"

    @property
    def line(self) -> str:
        """The rule with its first finding, and what helps."""
        return f"{self}; {self.help}"

    @property
    def help(self) -> str:
        """The pass that repairs the finding, and the advice, in words; that there is none, without either."""
        by_name = f"apply {self.first.remedy}" if self.first.remedy else ""
        return " or ".join(filter(None, [by_name, self.first.advice])) or UNREPAIRED


def grouped_by_rule(findings: Iterable[Finding]) -> list[RuleFindings]:
    """Group findings by rule, in the order of the first finding of each."""
    groups: dict[str, list[Finding]] = {}
    for finding in findings:
        groups.setdefault(finding.rule, []).append(finding)
    return [RuleFindings(group[0], len(group)) for group in groups.values()]


def is_lost(finding: Finding) -> bool:
    """Is the finding about a part that conversions were reported to lose?"""
    return finding.kind == "conversion" and finding.grade is Grade.REPORTED


def is_always_nan(finding: Finding) -> bool:
    """Is a result wrong whatever the inputs are, wherever infinities are infinite?"""
    return finding.rule == ALWAYS_NAN


def is_reported_wrong(finding: Finding) -> bool:
    """Does the finding rest on a report of wrong numbers, on this chip or another?"""
    return finding.rule in CLAIMS or finding.rule in WARNINGS


def is_reported_wrong_here(finding: Finding) -> bool:
    """Was the op reported wrong on the target itself?"""
    return finding.rule in CLAIMS


def hidden_risks(findings: Iterable[Finding]) -> tuple[str, str]:
    """Return (verdict, why) about parts that the conversion lost, and wrong ops that cannot be simulated.

    No run on Linux shows these: ("at risk", words), or ("holds", "") where there are none.
    """
    groups = grouped_by_rule(f for f in findings if is_lost(f) or _cannot_be_simulated(f))
    return ("at risk", "; ".join(group.line for group in groups)) if groups else ("holds", "")


def is_fault_elsewhere(finding: Finding, legal: bool | None, preferred: str | None) -> bool:
    """Is it a fault of the engine in an op that runs elsewhere, so that it is not the first thing to say?

    A test for NaN counts too: it works on every other unit.

    A report from another chip counts only if the op may be expected on the engine, one about the target's own
    chip unless the engine cannot run the op.

    Args:
        finding: about the op.
        legal: whether the engine can run the op; None where that is not known.
        preferred: the unit on which the op is expected; None where that is not known.
    """
    if finding.rule == NAN_TEST:
        return legal is False or preferred not in ("ane", None)
    if not is_fault_of_engine(finding):
        return False
    return legal is False or (not is_reported_wrong_here(finding) and preferred not in ("ane", None))


def is_fault_of_engine(finding: Finding) -> bool:
    """Is it about an op that other units compute right?"""
    fault = CLAIMS.get(finding.rule) or WARNINGS.get(finding.rule)
    return fault is not None and fault.units.startswith("engine")


def _cannot_be_simulated(finding: Finding) -> bool:
    """Is it a claim whose wrong results the interpreter cannot compute?"""
    return is_reported_wrong_here(finding) and CLAIMS[finding.rule].simulate is None


def in_short(findings: Iterable[Finding]) -> str:
    """Name the rules about lost parts, wrong ops and failing loads, each with its repair; "" for none."""
    findings = [f for f in findings if f.rule != ON_ROWS]
    wrong = (f for f in findings if is_lost(f) or is_reported_wrong_here(f) or is_always_nan(f))
    failing = (f for f in findings if f.rule in FAILING_LOADS)
    lines = [_rule_list("numbers may be wrong", wrong), _rule_list("the load may hang or fail", failing)]
    return "; ".join(filter(None, lines))


def _rule_list(what: str, findings: Iterable[Finding]) -> str:
    """Return "<what>: <rule> (<repair>), ..."; "" without findings."""
    firsts = [group.first for group in grouped_by_rule(findings)]
    words = ", ".join(f"{f.rule} ({f.remedy or f.advice or UNREPAIRED})" for f in firsts)
    return f"{what}: {words}" if words else ""


def report_lines(findings: Iterable[Finding]) -> Iterator[str]:
    """Yield a line for each rule that reports wrong numbers."""
    yield from (group.line for group in grouped_by_rule(filter(is_reported_wrong, findings)))


def unrepaired(findings: Iterable[Finding]) -> Iterator[str]:
    """Yield a line for each rule whose findings `auto` does not repair: repairing would change the results."""
    for group in grouped_by_rule(f for f in findings if is_lost(f) or is_reported_wrong(f)):
        yield f"left as it is: {group.line}"
