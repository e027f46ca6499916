"""Draw the ops of a program, or those around one of them: as an SVG picture, or as a page to move about in.

In the picture, layers run from top to bottom along the longest path of data, and boxes stand below what they
read. A box has the op type, the name and what it gives; a pointer over it shows the line of the program's
text. The picture needs no script, no other file and no installed program.

The page (`Picture.save("x.html")`) has pan, zoom and search, and folds repeated blocks into one box. In the
browser, Cytoscape.js draws and dagre places the boxes; both are embedded in the page, which needs no network.
"""

from __future__ import annotations

import html
import itertools
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from statistics import fmean
from typing import Any

import networkx as nx
import numpy as np

from anesurgery.display import counted, printable, short_name
from anesurgery.doors import door
from anesurgery.errors import IsPipeline, LoadError, SurgeryError, UnknownName
from anesurgery.files.arrays import write_text
from anesurgery.loading import load_graph, load_whole
from anesurgery.mil import Block, Operation, function_of, reads, walk_ops
from anesurgery.placement.inspector import inspect
from anesurgery.placement.target import Target
from anesurgery.show.page import render
from anesurgery.show.summary import UNIT_WORDS
from anesurgery.text import to_text, type_text

LETTERS = 28
"""The most characters on a line in a box."""
MOST = 300
"""Boxes in a picture at most; a larger program is drawn around an op."""


