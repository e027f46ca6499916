"""Show an inspection as one HTML file that needs no network, and as a notebook cell.

Verdict, bars, graph and findings are plain HTML and SVG. Only the table of ops is drawn by a script, from data
in the page, so that thousands of rows stay light and sort at once. All names are escaped by jinja2. The classes
here hold what the templates `page.html` and `cell.html` read.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from anesurgery.byte_counts import byte_words
from anesurgery.display import draws, short_name
from anesurgery.placement.inspection import Inspection, OpRow
from anesurgery.show import costs, summary
from anesurgery.show.drawing import WIDTH, Drawing, Style, draw, style_of
from anesurgery.show.headline import compared_shares
from anesurgery.show.summary import UNIT_WORDS

BAR = 590
"""Number of cells of the device bar."""
STRIP = 120
"""Ops in a row of the strip."""
STRIP_FROM = 60
"""The strip is shown for more ops than this; for fewer, the graph names each op."""
CELL_ROWS = 12
"""The most rows of the table in a notebook cell."""
STATUS_WORDS = ("on the ANE", "in part on the ANE", "not on the ANE")
"""Words for the numbers of `Inspection.status`."""
HALF = 580
"""Width of a graph beside another."""


@dataclass(frozen=True)
class Run:
    """A run of neighbouring cells that look the same: its position, its length, and its tooltip."""

    x: int
    y: int
    length: int
    unit: str
    legal: bool | None
    title: str


@dataclass(frozen=True)
class TimePart:
    """A source of cost in the bar of the time: the share, its colour, and its duration in words."""

    part: costs.TimeShare
    colour: str
    words: str


@dataclass(frozen=True)
class PageView:
    """An inspection as the templates need it; a page with `after` has two."""

    label: str
    inspection: Inspection
    verdict: str
    numbers: list[tuple[str, str, str]]
    shares: list[tuple[str, float, str]]
    legend: list[tuple[str, str, int]]
    bar: list[Run]
    strip: list[Run]
    drawings: list[tuple[str, Drawing]]
    time: list[TimePart]
    dearest: list[costs.TimeShare]
    slowest: list[costs.TimeShare]


@functools.cache
def environment() -> Environment:
    """Return the template environment. It escapes all names; an unknown name in a template is an error."""
    templates = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    templates.globals.update(
        status_words=STATUS_WORDS,
        unit_word=unit_word,
        short_name=short_name,
        key=css_name,
        duration=costs.in_words,
        percent=summary.percent,
    )
    return templates


def css_name(unit: str | None) -> str:
    """Return the name of a unit in style sheets."""
    return unit or "unknown"


def unit_word(name: str) -> str:
    """Return the word for a unit by its name in style sheets."""
    return UNIT_WORDS[None if name == "unknown" else name]


def heading(inspection: Inspection) -> str:
    """Return the model's name: the last part of a path."""
    return inspection.model.rstrip("/").rpartition("/")[2] or inspection.model


@draws("Inspection", "page")
def page(inspection: Inspection, after: Inspection | None = None) -> str:
    """Return one inspection, or a model before and after a surgery, as an HTML document.

    Args:
        inspection: the inspection; with `after`, that of the model before.
        after: an inspection of the model after the surgery; both are shown side by side.
    """
    if after is None:
        views = [page_view(inspection, "")]
    else:
        parts = [part for i in (inspection, after) for _, part in summary.sections(i)]
        style = style_of(parts, HALF)
        views = [page_view(inspection, "before", HALF, style), page_view(after, "after", HALF, style)]
    last = views[-1].inspection
    gone, new = summary.gone_and_new(inspection, last)
    return (
        environment()
        .get_template("page.html")
        .render(
            views=views,
            last=last,
            heading=heading(last),
            compared=after is not None,
            moved="" if after is None else compared_shares(inspection, after),
            changes=summary.changes(inspection, last),
            gone=gone,
            new=new,
            attention=summary.by_reason(summary.attention(last)),
            findings=summary.by_rule(last.all_findings),
            agreements=summary.agreements(last) if last.measured else [],
            agreement_words=summary.agreement_words(summary.agreements(last)),
            notes=summary.notes(last),
            strip_length=STRIP,
            data=data([(v.label, v.inspection) for v in views]),
        )
    )


@draws("Inspection", "html")
def cell(inspection: Inspection) -> str:
    """Return an inspection for a notebook cell, without script and style sheet."""
    return (
        environment()
        .get_template("cell.html")
        .render(
            view=page_view(inspection, "", None),
            heading=heading(inspection),
            attention=summary.attention(inspection),
            shown=CELL_ROWS,
        )
    )


def page_view(
    inspection: Inspection, label: str, width: int | None = WIDTH, style: Style | None = None
) -> PageView:
    """Return what a template shows of an inspection, with graphs of a width and style; None for no graphs."""
    rows = summary.all_rows(inspection)
    return PageView(
        label,
        inspection,
        summary.verdict(inspection),
        numbers(inspection),
        shares(inspection),
        [(css_name(u), UNIT_WORDS[u], n) for u, n in summary.ordered_counts(inspection)],
        bar(inspection),
        strip(rows) if width and len(rows) > STRIP_FROM else [],
        [(name, draw(part, width, style)) for name, part in summary.sections(inspection)] if width else [],
        [TimePart(p, costs.COLOURS[p.name], costs.in_words(p.ms)) for p in costs.parts(inspection)],
        costs.dearest(inspection),
        costs.segments(inspection),
    )


