"""What reports say of an inspection: runs of units, groups of ops and findings, numbers before and after.

The terminal, the page and the notebook cell show the same groups; here they are made, once and without a look.
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from anesurgery.byte_counts import byte_words
from anesurgery.placement.durations import change, from_to
from anesurgery.placement.evidence import Finding
from anesurgery.placement.inspection import SOFT, Inspection, Memory, OpRow
from anesurgery.placement.score import SAME

UNIT_WORDS: dict[str | None, str] = {"ane": "ANE", "gpu": "GPU", "cpu": "CPU", None: "unknown"}
LEGAL_WORDS: dict[bool | None, str] = {False: "no", None: "unknown", True: "yes"}
KINDS = ("load", "conversion", "interface", "shape", "memory", "legality", "speed", "numeric")


@dataclass(frozen=True)
class Attention:
    """Ops of one type that one rule keeps from the ANE, or about which nothing is known.

    Attributes:
        op_type: of all its rows.
        finding: of the first row; None where no rule says why.
        why: the message of the finding, or what the verdict means without one.
        messages: the distinct messages of its rows, in file order.
        rows: the ops, in file order.
    """

    op_type: str
    finding: Finding | None
    why: str
    messages: tuple[str, ...]
    rows: tuple[OpRow, ...]

    @property
    def reason(self) -> tuple[str, str]:
        """What groups have in common that are listed together: the rule and its remedy, or the words."""
        finding = self.finding
        return (self.why, "") if finding is None else (f"rule {finding.rule}", finding.remedy or "")

    @property
    def legal(self) -> str:
        """Can the ANE run them? In words."""
        return ", ".join(dict.fromkeys(LEGAL_WORDS[r.legal] for r in self.rows))

    @property
    def preferred(self) -> str:
        """Where they are expected to run, in words."""
        return ", ".join(dict.fromkeys(UNIT_WORDS[r.preferred] for r in self.rows))


@dataclass(frozen=True)
class RuleGroup:
    """All findings of one rule.

    Attributes:
        finding: the first of them.
        count: how many there are.
        messages: the distinct ones, in order.
        ops: names of the ops, in order; empty for a finding about the model.
    """

    finding: Finding
    count: int
    messages: tuple[str, ...]
    ops: tuple[str, ...]


@dataclass(frozen=True)
class Change:
    """A number before and after; `better` is None where it did not change or has no direction."""

    label: str
    before: str
    after: str
    better: bool | None


def sections(inspection: Inspection, name: str = "") -> list[tuple[str, Inspection]]:
    """The models in a report: itself, or the parts of a pipeline by name in the order in which they run."""
    alone = replace(inspection, parts={}) if inspection.parts else inspection
    own = [(name, alone)] if inspection.ops or not inspection.parts else []
    inner = ((f"{name} / {n}" if name else n, p) for n, p in inspection.parts.items())
    return own + [inner_section for n, part in inner for inner_section in sections(part, n)]


def all_rows(inspection: Inspection) -> list[OpRow]:
    """The rows of a model, or of all parts of a pipeline."""
    return [row for _, part in sections(inspection) for row in part.ops]


def own_findings(inspection: Inspection) -> list[Finding]:
    """Findings about the model as a whole, and about each part of a pipeline as a whole."""
    inner = [f for part in inspection.parts.values() for f in own_findings(part)]
    return [*inspection.findings, *inner]


def runs(inspection: Inspection) -> list[tuple[str | None, int]]:
    """Unit and number of ops of each run of ops on one unit, in file order."""
    grouped = itertools.groupby(all_rows(inspection), key=lambda row: row.preferred)
    return [(unit, len(list(group))) for unit, group in grouped]


def cells(inspection: Inspection, width: int) -> list[str | None]:
    """The ops in file order as a bar of `width` cells; empty without ops.

    Each run gets at least one cell, so that one op on the CPU among thousands is seen. Where there are more
    runs than cells, a cell has the unit of most of its ops.
    """
    if not (stretches := runs(inspection)):
        return []
    total = sum(n for _, n in stretches)
    if len(stretches) <= width:
        shares = [(width - len(stretches)) * n / total for _, n in stretches]
        counts = [1 + int(s) for s in shares]
        by_rest = sorted(range(len(stretches)), key=lambda k: int(shares[k]) - shares[k])
        for k in by_rest[: width - sum(counts)]:
            counts[k] += 1
        return [u for (u, _), n in zip(stretches, counts, strict=True) for _ in range(n)]
    units = [u for u, n in stretches for _ in range(n)]
    edges = [k * total // width for k in range(width + 1)]
    return [Counter(units[a:b]).most_common(1)[0][0] for a, b in itertools.pairwise(edges)]


def share_words(inspection: Inspection, what: str) -> str:
    """The share of the ANE in "ops" or "flop": "80.0%", or "80.0% to 85.0%" where some have no unit."""
    least, most = (percent(share[what]) for share in (inspection.residency, inspection.residency_at_most))
    return least if least == most else f"{least} to {most}"


def ordered_counts(inspection: Inspection) -> list[tuple[str | None, int]]:
    """Number of ops on each unit, those without ops left out."""
    counts = Counter(row.preferred for row in all_rows(inspection))
    return [(unit, counts[unit]) for unit in UNIT_WORDS if counts[unit]]


def percent(share: float) -> str:
    """A share in percent; 100 and 0 are exact."""
    said = f"{share:.1%}"
    if share < 1 and said == "100.0%":
        return "99.9%"
    return "<0.1%" if share > 0 and said == "0.0%" else said


def has_flop(inspection: Inspection) -> bool:
    """Were floating point operations counted?"""
    return any(row.flop for row in all_rows(inspection))


def verdict(inspection: Inspection) -> str:
    """The report in one sentence, after the outputs that nothing moves."""
    return _rated(inspection, inspection.summary)


def headline(inspection: Inspection) -> str:
    """Return the summary without causes and repairs, which a short report lists below it."""
    return _rated(inspection, inspection.headline)


def _rated(inspection: Inspection, sentence: str) -> str:
    """A sentence after the outputs that nothing moves; of a pipeline, which models it speaks of."""
    still = [f.message for f in inspection.all_findings if f.rule == "lost-output"]
    named = [(name, bool(part.ops)) for name, part in sections(inspection)]
    bare = [name for name, has_ops in named if not has_ops]
    if bare and len(bare) < len(named):
        rest = f"not rated, without ops: {', '.join(bare)}"
        sentence = f"In {len(named) - len(bare)} of {len(named)} models: {sentence} ({rest})"
    return "; ".join([*still, sentence])


def memory_words(inspection: Inspection) -> str:
    """Weights, their limit, the number of chunks, and what states hold and a call moves, in words."""
    memory = inspection.memory
    if memory is None:
        return ""
    limit = "" if memory.limit is None else f" of {byte_words(memory.limit)}"
    chunks = "1 chunk" if memory.chunks == 1 else f"{memory.chunks} chunks"
    moved = f" | states {byte_words(memory.states)}, {byte_words(memory.state_traffic)} a call"
    wide = f" ({byte_words(memory.expanded)} expanded)" if memory.expanded else ""
    app = f" | {app_words(memory)}" if memory.app is not None else ""
    return f"weights {byte_words(memory.weights)}{wide}{limit}, {chunks}{moved if memory.states else ''}{app}"


def app_words(memory: Memory) -> str:
    """What the model takes of the memory of an app, and what is left, in words; "" where that is not known."""
    if memory.app is None or memory.left is None:
        return ""
    rest = f"{byte_words(memory.left)} left" if memory.left >= 0 else f"{byte_words(-memory.left)} too much"
    return f"takes {byte_words(memory.needed)} of about {byte_words(memory.app)} for an app, {rest}"


UNDECIDED = "the CPU may be just as fast, by estimate"
"""Why an op that the engine can run has no unit, though the time on both is known."""


def needs_attention(row: OpRow) -> bool:
    """Is it not legal on the ANE, not known to be, or not expected there?"""
    return row.legal is not True or row.preferred != "ane"


def _blocking(row: OpRow) -> list[Finding]:
    return [f for f in row.findings if f.kind not in SOFT] if needs_attention(row) else []


def without_rule(row: OpRow, uses_ane: bool) -> str:
    """What the verdict on an op means where no rule says why."""
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
    """Ops that need attention by (op type, rule): not legal first, then unknown, then not preferred.

    An op that two rules keep from the ANE is in two groups: both need repair. Groups of one reason are
    neighbours where they are equally severe.
    """
    by_reason_given: dict[tuple[str, str], list[tuple[OpRow, Finding | None, str]]] = defaultdict(list)
    for _, part in sections(inspection):
        for row in filter(needs_attention, part.ops):
            reasons: list[Finding | None] = [*_blocking(row)] or [None]
            for f in reasons:
                why = f.message if f else without_rule(row, part.target.uses_ane)
                by_reason_given[row.op_type, f"rule {f.rule}" if f else why].append((row, f, why))
    groups = [
        Attention(
            op_type,
            met[0][1],
            met[0][2],
            tuple(dict.fromkeys(why for _, _, why in met)),
            tuple({id(row): row for row, _, _ in met}.values()),
        )
        for (op_type, _), met in by_reason_given.items()
    ]
    sizes: Counter[tuple[str, str]] = Counter()
    for group in groups:
        sizes[group.reason] += len(group.rows)
    severity = lambda g: (_worst(g), -sizes[g.reason], g.reason, -len(g.rows))  # noqa: E731
    return sorted(groups, key=severity)


def _worst(group: Attention) -> int:
    legal = [row.legal for row in group.rows]
    return 0 if False in legal else 1 if None in legal else 2


def by_reason(groups: Iterable[Attention]) -> list[list[Attention]]:
    """Neighbouring groups of one reason together: it is given once for all its op types."""
    return [list(met) for _, met in itertools.groupby(groups, key=lambda g: g.reason)]


def by_rule(findings: Iterable[Finding]) -> list[RuleGroup]:
    """Findings by rule, in the order of `KINDS`, frequent ones first."""
    ruled: dict[tuple[str, str], list[Finding]] = defaultdict(list)
    for finding in findings:
        ruled[finding.kind, finding.rule].append(finding)
    groups = [
        RuleGroup(
            met[0],
            len(met),
            tuple(dict.fromkeys(f.message for f in met)),
            tuple(dict.fromkeys(f.op for f in met if f.op)),
        )
        for met in ruled.values()
    ]
    return sorted(groups, key=lambda g: (_kind(g.finding), -g.count))


def _kind(finding: Finding) -> int:
    return KINDS.index(finding.kind) if finding.kind in KINDS else len(KINDS)


def other_findings(inspection: Inspection) -> list[RuleGroup]:
    """Findings by rule that the attention table does not show: about the model, speed and numbers."""
    rows = all_rows(inspection)
    soft = [f for row in rows for f in row.findings if f not in _blocking(row)]
    return by_rule([*own_findings(inspection), *soft])


def notes(inspection: Inspection) -> list[str]:
    """What the reader must know, each sentence once."""
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
    """Predicted beside measured, disagreements first; ops that the plan does not name are left out."""
    groups: dict[tuple[str, str | None, str | None], list[OpRow]] = defaultdict(list)
    for row in all_rows(inspection):
        if row.measured is not None:
            groups[row.op_type, row.preferred, row.measured].append(row)
    compared = [Agreement(*key, tuple(rows)) for key, rows in groups.items()]
    return sorted(compared, key=lambda a: (a.agrees, -len(a.rows)))


def agreement_words(compared: Sequence[Agreement]) -> str:
    """How many ops run where they were predicted to, in words."""
    right, total = (sum(len(a.rows) for a in compared if a.agrees or every) for every in (False, True))
    if not total:
        return "Core ML's plan names none of these ops."
    return f"{right:,} of {total:,} ops as predicted ({percent(right / total)})"


def _whole(count: Callable[[Inspection], int]) -> Callable[[Inspection], tuple[float, str]]:
    return lambda i: (count(i), f"{count(i):,}")


def _share(key: str) -> Callable[[Inspection], tuple[float, str]]:
    """Return a share in words; of a range both ends."""
    return lambda i: (i.residency[key] + i.residency_at_most[key], share_words(i, key))


def cost(inspection: Inspection) -> float | None:
    """What the chosen path costs by the estimates, microseconds; None where a part has none."""
    costs = [part.cost for _, part in sections(inspection)]
    return None if None in costs else sum(c for c in costs if c is not None)


NUMBERS: dict[str, tuple[Callable[[Inspection], tuple[float, str]], int]] = {
    "status": (_whole(lambda i: i.status), -1),
    "ops": (_whole(lambda i: len(all_rows(i))), 0),
    "ops on the ANE": (_share("ops"), 1),
    "work on the ANE": (lambda i: _share("flop")(i) if has_flop(i) else (0, "unknown"), 1),
    "segments": (_whole(lambda i: sum(len(p.segments) for _, p in sections(i))), -1),
    "switches": (_whole(lambda i: i.switches), -1),
    "ops the ANE cannot run": (_whole(lambda i: sum(r.legal is False for r in all_rows(i))), -1),
    "ops of unknown legality": (_whole(lambda i: sum(r.legal is None for r in all_rows(i))), -1),
    "findings": (_whole(lambda i: len(i.all_findings)), -1),
    "weights": (lambda i: (i.memory.weights, byte_words(i.memory.weights)) if i.memory else (0, "unknown"), -1),
}
"""Label -> how the number is found (also in words), and the direction in which it improves; 0 for none."""


def changes(before: Inspection, after: Inspection) -> list[Change]:
    """The numbers of two inspections of one model."""
    changed = []
    for label, (get, direction) in NUMBERS.items():
        (old, old_words), (new, new_words) = get(before), get(after)
        told = direction and old_words != new_words and "unknown" not in (old_words, new_words)
        better = (new - old) * direction > 0 if told else None
        changed.append(Change(label, old_words, new_words, better))
    return changed + time_changes(before, after)


def time_changes(before: Inspection, after: Inspection) -> list[Change]:
    """The times, and the band of their ratio: better or worse only where that leaves out 1."""
    if before.time is None or after.time is None:
        return _relative_cost(before, after)
    ratio = change(before.time, after.time)
    band = f"{ratio.ratio:.2f} ({ratio.low:.2f} to {ratio.high:.2f})"
    return [
        Change("time (estimated)", str(before.time), str(after.time), ratio.better),
        Change("time after / before", "1", band, ratio.better),
    ]


def _relative_cost(before: Inspection, after: Inspection) -> list[Change]:
    """What Core ML itself counts, as a multiple of that before: it ranks two forms, and is no time."""
    old, new = cost(before), cost(after)
    if not old or new is None:
        return []
    better = None if abs(new / old - 1) < SAME else new < old
    return [
        Change("relative cost (no time is known)", "1", from_to(1.0, new / old, "").split(" -> ")[1], better)
    ]


def gone_and_new(
    before: Inspection, after: Inspection
) -> tuple[list[tuple[RuleGroup, int]], list[tuple[RuleGroup, int]]]:
    """Rules with fewer findings after, and those with more, each with the difference.

    Rules are counted, not ops: a rewrite renames ops.
    """
    old = {(g.finding.kind, g.finding.rule): g for g in by_rule(before.all_findings)}
    new = {(g.finding.kind, g.finding.rule): g for g in by_rule(after.all_findings)}
    less = [(g, n) for k, g in old.items() if (n := g.count - (new[k].count if k in new else 0)) > 0]
    more = [(g, n) for k, g in new.items() if (n := g.count - (old[k].count if k in old else 0)) > 0]
    return less, more
