"""Show where an estimated time goes: a bar of its sources of cost, the segments, and the dearest ops."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rich.text import Text

from anesurgery.display import short_name
from anesurgery.placement.durations import rounded
from anesurgery.placement.inspection import Inspection
from anesurgery.show import summary
from anesurgery.show.console import WIDTH, bars
from anesurgery.show.report import Table
from anesurgery.show.summary import UNIT_WORDS

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
"""Its colour on a page."""
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
