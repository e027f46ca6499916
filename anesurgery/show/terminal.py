"""Show an inspection in a terminal: a bar of devices, the ops that need attention, findings, notes.

Units differ in height as well as in colour, so that the bar reads without colour too.
"""

from __future__ import annotations

import itertools
from typing import Any

from rich import box
from rich.console import Group
from rich.padding import Padding
from rich.rule import Rule as Line
from rich.table import Table
from rich.text import Text

from anesurgery.display import draws, short_name
from anesurgery.placement.evidence import Finding
from anesurgery.placement.inspection import Inspection
from anesurgery.show import summary
from anesurgery.show.console import WIDTH, as_text, plain
from anesurgery.show.costs import Repair, in_python, on_a_screen
from anesurgery.show.headline import compared_shares
from anesurgery.show.summary import LEGAL_WORDS, UNIT_WORDS
from anesurgery.show.times import time_group

BAR = WIDTH - 4
"""Cells of the device bar."""

GLYPHS: dict[str | None, tuple[str, str]] = {
    "ane": ("█", "cyan"),
    "gpu": ("▆", "magenta"),
    "cpu": ("▃", "yellow"),
    None: ("░", "bright_black"),
}
"""Unit -> what a cell of the bar looks like, and its colour."""

LEGEND: dict[str | None, str] = {"ane": "Neural Engine", "gpu": "GPU", "cpu": "CPU", None: "not known"}
SIDES = ("before", "after")
LEGAL_STYLES = {LEGAL_WORDS[False]: "red", LEGAL_WORDS[None]: "bright_black"}
STATUS_STYLES = ("green", "yellow", "red")
SHOWN = 30
"""Entries of a list at most; the page has them all."""
CELL = 28
"""Characters of a column at most."""
GAP = "  "
"""Between columns."""


def device_bar(inspection: Inspection, width: int = BAR) -> Text:
    """The ops in file order, a cell for a share of them, and a legend with counts."""
    bar = Text()
    _append_bar(bar, inspection, width)
    bar.append("\n" if bar else "")
    for unit, count in summary.ordered_counts(inspection):
        glyph, style = GLYPHS[unit]
        bar.append(glyph, style)
        bar.append(f" {LEGEND[unit]} {count:,}   ")
    bar.rstrip()
    return bar


def _append_bar(text: Text, inspection: Inspection, width: int) -> None:
    """The cells of a bar behind a text."""
    for unit, group in itertools.groupby(summary.cells(inspection, width)):
        glyph, style = GLYPHS[unit]
        text.append(glyph * len(list(group)), style)


def status_line(inspection: Inspection) -> Text:
    """Status and residency in a line; segments, switches, time and memory in the next."""
    counted = summary.has_flop(inspection)
    flop = f"{summary.share_words(inspection, 'flop')} of the work" if counted else "work not counted"
    memory = summary.memory_words(inspection)
    segments = sum(len(part.segments) for _, part in summary.sections(inspection))
    share = f" | on the ANE: {summary.share_words(inspection, 'ops')} of ops, {flop}"
    more = [f"{summary.counted(segments, 'segment')}, {summary.counted(inspection.switches, 'switch')}"]
    more += [] if inspection.time is None else [f"time {inspection.time}"]
    more += [memory] if memory else []
    line = Text(f"status {inspection.status}", style=f"bold {STATUS_STYLES[inspection.status]}")
    return line.append(f"{share}\n{' | '.join(more)}", style="not bold default")


def evidence_words(finding: Finding | None, length: int = 70) -> str:
    """Grade and source of a finding, the source cut to a length."""
    if finding is None:
        return ""
    source = finding.source.split(";")[0].strip().removeprefix("Apple: ")
    cut = source if len(source) <= length else source[: length - 1].rstrip(" ,") + "…"
    return f"{finding.grade.value}: {cut}" if cut else finding.grade.value


def _sentences(words: str, others: int, finding: Finding | None) -> list[Text]:
    """Why, how it is known, and what to do where no pass exists."""
    why = plain(words)
    if others:
        why.append(f" (and {others} more)", "dim")
    if finding is None:
        return [why]
    advice = finding.remedy is None and finding.advice
    evidence = plain(evidence_words(finding), "dim")
    return [why, evidence, *([plain(f"do: {finding.advice}", "green")] if advice else [])]


