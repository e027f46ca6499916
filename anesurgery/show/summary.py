"""What reports say of an inspection: runs of units, groups of ops and findings, numbers before and after.

The terminal, the page and the notebook cell show the same groups; here they are made, once and without a look.
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from anesurgery.display import byte_words
from anesurgery.placement.durations import as_different, change
from anesurgery.placement.evidence import Finding
from anesurgery.placement.inspection import SOFT, Inspection, Memory, OpRow
from anesurgery.placement.rules.whole_model import doubts_among
from anesurgery.placement.score import SAME

UNIT_WORDS: dict[str | None, str] = {"ane": "Neural Engine", "gpu": "GPU", "cpu": "CPU", None: "unknown"}
LEGAL_WORDS: dict[bool | None, str] = {False: "no", None: "unknown", True: "yes"}
KINDS = ("load", "conversion", "interface", "shape", "memory", "legality", "speed", "numeric")


@dataclass(frozen=True)
class Attention:
    """Ops of one type that one rule keeps from the Neural Engine, or about which nothing is known."""

    op_type: str
    """The op type of all its rows."""
    finding: Finding | None
    """The finding of the first row; None where no rule says why."""
    why: str
    """The message of the finding, or what the verdict means without one."""
    messages: tuple[str, ...]
    """The distinct messages of its rows, in file order."""
    rows: tuple[OpRow, ...]
    """The ops, in file order."""

    @property
    def reason(self) -> tuple[str, str]:
        """What groups have in common that are listed together: the rule and its remedy, or the words."""
        finding = self.finding
        return (self.why, "") if finding is None else (f"rule {finding.rule}", finding.remedy or "")

    @property
    def legal(self) -> str:
        """Can the Neural Engine run them? In words."""
        return ", ".join(dict.fromkeys(LEGAL_WORDS[r.legal] for r in self.rows))

    @property
    def preferred(self) -> str:
        """Where they are expected to run, in words."""
        return ", ".join(dict.fromkeys(UNIT_WORDS[r.preferred] for r in self.rows))


@dataclass(frozen=True)
class RuleGroup:
    """All findings of one rule."""

    finding: Finding
    """The first of them."""
    count: int
    """How many there are."""
    messages: tuple[str, ...]
    """The distinct ones, in order."""
    ops: tuple[str, ...]
    """Names of the ops, in order; empty for a finding about the model."""


@dataclass(frozen=True)
class Change:
    """A number before and after; `better` is None where it did not change or has no direction."""

    label: str
    before: str
    after: str
    better: bool | None


def sections(inspection: Inspection, name: str = "") -> list[tuple[str, Inspection]]:
    """Return (name, inspection) of the model, or of each part of a pipeline in the order of the run."""
    alone = replace(inspection, parts={}) if inspection.parts else inspection
    own = [(name, alone)] if inspection.ops or not inspection.parts else []
    inner = ((f"{name} / {n}" if name else n, p) for n, p in inspection.parts.items())
    return own + [inner_section for n, part in inner for inner_section in sections(part, n)]


def all_rows(inspection: Inspection) -> list[OpRow]:
    """Return the rows of a model, or of all parts of a pipeline."""
    return [row for _, part in sections(inspection) for row in part.ops]


def own_findings(inspection: Inspection) -> list[Finding]:
    """Return findings about the model as a whole, and about each part of a pipeline as a whole."""
    inner = [f for part in inspection.parts.values() for f in own_findings(part)]
    return [*inspection.findings, *inner]


def runs(inspection: Inspection) -> list[tuple[str | None, int]]:
    """Return (unit, number of ops) of each run of ops on one unit, in file order."""
    grouped = itertools.groupby(all_rows(inspection), key=lambda row: row.preferred)
    return [(unit, len(list(group))) for unit, group in grouped]


def cells(inspection: Inspection, width: int) -> list[str | None]:
    """Return the unit of each of `width` cells of a bar, which shows the ops in file order; [] without ops.

    Each run gets at least one cell, so that one op on the CPU among thousands is seen. Where there are more
    runs than cells, a cell has the unit of most of its ops.
    """
    if not (unit_runs := runs(inspection)):
        return []
    total = sum(n for _, n in unit_runs)
    if len(unit_runs) <= width:
        # one cell for each run; the others are shared out by length, first the whole ones, then by remainders
        shares = [(width - len(unit_runs)) * n / total for _, n in unit_runs]
        counts = [1 + int(share) for share in shares]
        by_remainder = sorted(range(len(unit_runs)), key=lambda k: int(shares[k]) - shares[k])
        for k in by_remainder[: width - sum(counts)]:
            counts[k] += 1
        return [unit for (unit, _), n in zip(unit_runs, counts, strict=True) for _ in range(n)]
    units = [unit for unit, n in unit_runs for _ in range(n)]
    edges = [k * total // width for k in range(width + 1)]
    return [Counter(units[a:b]).most_common(1)[0][0] for a, b in itertools.pairwise(edges)]


def share_words(inspection: Inspection, measure: str) -> str:
    """Return the engine's share in "ops" or "flop": "80.0%", or "80.0% to 85.0%" if some have no unit."""
    least, most = (percent(share[measure]) for share in (inspection.residency, inspection.residency_at_most))
    return least if least == most else f"{least} to {most}"


