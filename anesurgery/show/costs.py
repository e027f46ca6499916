"""Rank what matters most in a model, with the repair.

Failing loads come first, then wrong numbers, then time. `terminal` and `surgeries` put the first few into short
reports (`on_a_screen`).
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, NamedTuple

from rich.text import Text

from anesurgery.display import short_name
from anesurgery.errors import Refusal
from anesurgery.placement.evidence import Finding, Grade
from anesurgery.placement.findings_in_words import (
    FAILING_LOADS,
    NOT_FINITE,
    WARNED_LOADS,
    is_always_nan,
    is_fault_elsewhere,
    is_fault_of_engine,
    is_lost,
    is_reported_wrong_here,
)
from anesurgery.placement.inspection import Inspection, OpRow, percent
from anesurgery.placement.rules.faulty_ops import CLAIMS
from anesurgery.placement.rules.lost_in_conversion import MEANT
from anesurgery.placement.rules.shapes import FIXED_WINDOW, RANGE
from anesurgery.placement.rules.whole_model import DISPUTED_RANGE, RANGE_ELSEWHERE
from anesurgery.placement.score import WOULD_RISE
from anesurgery.placement.target import Target
from anesurgery.show import summary
from anesurgery.show.console import WIDTH, as_text, plain
from anesurgery.show.report import Line, Report, Table, first_rows

MOST = 3
"""The most problems in a short report."""
SCREEN = 11
"""Lines of a short report; a command adds three of its own."""
MATTERS = 0.01
"""From this share of the time, or of the work, a cost ranks above a risk of wrong numbers."""
UNKNOWN_ERROR = 40.0
"""An error of unknown size ranks among those of so many dB, the default gate of `certify`; NaN leaves 0 dB."""
LEAST = 0.001
"""The smallest share that is mentioned. Such limits of reports are choices."""
NAME = re.compile(r"%[\w./:-]+")
MEASURE = "measure each compute unit on the device: anesurgery measure MODEL"
LONGEST = 20
"""The most characters of a name in a cause."""
Repair = Callable[[str], str]
"""The command that applies a pass, by its name."""


@dataclass(frozen=True)
class Problem:
    """One thing that matters."""

    what: str
    """The ops in words; "" for the model as a whole."""
    why: str
    """The cause, in words."""
    kind: str
    """The kind of the finding; "placement" where no rule says why ops run elsewhere."""
    share: float = 0.0
    """Its share of the time with costly switches to it, else of the work, else of the ops."""
    remedies: tuple[str, ...] = ()
    """The passes that help, the likeliest first."""
    advice: str = ""
    """What to do where no pass helps."""
    wrong: bool = False
    """Whether the model may fail to load, or give wrong numbers."""
    rule: str = ""
    """The rule of the finding."""
    grade: Grade = Grade.GUESS
    """How well the finding is supported."""
    decibels: float | None = None
    """The PSNR in dB of what fp16 leaves of the op's result; None where that is not known."""

    @property
    def is_risk(self) -> bool:
        """May numbers be wrong, or may the model fail to load?"""
        return self.wrong or self.kind == "numeric" or self.decibels is not None or self.rule in WARNED_LOADS

    @property
    def rank(self) -> tuple[int, bool, float, int, float, int]:
        """Sorts failures first, then costs with a repair, then risks of wrong numbers, then the rest.

        Among failures, those that follow from the model come before those that somebody reported. Among risks
        of wrong numbers, infinities and NaN come first, then the largest error, then what is best supported:
        time does not tell how wrong a number is.
        """
        kinds = (*summary.KINDS, "placement")
        has_repair = self.remedies or (self.advice and self.kind != "placement")
        if self.wrong:
            order = 0
        elif self.is_risk:
            order = 2
        else:
            order = 1 if self.share >= MATTERS and has_repair else 3
        kind = kinds.index(self.kind) if self.kind in kinds else len(kinds)
        loses_digits = order == 2 and self.rule not in NOT_FINITE
        support = [*Grade].index(self.grade) if order == 2 else 0
        expected = 0.0 if self.rule in NOT_FINITE else UNKNOWN_ERROR
        error = expected if self.decibels is None else self.decibels
        return order, self.rule in CLAIMS or loses_digits, error, support, -self.share, kind

    def lines(self, number: int, repair: Repair, two_lines: bool = False) -> Iterator[Text]:
        """Yield the problem with its cause, and below it the command that repairs it, or the advice.

        The problem has one line, and is cut; or up to two with `two_lines`. If the line would end inside the
        cause, it leaves out units and shares.
        """
        words = f"{number}) {self.what}: {self.why}" if self.what else f"{number}) {self.why}"
        wrapped = textwrap.wrap(words, WIDTH, subsequent_indent="   ")
        if two_lines and len(wrapped) <= 2:
            yield from map(plain, wrapped)
        else:
            line = cut(words)
            short = f"{number}) {self.what.partition(' (')[0]}: {self.why}"
            yield cut(short) if self.what and line.plain.endswith("…") else line
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
OFF_THE_ENGINE = "the sizes of the inputs vary, which kept whole models on the CPU of some Macs"
"""Its cause, where a finding doubts that the engine runs such a model; passes then are the lesser reason."""
OF_SIZES = frozenset({RANGE.id, DISPUTED_RANGE.id, RANGE_ELSEWHERE.id})
"""Rules that say the same as `SIZES_FIRST`."""
BOUNDARIES = ("; ", r" \(", r", (?!which |an? |the |though )", " and the ")
"""Patterns at which a line that is too long ends, the best first; else after a word. `--full` shows all."""
LAST_WORD = 20
"""From this many letters on, a word at the end of a line is cut itself."""
WHAT_LENGTH = 56
"""The most letters of a problem's ops, so that its cause has room on their line."""


