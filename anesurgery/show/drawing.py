"""Lay out the segments of a model as boxes in layers of data flow, with arrows between them.

`page` puts the `Drawing` into the report. Layers run from left to right and wrap into rows like text. A small
model shows its ops in the boxes, a larger one op types, and one of very many segments only unit and size.
Coordinates are in CSS pixels.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import networkx as nx

from anesurgery.placement.inspection import Inspection, OpRow, Segment
from anesurgery.show.summary import UNIT_WORDS, counted

OPS_SHOWN = 60
"""The most ops that are named one by one in boxes."""
TYPES_SHOWN = 48
"""The most segments, at full width, whose boxes name op types."""
BOXES = 400
"""The most segments that are drawn."""
FAINT = 60
"""The most arrows across layers that are drawn; more would hide the rest."""

WIDTH = 1180
HEAD, LINE, PAD = 24, 16, 8
GAP_X, GAP_Y, GUTTER = 34, 10, 28
LETTER = 6.7
"""Width in pixels of a monospaced letter of 11 px."""

Point = tuple[float, float]


@dataclass(frozen=True)
class Style:
    """What a box shows, by the size of the model.

    Attributes:
        name: "ops", "types" or "small".
        column: width of a column of text in a box.
        stack: the most boxes above each other in one layer.
        lines: the lines of a column.
    """

    name: str
    column: int
    stack: int
    lines: int


OPS, SMALL = Style("ops", 136, 4, 7), Style("small", 76, 5, 0)
TYPES, FEW = Style("types", 144, 4, 3), Style("types", 144, 4, 8)


class BoxText(NamedTuple):
    """Words in a box and their position; `op` is the number of the op that they name, if any."""

    x: float
    y: float
    words: str
    op: int | None


@dataclass(frozen=True)
class Box:
    """A segment as drawn: its size, its texts with positions inside, and its own position once it has one."""

    segment: Segment
    width: float
    height: float
    head: str
    lines: tuple[BoxText, ...]
    title: str
    x: float = 0.0
    y: float = 0.0


@dataclass(frozen=True)
class Drawing:
    """The boxes and arrows of a model.

    Attributes:
        width, height: of the whole.
        style: "ops", "types" or "small".
        boxes: in layers.
        arrows: path data, those between neighbouring layers.
        faint: path data, those that skip a layer.
        note: what is not drawn, in words.
    """

    width: float
    height: float
    style: str
    boxes: tuple[Box, ...]
    arrows: tuple[str, ...]
    faint: tuple[str, ...]
    note: str


def style_of(inspections: Sequence[Inspection], width: int = WIDTH) -> Style:
    """Return the style in which several models are drawn beside each other."""
    most = max((len(i.segments) for i in inspections), default=0)
    share = most / TYPES_SHOWN * WIDTH / width
    large = FEW if share <= 0.25 else TYPES if share <= 1 else SMALL
    return OPS if all(len(i.ops) <= OPS_SHOWN for i in inspections) else large


def draw(inspection: Inspection, width: int = WIDTH, style: Style | None = None) -> Drawing:
    """Lay out the segments of one model (not of a pipeline) in a given width."""
    segments = inspection.segments[:BOXES]
    style = style or style_of([inspection], width)
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
    left = len(inspection.segments) - len(segments)
    said = [f"{left:,} more segments are not drawn"] if left else []
    said += [] if faint or not skips else [f"{len(skips):,} arrows that skip a layer are left out"]
    return Drawing(
        width, height, style.name, tuple(boxes.values()), tuple(arrows), tuple(faint), "; ".join(said)
    )


def _data_flow(segments: Sequence[Segment]) -> nx.DiGraph:
    """Return which segment reads which; readers earlier in the file would make a circle, and are left out."""
    graph = nx.DiGraph()
    graph.add_nodes_from(s.index for s in segments)
    graph.add_edges_from((s.index, r) for s in segments for r in s.readers if s.index < r and r in graph)
    return graph


def _unplaced_box(segment: Segment, rows: dict[str, OpRow], style: Style, width: int) -> Box:
    unit, count = UNIT_WORDS[segment.unit], len(segment.ops)
    types = [rows[name].op_type if name in rows else name for name in segment.ops]
    title = _title(segment, types)
    if style is SMALL:
        head = f"{unit if segment.unit else '?'} {count:,}"
        return Box(segment, style.column, HEAD + 2, head, (), title)
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
        BoxText(PAD + k // each * style.column, HEAD + LINE * (k % each) + 12, _shortened(word, letters), op)
        for k, (word, op) in enumerate(zip(words, numbers, strict=False))
    )
    tall = HEAD + LINE * min(each, max(len(lines), 1)) + PAD
    return Box(segment, columns * style.column + PAD, tall, head, lines, title)


def _title(segment: Segment, types: Sequence[str]) -> str:
    unit = UNIT_WORDS[segment.unit]
    common = ", ".join(f"{n} {t}" for t, n in Counter(types).most_common(8))
    said = [f"segment {segment.index} on {unit}: {common}"]
    for word, values in (("reads", segment.inputs), ("gives", segment.outputs)):
        named = [f"{n} {'x'.join(map(str, s)) or 'scalar'}" for n, s in list(values.items())[:6]]
        said += [f"{word} {', '.join(named)}{', …' * (len(values) > 6)}"] if named else []
    return "\n".join(said)


def _shortened(word: str, letters: int) -> str:
    return word if len(word) <= letters else word[: letters - 1] + "…"


@dataclass(frozen=True)
class _Lanes:
    """Where arrows can run without crossing a box.

    Attributes:
        row: segment -> number of its row.
        column: segment -> number of its column, counted over all rows.
        above: height of the lane above each row, and of the lane below the last.
    """

    row: dict[int, int]
    column: dict[int, int]
    above: list[float]


def _placed_boxes(columns: list[list[Box]], width: int) -> tuple[dict[int, Box], _Lanes, float]:
    rows: list[list[list[Box]]] = [[]]
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


def _column_height(column: Sequence[Box]) -> float:
    return sum(c.height for c in column) + GAP_Y * (len(column) - 1)


def _arrow(a: Box, b: Box, lanes: _Lanes) -> str:
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


def _path(points: Sequence[Point], radius: float = 5) -> str:
    """Return the path of straight lines with rounded corners."""
    said = f"M{points[0][0]:.0f} {points[0][1]:.0f}"
    for a, b, c in zip(points, points[1:], points[2:], strict=False):
        (p, q), (r, s) = _towards(b, a, radius), _towards(b, c, radius)
        said += f"L{p:.0f} {q:.0f}Q{b[0]:.0f} {b[1]:.0f} {r:.0f} {s:.0f}"
    return said + f"L{points[-1][0]:.0f} {points[-1][1]:.0f}"


def _towards(a: Point, b: Point, most: float) -> Point:
    length = math.dist(a, b)
    step = min(most, length / 2) / length if length else 0.0
    return a[0] + (b[0] - a[0]) * step, a[1] + (b[1] - a[1]) * step
