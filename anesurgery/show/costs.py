"""Rank what matters most in a model, with the repair; and show where an estimated time goes.

Failing loads come first, then wrong numbers, then time. `terminal` and `surgeries` put the first few into short
reports (`on_a_screen`). The last part draws an estimated time: a bar of its sources, the slowest segments and
ops.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rich.text import Text

from anesurgery.display import counted, short_name
from anesurgery.placement.durations import rounded
from anesurgery.placement.evidence import Finding
from anesurgery.placement.findings_in_words import (
    FAILING_LOADS,
    is_certain,
    is_claim,
    is_fault_elsewhere,
    is_lost,
)
from anesurgery.placement.inspection import Inspection, OpRow, percent
from anesurgery.placement.rules.faulty_ops import CLAIMS
from anesurgery.placement.rules.shapes import RANGE
from anesurgery.show import summary
from anesurgery.show.console import WIDTH, as_text, bars, plain
from anesurgery.show.report import Line, Report, Table
from anesurgery.show.summary import UNIT_WORDS

MOST = 3
"""The most problems in a short report."""
SCREEN = 11
"""Lines of a short report; a command adds three of its own."""
MATTERS = 0.01
"""From this share of the time, or of the work, a cost ranks above a risk of wrong numbers."""
LEAST = 0.001
"""The smallest share that is mentioned."""
NAME = re.compile(r"%[\w./:-]+")
MEASURE = "measure each compute unit on the device: anesurgery measure MODEL"
LONGEST = 20
"""The most characters of a name in a cause."""
Repair = Callable[[str], str]
"""The command that applies a pass, by its name."""


@dataclass(frozen=True)
class Problem:
    """One thing that matters.

    Attributes:
        what: the ops in words; "" for the model as a whole.
        why: the cause, in words.
        kind: the kind of the finding; "placement" where no rule says why ops run elsewhere.
        share: its share of the time, else of the work, else of the ops.
        remedies: the passes that help, the likeliest first.
        advice: what to do where no pass helps.
        wrong: whether the model may fail to load, or give wrong numbers.
        rule: the rule of the finding.
    """

    what: str
    why: str
    kind: str
    share: float = 0.0
    remedies: tuple[str, ...] = ()
    advice: str = ""
    wrong: bool = False
    rule: str = ""

    @property
    def rank(self) -> tuple[int, bool, float, int]:
        """Sorts failures first, then costs with a repair, then risks of wrong numbers, then the rest.

        Among failures, those that follow from the model come before those that somebody reported.
        """
        kinds = (*summary.KINDS, "placement")
        has_repair = self.remedies or (self.advice and self.kind != "placement")
        classes = (self.wrong, self.share >= MATTERS and has_repair, self.kind == "numeric", True)
        first = next(k for k, applies in enumerate(classes) if applies)
        kind = kinds.index(self.kind) if self.kind in kinds else len(kinds)
        return first, self.rule in CLAIMS, -self.share, kind

    def lines(self, number: int, repair: Repair, two_lines: bool = False) -> Iterator[Text]:
        """Yield the problem with its cause, and below it the command that repairs it, or the advice.

        The problem has one line, and is cut; or up to two with `two_lines`.
        """
        words = f"{number}) {self.what}: {self.why}" if self.what else f"{number}) {self.why}"
        wrapped = textwrap.wrap(words, WIDTH, subsequent_indent="   ")
        yield from map(plain, wrapped) if two_lines and len(wrapped) <= 2 else [cut(words)]
        if self.remedies:
            yield Text(f"   {repair(self.remedies[0])}", "green", no_wrap=True, overflow="ignore")
        elif self.advice:
            yield cut(f"   {self.advice}", "green")


SIZES_FIRST = Problem(
    "",
    "the sizes of the inputs vary, and most passes need fixed ones",
    "legality",
    advice="fix them first, with the pass fix_shapes; or make several sizes: `anesurgery sizes`",
)
"""The first problem of a model of flexible size."""
BOUNDARIES = ("; ", r" \(", r", (?!which |an? |the |though )")
"""Patterns at which a line that is too long ends, the best first; else after a word. `--full` shows all."""
LAST_WORD = 20
"""From this many letters on, a word at the end of a line is cut itself."""
WHAT_LENGTH = 56
"""The most letters of a problem's ops, so that its cause has room on their line."""