def _name(name: str) -> Text:
    return plain(short_name(name, CELL))


def _remedy(finding: Finding | None) -> Text:
    return plain(finding.remedy, "green") if finding and finding.remedy else Text("none", "dim")


def _listing(header: tuple[str, ...], entries: list[tuple[list[Text], list[Text]]]) -> list[Any]:
    """A line of columns for each entry, and sentences below it, which have the whole width."""
    widths = _widths(header, [cells for cells, _ in entries])
    shown: list[Any] = [_columns([Text(name, "dim underline") for name in header], widths)]
    for cells, sentences in entries[:SHOWN]:
        shown += [_columns(cells, widths), *(Padding(s, (0, 0, 0, 4), expand=False) for s in sentences)]
    left = len(entries) - SHOWN
    return shown + ([Text(f"and {left:,} more; the page has all", "dim")] if left > 0 else [])


def _widths(header: tuple[str, ...], rows: list[list[Text]]) -> list[int]:
    """Characters of each column: what it needs, and of the widest ones less until a line has room for all."""
    widths = [min(max(len(name), *(row[k].cell_len for row in rows)), CELL) for k, name in enumerate(header)]
    while sum(widths) + len(GAP) * (len(widths) - 1) > WIDTH:
        widths[widths.index(max(widths))] -= 1
    return widths


def _columns(cells: list[Text], widths: list[int]) -> Text:
    for cell, width in zip(cells, widths, strict=True):
        cell.truncate(width, overflow="ellipsis", pad=True)
    line = Text(GAP).join(cells)
    line.rstrip()
    return line


def _attention(inspection: Inspection) -> list[Any]:
    entries: list[tuple[list[Text], list[Text]]] = []
    for alike in summary.by_reason(summary.attention(inspection)):
        entries += [
            (
                [
                    plain(g.op_type, "bold"),
                    Text(f"{len(g.rows):,}"),
                    _name(g.rows[0].name),
                    Text(g.legal, LEGAL_STYLES.get(g.legal, "")),
                    Text(g.preferred),
                    _remedy(g.finding),
                ],
                [],
            )
            for g in alike
        ]
        others = len({m for g in alike for m in g.messages}) - 1
        entries[-1][1].extend(_sentences(alike[0].why, others, alike[0].finding))
    if not entries:
        return []
    header = ("op type", "ops", "first op", "can run", "runs on", "repair")
    return [Text("\nops that need attention", "bold"), *_listing(header, entries)]


def _findings(inspection: Inspection) -> list[Any]:
    entries = [
        (
            [
                plain(g.finding.kind, "bold"),
                plain(g.finding.rule),
                Text(f"{len(g.ops):,}" if g.ops else ""),
                _name(g.ops[0] if g.ops else ""),
                _remedy(g.finding),
            ],
            _sentences(g.finding.message, len(g.messages) - 1, g.finding),
        )
        for g in summary.other_findings(inspection)
    ]
    if not entries:
        return []
    header = ("finding", "rule", "ops", "first op", "repair")
    title = Text("\nthe model, its speed and its numbers", "bold")
    return [title, *_listing(header, entries)]


def _measured(inspection: Inspection) -> list[Any]:
    if not inspection.measured:
        return []
    compared = summary.agreements(inspection)
    entries: list[tuple[list[Text], list[Text]]] = [
        (
            [
                Text(UNIT_WORDS[a.predicted]),
                Text(UNIT_WORDS[a.measured]),
                Text("as predicted", "green") if a.agrees else Text("differs", "red"),
                plain(a.op_type, "bold"),
                Text(f"{len(a.rows):,}"),
                _name(a.rows[0].name),
            ],
            [],
        )
        for a in compared
    ]
    header = ("predicted", "measured", "", "op type", "ops", "first op")
    title = Text("\npredicted beside measured: ", "bold")
    title.append(summary.agreement_words(compared), "not bold")
    return [title, *(_listing(header, entries) if entries else [])]


def _section(inspection: Inspection) -> list[Any]:
    tables = [*time_group(inspection), *_attention(inspection), *_measured(inspection), *_findings(inspection)]
    return [device_bar(inspection), status_line(inspection), *tables]


