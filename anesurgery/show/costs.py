"""What matters most in a model: failing loads, wrong numbers, then what takes most time; with its repair.

Where an estimated time goes: a bar of its sources of cost, the segments, and the dearest ops.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rich.text import Text

from anesurgery.display import short_name
from anesurgery.placement.durations import rounded
from anesurgery.placement.evidence import Finding
from anesurgery.placement.findings_in_words import FAILING_LOADS, is_claim, is_lost
from anesurgery.placement.inspection import Inspection, OpRow, percent
from anesurgery.placement.rules.shapes import RANGE
from anesurgery.show import summary
from anesurgery.show.console import WIDTH, as_text, bars, plain
from anesurgery.show.report import Line, Report, Table
from anesurgery.show.summary import UNIT_WORDS

MOST = 3
"""Things in a short report."""
SCREEN = 11
"""Lines of a short report; a command adds three: what it wrote, what to run next, what else there is."""
MATTERS = 0.01
"""Share of the time, or of the work, from which on a cost comes before a risk of wrong numbers."""
LEAST = 0.001
"""Share that is said."""
NAME = re.compile(r"%[\w./:-]+")
LONGEST = 20
"""Characters of a name in a cause."""
Repair = Callable[[str], str]
"""The command that applies a pass, by its name."""


@dataclass(frozen=True)
class Cost:
    """One thing that matters.

    Attributes:
        what: ops in words; "" for the model as a whole.
        why: the cause, in words.
        kind: of the finding; "placement" where no rule says why ops run elsewhere.
        share: of the time, else of the work, else of the ops.
        remedies: the passes that help, the likeliest first.
        advice: what to do where no pass helps.
        wrong: may it fail to load, or give wrong numbers?
        rule: of the finding.
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
    def rank(self) -> tuple[int, float, int]:
        """Failures first, then what takes time and can be helped, risks of wrong numbers, and the rest."""
        kinds, helped = (*summary.KINDS, "placement"), bool(self.remedies or self.advice)
        first = (
            0 if self.wrong else 1 if self.share >= MATTERS and helped else 2 if self.kind == "numeric" else 3
        )
        return first, -self.share, kinds.index(self.kind) if self.kind in kinds else len(kinds)

    def lines(self, number: int, repair: Repair, whole: bool = False) -> Iterator[Text]:
        """The thing with its cause, in one line or as a whole, and below it the command, or what to do."""
        said = f"{number}. {self.what}: {self.why}" if self.what else f"{number}. {self.why}"
        said_in_two = textwrap.wrap(said, WIDTH, subsequent_indent="   ")
        yield from map(plain, said_in_two) if whole and len(said_in_two) <= 2 else [cut(said)]
        if self.remedies:
            yield Text(f"   {repair(self.remedies[0])}", "green", no_wrap=True, overflow="ignore")
        elif self.advice:
            yield cut(f"   {self.advice}", "green")


SIZES_FIRST = Cost(
    "",
    "the sizes of the inputs vary, and most passes need fixed ones",
    "legality",
    advice="fix them first, with the pass fix_shapes; or make several sizes: `anesurgery sizes`",
)
"""What comes before all else in a model of flexible size."""
BOUNDARIES = ("; ", " (", ", ")
"""Where words may end that have no room, the best first: what follows is said by `--full`."""