def ordered_counts(inspection: Inspection) -> list[tuple[str | None, int]]:
    """Return (unit, number of ops) for each unit that has ops."""
    counts = Counter(row.preferred for row in all_rows(inspection))
    return [(unit, counts[unit]) for unit in UNIT_WORDS if counts[unit]]


def percent(share: float) -> str:
    """Return a share in percent; 100 and 0 are exact."""
    words = f"{share:.1%}"
    if share < 1 and words == "100.0%":
        return "99.9%"
    return "<0.1%" if share > 0 and words == "0.0%" else words


def has_flop(inspection: Inspection) -> bool:
    """Were floating point operations counted?"""
    return any(row.flop for row in all_rows(inspection))


def full_sentence(inspection: Inspection) -> str:
    """Return the report in one sentence, after the outputs that no input changes."""
    return _rated(inspection, inspection.summary)


def short_sentence(inspection: Inspection) -> str:
    """Return the summary without causes and repairs, which a short report lists below it."""
    return _rated(inspection, inspection.headline)


def _rated(inspection: Inspection, sentence: str) -> str:
    """Return a sentence after the outputs that no input changes; of a pipeline, say which models it is of."""
    unchanged = [f.message for f in inspection.all_findings if f.rule == "lost-output"]
    models = sections(inspection)
    without_ops = [name for name, part in models if not part.ops]
    if without_ops and len(without_ops) < len(models):
        rest = f"not rated, without ops: {', '.join(without_ops)}"
        sentence = f"In {len(models) - len(without_ops)} of {len(models)} models: {sentence} ({rest})"
    return "; ".join([*unchanged, sentence])


def memory_words(inspection: Inspection) -> str:
    """Return the weights, their limit, the chunks, and what states hold and a call moves, in words."""
    memory = inspection.memory
    if memory is None:
        return ""
    limit = "" if memory.limit is None else f" of {byte_words(memory.limit)}"
    chunks = "1 chunk" if memory.chunks == 1 else f"{memory.chunks} chunks"
    moved = f" | states {byte_words(memory.states)}, {byte_words(memory.state_traffic)} a call"
    wide = f" ({byte_words(memory.expanded)} expanded)" if memory.expanded else ""
    app = f" | {words}" if (words := app_words(memory)) else ""
    return f"weights {byte_words(memory.weights)}{wide}{limit}, {chunks}{moved if memory.states else ''}{app}"


def app_words(memory: Memory) -> str:
    """Return what the model takes of the memory of an app, and what is left; "" if that is not known."""
    if memory.app is None:
        return ""
    left = memory.app - memory.needed
    rest = f"{byte_words(left)} left" if left >= 0 else f"{byte_words(-left)} too much"
    return f"takes {byte_words(memory.needed)} of about {byte_words(memory.app)} for an app, {rest}"


UNDECIDED = "the CPU may be just as fast, by estimate"
"""Why an op that the engine can run has no unit, though the time on both is known."""


def needs_attention(row: OpRow) -> bool:
    """Is it not legal on the Neural Engine, not known to be, or not expected there?"""
    return row.legal is not True or row.preferred != "ane"


def _blocking(row: OpRow) -> list[Finding]:
    return [f for f in row.findings if f.kind not in SOFT] if needs_attention(row) else []


def without_rule(row: OpRow, uses_ane: bool) -> str:
    """Return what the verdict on an op means if no rule says why."""
    if not uses_ane:
        return "the compute units exclude the Neural Engine"
    if row.legal is None:
        return "no rule covers it"
    if row.legal is False:
        return "the Neural Engine cannot run it"
    if row.preferred is None:
        return UNDECIDED if row.estimate is not None else "the Neural Engine can run it, but no time is known"
    return "not faster on the Neural Engine, by estimate"