def inspection_group(inspection: Inspection) -> Group:
    """An inspection as a bar, a line and tables, for a rich console; a section for each part of a pipeline."""
    title = plain(inspection.model, "dim").append_text(plain(f" on {inspection.target}", "dim"))
    shown: list[Any] = [plain(summary.verdict(inspection), "bold"), title]
    if inspection.parts:
        shown += [device_bar(inspection), status_line(inspection), *time_group(inspection)]
        for name, part in summary.sections(inspection):
            shown += [Text(), Line(plain(name or inspection.model), align="left"), *_section(part)]
        own = Inspection(inspection.model, inspection.target, (), findings=inspection.findings)
        shown += _findings(own) if inspection.ops == () else []
    else:
        shown += _section(inspection)
    notes = summary.notes(inspection)
    shown += [Text("\nnotes", "bold")] * bool(notes) + [plain(f"- {n}", "dim") for n in notes]
    return Group(*shown)


def short_group(inspection: Inspection, repair: Repair = in_python) -> Group:
    """An inspection on one screen: a sentence, the bar, and what matters most with its repair.

    Args:
        inspection: what is shown.
        repair: the command that applies a pass, by its name.
    """
    lines = [plain(summary.headline(inspection), "bold"), device_bar(inspection)]
    if inspection.measured:
        words = summary.agreement_words(summary.agreements(inspection))
        lines.append(Text(f"Core ML's plan: {words}"))
    return on_a_screen(lines, inspection, repair)


def short_difference(before: Inspection, after: Inspection, repair: Repair = in_python, *lines: Any) -> Group:
    """Two inspections of one model on one screen: a sentence, both bars, and what still matters."""
    first = plain(compared_shares(before, after), "bold")
    return on_a_screen([first, two_bars(before, after), *lines], after, repair)


def two_bars(before: Inspection, after: Inspection) -> Text:
    """A bar before and one after, and one legend with the counts of both."""
    bars, label = Text(), max(map(len, SIDES)) + 1
    for side, inspection in zip(SIDES, (before, after), strict=True):
        bars.append(side.ljust(label))
        _append_bar(bars, inspection, BAR - label)
        bars.append("\n")
    counts = [dict(summary.ordered_counts(inspection)) for inspection in (before, after)]
    for unit, (glyph, style) in GLYPHS.items():
        old, new = (count.get(unit, 0) for count in counts)
        if old or new:
            bars.append(glyph, style)
            bars.append(f" {LEGEND[unit]} {f'{old:,} -> {new:,}' if old != new else f'{old:,}'}   ")
    bars.rstrip()
    return bars


@draws("Inspection", "text")
def inspection_text(inspection: Inspection) -> str:
    """An inspection as plain text, on one screen."""
    return as_text(short_group(inspection))


@draws("Inspection", "details")
def inspection_details(inspection: Inspection) -> str:
    """All that is said of an inspection, as plain text."""
    return as_text(inspection_group(inspection))


def difference_group(before: Inspection, after: Inspection) -> Group:
    """Two inspections of one model, before and after a surgery: bars, numbers, findings gone and new."""
    table = Table("", "before", "after", "", box=box.SIMPLE_HEAD, pad_edge=False)
    styles = {True: "green", False: "red", None: "dim"}
    words = {True: "better", False: "worse", None: ""}
    for c in summary.changes(before, after):
        moved = styles[c.better] if c.before != c.after else "dim"
        table.add_row(c.label, c.before, Text(c.after, moved), Text(words[c.better], moved))
    gone, new = summary.gone_and_new(before, after)
    lines = [plain(f"- {n:,} gone: {g.finding.rule}: {g.finding.message}", "green") for g, n in gone]
    lines += [plain(f"+ {n:,} new: {g.finding.rule}: {g.finding.message}", "red") for g, n in new]
    first = plain(compared_shares(before, after), "bold")
    title = plain(f"{before.model} on {after.target}", "dim")
    bars = [Text("before"), device_bar(before), Text("after"), device_bar(after)]
    return Group(first, title, *bars, table, *(lines or [Text("the findings are the same", "dim")]))