def first_clauses(words: str, most: int, least: int = 0) -> str:
    """Return the first clauses: more than `least`, at most `most` characters; "" where none ends there."""
    for boundary in BOUNDARIES:
        ends = [match.start() for match in re.finditer(boundary, words)]
        if fitting := [end for end in ends if least < end <= most]:
            return words[: fitting[-1]]
    return ""


def cut(words: str, style: str = "") -> Text:
    """Return a line that fits a terminal, ended at a clause if possible, and never before the cause."""
    if len(words) <= WIDTH:
        return plain(words, style)
    cause = words.find(": ", 0, WIDTH - 1) + 2  # a later colon is not in front of the cause
    least = max(cause, WIDTH // 2)  # no short line
    if shorter := first_clauses(words, WIDTH, least):
        return plain(shorter, style)
    if " " in words[max(least, WIDTH - LAST_WORD) : WIDTH - 1]:
        return plain(f"{words[: words.rindex(' ', 0, WIDTH - 1)]} …", style)
    line = plain(words, style)
    line.truncate(WIDTH, overflow="ellipsis")
    return line


def costs(inspection: Inspection) -> list[Problem]:
    """Return all problems, the most important first; those of one set of ops are one problem.

    Infinities and NaN are a problem of their own, and so are numbers where a rule keeps the ops off the engine:
    it must not hide them.
    """
    rows = {row.name: row for row in summary.all_rows(inspection)}
    by_ops: dict[tuple[tuple[str, ...], bool], Problem] = {}
    for ops, problem in _problems(inspection, rows):
        key = ops or (problem.why,), problem.rule in NOT_FINITE
        if problem.kind == "numeric" and key in by_ops and by_ops[key].kind == "legality":
            key = ("numbers", *ops), problem.rule in NOT_FINITE
        by_ops[key] = _merged(by_ops[key], problem) if key in by_ops else problem
    problems = [problem for problem in by_ops.values() if not _is_negligible(inspection, problem)]
    problems.sort(key=lambda problem: problem.rank)
    if not inspection.fixing:
        return problems
    doubted = inspection.target.uses_ane and any(problem.rule in OF_SIZES for problem in problems)
    first = replace(SIZES_FIRST, why=OFF_THE_ENGINE) if doubted else SIZES_FIRST
    return [first, *(_after_fixing(problem) for problem in problems if problem.rule not in OF_SIZES)]


def _after_fixing(problem: Problem) -> Problem:
    """Return a problem of a model whose sizes vary: its passes come after the sizes are fixed."""
    names = ", ".join(problem.remedies)
    return replace(problem, remedies=(), advice=f"after that: {names}") if names else problem


COSTLY_SWITCHES = 0.1
"""The share of switches of the time from which each op off the engine is a problem, however short it is. Below
it, its repair mostly costs more than the switches: a lookup as a product in a GPT-2 with 2 % of switches."""


def _is_negligible(inspection: Inspection, problem: Problem) -> bool:
    """Does a problem only cost time or memory of ops that take next to no time, without costly switches?"""
    if inspection.time is None or not problem.what or problem.wrong or problem.share >= LEAST:
        return False
    if problem.kind in ("legality", "placement"):
        return inspection.time.parts.get("switches", 0.0) / inspection.time.ms < COSTLY_SWITCHES
    return problem.kind in ("speed", "shape")


def _merged(one: Problem, other: Problem) -> Problem:
    """Return two problems of the same ops as one; of a wrong and another, the wrong one counts.

    Words about time that no pass goes with give way to those that a pass goes with, and to those about numbers.
    """
    if other.wrong and not one.wrong:
        return other
    remedies = tuple(dict.fromkeys((*one.remedies, *other.remedies)))
    is_numeric = other.kind == "numeric"
    gives_way = not one.remedies or (is_numeric and set(one.remedies) <= set(other.remedies))
    if one.kind in ("placement", "speed") and gives_way and (other.remedies or is_numeric):
        return replace(other, remedies=remedies)
    return replace(one, remedies=remedies, advice=one.advice or other.advice, wrong=one.wrong or other.wrong)


def _problems(inspection: Inspection, rows: dict[str, OpRow]) -> Iterator[tuple[tuple[str, ...], Problem]]:
    """Yield (names of the ops, problem); what keeps ops off the engine comes first."""
    for groups in summary.by_reason(summary.attention(inspection)):
        own = list({row.name: row for group in groups for row in group.rows}.values())
        costliest = max(groups, key=lambda group: _share_of(inspection, group.rows).number)
        problem = _problem_of(inspection, own, costliest.why, costliest.finding)
        if costliest.finding is not None or any(row.preferred is not None for row in own):
            yield tuple(sorted(row.name for row in own)), problem
        elif costliest.why == summary.UNDECIDED:
            kind = "undecided" if 2 * len(own) > len(rows) else problem.kind  # of most ops, it is news
            yield (), replace(problem, advice=MEASURE, kind=kind)
    for group in summary.other_findings(inspection):
        own, finding = [rows[name] for name in group.ops if name in rows], group.finding
        if own and all(is_fault_elsewhere(finding, row.legal, row.preferred) for row in own):
            continue
        off = own and is_fault_of_engine(finding) and all(row.preferred not in ("ane", None) for row in own)
        why = finding.message.replace(": ", " if it runs on the Neural Engine: ", 1) if off else finding.message
        yield tuple(sorted(row.name for row in own)), _problem_of(inspection, own, why, finding)


def _problem_of(inspection: Inspection, rows: Sequence[OpRow], why: str, finding: Finding | None) -> Problem:
    share = _share_of(inspection, rows)
    if finding is not None and finding.kind == "legality" and (switches := _switches_to(inspection, rows)):
        share = _Share(share.number + switches, "with switches")
    problem = Problem(
        what=_ops_in_words(rows, share), why=_without_name(why, rows), kind="placement", share=share.number
    )
    if finding is None:
        return problem
    return replace(
        problem,
        kind=finding.kind,
        remedies=(finding.remedy,) if finding.remedy else (),
        advice=finding.advice,
        wrong=_is_wrong(finding),
        rule=finding.rule,
        grade=finding.grade,
        decibels=finding.decibels,
    )


def _switches_to(inspection: Inspection, rows: Sequence[OpRow]) -> float:
    """Return the share of the time that switches to the segments of some ops take; 0 where it is small."""
    if inspection.time is None or not inspection.time.ms:
        return 0.0
    share = inspection.time.parts.get("switches", 0.0) / inspection.time.ms
    every, own = (
        {row.segment for row in some if row.preferred != "ane"} for some in (summary.all_rows(inspection), rows)
    )
    return share * len(own) / len(every) if share >= COSTLY_SWITCHES and every else 0.0


class _Share(NamedTuple):
    """The share of some ops."""

    number: float
    of_what: str
    """In words: of the time, the work or the ops of the whole model; or of the time with switches."""


def _share_of(inspection: Inspection, rows: Sequence[OpRow]) -> _Share:
    """Return the share of some ops: of the time, else of the work, else of all ops."""
    every = summary.all_rows(inspection)
    if inspection.time is not None:
        return _Share(sum(row.ms or 0.0 for row in rows) / inspection.time.ms, "of the time")
    if flop := sum(row.flop for row in every):
        return _Share(sum(row.flop for row in rows) / flop, "of the work")
    return _Share(len(rows) / max(len(every), 1), "of the ops")


def _ops_in_words(rows: Sequence[OpRow], share: _Share) -> str:
    """Return ops in words, such as ``linear logits (CPU, 93% of the time)``; "" for the whole model."""
    if not rows:
        return ""
    op_types, units = {row.op_type for row in rows}, {row.preferred for row in rows}
    op_type = op_types.pop() if len(op_types) == 1 else ""
    unit = units.pop() if len(units) == 1 else None
    remarks = [] if unit in (None, "ane") else [summary.UNIT_WORDS[unit]]
    if share.number >= LEAST:
        remarks.append(f"{percent(share.number)} {share.of_what}")
    more = f" ({', '.join(remarks)})" if remarks else ""
    room = min(max(WHAT_LENGTH - len(op_type) - len(more), 12), 28)
    name = f"{op_type} {short_name(rows[0].name, room)}" if len(rows) == 1 else f"{len(rows):,} {op_type} ops"
    return " ".join(name.split()) + more


def _without_name(why: str, rows: Sequence[OpRow]) -> str:
    """Return a cause without the op's name or type in front, and with short names."""
    why = why.removeprefix(f"%{rows[0].name} is ") if len(rows) == 1 else why
    why = why.removeprefix(f"{rows[0].op_type}: ") if rows else why
    return NAME.sub(lambda name: short_name(name[0], LONGEST), why)


def _is_wrong(finding: Finding) -> bool:
    loads = finding.kind == "load" or finding.rule in FAILING_LOADS
    return (
        loads
        or is_lost(finding)
        or finding.rule in (*MEANT, FIXED_WINDOW.id)
        or is_reported_wrong_here(finding)
        or is_always_nan(finding)
    )


def _in_python(target: Target) -> Repair:
    """Return what writes the call that applies a pass: for the target, so that its report tells the time."""
    more = "" if target.label == "any" else f', target="{target.name}"'
    return lambda name: f'ane.apply(model, "{name}"{more})'


MOST_IMPORTANT = "What matters most:"
STILL = "What still matters:"
"""The line above the problems of a model, and of one that was changed."""


def on_a_screen(
    report: Report,
    inspection: Inspection | None,
    repair: Repair | None = None,
    tried: Mapping[str, Refusal] = MappingProxyType({}),
    title: str = MOST_IMPORTANT,
) -> Report:
    """Return a report with the most important problems below it, as many as fit on a screen.

    Args:
        report: the report that comes first.
        inspection: the inspection of the model; None without one.
        repair: returns the command that applies a pass, by its name; a call in Python by default.
        tried: passes that were tried, and why they were left out. They are not suggested again, unless they
            only took too long and repair numbers or a load.
        title: the line above them.
    """
    report = replace(report, parts=[part for part in report.parts if part])
    room = SCREEN - len(as_text(report).splitlines()) - 1  # lines, without that of the title
    if inspection is None:
        return report
    repair = repair or _in_python(inspection.target)
    problems = [*filter(None, (_without(p, tried) for p in costs(inspection)))]
    shown = _first(problems, max(0, min(MOST, room // 2)))  # each has two lines, or three if there is room
    lines: list[Text] = []
    for number, problem in enumerate(shown, 1):
        spare = room - len(lines) - 2 * (len(shown) - number + 1)
        lines += problem.lines(number, repair, two_lines=spare > 0)
    below = [Line(title, "bold"), *lines] if lines else []
    return replace(report, parts=[*report.parts, *below])


def _first(problems: list[Problem], most: int) -> list[Problem]:
    """Return the first problems; if none is about numbers, the last place goes to the first that is."""
    shown, rest = problems[:most], problems[most:]
    if most < 2 or any(problem.kind in ("numeric", "conversion") for problem in shown):
        return shown
    numbers = [problem for problem in rest if problem.kind == "numeric" and problem.remedies]
    return [*shown[:-1], *numbers[:1]] if numbers else shown


ROWS = 4
"""The most rows of a table on a screen, so that lines below it have room."""


def fitted(report: Report, lines: int) -> Report:
    """Return the first parts of a report, as many as fit: lines are cut at a clause, and tables keep ROWS rows.

    Args:
        report: with what matters most in front.
        lines: how many it may have.
    """
    parts: list[Any] = []
    for part in _in_a_row(report):
        if fitting := next((s for s in _smaller(part) if _height(report, *parts, *s) <= lines), None):
            parts += fitting
    return replace(report, parts=parts)


def _in_a_row(report: Report) -> Iterator[Any]:
    """Yield the parts of a report; those of a report among them come after its title."""
    for part in report.parts:
        if isinstance(part, Report):
            yield part.title
            yield from _in_a_row(part)
        else:
            yield part


def _smaller(part: Any) -> Iterator[list[Any]]:
    """Yield a part of a report, cut to a line or to fewer and fewer rows."""
    if isinstance(part, (str, Line)):
        line = part if isinstance(part, Line) else Line(part)
        yield [cut(" " * line.indent + str(line.words), line.style)]
    elif isinstance(part, Table):
        rows = list(part.rows)
        for most in range(min(ROWS, len(rows)), 0, -1):
            shown, more = first_rows(rows, most)
            yield [replace(part, rows=shown, styles=part.styles[:most], ruled=False, edge=False), *more]
    else:
        yield [part]


def _height(report: Report, *parts: Any) -> int:
    return len(as_text(replace(report, parts=parts)).splitlines())


def _without(problem: Problem, tried: Mapping[str, Refusal]) -> Problem | None:
    """Return a problem without the passes that were tried; None if it had only these.

    A risk keeps a pass that was only too slow.
    """
    done = {name for name, why in tried.items() if not (problem.is_risk and WOULD_RISE in why.reason)}
    remedies = tuple(name for name in problem.remedies if name not in done)
    return None if problem.remedies and not remedies else replace(problem, remedies=remedies)
