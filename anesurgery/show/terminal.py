"""Show an inspection in a terminal: a bar of compute units, the ops that need attention, findings, notes.

Units differ in height as well as in colour, so that the bar can be read without colour.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich.rule import Rule
from rich.text import Text

from anesurgery.display import counted
from anesurgery.placement.durations import SHORTEST, rounded
from anesurgery.placement.evidence import Finding
from anesurgery.placement.inspection import Inspection
from anesurgery.show import summary
from anesurgery.show.console import WIDTH, bars, plain, shows
from anesurgery.show.costs import STILL, Repair, on_a_screen
from anesurgery.show.headline import compared_shares
from anesurgery.show.report import Line, Listing, Report, Table
from anesurgery.show.summary import LEGAL_WORDS, UNIT_WORDS
from anesurgery.show.time_shares import LOOKS, time_parts

BAR = WIDTH - 4
"""Cells of the device bar."""

GLYPHS: dict[str | None, tuple[str, str]] = {
    "ane": ("█", "cyan"),
    "gpu": ("▆", "magenta"),
    "cpu": ("▃", "yellow"),
    None: ("░", "bright_black"),
}
"""Unit -> (glyph of its cells in the bar, colour)."""
UNITS = tuple(GLYPHS)
GLYPHS |= {part: LOOKS[part] for part in ("switches", "dispatch")}  # in bars of time: what belongs to no unit

LEGEND = UNIT_WORDS | {None: "not known", "switches": "switches", "dispatch": "dispatch"}
SIDES = ("before", "after")
LEGAL_STYLES = {LEGAL_WORDS[False]: "red", LEGAL_WORDS[None]: "bright_black"}
STATUS_STYLES = ("green", "yellow", "red")


def device_bar(inspection: Inspection) -> Text:
    """Return the ops in file order as a bar, with a legend of counts."""
    counts = {unit: f"{LEGEND[unit]} {count:,}" for unit, count in summary.ordered_counts(inspection)}
    return bars([("", _cells(inspection, BAR))], counts, GLYPHS)


def _cells(inspection: Inspection, width: int) -> list[tuple[str | None, int]]:
    """Return the runs of cells of a bar."""
    return [(u, len(list(same))) for u, same in itertools.groupby(summary.cells(inspection, width))]


def status_line(inspection: Inspection) -> Text:
    """Return residency, in the colour of the status; segments, switches, time and memory on the next line."""
    has_flop = summary.has_flop(inspection)
    flop = f"{summary.share_words(inspection, 'flop')} of the work" if has_flop else "work not counted"
    memory = summary.memory_words(inspection)
    segments = sum(len(part.segments) for _, part in summary.sections(inspection))
    share = f"on the Neural Engine: {summary.share_words(inspection, 'ops')} of ops, {flop}"
    more = [f"{counted(segments, 'segment')}, {counted(inspection.switches, 'switch')}"]
    more += [] if inspection.time is None else [f"time {inspection.time}"]
    more += [memory] if memory else []
    line = Text(share, style=f"bold {STATUS_STYLES[inspection.status]}")
    return line.append(f"\n{' | '.join(more)}", style="not bold default")


MOST_LETTERS = 70
"""The most letters of a source."""


def evidence_words(finding: Finding | None) -> str:
    """Return grade and source of a finding, the source cut."""
    if finding is None:
        return ""
    source = finding.source.split(";")[0].strip().removeprefix("Apple: ")
    cut = source if len(source) <= MOST_LETTERS else source[: MOST_LETTERS - 1].rstrip(" ,") + "…"
    return f"{finding.grade.value}: {cut}" if cut else finding.grade.value


def _sentences(words: str, others: int, finding: Finding | None) -> list[Any]:
    """Return why, the evidence, and what to do where no pass exists."""
    why = plain(words)
    if others:
        why.append(f" (and {others} more)", "dim")
    if finding is None:
        return [why]
    advice = finding.remedy is None and finding.advice
    evidence = Line(evidence_words(finding), "dim")
    return [why, evidence, *([Line(f"do: {finding.advice}", "green")] if advice else [])]


def _repair_cell(finding: Finding | None) -> Line:
    return Line(finding.remedy, "green") if finding and finding.remedy else Line("none", "dim")


def _titled_list(title: str, listing: Listing) -> list[Any]:
    """Return a list below its title; [] where it is empty."""
    return [Text(), Line(title, "bold"), listing] if listing.entries else []


def _attention_list(inspection: Inspection) -> list[Any]:
    entries: list[tuple[Sequence[Any], Sequence[Any]]] = []
    for alike in summary.by_reason(summary.attention(inspection)):
        rows = [
            (
                Line(g.op_type, "bold"),
                f"{len(g.rows):,}",
                g.rows[0].name,
                Line(g.legal, LEGAL_STYLES.get(g.legal, "")),
                g.preferred,
                _repair_cell(g.finding),
            )
            for g in alike
        ]
        others = len({m for g in alike for m in g.messages}) - 1
        below = _sentences(alike[0].why, others, alike[0].finding)
        entries += [*((cells, ()) for cells in rows[:-1]), (rows[-1], below)]
    head = ("op type", "ops", "first op", "can run", "runs on", "repair")
    return _titled_list("ops that need attention", Listing(head, entries))


def _findings_list(inspection: Inspection) -> list[Any]:
    entries = [
        (
            (
                Line(g.finding.kind, "bold"),
                g.finding.rule,
                f"{len(g.ops):,}" if g.ops else "",
                g.ops[0] if g.ops else "",
                _repair_cell(g.finding),
            ),
            _sentences(g.finding.message, len(g.messages) - 1, g.finding),
        )
        for g in summary.other_findings(inspection)
    ]
    head = ("finding", "rule", "ops", "first op", "repair")
    return _titled_list("the model, its speed and its numbers", Listing(head, entries))


def _measured_list(inspection: Inspection) -> list[Any]:
    if not inspection.measured:
        return []
    compared = summary.agreements(inspection)
    entries = [
        (
            (
                UNIT_WORDS[a.predicted],
                UNIT_WORDS[a.measured],
                Line("as predicted", "green") if a.agrees else Line("differs", "red"),
                Line(a.op_type, "bold"),
                f"{len(a.rows):,}",
                a.rows[0].name,
            ),
            (),
        )
        for a in compared
    ]
    title = Text("predicted beside measured: ", "bold").append(summary.agreement_words(compared), "not bold")
    return [Text(), title, Listing(("predicted", "measured", "", "op type", "ops", "first op"), entries)]


def _section(inspection: Inspection) -> list[Any]:
    tables = [
        *time_parts(inspection),
        *_attention_list(inspection),
        *_measured_list(inspection),
        *_findings_list(inspection),
    ]
    return [device_bar(inspection), status_line(inspection), *tables]


@shows("Inspection", "details")
def inspection_report(inspection: Inspection) -> Report:
    """Report an inspection as a bar, a line and tables, with a section for each part of a pipeline."""
    parts: list[Any] = [Line(f"{inspection.model} on {inspection.target}", "dim")]
    if inspection.parts:
        parts += [device_bar(inspection), status_line(inspection), *time_parts(inspection)]
        for name, part in summary.sections(inspection):
            parts += [Text(), Rule(plain(name or inspection.model), align="left"), *_section(part)]
        own = Inspection(inspection.model, inspection.target, (), findings=inspection.findings)
        parts += _findings_list(own) if inspection.ops == () else []
    else:
        parts += _section(inspection)
    if notes := [Line(f"- {note}", "dim") for note in summary.notes(inspection)]:
        parts += [Text(), Line("notes", "bold"), *notes]
    return Report(summary.full_sentence(inspection), parts)


@shows("Inspection", "rich", "text")
def short_report(inspection: Inspection, repair: Repair | None = None) -> Report:
    """Report an inspection on one screen: a sentence, the bar, and what matters most with its repair.

    Args:
        inspection: what is shown.
        repair: the command that applies a pass, by its name; a call in Python by default.
    """
    words = summary.agreement_words(summary.agreements(inspection))
    plan = [f"Core ML's plan: {words}"] if inspection.measured else []
    return on_a_screen(
        Report(summary.short_sentence(inspection), [unit_bars(inspection), *plan]), inspection, repair
    )


def short_difference(
    before: Inspection, after: Inspection, repair: Repair | None = None, *lines: Any
) -> Report:
    """Report two inspections of one model on one screen: a sentence, both bars, and what still matters."""
    report = Report(compared_shares(before, after), [unit_bars(before, after), *lines])
    return on_a_screen(report, after, repair, title=STILL)


def unit_bars(*inspections: Inspection) -> Text:
    """Return one bar, or one before and one after, of the units of a model, with a legend.

    Where all times are known the bars show the time on each unit, on one scale: 14.9 ms on 60 cells, 1.89 ms
    on 8. Else they show the units of the ops in file order.
    """
    times = [time_by_unit(one) for one in inspections]
    if all(times):
        return _bars_of_time(times)
    sides = _labels([""] * len(inspections))
    counts = [dict(summary.ordered_counts(one)) for one in inspections]
    legend = {
        unit: f"{LEGEND[unit]} {words}"
        for unit in UNITS
        if (words := _moved(unit, counts, "{:,}".format)) != "0"
    }
    runs = [_cells(one, BAR - len(side)) for side, one in zip(sides, inspections, strict=True)]
    return bars(list(zip(sides, runs, strict=True)), legend, GLYPHS)


def time_by_unit(inspection: Inspection) -> dict[str | None, float]:
    """Return the estimated ms on each unit, of switches and of the dispatch; {} where no time is shown."""
    timed = [(s.unit, s.ms) for _, part in summary.sections(inspection) for s in part.segments if s.ms]
    if inspection.time is None or inspection.time.ms < SHORTEST or not timed:
        return {}
    times = {unit: sum(ms for at, ms in timed if at == unit) for unit in UNITS}
    rest = max(inspection.time.ms - sum(times.values()), 0.0)
    switches = min(inspection.time.parts.get("switches", 0.0), rest)
    return {**times, "switches": switches, "dispatch": rest - switches}


def _bars_of_time(times: Sequence[Mapping[str | None, float]]) -> Text:
    """Return bars of milliseconds on one scale: CPU and engine always, the rest if it fills a cell of a bar."""
    totals = [sum(time.values()) for time in times]
    sides = _labels([f"{rounded(total, 3)} ms" for total in totals])
    cells_per_ms = (BAR - len(sides[0])) / max(totals)
    longest = {unit: max(time[unit] for time in times) for unit in LEGEND}
    shown = [unit for unit, ms in longest.items() if ms * cells_per_ms >= 1 or (ms and unit in ("ane", "cpu"))]
    legend = {unit: f"{LEGEND[unit]} {_moved(unit, times, rounded)} ms" for unit in shown}
    runs = [
        [(unit, max(round(time[unit] * cells_per_ms), 1)) for unit in shown if time[unit]] for time in times
    ]
    return bars(list(zip(sides, runs, strict=True)), legend, GLYPHS)


def _labels(ends: Sequence[str]) -> Sequence[str]:
    """Return the labels of two bars, each with words at its end, in one width; one bar has none."""
    if len(ends) < 2:
        return [""]
    words = [f"{side} {end}".rstrip() for side, end in zip(SIDES, ends, strict=True)]
    return [word.ljust(max(map(len, words)) + 1) for word in words]


def _moved(unit: str | None, amounts: Sequence[Mapping[str | None, Any]], word: Callable[[Any], str]) -> str:
    """Return the amounts of a unit in words: "97", or "97 -> 99" where they differ."""
    return " -> ".join(dict.fromkeys(word(one.get(unit, 0)) for one in amounts))


def difference_report(before: Inspection, after: Inspection) -> Report:
    """Report two inspections of one model: bars, numbers, findings that are gone or new."""
    styles, words = {True: "green", False: "red", None: "dim"}, {True: "better", False: "worse", None: ""}
    rows = []
    for c in summary.changes(before, after):
        moved = styles[c.better] if c.before != c.after else "dim"
        rows.append((c.label, c.before, Line(c.after, moved), Line(words[c.better], moved)))
    gone, new = summary.gone_and_new(before, after)
    lines = [Line(f"- {n:,} gone: {g.finding.rule}: {g.finding.message}", "green") for g, n in gone]
    lines += [Line(f"+ {n:,} new: {g.finding.rule}: {g.finding.message}", "red") for g, n in new]
    bars = ["before", device_bar(before), "after", device_bar(after)]
    return Report(
        compared_shares(before, after),
        [
            Line(f"{before.model} on {after.target}", "dim"),
            *bars,
            Table(("", "before", "after", ""), rows, edge=False),
            *(lines or [Line("the findings are the same", "dim")]),
        ],
    )
