"""Show an inspection as one HTML file that needs no network, and as a notebook cell.

Verdict, bars, graph and findings are plain HTML and SVG. Only the table of ops is drawn by a script, from data
in the page, so that thousands of rows stay light and sort at once. All names are escaped by jinja2. The
classes here hold what the templates `page.html` and `cell.html` read.

The graph shows the segments of a model as boxes in layers of data flow, with arrows between them (`_Drawing`).
Layers run from left to right and wrap into rows like text. A small model shows its ops in the boxes, a larger
one op types, and one of very many segments only unit and size. Coordinates are in CSS pixels.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import networkx as nx
from jinja2 import Environment, FileSystemLoader, StrictUndefined

from anesurgery.display import byte_words, counted, draws, short_name
from anesurgery.placement.inspection import Inspection, OpRow, Segment
from anesurgery.show import summary, time_shares
from anesurgery.show.headline import compared_shares
from anesurgery.show.summary import UNIT_WORDS

OPS_SHOWN = 60
"""The most ops that are named one by one in boxes."""
TYPES_SHOWN = 48
"""The most segments, at full width, whose boxes name op types."""
BOXES = 400
"""The most segments that are drawn."""
FAINT = 60
"""The most arrows across layers that are drawn; more would hide the rest."""

_WIDTH = 1180
HEAD, LINE, PAD = 24, 16, 8
GAP_X, GAP_Y, GUTTER = 34, 10, 28
LETTER = 6.7
"""Width in pixels of a monospaced letter of 11 px."""

Point = tuple[float, float]


@dataclass(frozen=True)
class _Style:
    """What a box shows, by the size of the model."""

    name: str
    """"ops", "types" or "small"."""
    column: int
    """Width of a column of text in a box."""
    stack: int
    """The most boxes above each other in one layer."""
    lines: int
    """The lines of a column."""


OPS, SMALL = _Style("ops", 136, 4, 7), _Style("small", 76, 5, 0)
TYPES, FEW = _Style("types", 144, 4, 3), _Style("types", 144, 4, 8)


class _BoxText(NamedTuple):
    """Words in a box and their position; `op` is the number of the op that they name, if any."""

    x: float
    y: float
    words: str
    op: int | None


@dataclass(frozen=True)
class _Box:
    """A segment as drawn: its size, its texts with positions inside, and its own position once it has one."""

    segment: Segment
    width: float
    height: float
    head: str
    lines: tuple[_BoxText, ...]
    title: str
    x: float = 0.0
    y: float = 0.0


@dataclass(frozen=True)
class _Drawing:
    """The boxes and arrows of a model."""

    width: float
    height: float
    """The size of the whole."""
    style: str
    """"ops", "types" or "small"."""
    boxes: tuple[_Box, ...]
    """The boxes in layers."""
    arrows: tuple[str, ...]
    """Path data, those between neighbouring layers."""
    faint: tuple[str, ...]
    """Path data, those that skip a layer."""
    note: str
    """What is not drawn, in words."""


def _style_of(inspections: Sequence[Inspection], width: int = _WIDTH) -> _Style:
    """Return the style in which several models are drawn beside each other."""
    if all(len(i.ops) <= OPS_SHOWN for i in inspections):
        return OPS
    most_segments = max((len(i.segments) for i in inspections), default=0)
    share = most_segments / TYPES_SHOWN * _WIDTH / width
    if share > 1:
        return SMALL
    return TYPES if share > 0.25 else FEW


def draw(inspection: Inspection, width: int = _WIDTH, style: _Style | None = None) -> _Drawing:
    """Lay out the segments of one model (not of a pipeline) in a given width."""
    segments = inspection.segments[:BOXES]
    style = style or _style_of([inspection], width)
    rows = {row.name: row for row in inspection.ops}
    contents = {s.index: _unplaced_box(s, rows, style, width) for s in segments}
    flow = _data_flow(segments)
    columns = [
        [contents[k] for k in layer[at : at + style.stack]]
        for layer in map(sorted, nx.topological_generations(flow))
        for at in range(0, len(layer), style.stack)
    ]
    boxes, lanes, height = _placed_boxes(columns, width)
    direct = nx.transitive_reduction(flow)
    arrows = [_arrow(boxes[a], boxes[b], lanes) for a, b in sorted(direct.edges)]
    skips = [e for e in sorted(flow.edges) if not direct.has_edge(*e)]
    faint = [_arrow(boxes[a], boxes[b], lanes) for a, b in skips] if len(skips) <= FAINT else []
    left_out = len(inspection.segments) - len(segments)
    notes = [f"{left_out:,} more segments are not drawn"] if left_out else []
    notes += [] if faint or not skips else [f"{counted(len(skips), 'longer arrow')} left out"]
    return _Drawing(
        width=width,
        height=height,
        style=style.name,
        boxes=tuple(boxes.values()),
        arrows=tuple(arrows),
        faint=tuple(faint),
        note="; ".join(notes),
    )


def _data_flow(segments: Sequence[Segment]) -> nx.DiGraph:
    """Return which segment reads which; readers earlier in the file would make a circle, and are left out."""
    graph = nx.DiGraph()
    graph.add_nodes_from(s.index for s in segments)
    graph.add_edges_from((s.index, r) for s in segments for r in s.readers if s.index < r and r in graph)
    return graph


def _unplaced_box(segment: Segment, rows: dict[str, OpRow], style: _Style, width: int) -> _Box:
    """Return the box of a segment with its texts; `_placed_boxes` gives its position."""
    unit, count = UNIT_WORDS[segment.unit], len(segment.ops)
    types = [rows[name].op_type if name in rows else name for name in segment.ops]
    title = _title(segment, types)
    if style is SMALL:
        head = f"{'' if segment.unit else '? '}{count:,}"  # the colour and the title name the unit
        return _Box(segment=segment, width=style.column, height=HEAD + 2, head=head, lines=(), title=title)
    head = f"{unit} · {counted(count, 'op')}"
    if style is OPS:
        columns = max(1, min(math.ceil(count / style.lines), (width - 2 * PAD) // style.column))
        each = math.ceil(count / columns) or 1
        words: list[str] = types
    else:
        columns, each = 1, style.lines
        counts = Counter(types)
        words = [f"{n} {t}" if n > 1 else t for t, n in counts.items()]
        if len(words) > each:
            words = [*words[: each - 1], f"+ {len(words) - each + 1} more types"]
    letters = int((style.column - PAD) / LETTER)
    numbers = [rows[name].index if style is OPS and name in rows else None for name in segment.ops]
    lines = tuple(
        _BoxText(PAD + k // each * style.column, HEAD + LINE * (k % each) + 12, _shortened(word, letters), op)
        for k, (word, op) in enumerate(zip(words, numbers, strict=False))
    )
    tall = HEAD + LINE * min(each, max(len(lines), 1)) + PAD
    wide = max(columns * style.column + PAD, len(head) * LETTER + 2 * PAD)
    return _Box(segment=segment, width=wide, height=tall, head=head, lines=lines, title=title)


def _title(segment: Segment, types: Sequence[str]) -> str:
    unit = UNIT_WORDS[segment.unit]
    common = ", ".join(f"{n} {t}" for t, n in Counter(types).most_common(8))
    lines = [f"segment {segment.index} on {unit}: {common}"]
    for verb, values in (("reads", segment.inputs), ("gives", segment.outputs)):
        named = [f"{n} {'x'.join(map(str, s)) or 'scalar'}" for n, s in list(values.items())[:6]]
        lines += [f"{verb} {', '.join(named)}{', …' * (len(values) > 6)}"] if named else []
    return "\n".join(lines)


def _shortened(word: str, letters: int) -> str:
    return word if len(word) <= letters else word[: letters - 1] + "…"


@dataclass(frozen=True)
class _Lanes:
    """Where arrows can run without crossing a box."""

    row: dict[int, int]
    """Segment -> number of its row."""
    column: dict[int, int]
    """Segment -> number of its column, counted over all rows."""
    above: list[float]
    """Height of the lane above each row, and of the lane below the last."""


def _placed_boxes(columns: list[list[_Box]], width: int) -> tuple[dict[int, _Box], _Lanes, float]:
    """Return the boxes of segments with their positions, the lanes between them, and the height of all.

    Columns stand beside each other, and wrap into rows where the width ends.
    """
    rows: list[list[list[_Box]]] = [[]]
    x = float(GAP_X)
    for column in columns:
        wide = max(c.width for c in column)
        if rows[-1] and x + wide + GAP_X / 2 > width:
            rows.append([])
            x = GAP_X
        rows[-1].append(column)
        x += wide + GAP_X
    lanes, boxes, y = _Lanes({}, {}, []), {}, float(GUTTER)
    numbers = itertools.count()
    for k, row in enumerate(rows):
        lanes.above.append(y - GUTTER / 2)
        tallest = max((_column_height(column) for column in row), default=0.0)
        x = GAP_X
        for column in row:
            number = next(numbers)
            top = y + (tallest - _column_height(column)) / 2
            for c in column:
                at = c.segment.index
                lanes.row[at], lanes.column[at] = k, number
                boxes[at] = replace(c, x=x, y=top)
                top += c.height + GAP_Y
            x += max(c.width for c in column) + GAP_X
        y += tallest + GUTTER
    lanes.above.append(y - GUTTER / 2)
    return boxes, lanes, y


def _column_height(column: Sequence[_Box]) -> float:
    return sum(c.height for c in column) + GAP_Y * (len(column) - 1)


def _arrow(a: _Box, b: _Box, lanes: _Lanes) -> str:
    """Return the path of an arrow from the right side of a box to the left side of another."""
    first, last = a.segment.index, b.segment.index
    start, end = (a.x + a.width, a.y + a.height / 2), (b.x - 2, b.y + b.height / 2)
    row, goal = lanes.row[first], lanes.row[last]
    if row == goal and lanes.column[last] == lanes.column[first] + 1:
        middle = (start[0] + end[0]) / 2
        return (
            f"M{start[0]:.0f} {start[1]:.0f}C{middle:.0f} {start[1]:.0f} "
            f"{middle:.0f} {end[1]:.0f} {end[0]:.0f} {end[1]:.0f}"
        )
    spread = 3 * (first % 3 - 1)  # lines in one lane lie beside each other
    out, into = start[0] + 10 + spread, end[0] - 12 + spread
    lane = lanes.above[goal] + spread
    if goal in (row, row + 1):
        return _path([start, (out, start[1]), (out, lane), (into, lane), (into, end[1]), end])
    leave, margin = lanes.above[row + 1] + spread, GAP_X / 3 + spread
    down = [(out, start[1]), (out, leave), (margin, leave), (margin, lane)]
    return _path([start, *down, (into, lane), (into, end[1]), end])


def _path(points: Sequence[Point]) -> str:
    """Return the path of straight lines with corners that are rounded by 5 pixels."""
    path = f"M{points[0][0]:.0f} {points[0][1]:.0f}"
    for before, corner, after in zip(points, points[1:], points[2:], strict=False):
        (x, y), (end_x, end_y) = _towards(corner, before, 5), _towards(corner, after, 5)
        path += f"L{x:.0f} {y:.0f}Q{corner[0]:.0f} {corner[1]:.0f} {end_x:.0f} {end_y:.0f}"
    return path + f"L{points[-1][0]:.0f} {points[-1][1]:.0f}"


def _towards(a: Point, b: Point, most: float) -> Point:
    """Return the point on the way from a to b that is `most` pixels from a, or half-way if that is less."""
    length = math.dist(a, b)
    step = min(most, length / 2) / length if length else 0.0
    return a[0] + (b[0] - a[0]) * step, a[1] + (b[1] - a[1]) * step


BAR = 590
"""Number of cells of the device bar."""
STRIP = 120
"""Ops in a row of the strip."""
STRIP_FROM = 60
"""The strip is shown for more ops than this; for fewer, the graph names each op."""
CELL_ROWS = 12
"""The most rows of the table in a notebook cell."""
STATUS_WORDS = ("on the Neural Engine", "in part on the Neural Engine", "not on the Neural Engine")
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
class PageView:
    """An inspection as the templates need it; a page with `after` has two."""

    label: str
    """"before" or "after"; "" on a page with one."""
    inspection: Inspection
    """What is shown."""
    verdict: str
    """The verdict in a sentence."""
    numbers: list[tuple[str, str, str]]
    """(name, value, remark)."""
    shares: list[tuple[str, float, str]]
    """(name, share of the Neural Engine, the same in words)."""
    legend: list[tuple[str, str, int]]
    """(unit in style sheets, in words, its ops). `numbers`, `shares` and `legend` stand at the top."""
    bar: list[Run]
    """The units of all ops, in one row."""
    strip: list[Run]
    """A cell for each op, in rows; [] if the graph names each op."""
    drawings: list[tuple[str, _Drawing]]
    """(name of a part, its graph)."""
    time: list[time_shares.TimeShare]
    """The sources of cost."""
    dearest: list[time_shares.TimeShare]
    """The ops that take longest."""
    slowest: list[time_shares.TimeShare]
    """The segments that take longest."""


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
        duration=time_shares.in_words,
        time_colours=time_shares.COLOURS,
        percent=summary.percent,
    )
    return templates


def render(template: str, **values: Any) -> str:
    """Return a template of this folder, filled."""
    return environment().get_template(template).render(values)


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
        style = _style_of(parts, HALF)
        views = [page_view(inspection, "before", HALF, style), page_view(after, "after", HALF, style)]
    last = views[-1].inspection
    gone, new = summary.gone_and_new(inspection, last)
    return render(
        "page.html",
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


@draws("Inspection", "html")
def cell(inspection: Inspection) -> str:
    """Return an inspection for a notebook cell, without script and style sheet."""
    return render(
        "cell.html",
        view=page_view(inspection, "", None),
        heading=heading(inspection),
        attention=summary.attention(inspection),
        shown=CELL_ROWS,
    )


def page_view(
    inspection: Inspection, label: str, width: int | None = _WIDTH, style: _Style | None = None
) -> PageView:
    """Return what a template shows of an inspection, with graphs of a width and style; None for no graphs."""
    rows = summary.all_rows(inspection)
    return PageView(
        label=label,
        inspection=inspection,
        verdict=summary.full_sentence(inspection),
        numbers=numbers(inspection),
        shares=shares(inspection),
        legend=[(css_name(u), UNIT_WORDS[u], n) for u, n in summary.ordered_counts(inspection)],
        bar=bar(inspection),
        strip=strip(rows) if width and len(rows) > STRIP_FROM else [],
        drawings=[(name, draw(part, width, style)) for name, part in summary.sections(inspection)]
        if width
        else [],
        time=time_shares.parts(inspection),
        dearest=time_shares.dearest(inspection),
        slowest=time_shares.segments(inspection),
    )


def numbers(inspection: Inspection) -> list[tuple[str, str, str]]:
    """Return the numbers at the top."""
    rows = summary.all_rows(inspection)
    segments = sum(len(part.segments) for _, part in summary.sections(inspection))
    illegal, unknown = (sum(r.legal is value for r in rows) for value in (False, None))
    rules = len({f.rule for f in inspection.all_findings})
    top = [
        ("ops", f"{len(rows):,}", counted(len({r.op_type for r in rows}), "type")),
        ("Neural Engine cannot run", f"{illegal:,}", f"unclear for {unknown:,} more" if unknown else ""),
        ("segments", f"{segments:,}", counted(inspection.switches, "switch")),
        ("findings", f"{len(inspection.all_findings):,}", counted(rules, "rule")),
    ]
    if (time := inspection.time) is not None:
        top.append(("time", f"{time.ms:.3g} ms", f"{time.low:.3g} to {time.high:.3g}; estimated"))
    memory = inspection.memory
    if memory is not None:
        limit = "limit unknown" if memory.limit is None else f"of {byte_words(memory.limit)}"
        chunks = f", {memory.chunks} chunks" if memory.chunks > 1 else ""
        wide = f", {byte_words(memory.expanded)} expanded" if memory.expanded else ""
        top.append(("weights", byte_words(memory.weights), limit + chunks + wide))
        largest = f"largest {byte_words(memory.largest)}"
        top.append(("activations", byte_words(memory.activations), largest))
        if memory.states:
            traffic = f"{byte_words(memory.state_traffic)} a call"
            top.append(("states", byte_words(memory.states), traffic))
        if app := summary.app_words(memory):
            top.append(("in an app", byte_words(memory.needed), app))
    return top


def shares(inspection: Inspection) -> list[tuple[str, float, str]]:
    """Return the shares of the Neural Engine: of the ops, and of the work if it was counted."""
    residency = inspection.residency
    words = {"ops": "ops"} | ({"flop": "the work"} if summary.has_flop(inspection) else {})
    return [
        (f"of {word} on the Neural Engine", residency[what], summary.share_words(inspection, what))
        for what, word in words.items()
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
    """Return an op as the script takes it, and number new rules in `rules`."""
    findings = []
    for f in row.findings:
        rule = (f.rule, f.kind, f.because, f.source, f.grade.value, f.scope, f.remedy or "", f.advice)
        findings.append([rules.setdefault(rule, len(rules)), f.message])
    # the third, that of the GPU, is a guess and not shown
    microseconds = (None, None, None) if row.estimate is None else (row.estimate.ane, row.estimate.cpu, None)
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