@dataclass(frozen=True)
class Picture:
    """A picture of ops and their connections. A notebook shows it, `save` writes it."""

    flow: nx.DiGraph = field(repr=False)
    """What is drawn. Each node has `op` (False for an input), `kind`, `name`, `gives`, `line` (of the text),
    `unit`, `around` (whether it is the op asked for) and `more` (whether it has neighbours not drawn)."""
    heading: str = ""
    """The heading of the page."""
    target: str | None = None
    """Chip and OS by which the boxes are coloured."""

    @property
    def ops(self) -> tuple[str, ...]:
        """Names of the ops that are drawn, in the order of the program."""
        return tuple(node for node, data in self.flow.nodes(data=True) if data["op"])

    @cached_property
    def svg(self) -> str:
        """The picture as an SVG document.

        Raises:
            SurgeryError: more than 300 boxes.
        """
        if len(self.flow) > MOST:
            raise SurgeryError(
                f"{len(self.flow):,} boxes are too many for an SVG picture; save it as .html, which folds "
                "repeated blocks and has a search, or draw around an op"
            )
        return _svg(self.flow)

    def _repr_svg_(self) -> str | None:
        return self.svg if len(self.flow) <= MOST else None

    def __str__(self) -> str:
        return f"a picture of {len(self.ops)} op{'s' * (len(self.ops) != 1)}; .save('ops.html') writes it"

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the picture atomically. An existing file is replaced.

        Args:
            path: ends in .svg for a picture, or in .html for a page with pan, zoom, search and folded blocks.

        Raises:
            LoadError: the folder does not exist, or the name ends otherwise.
            SurgeryError: more than 300 boxes for an .svg.
        """
        place = check_picture(path)
        is_page = place.suffix == ".html"
        return write_text(place, _graph_page(self.flow, self.heading, self.target) if is_page else self.svg)


def check_picture(path: str | os.PathLike[str]) -> Path:
    """See that a picture can be written as what its name says.

    Raises:
        LoadError: it ends neither in .svg nor in .html.
    """
    place = Path(path).expanduser()
    if place.suffix not in (".svg", ".html"):
        raise LoadError(f"{place} ends in {place.suffix!r}; name it .svg or .html; browsers open both")
    return place


@door()
def draw(
    model: Any,
    around: str | None = None,
    before: int = 2,
    after: int = 2,
    *,
    function: str | None = None,
    target: str | None = None,
) -> Picture:
    """Draw the ops of a program, or those around one of them.

    ::

        ane.draw("gpt2.mlpackage", around="logits", before=3, target="M1").save("logits.svg")

    Args:
        model: path, MLModel, MIL program, or what `load` gives.
        around: the name of an op or of a value that it makes, as `to_text` shows it. Default: the whole
            function.
        before: number of steps upstream of it.
        after: number of steps downstream of it.
        function: which function; the default one when absent.
        target: chip and OS, as "M1/macOS 14": colours each op by the unit on which `inspect` expects it.

    Returns:
        A picture; a notebook shows it, `save` writes it as .svg, or as an .html page for many ops.

    Raises:
        UnknownName: the program has no such op.
        SurgeryError: `before` or `after` is negative.
    """
    if before < 0 or after < 0:
        raise SurgeryError(f"before={before}, after={after}: steps are counted from 0")
    try:
        loaded = load_graph(model)
    except IsPipeline:
        loaded = load_whole(model)
    chosen = function_of(loaded.program, function)
    middle = None if around is None else _named(chosen, around)
    flow = _flow((middle and middle.enclosing_block) or chosen)
    drawn = set(flow)
    if middle is not None:
        upstream = nx.single_source_shortest_path_length(flow.reverse(copy=False), _key(middle), before)
        drawn = {*upstream, *nx.single_source_shortest_path_length(flow, _key(middle), after)}
    units = dict[str, str]()
    if target is not None:
        rows = inspect(model, target, function=function).ops
        units = {row.name: row.preferred or "unknown" for row in rows}
    degrees = dict(flow.degree)
    flow.remove_nodes_from([node for node in flow if node not in drawn])
    for node, data in flow.nodes(data=True):
        data["unit"] = units.get(node, "")
        data["around"] = middle is not None and node == _key(middle)
        data["more"] = flow.degree(node) < degrees[node]  # has it neighbours that are not drawn?
    name = loaded.source.name if loaded.source is not None else "a program"
    heading = name if around is None else f"{name}, around {around}"
    return Picture(flow, heading, None if target is None else Target.parse(target).name)


def _key(op: Operation) -> str:
    return str(op.outputs[0].name) if op.outputs else str(op.name)


def _named(function: Block, name: str) -> Operation:
    """Return the op of a name, or the one that makes the value of that name, in nested blocks too."""
    ops = [op for op in walk_ops(function) if op.op_type != "const"]
    wanted = name.removeprefix("%")
    for op in ops:
        if wanted == op.name or any(wanted == var.name for var in op.outputs):
            return op
    raise UnknownName("op", wanted, [var.name for op in ops for var in op.outputs])


def _flow(block: Block) -> nx.DiGraph:
    """Return the ops of a block (without constants) and its inputs, with an edge from each to its readers."""
    flow = nx.DiGraph()
    inputs = block.inputs.values() if isinstance(block.inputs, dict) else block.inputs
    for var in inputs:
        flow.add_node(var.name, op=False, kind="input", name=var.name, gives=type_text(var), line="")
    for op in block.operations:
        if op.op_type == "const":
            continue
        gives = types_in_words([type_text(var) for var in op.outputs])
        name = _key(op)
        flow.add_node(name, op=True, kind=op.op_type, name=name, gives=gives, line=to_text(op))
        makers = (_maker(var, flow) for var in reads(op))
        flow.add_edges_from((source, name) for source in makers if source is not None and source != name)
    return flow


def types_in_words(types: list[str]) -> str:
    """Return types on one line: equal neighbours once with their number, and as many as fit into a box."""
    runs = [(kind, len(list(same))) for kind, same in itertools.groupby(types)]
    words = [kind if n == 1 else f"{n} of {kind}" for kind, n in runs]
    fitting = len(words)
    while fitting > 1 and len(", ".join(words[:fitting])) > LETTERS:
        fitting -= 1
    left_out = sum(n for _, n in runs[fitting:])
    return ", ".join(words[:fitting]) + (f" and {left_out} more" if left_out else "")


def _maker(var: Any, flow: nx.DiGraph) -> str | None:
    """Return the node that makes a value: an op, or an input of the block; None for constants."""
    if var is None:
        return None
    name = var.name if var.op is None else _key(var.op)
    return name if name in flow else None


# The page: Cytoscape draws the boxes; repeated blocks are folded.

VENDOR = Path(__file__).with_name("vendor")
LIBRARIES = ("cytoscape.min.js", "cytoscape-dagre.min.js")
"""The scripts, in the order in which a page loads them."""
LEAST = 4
"""The fewest ops of a block that is folded. A choice: fewer are read as quickly as the words on a fold."""


@dataclass(frozen=True)
class Repeats:
    """A block of ops that follows itself several times: its start, its length in ops, and how often."""

    start: int
    length: int
    times: int

    @property
    def end(self) -> int:
        """The first op after the last repetition."""
        return self.start + self.length * self.times


@dataclass(frozen=True)
class _Fold:
    """One of several equal blocks of ops: its ops, its number from 1, and how many blocks there are."""

    ops: tuple[object, ...]
    number: int
    times: int

    def as_box(self, flow: nx.DiGraph) -> dict[str, str]:
        """Return the words in its box, and the unit that gives its colour, if all its ops have one."""
        units = Counter(UNIT_WORDS.get(flow.nodes[op]["unit"], "unknown") for op in self.ops)
        words, only_unit = f"block {self.number} of {self.times}\n{counted(len(self.ops), 'op')}", ""
        if len(units) == 1:
            (word,), only_unit = units, str(flow.nodes[self.ops[0]]["unit"])
            places = f"all {word}"
        else:
            places = ", ".join(f"{n} {word}" for word, n in units.most_common())
        is_coloured = any(flow.nodes[op]["unit"] for op in self.ops)
        return {"label": f"{words}\n{places}" if is_coloured else words, "unit": only_unit}


def repeated_blocks(kinds: Sequence[object]) -> list[Repeats]:
    """Return the blocks of a list that repeat, in order; the block that covers most is found first.

    Of A B C D A B C D E, a block of 4 that starts at 0 and is there twice.

    Args:
        kinds: a value for each op, equal for ops that may be folded together.
    """
    numbers = {kind: n for n, kind in enumerate(dict.fromkeys(kinds))}
    row = np.array([numbers[kind] for kind in kinds], dtype=np.int64)
    best = max(
        (
            repeats
            for length in range(LEAST, len(row) // 2 + 1)
            if (repeats := _longest_repetition(row, length)) is not None
        ),
        key=lambda repeats: (repeats.length * repeats.times, -repeats.length),
        default=None,
    )
    if best is None:
        return []
    after = [
        Repeats(best.end + later.start, later.length, later.times)
        for later in repeated_blocks(kinds[best.end :])
    ]
    return [*repeated_blocks(kinds[: best.start]), best, *after]


def _longest_repetition(row: np.ndarray, length: int) -> Repeats | None:
    """Return the longest stretch in which blocks of `length` ops repeat; None where none does.

    If n ops in a row equal those `length` ops later, as the first 4 of A B C D A B C D do, the stretch has n //
    length + 1 blocks.
    """
    equals_later_op = np.concatenate(([False], row[:-length] == row[length:], [False]))
    edges = np.flatnonzero(np.diff(equals_later_op.astype(np.int8)))  # start, end, start, end, ...
    starts, lengths = edges[::2], edges[1::2] - edges[::2]
    if not len(starts) or lengths.max() < length:
        return None
    longest = int(lengths.argmax())
    return Repeats(int(starts[longest]), length, int(lengths[longest]) // length + 1)


def _graph_page(flow: nx.DiGraph, heading: str, target: str | None) -> str:
    """Return an HTML document of ops and their connections, of the parts of a `Picture`."""
    ops = [node for node, data in flow.nodes(data=True) if data["op"]]
    alike_keys = [(flow.nodes[node]["kind"], flow.nodes[node]["gives"]) for node in ops]
    folds = [
        _Fold(tuple(ops[start : start + repeats.length]), number, repeats.times)
        for repeats in repeated_blocks(alike_keys)
        for number, start in enumerate(range(repeats.start, repeats.end, repeats.length), 1)
    ]
    fold_of = {node: n for n, fold in enumerate(folds) for node in fold.ops}
    places = {node: n for n, node in enumerate(flow)}
    counts = Counter(data["unit"] for _, data in flow.nodes(data=True) if data["op"] and data["unit"])
    graph = {
        "nodes": [_node(flow.nodes[node], fold_of.get(node)) for node in flow],
        "edges": [[places[a], places[b]] for a, b in flow.edges],
        "folds": [fold.as_box(flow) for fold in folds],
    }
    return render(
        "graph.html",
        heading=heading,
        target=target,
        ops=len(ops),
        units=[(unit or "unknown", UNIT_WORDS[unit], counts[unit or "unknown"]) for unit in UNIT_WORDS],
        graph=graph,
        libraries="\n".join((VENDOR / name).read_text(encoding="utf-8") for name in LIBRARIES),
    )


def _node(data: dict[str, object], fold: int | None) -> dict[str, object]:
    words = {key: printable(str(data[key])) for key in ("kind", "name", "gives", "line")}
    short = "\n".join(short_name(words[key], LETTERS) for key in ("kind", "name", "gives"))
    place = {"unit": data["unit"], "op": data["op"], "fold": fold, "around": data.get("around", False)}
    return {**words, "label": short, **place}


# The SVG picture, with a layout of its own.

LETTER, HEIGHT, GAP_X, GAP_Y, MARGIN = 6.7, 50, 22, 34, 12
SWEEPS = 8
"""Times that boxes are moved towards their neighbours, up and down. A choice: later ones move little."""
LEGEND = 24
"""Height of the row that names the colours."""
BEND = 8.0
"""Width that an arrow has in a row that it passes."""

STYLE = """
.ane-ops{--paper:#fff;--ink:#1b2026;--soft:#57606b;--ane:#166aab;--cpu:#a25308;--gpu:#8447b0;--unknown:#606872}
@media(prefers-color-scheme:dark){.ane-ops{--paper:#1a1e23;--ink:#e5e8eb;--soft:#9aa4af;--ane:#58aaf0;--cpu:#eba14f;
--gpu:#c294e6;--unknown:#8f99a3}}
.ane-ops text{font:11px ui-monospace,Menlo,Consolas,"DejaVu Sans Mono",monospace;fill:var(--soft)}
.ane-ops .type{font-weight:700;fill:var(--u,var(--ink))}
.ane-ops rect{fill:var(--paper);stroke:var(--u,var(--unknown))}
.ane-ops path{fill:none;stroke:var(--soft)}
.ane-ops .ane{--u:var(--ane)} .ane-ops .cpu{--u:var(--cpu)} .ane-ops .gpu{--u:var(--gpu)}
.ane-ops .input rect,.ane-ops .more rect{stroke-dasharray:4 3}
.ane-ops .around rect{stroke-width:3;stroke-dasharray:none}
"""
"""For these pictures alone: a notebook that shows one inside its page keeps its own look."""


def _layers(flow: nx.DiGraph) -> tuple[nx.DiGraph, list[list[Any]]]:
    """Return the graph with bends, and its nodes in layers, each ordered by the places of its neighbours.

    An arrow from layer 0 to 3 passes layers 1 and 2: it has a bend in each, the nodes (source, 1) and (source,
    2). Arrows from one node to several layers share these bends, and so are one line as far as they go alike.
    """
    depth = _depths(flow)
    bent = nx.DiGraph()
    bent.add_nodes_from(flow)
    for a, b in flow.edges:
        bends = [(a, level) for level in range(depth[a] + 1, depth[b])]
        depth |= {bend: bend[1] for bend in bends}
        nx.add_path(bent, [a, *bends, b])
    layers: list[list[Any]] = [[] for _ in range(max(depth.values(), default=-1) + 1)]
    for node in bent:
        layers[depth[node]].append(node)
    for sweep in range(SWEEPS):
        down = sweep % 2 == 0
        for layer in layers if down else layers[::-1]:
            place = {node: k / len(row) for row in layers for k, node in enumerate(row)}
            neighbours = {n: list(bent.predecessors(n) if down else bent.successors(n)) for n in layer}
            wish = {n: fmean(place[m] for m in ms) if ms else place[n] for n, ms in neighbours.items()}
            layer.sort(key=lambda n: wish[n])
    return bent, layers


def _depths(flow: nx.DiGraph) -> dict[Any, int]:
    """Return the layer of each node: below all that it reads, and near its first reader if no line is added."""
    order = list(nx.topological_sort(flow))
    layers = enumerate(nx.topological_generations(flow))
    depth: dict[Any, int] = {node: level for level, nodes in layers for node in nodes}
    for node in reversed(order):
        if flow.out_degree(node):
            above_first_reader = min(depth[s] for s in flow.successors(node)) - 1
            # moving the node down makes the lines of these operands longer, and its own line shorter
            longer = [p for p in flow.predecessors(node) if _ends(flow, depth, p, node) < above_first_reader]
            depth[node] = above_first_reader if len(longer) <= 1 else depth[node]
    return depth


def _ends(flow: nx.DiGraph, depth: dict[Any, int], node: Any, without: Any) -> int:
    """Return the lowest layer in which a reader of a node stands, without one of the readers."""
    return max((depth[s] for s in flow.successors(node) if s != without), default=-1)


def _words(flow: nx.DiGraph) -> dict[Any, list[str]]:
    """Return the three lines of each box."""
    short = _apart({node: printable(data["name"]) for node, data in flow.nodes(data=True)})
    return {
        node: [short_name(printable(data["kind"]), LETTERS), short[node], printable(data["gives"])]
        for node, data in flow.nodes(data=True)
    }


def _apart(names: dict[Any, str]) -> dict[Any, str]:
    """Return names that fit into a box; of different ones that would read the same, the words that differ."""
    short = {node: short_name(name, LETTERS) for node, name in names.items()}
    words = {node: names[node].split("_") for node, name in names.items() if short[node] != name}
    for group in _alike(names, short):
        short |= {node: _differing(words[node], list(words.values())) for node in group if node in words}
    for group in _alike(names, short):
        short |= {node: names[node] for node in group}
    return short


def _alike(names: dict[Any, str], short: dict[Any, str]) -> list[list[Any]]:
    """Return groups of nodes whose names differ, but are shown alike."""
    groups: dict[str, list[Any]] = {}
    for node in names:
        groups.setdefault(short[node], []).append(node)
    return [group for group in groups.values() if len({names[node] for node in group}) > 1]


def _differing(own: list[str], others: list[list[str]]) -> str:
    """Return the first word of a name, and each word at which a name that began alike goes on differently.

    Of a_3_b_c beside a_4_b_c, a_3…: after a_3 no other name goes on.
    """
    short, left_out = "", False
    for k, word in enumerate(own):
        others = [other for other in others if other[:k] == own[:k]]
        if k and len({*(tuple(other[k : k + 1]) for other in others)}) == 1:
            left_out = True
            continue
        between = "…" if left_out else "_"
        short += between + word if k else word
        left_out = False
    return f"{short}…" if left_out else short


def _columns(bent: nx.DiGraph, layers: list[list[Any]], sizes: dict[Any, float]) -> dict[Any, float]:
    """Return the middle of each node: below what it reads and above its readers, as far as its row has room."""
    x: dict[Any, float] = {}
    for row in layers:
        x |= _spaced(row, sizes, dict.fromkeys(row, 0.0))
    neighbours = {node: [*bent.predecessors(node), *bent.successors(node)] for node in bent}
    for sweep in range(2 * SWEEPS):
        for row in layers if sweep % 2 == 0 else layers[::-1]:
            wish = {n: fmean(x[m] for m in neighbours[n]) if neighbours[n] else x[n] for n in row}
            x |= _spaced(row, sizes, wish)
    return x


def _spaced(row: list[Any], sizes: dict[Any, float], wish: dict[Any, float]) -> dict[Any, float]:
    """Return places in a row, in its order and without overlap, with the least squares from the wishes."""
    # This is isotonic regression, by the algorithm of pooling adjacent violators.
    # Without its shift, the distance from the first box in a row without gaps, a box only has to be right of
    # the box before it. Boxes that wish to stand in the other order touch, at the mean of their wishes.
    distances = ((sizes[a] + sizes[b]) / 2 + GAP_X for a, b in itertools.pairwise(row))
    shifts = [0.0, *itertools.accumulate(distances)]
    touching: list[list[float]] = []  # the wishes, without shifts, of boxes that touch
    for node, shift in zip(row, shifts, strict=False):
        touching.append([wish[node] - shift])
        while len(touching) > 1 and fmean(touching[-2]) > fmean(touching[-1]):
            last = touching.pop()
            touching[-1] += last
    places = [fmean(group) for group in touching for _ in group]
    return {node: place + shift for node, place, shift in zip(row, places, shifts, strict=False)}


def _svg(flow: nx.DiGraph) -> str:
    """Return the picture: the boxes of each layer in a centred row, and the arrows between them."""
    bent, layers = _layers(flow)
    words = _words(flow)
    sizes = {n: max(map(len, words[n])) * LETTER + 16 if n in flow else BEND for n in bent}
    middles = _columns(bent, layers, sizes)
    left = min((middles[n] - sizes[n] / 2 for n in bent), default=0) - MARGIN
    width = max((middles[n] + sizes[n] / 2 for n in bent), default=0) - left + MARGIN
    height = len(layers) * (HEIGHT + GAP_Y) - GAP_Y + 2 * MARGIN
    legend, needed = _legend(flow, height)
    left, width = left - max(needed - width, 0) / 2, max(needed, width)
    height += LEGEND if legend else 0
    at: dict[Any, tuple[float, float]] = {
        n: (middles[n] - left, MARGIN + level * (HEIGHT + GAP_Y))
        for level, row in enumerate(layers)
        for n in row
    }
    arrows = [_arrow(at, a, b, b in flow) for a, b in bent.edges]
    boxes = [_box(flow.nodes[node], words[node], *at[node], sizes[node]) for node in flow]
    kinds = itertools.islice((data["kind"] for _, data in flow.nodes(data=True)), 6)
    label = f"{len(boxes)} boxes: {', '.join(kinds)}"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="ane-ops" viewBox="0 0 {width:.0f} {height:.0f}" '
        f'width="{width:.0f}" height="{height:.0f}" role="img" aria-label="{html.escape(label)}">'
        f"<style>{' '.join(STYLE.split())}</style>{''.join(arrows)}{''.join(boxes)}{legend}</svg>"
    )


def _legend(flow: nx.DiGraph, y: float) -> tuple[str, float]:
    """Return the colour of each unit that a box has, in a row below the boxes ("" without), and its width."""
    units = dict.fromkeys(data["unit"] for _, data in flow.nodes(data=True) if data["unit"])
    words, x = [], float(MARGIN)
    for unit in units:
        word = UNIT_WORDS.get(unit, unit)
        words.append(
            f'<g class="{unit}"><rect x="{x:.1f}" y="{y:.1f}" width="12" height="12" rx="3"/>'
            f'<text class="type" x="{x + 18:.1f}" y="{y + 10:.1f}">{word}</text></g>'
        )
        x += 18 + len(word) * LETTER + GAP_X
    return "".join(words), x - GAP_X + MARGIN


def _arrow(at: dict[Any, tuple[float, float]], a: Any, b: Any, ends: bool) -> str:
    """Return a curve through the gap between two rows, to a box, or to a bend in a row that it passes."""
    (x, top), (end_x, end_y) = at[a], at[b]
    y = top + HEIGHT
    middle = (y + end_y) / 2
    tip = f"V{end_y + HEIGHT:.1f}"
    if ends:
        left, right, barb_y = end_x - 3, end_x + 3, end_y - 5
        tip = f"M{left:.1f} {barb_y:.1f}L{end_x:.1f} {end_y:.1f}L{right:.1f} {barb_y:.1f}"
    curve = f"C{x:.1f} {middle:.1f} {end_x:.1f} {middle:.1f} {end_x:.1f} {end_y:.1f}"
    return f'<path d="M{x:.1f} {y:.1f}{curve}{tip}"/>'


def _box(data: dict[str, Any], words: list[str], x: float, y: float, width: float) -> str:
    classes = [data["unit"], "" if data["op"] else "input", *(c for c in ("around", "more") if data[c])]
    lines = "".join(
        f'<text class="{kind}" x="{x:.1f}" y="{y + 15 + 14 * k:.1f}" text-anchor="middle">{word}</text>'
        for k, (kind, word) in enumerate(zip(("type", "name", "gives"), map(html.escape, words), strict=True))
    )
    title = f"<title>{html.escape(printable(data['line']))}</title>" if data["line"] else ""
    return (
        f'<g class="{" ".join(filter(None, classes))}">{title}'
        f'<rect x="{x - width / 2:.1f}" y="{y:.1f}" width="{width:.1f}" height="{HEIGHT}" rx="5"/>{lines}</g>'
    )