def attention(inspection: Inspection) -> list[Attention]:
    """Return groups of ops that need attention, by op type and rule: illegal, then unknown, then not preferred.

    An op that two rules keep from the engine is in two groups: both need repair. Groups of one reason are
    neighbours where they are equally severe.
    """
    by_type_and_reason: dict[tuple[str, str], list[_Reason]] = defaultdict(list)
    for _, part in sections(inspection):
        doubts = doubts_among(part.findings, part.target)
        for row in filter(needs_attention, part.ops):
            for reason in _reasons(row, part.target.uses_ane, doubts):
                # without the remedy: findings of one rule are one group, whatever repairs each
                rule = f"rule {reason.finding.rule}" if reason.finding else reason.why
                by_type_and_reason[row.op_type, rule].append(reason)
    groups = [
        Attention(
            op_type=op_type,
            finding=reasons[0].finding,
            why=reasons[0].why,
            messages=tuple(dict.fromkeys(reason.why for reason in reasons)),
            rows=tuple({id(reason.row): reason.row for reason in reasons}.values()),
        )
        for (op_type, _), reasons in by_type_and_reason.items()
    ]
    sizes: Counter[tuple[str, str]] = Counter()
    for group in groups:
        sizes[group.reason] += len(group.rows)
    return sorted(groups, key=lambda g: (_severity(g), -sizes[g.reason], g.reason, -len(g.rows)))


class _Reason(NamedTuple):
    """Why one op needs attention; `finding` is None where no rule says why."""

    row: OpRow
    finding: Finding | None
    why: str


def _reasons(row: OpRow, uses_ane: bool, doubts: Sequence[Finding]) -> list[_Reason]:
    """Return a reason for each finding that keeps an op off the engine, or what no finding means.

    An op without a unit has the first of the `doubts` about the whole model as its reason.
    """
    findings = _blocking(row)
    if not findings and row.preferred is None and row.legal:
        findings = [*doubts[:1]]
    return [_Reason(row, f, f.message) for f in findings] or [_Reason(row, None, without_rule(row, uses_ane))]


def _severity(group: Attention) -> int:
    """Return 0 for a group with an illegal op, 1 for one with an unknown op, 2 for others."""
    legal = {row.legal for row in group.rows}
    return next((k for k, verdict in enumerate((False, None)) if verdict in legal), 2)


def by_reason(groups: Iterable[Attention]) -> list[list[Attention]]:
    """Return neighbouring groups of one reason together, which is then shown once for all their op types."""
    return [list(neighbours) for _, neighbours in itertools.groupby(groups, key=lambda g: g.reason)]


def by_rule(findings: Iterable[Finding]) -> list[RuleGroup]:
    """Return findings grouped by rule, in the order of `KINDS`, frequent ones first."""
    ruled: dict[tuple[str, str], list[Finding]] = defaultdict(list)
    for finding in findings:
        ruled[finding.kind, finding.rule].append(finding)
    groups = [
        RuleGroup(
            finding=same[0],
            count=len(same),
            messages=tuple(dict.fromkeys(f.message for f in same)),
            ops=tuple(dict.fromkeys(f.op for f in same if f.op)),
        )
        for same in ruled.values()
    ]
    return sorted(groups, key=lambda g: (KINDS.index(g.finding.kind), -g.count))


def other_findings(inspection: Inspection) -> list[RuleGroup]:
    """Return the findings, by rule, that `attention` lacks: about the model, and soft ones (speed, numbers)."""
    rows = all_rows(inspection)
    soft = [f for row in rows for f in row.findings if f not in _blocking(row)]
    listed = {(g.finding.rule, words) for g in attention(inspection) if g.finding for words in g.messages}
    return by_rule([*(f for f in own_findings(inspection) if (f.rule, f.message) not in listed), *soft])


def notes(inspection: Inspection) -> list[str]:
    """Return the notes of a model and of its parts, each once."""
    inner = [n for part in inspection.parts.values() for n in notes(part)]
    return list(dict.fromkeys([*inspection.notes, *inner]))


@dataclass(frozen=True)
class Agreement:
    """Ops of one type for which prediction and Core ML's plan say these units."""

    op_type: str
    predicted: str | None
    measured: str | None
    rows: tuple[OpRow, ...]

    @property
    def agrees(self) -> bool:
        """Do both say the same?"""
        return self.predicted == self.measured


def agreements(inspection: Inspection) -> list[Agreement]:
    """Return predicted beside measured units of the ops that the plan names, disagreements first."""
    groups: dict[tuple[str, str | None, str | None], list[OpRow]] = defaultdict(list)
    for row in all_rows(inspection):
        if row.measured is not None:
            groups[row.op_type, row.preferred, row.measured].append(row)
    compared = [Agreement(*key, tuple(rows)) for key, rows in groups.items()]
    return sorted(compared, key=lambda a: (a.agrees, -len(a.rows)))