def numbers(inspection: Inspection) -> list[tuple[str, str, str]]:
    """Return the numbers at the top: (name, value, remark)."""
    rows = summary.all_rows(inspection)
    segments = sum(len(part.segments) for _, part in summary.sections(inspection))
    illegal, unknown = (sum(r.legal is value for r in rows) for value in (False, None))
    rules = len({f.rule for f in inspection.all_findings})
    top = [
        ("ops", f"{len(rows):,}", summary.counted(len({r.op_type for r in rows}), "type")),
        ("ANE cannot run", f"{illegal:,}", f"{unknown:,} not known"),
        ("segments", f"{segments:,}", summary.counted(inspection.switches, "switch")),
        ("findings", f"{len(inspection.all_findings):,}", summary.counted(rules, "rule")),
    ]
    if (time := inspection.time) is not None:
        top.append(("time", f"{time.ms:.3g} ms", f"{time.low:.3g} to {time.high:.3g}; estimated"))
    memory = inspection.memory
    if memory is not None:
        limit = "limit unknown" if memory.limit is None else f"of {byte_words(memory.limit)}"
        chunks = f", {memory.chunks} chunks" if memory.chunks > 1 else ""
        wide = f", {byte_words(memory.expanded)} expanded" if memory.expanded else ""
        top.append(("weights", byte_words(memory.weights), limit + chunks + wide))
        top.append(("activations", byte_words(memory.activations), f"largest {byte_words(memory.largest)}"))
        if memory.states:
            top.append(("states", byte_words(memory.states), f"{byte_words(memory.state_traffic)} a call"))
        if app := summary.app_words(memory):
            top.append(("in an app", byte_words(memory.needed), app))
    return top


def shares(inspection: Inspection) -> list[tuple[str, float, str]]:
    """Return shares of the ANE: (name, share, words)."""
    residency = inspection.residency
    kinds = {"ops": "ops"} | ({"flop": "the work"} if summary.has_flop(inspection) else {})
    return [
        (f"of {said} on the ANE", residency[what], summary.share_words(inspection, what))
        for what, said in kinds.items()
    ]


def bar(inspection: Inspection) -> list[Run]:
    """Return the device bar: runs of ops in file order."""
    cells, x = [], 0
    for unit, group in itertools.groupby(summary.cells(inspection, BAR)):
        length = len(list(group))
        cells.append(Run(x, 0, length, css_name(unit), True, UNIT_WORDS[unit]))
        x += length
    return cells


def strip(rows: list[OpRow]) -> list[Run]:
    """Return a cell for each op in file order, `STRIP` in a row; equal neighbours are one run."""
    cells = []
    for y in range(0, len(rows), STRIP):
        x = 0
        line = enumerate(rows[y : y + STRIP], y)
        for (unit, legal), group in itertools.groupby(
            line, key=lambda pair: (pair[1].preferred, pair[1].legal)
        ):
            run = list(group)
            (first, row), last = run[0], run[-1][0]
            where = f"op {first} ({row.name})" if first == last else f"ops {first} to {last}"
            title = f"{where}: {UNIT_WORDS[unit]}, legal: {summary.LEGAL_WORDS[legal]}"
            cells.append(Run(x, y // STRIP, len(run), css_name(unit), legal, title))
            x += len(run)
    return cells


def data(views: Iterable[tuple[str, Inspection]]) -> dict[str, Any]:
    """Return what the script needs: rows as plain lists, and the rules that they name by number."""
    rules: dict[tuple[str, ...], int] = {}
    shown = [
        {
            "label": label,
            "measured": inspection.measured,
            "parts": [name for name, _ in summary.sections(inspection)],
            "rows": [
                _row(row, at, rules)
                for at, (_, part) in enumerate(summary.sections(inspection))
                for row in part.ops
            ],
        }
        for label, inspection in views
    ]
    return {"views": shown, "rules": [list(rule) for rule in rules]}


def _row(row: OpRow, part: int, rules: dict[tuple[str, ...], int]) -> list[Any]:
    findings = []
    for f in row.findings:
        rule = (f.rule, f.kind, f.because, f.source, f.grade.value, f.scope, f.remedy or "", f.advice)
        findings.append([rules.setdefault(rule, len(rules)), f.message])
    e = row.estimate
    microseconds = (
        (None, None, None) if e is None else (e.ane, e.cpu, None)
    )  # a guess about the GPU is no number
    estimates = [float(f"{t:.4g}") if t is not None and math.isfinite(t) else None for t in microseconds]
    return [
        row.index,
        part,
        row.name,
        row.op_type,
        row.shape,
        row.dtype,
        row.legal,
        row.preferred,
        row.measured,
        *estimates,
        row.flop,
        row.segment,
        findings,
    ]
