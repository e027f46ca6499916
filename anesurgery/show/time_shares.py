"""Show where an estimated time goes: a bar of its sources, the slowest segments and ops."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from rich.text import Text

from anesurgery.display import counted
from anesurgery.placement.durations import rounded
from anesurgery.placement.inspection import Inspection
from anesurgery.show import summary
from anesurgery.show.console import WIDTH, bars
from anesurgery.show.report import Table

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
LABELS = {
    "products": "products on the engine",
    "memory": "moving numbers on the engine",
    "weights": "reading weights on any unit",
    "waiting": "small ops waiting for one another",
    "CPU": "computing on the CPU",
    "switches": "switches of the unit",
    "dispatch": "starting a prediction",
}
"""Source of cost -> what takes that time."""
BAR = WIDTH - 4
"""The cells of a bar."""
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
    return _slowest_first(time.ms, ((name, ms, LABELS[name]) for name, ms in time.parts.items() if ms > 0))


def _slowest_first(total: float, rows: Iterable[tuple[str, float, str]]) -> list[TimeShare]:
    """Return the shares of a time from rows of (name, milliseconds, explanation)."""
    shares = [TimeShare(name, ms, ms / total, what) for name, ms, what in rows]
    return sorted(shares, key=lambda one: -one.ms)


def segments(inspection: Inspection) -> list[TimeShare]:
    """Return the segments that take longest; [] where there is only one."""
    timed = [
        (f"segment {s.index}", s.ms, f"{summary.UNIT_WORDS[s.unit]}, {counted(len(s.ops), 'op')}")
        for _, part in summary.sections(inspection)
        for s in part.segments
        if s.ms
    ]
    return [] if inspection.time is None or len(timed) < 2 else _slowest_first(inspection.time.ms, timed)


def dearest(inspection: Inspection) -> list[TimeShare]:
    """Return the ops that take longest, at most `DEAREST`."""
    rows = [(row.name, row.ms, row.op_type) for row in summary.all_rows(inspection) if row.ms]
    return [] if inspection.time is None else _slowest_first(inspection.time.ms, rows)[:DEAREST]


def cells(shares: list[TimeShare], width: int) -> list[tuple[str, int]]:
    """Return how many cells of a bar each source of cost has, at least one; the first takes the rounding."""
    counts = [max(round(one.share * width), 1) for one in shares]
    if counts:
        counts[0] += width - sum(counts)
    return [(one.name, count) for one, count in zip(shares, counts, strict=True)]


def in_words(ms: float) -> str:
    """Return a duration in words: "12.3 ms", "0.045 ms"."""
    return f"{rounded(ms, 3)} ms"


def time_bar(inspection: Inspection) -> Text:
    """Return the sources of cost as a bar, with a legend."""
    shares = parts(inspection)
    legend = {one.name: f"{one.what} {in_words(one.ms)} ({summary.percent(one.share)})" for one in shares}
    return bars([("", cells(shares, BAR))], legend, LOOKS)


def time_parts(inspection: Inspection) -> list[Any]:
    """Return the parts of a report on where the time goes; [] without a time."""
    if (time := inspection.time) is None:
        return []
    source = counted(time.measurements, "published time") if time.measurements else time.source
    title = Text("where the time goes", "bold").append(f"  {time}, from {source}", "not bold")
    rows = [
        (one.name, one.what, in_words(one.ms), summary.percent(one.share))
        for one in (*segments(inspection)[:SEGMENTS], *dearest(inspection))
    ]
    return [Text(), title, time_bar(inspection), Table((), rows)]