def cut(words: str, style: str = "") -> Text:
    """A line of a terminal, ended at a clause where the second half has one."""
    ends = (words.rfind(mark, WIDTH // 2, WIDTH + 1) for mark in BOUNDARIES)
    end = next((at for at in ends if at >= 0), None) if len(words) > WIDTH else None
    line = plain(words[:end], style)
    line.truncate(WIDTH, overflow="ellipsis")
    return line


def costs(inspection: Inspection) -> list[Cost]:
    """All things that matter, those that matter most first; what one set of ops suffers is one thing."""
    rows = {row.name: row for row in summary.all_rows(inspection)}
    found: dict[tuple[str, ...], Cost] = {}
    for place, cost in _things(inspection, rows):
        known = found.get(place) if place else None
        found[place or (cost.why,)] = cost if known is None else _both(known, cost)
    matter = sorted(
        (cost for cost in found.values() if not _too_short(inspection, cost)), key=lambda cost: cost.rank
    )
    if not inspection.fixing:
        return matter
    return [SIZES_FIRST, *(_afterwards(cost) for cost in matter if cost.rule != RANGE.id)]


def _afterwards(cost: Cost) -> Cost:
    """A thing in a model whose sizes vary: passes come after the sizes are fixed."""
    names = ", ".join(cost.remedies)
    return replace(cost, remedies=(), advice=f"after that: {names}") if names else cost


def _too_short(inspection: Inspection, cost: Cost) -> bool:
    """Is it about where ops run that take next to no time? Moving them gains nothing that can be told."""
    timed = inspection.time is not None and bool(cost.what)
    return timed and cost.share < LEAST and cost.kind in ("legality", "placement", "speed") and not cost.wrong


def _both(one: Cost, other: Cost) -> Cost:
    remedies = tuple(dict.fromkeys((*one.remedies, *other.remedies)))
    return replace(one, remedies=remedies, advice=one.advice or other.advice, wrong=one.wrong or other.wrong)


def _things(inspection: Inspection, rows: dict[str, OpRow]) -> Iterator[tuple[tuple[str, ...], Cost]]:
    """The names of the ops of each thing, and the thing; what keeps ops off the engine first."""
    for alike in summary.by_reason(summary.attention(inspection)):
        own = list({row.name: row for group in alike for row in group.rows}.values())
        first = alike[0]
        if first.finding is not None or any(row.preferred is not None for row in own):
            yield tuple(sorted(row.name for row in own)), _cost(inspection, own, first.why, first.finding)
    for ruled in summary.other_findings(inspection):
        own = [rows[name] for name in ruled.ops if name in rows]
        yield (
            tuple(sorted(row.name for row in own)),
            _cost(inspection, own, ruled.finding.message, ruled.finding),
        )


def _cost(inspection: Inspection, rows: Sequence[OpRow], why: str, finding: Finding | None) -> Cost:
    share, of_what = _share(inspection, rows)
    said: dict[str, Any] = {}
    if finding is not None:
        said = {"advice": finding.advice, "wrong": _is_wrong(finding), "rule": finding.rule}
    return Cost(
        _named(rows, share, of_what),
        _without_name(why, rows),
        "placement" if finding is None else finding.kind,
        share,
        (finding.remedy,) if finding is not None and finding.remedy else (),
        **said,
    )


def _share(inspection: Inspection, rows: Sequence[OpRow]) -> tuple[float, str]:
    """What ops take of the whole: of the time, else of the work, else of the ops."""
    every = summary.all_rows(inspection)
    if inspection.time is not None:
        return sum(row.ms or 0.0 for row in rows) / inspection.time.ms, "time"
    if flop := sum(row.flop for row in every):
        return sum(row.flop for row in rows) / flop, "work"
    return len(rows) / max(len(every), 1), "ops"


def _named(rows: Sequence[OpRow], share: float, of_what: str) -> str:
    """``linear logits (CPU, 93% of the time)``; "" for the model as a whole."""
    if not rows:
        return ""
    kinds, units = {row.op_type for row in rows}, {row.preferred for row in rows}
    kind = kinds.pop() if len(kinds) == 1 else ""
    name = f"{kind} {short_name(rows[0].name)}" if len(rows) == 1 else f"{len(rows):,} {kind} ops"
    unit = units.pop() if len(units) == 1 else None
    said = [] if unit in (None, "ane") else [summary.UNIT_WORDS[unit]]
    said += [f"{percent(share)} of the {of_what}"] if share >= LEAST else []
    return " ".join(name.split()) + (f" ({', '.join(said)})" if said else "")


def _without_name(why: str, rows: Sequence[OpRow]) -> str:
    """A cause without the name of the op that stands before it, and with short names."""
    why = why.removeprefix(f"%{rows[0].name} is ") if len(rows) == 1 else why
    return NAME.sub(lambda name: short_name(name[0], LONGEST), why)


def _is_wrong(finding: Finding) -> bool:
    return finding.kind == "load" or finding.rule in FAILING_LOADS or is_lost(finding) or is_claim(finding)


def in_python(name: str) -> str:
    """The call that applies a pass."""
    return f'ane.apply(model, "{name}")'


def on_a_screen(
    report: Report, inspection: Inspection | None, repair: Repair, tried: Collection[str] = ()
) -> Report:
    """A report, and below it the things that matter most, as many as fit on a screen.

    Args:
        report: what comes first.
        inspection: of the model that is left; None where nobody looked at it.
        repair: the command that applies a pass, by its name.
        tried: passes that were tried, and are not named again.
    """
    report = replace(report, parts=[part for part in report.parts if part])
    room = SCREEN - len(as_text(report).splitlines()) - 1
    every = [] if inspection is None else costs(inspection)
    left = [replace(one, remedies=tuple(name for name in one.remedies if name not in tried)) for one in every]
    most = [new for old, new in zip(every, left, strict=True) if new.remedies or not old.remedies]
    below: list[Text] = []
    for k, cost in enumerate(shortest := most[: max(0, min(MOST, room // 2))], 1):
        spare = room - len(below) - 2 * (len(shortest) - k + 1)
        below += cost.lines(k, repair, whole=spare > 0)
    matters = [Line("What matters most:", "bold"), *below] if below else []
    return replace(report, parts=[*report.parts, *matters])


LOOKS = {
    "products": ("█", "cyan"),
    "memory": ("▓", "blue"),
    "weights": ("▒", "green"),
    "waiting": ("░", "bright_black"),
    "CPU": ("▃", "yellow"),
    "switches": ("▚", "red"),
    "dispatch": ("·", "white"),
}
"""Source of cost -> what a cell of the bar looks like, and its colour in a terminal."""
COLOURS = dict(
    zip(LOOKS, ("#2f86c9", "#5b6fb5", "#3f9a66", "#8b949d", "#cf7a1f", "#c4473c", "#b9a44c"), strict=True)
)
"""Look of a part -> its colour on a page."""
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
"""Ops that are listed, the dearest first: as many as fit on a screen; JSON has all."""
SEGMENTS = 6
"""Segments that are listed; the page has them all."""


@dataclass(frozen=True)
class Share:
    """A part of a time: its name, milliseconds, share of the whole, and what it is, in words."""

    name: str
    ms: float
    share: float
    what: str = ""


def parts(inspection: Inspection) -> list[Share]:
    """The sources of cost, the largest first; none without a time."""
    if (time := inspection.time) is None:
        return []
    shares = [Share(name, ms, ms / time.ms, WHAT[name]) for name, ms in time.parts.items() if ms > 0]
    return sorted(shares, key=lambda one: -one.ms)


def segments(inspection: Inspection) -> list[Share]:
    """The segments that take longest; none where there is one only."""
    timed = [(part, s) for _, part in summary.sections(inspection) for s in part.segments if s.ms]
    if inspection.time is None or len(timed) < 2:
        return []
    longest = [
        Share(
            f"segment {s.index}",
            s.ms or 0.0,
            (s.ms or 0.0) / inspection.time.ms,
            f"{UNIT_WORDS[s.unit]}, {summary.counted(len(s.ops), 'op')}",
        )
        for _, s in timed
    ]
    return sorted(longest, key=lambda one: -one.ms)


def dearest(inspection: Inspection) -> list[Share]:
    """The ops that take longest, `DEAREST` at most."""
    if (time := inspection.time) is None:
        return []
    rows = sorted((r for r in summary.all_rows(inspection) if r.ms), key=lambda r: -(r.ms or 0.0))
    return [Share(r.name, r.ms or 0.0, (r.ms or 0.0) / time.ms, r.op_type) for r in rows[:DEAREST]]


def cells(shares: list[Share], width: int) -> list[tuple[str, int]]:
    """How many cells of a bar each source of cost has; one at least."""
    counts = [max(round(one.share * width), 1) for one in shares]
    if counts:
        counts[0] += width - sum(counts)
    return [(one.name, count) for one, count in zip(shares, counts, strict=True)]


def in_words(ms: float) -> str:
    """A duration, in the unit of the whole: "12.3 ms", "0.045 ms"."""
    return f"{rounded(ms, 3)} ms"


def time_bar(inspection: Inspection, width: int = BAR) -> Text:
    """The sources of cost as a bar, and a legend."""
    shares = parts(inspection)
    legend = {one.name: f"{one.name} {in_words(one.ms)} ({summary.percent(one.share)})" for one in shares}
    return bars([("", cells(shares, width))], legend, LOOKS)


def time_parts(inspection: Inspection) -> list[Any]:
    """Where the time goes, for a report; nothing without a time."""
    if (time := inspection.time) is None:
        return []
    source = summary.counted(time.measurements, "published time") if time.measurements else time.source
    title = Text("where the time goes", "bold").append(f"  {time}, from {source}", "not bold")
    rows = [
        (short_name(one.name), one.what, in_words(one.ms), summary.percent(one.share))
        for one in (*segments(inspection)[:SEGMENTS], *dearest(inspection))
    ]
    return [Text(), title, time_bar(inspection), Table((), rows)]