def agreement_words(compared: Sequence[Agreement]) -> str:
    """How many ops run where they were predicted to, in words."""
    right, total = sum(len(a.rows) for a in compared if a.agrees), sum(len(a.rows) for a in compared)
    if not total:
        return "Core ML's plan names none of these ops."
    return f"{right:,} of {total:,} ops as predicted ({percent(right / total)})"


Number = Callable[[Inspection], tuple[tuple[float, float] | None, str]]
"""Returns (least, largest) of a number of an inspection, None if it is unknown, and the number in words."""
UNKNOWN = (None, "unknown")


def _whole(count: Callable[[Inspection], int]) -> Number:
    return lambda i: ((count(i), count(i)), f"{count(i):,}")


def _share(measure: str) -> Number:
    return lambda i: ((i.residency[measure], i.residency_at_most[measure]), share_words(i, measure))


def cost(inspection: Inspection) -> float | None:
    """Return the microseconds that the chosen path costs by the estimates; None if a part has no estimate."""
    costs = [part.cost for _, part in sections(inspection)]
    return None if None in costs else sum(c for c in costs if c is not None)


NUMBERS: dict[str, tuple[Number, int]] = {
    "ops": (_whole(lambda i: len(all_rows(i))), 0),
    "ops on the Neural Engine": (_share("ops"), 1),
    "work on the Neural Engine": (lambda i: _share("flop")(i) if has_flop(i) else UNKNOWN, 1),
    "segments": (_whole(lambda i: sum(len(p.segments) for _, p in sections(i))), -1),
    "switches": (_whole(lambda i: i.switches), -1),
    "ops the Neural Engine cannot run": (_whole(lambda i: sum(r.legal is False for r in all_rows(i))), -1),
    "ops for which that is unclear": (_whole(lambda i: sum(r.legal is None for r in all_rows(i))), -1),
    "findings": (_whole(lambda i: len(i.all_findings)), -1),
    "weights": (lambda i: ((m.weights,) * 2, byte_words(m.weights)) if (m := i.memory) else UNKNOWN, -1),
}
"""Label -> (the number, the direction in which it improves: 1 if more is better, -1 if less is, 0 for none)."""


def changes(before: Inspection, after: Inspection) -> list[Change]:
    """Return the numbers of a model before and after. Two ranges that overlap are not judged."""
    changed = []
    for label, (number_of, direction) in NUMBERS.items():
        (old, old_words), (new, new_words) = number_of(before), number_of(after)
        better = None
        if direction and old is not None and new is not None and old_words != new_words:
            is_apart = min(new) >= max(old) or max(new) <= min(old)
            better = (sum(new) - sum(old)) * direction > 0 if is_apart else None
        changed.append(Change(label, old_words, new_words, better))
    return changed + time_changes(before, after)


def time_changes(before: Inspection, after: Inspection) -> list[Change]:
    """Return the times, and the band of their ratio; better or worse is said only if the band excludes 1."""
    if before.time is None or after.time is None:
        return _relative_cost(before, after)
    ratio = change(before.time, after.time)
    band = f"{ratio.ratio:.2f} ({ratio.low:.2f} to {ratio.high:.2f})"
    return [
        Change("time (estimated)", str(before.time), str(after.time), ratio.better),
        Change("time after / before", "1", band, ratio.better),
    ]


def _relative_cost(before: Inspection, after: Inspection) -> list[Change]:
    """Return Core ML's own estimate as a multiple of that before, which ranks two forms and is no time."""
    old, new = cost(before), cost(after)
    if not old or new is None:
        return []
    better = None if abs(new / old - 1) < SAME else new < old
    return [Change("relative cost (no time is known)", *as_different(1.0, new / old), better)]


def gone_and_new(
    before: Inspection, after: Inspection
) -> tuple[list[tuple[RuleGroup, int]], list[tuple[RuleGroup, int]]]:
    """Return (rules with fewer findings after, rules with more), each rule with the difference.

    Rules are counted, not ops: a rewrite renames ops.
    """
    old, new = by_rule(before.all_findings), by_rule(after.all_findings)
    return _exceeding(old, new), _exceeding(new, old)


def _exceeding(groups: Sequence[RuleGroup], others: Sequence[RuleGroup]) -> list[tuple[RuleGroup, int]]:
    """Return the rules with more findings in `groups` than in `others`, each with the difference."""
    counts = {(g.finding.kind, g.finding.rule): g.count for g in others}
    return [(g, n) for g in groups if (n := g.count - counts.get((g.finding.kind, g.finding.rule), 0)) > 0]