def cut(words: str, style: str = "") -> Text:
    """Return a line that fits a terminal, ended at a clause if possible, and never before the cause."""
    if len(words) <= WIDTH:
        return plain(words, style)
    begin = max(words.find(": ") + 2, WIDTH // 2)
    for boundary in BOUNDARIES:
        if ends := [m.start() for m in re.finditer(boundary, words) if begin < m.start() <= WIDTH]:
            return plain(words[: ends[-1]], style)
    if " " in words[max(begin, WIDTH - LAST_WORD) : WIDTH - 1]:
        return plain(f"{words[: words.rindex(' ', 0, WIDTH - 1)]} …", style)
    line = plain(words, style)
    line.truncate(WIDTH, overflow="ellipsis")
    return line


def costs(inspection: Inspection) -> list[Problem]:
    """Return all problems, the most important first; those of one set of ops are one problem."""
    rows = {row.name: row for row in summary.all_rows(inspection)}
    by_ops: dict[tuple[str, ...], Problem] = {}
    for ops, problem in _problems(inspection, rows):
        earlier = by_ops.get(ops) if ops else None
        by_ops[ops or (problem.why,)] = problem if earlier is None else _merged(earlier, problem)
    problems = [problem for problem in by_ops.values() if not _is_negligible(inspection, problem)]
    problems.sort(key=lambda problem: problem.rank)
    if not inspection.fixing:
        return problems
    return [SIZES_FIRST, *(_after_fixing(problem) for problem in problems if problem.rule != RANGE.id)]


def _after_fixing(problem: Problem) -> Problem:
    """Return a problem of a model whose sizes vary: its passes come after the sizes are fixed."""
    names = ", ".join(problem.remedies)
    return replace(problem, remedies=(), advice=f"after that: {names}") if names else problem


COSTLY_SWITCHES = 0.1
"""The share of switches of the time from which each op off the engine is a problem, however short it is. Below
it, its repair mostly costs more than the switches: a lookup as a product in a GPT-2 with 2 % of switches."""


def _is_negligible(inspection: Inspection, problem: Problem) -> bool:
    """Does a problem only say where ops run that take next to no time, without costly switches?"""
    if inspection.time is None or not problem.what or problem.wrong or problem.share >= LEAST:
        return False
    switches = inspection.time.parts.get("switches", 0.0) / inspection.time.ms
    return problem.kind == "speed" or (problem.kind in ("legality", "placement") and switches < COSTLY_SWITCHES)


def _merged(one: Problem, other: Problem) -> Problem:
    """Return two problems of the same ops as one; of a wrong and another, the wrong one counts.

    Words about numbers replace those about time that no pass goes with.
    """
    if other.wrong and not one.wrong:
        return other
    remedies = tuple(dict.fromkeys((*one.remedies, *other.remedies)))
    if (one.kind, other.kind) == ("speed", "numeric") and not one.remedies:
        return replace(other, remedies=remedies)
    return replace(one, remedies=remedies, advice=one.advice or other.advice, wrong=one.wrong or other.wrong)


def _problems(inspection: Inspection, rows: dict[str, OpRow]) -> Iterator[tuple[tuple[str, ...], Problem]]:
    """Yield (names of the ops, problem); what keeps ops off the engine comes first."""
    for groups in summary.by_reason(summary.attention(inspection)):
        own = list({row.name: row for group in groups for row in group.rows}.values())
        first = max(
            groups, key=lambda group: _share_of(inspection, group.rows)[0]
        )  # the words of the costliest
        if first.finding is not None or any(row.preferred is not None for row in own):
            yield tuple(sorted(row.name for row in own)), _problem_of(inspection, own, first.why, first.finding)
        elif first.why == summary.UNDECIDED:
            yield (), replace(_problem_of(inspection, own, first.why, None), advice=MEASURE)
    for group in summary.other_findings(inspection):
        own, finding = [rows[name] for name in group.ops if name in rows], group.finding
        if own and all(is_fault_elsewhere(finding, row.legal, row.preferred) for row in own):
            continue
        yield tuple(sorted(row.name for row in own)), _problem_of(inspection, own, finding.message, finding)


def _problem_of(inspection: Inspection, rows: Sequence[OpRow], why: str, finding: Finding | None) -> Problem:
    share, of_what = _share_of(inspection, rows)
    said: dict[str, Any] = {}
    if finding is not None:
        said = {"advice": finding.advice, "wrong": _is_wrong(finding), "rule": finding.rule}
    return Problem(
        what=_ops_in_words(rows, share, of_what),
        why=_without_name(why, rows),
        kind="placement" if finding is None else finding.kind,
        share=share,
        remedies=(finding.remedy,) if finding is not None and finding.remedy else (),
        **said,
    )


def _share_of(inspection: Inspection, rows: Sequence[OpRow]) -> tuple[float, str]:
    """Return the share of some ops: of the time, else of the work, else of all ops."""
    every = summary.all_rows(inspection)
    if inspection.time is not None:
        return sum(row.ms or 0.0 for row in rows) / inspection.time.ms, "time"
    if flop := sum(row.flop for row in every):
        return sum(row.flop for row in rows) / flop, "work"
    return len(rows) / max(len(every), 1), "ops"


def _ops_in_words(rows: Sequence[OpRow], share: float, of_what: str) -> str:
    """Return ops in words, such as ``linear logits (CPU, 93% of the time)``; "" for the whole model."""
    if not rows:
        return ""
    op_types, units = {row.op_type for row in rows}, {row.preferred for row in rows}
    op_type = op_types.pop() if len(op_types) == 1 else ""
    unit = units.pop() if len(units) == 1 else None
    remarks = [] if unit in (None, "ane") else [summary.UNIT_WORDS[unit]]
    remarks += [f"{percent(share)} of the {of_what}"] if share >= LEAST else []
    more = f" ({', '.join(remarks)})" if remarks else ""
    room = min(max(WHAT_LENGTH - len(op_type) - len(more), 12), 28)
    name = f"{op_type} {short_name(rows[0].name, room)}" if len(rows) == 1 else f"{len(rows):,} {op_type} ops"
    return " ".join(name.split()) + more


def _without_name(why: str, rows: Sequence[OpRow]) -> str:
    """Return a cause without the op's name in front, and with short names."""
    why = why.removeprefix(f"%{rows[0].name} is ") if len(rows) == 1 else why
    return NAME.sub(lambda name: short_name(name[0], LONGEST), why)


def _is_wrong(finding: Finding) -> bool:
    loads = finding.kind == "load" or finding.rule in FAILING_LOADS
    return loads or is_lost(finding) or is_claim(finding) or is_certain(finding)


def in_python(name: str) -> str:
    """Return the call that applies a pass."""
    return f'ane.apply(model, "{name}")'


MOST_IMPORTANT = "What matters most:"
STILL = "What still matters:"
"""The line above the problems of a model, and of one that was changed."""


def on_a_screen(
    report: Report,
    inspection: Inspection | None,
    repair: Repair,
    tried: Collection[str] = (),
    title: str = MOST_IMPORTANT,
) -> Report:
    """Return a report with the most important problems below it, as many as fit on a screen.

    Args:
        report: the report that comes first.
        inspection: the inspection of the model; None without one.
        repair: returns the command that applies a pass, by its name.
        tried: passes that were tried, and are not suggested again.
        title: the line above them.
    """
    report = replace(report, parts=[part for part in report.parts if part])
    room = SCREEN - len(as_text(report).splitlines()) - 1  # lines, without that of the title
    problems = [] if inspection is None else [*filter(None, (_without(p, tried) for p in costs(inspection)))]
    shown = problems[: max(0, min(MOST, room // 2))]
    lines: list[Text] = []
    for number, problem in enumerate(shown, 1):
        spare = room - len(lines) - 2 * (len(shown) - number + 1)
        lines += problem.lines(number, repair, two_lines=spare > 0)
    below = [Line(title, "bold"), *lines] if lines else []
    return replace(report, parts=[*report.parts, *below])


def _without(problem: Problem, tried: Collection[str]) -> Problem | None:
    """Return a problem without the passes that were tried; None if it had only these."""
    remedies = tuple(name for name in problem.remedies if name not in tried)
    return None if problem.remedies and not remedies else replace(problem, remedies=remedies)


LOOKS = {
    "products": ("█", "cyan"),
    "memory": ("▓", "blue"),
    "weights": ("▒", "green"),
    "waiting": ("░", "bright_black"),
    "CPU": ("▃", "yellow"),
    "switches": ("▚", "red"),
    "dispatch": ("·", "white"),
}
"""Source of cost -> (glyph of its cells in the bar, colour in a terminal)."""
COLOURS = dict(
    zip(LOOKS, ("#2f86c9", "#5b6fb5", "#3f9a66", "#8b949d", "#cf7a1f", "#c4473c", "#b9a44c"), strict=True)
)
"""Source of cost -> its colour on a page."""
WHAT = {
    "products": "sums of products, on the engine",
    "memory": "ops of the engine that only move numbers",
    "weights": "until weights are read",
    "waiting": "small ops for one another",
    "CPU": "ops of the CPU",
    "switches": "changes of the unit",
    "dispatch": "what each prediction costs",
}
BAR = WIDTH - 4
DEAREST = 10
"""The most ops that are listed, the slowest first; JSON has all."""
SEGMENTS = 6
"""The most segments that are listed; the page has them all."""


@dataclass(frozen=True)
class TimeShare:
    """A part of a time: its name, milliseconds, share of the whole, and an explanation."""

    name: str
    ms: float
    share: float
    what: str = ""


def parts(inspection: Inspection) -> list[TimeShare]:
    """Return the sources of cost, the largest first; [] without a time."""
    if (time := inspection.time) is None:
        return []
    shares = [TimeShare(name, ms, ms / time.ms, WHAT[name]) for name, ms in time.parts.items() if ms > 0]
    return sorted(shares, key=lambda one: -one.ms)


def segments(inspection: Inspection) -> list[TimeShare]:
    """Return the segments that take longest; [] where there is only one."""
    timed = [(part, s) for _, part in summary.sections(inspection) for s in part.segments if s.ms]
    if inspection.time is None or len(timed) < 2:
        return []
    longest = [
        TimeShare(
            f"segment {s.index}",
            s.ms or 0.0,
            (s.ms or 0.0) / inspection.time.ms,
            f"{UNIT_WORDS[s.unit]}, {counted(len(s.ops), 'op')}",
        )
        for _, s in timed
    ]
    return sorted(longest, key=lambda one: -one.ms)


def dearest(inspection: Inspection) -> list[TimeShare]:
    """Return the ops that take longest, at most `DEAREST`."""
    if (time := inspection.time) is None:
        return []
    rows = sorted((r for r in summary.all_rows(inspection) if r.ms), key=lambda r: -(r.ms or 0.0))
    return [TimeShare(r.name, r.ms or 0.0, (r.ms or 0.0) / time.ms, r.op_type) for r in rows[:DEAREST]]


def cells(shares: list[TimeShare], width: int) -> list[tuple[str, int]]:
    """Return how many cells of a bar each source of cost has, at least one."""
    counts = [max(round(one.share * width), 1) for one in shares]
    if counts:
        counts[0] += width - sum(counts)
    return [(one.name, count) for one, count in zip(shares, counts, strict=True)]


def in_words(ms: float) -> str:
    """Return a duration in words: "12.3 ms", "0.045 ms"."""
    return f"{rounded(ms, 3)} ms"


def time_bar(inspection: Inspection, width: int = BAR) -> Text:
    """Return the sources of cost as a bar, with a legend."""
    shares = parts(inspection)
    legend = {one.name: f"{one.name} {in_words(one.ms)} ({summary.percent(one.share)})" for one in shares}
    return bars([("", cells(shares, width))], legend, LOOKS)


def time_parts(inspection: Inspection) -> list[Any]:
    """Return the parts of a report on where the time goes; [] without a time."""
    if (time := inspection.time) is None:
        return []
    source = counted(time.measurements, "published time") if time.measurements else time.source
    title = Text("where the time goes", "bold").append(f"  {time}, from {source}", "not bold")
    rows = [
        (short_name(one.name), one.what, in_words(one.ms), summary.percent(one.share))
        for one in (*segments(inspection)[:SEGMENTS], *dearest(inspection))
    ]
    return [Text(), title, time_bar(inspection), Table((), rows)]
