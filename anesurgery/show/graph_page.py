"""The ops of a program as a page to move about in: pan, zoom, search, and repeated blocks folded into one box.

Cytoscape.js draws and dagre places the boxes, in the browser; both are in the page, which needs no network.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import networkx as nx
import numpy as np

from anesurgery.display import printable, short_name
from anesurgery.show.page import environment
from anesurgery.show.summary import UNIT_WORDS

VENDOR = Path(__file__).with_name("vendor")
LIBRARIES = ("cytoscape.min.js", "cytoscape-dagre.min.js")
"""In the order in which a page loads them."""
LEAST = 4
"""Ops of a block at least that is folded. A choice: less is read as quickly as the words on a fold."""
LETTERS = 28
"""Characters of a line in a box at most."""


@dataclass(frozen=True)
class Repeats:
    """A block of ops that follows itself several times: where it begins, its length in ops, how often."""

    start: int
    length: int
    times: int

    @property
    def end(self) -> int:
        """The first op behind the last of them."""
        return self.start + self.length * self.times


@dataclass(frozen=True)
class Fold:
    """One of several blocks of alike ops: its ops, its number from 1, and how many there are."""

    ops: tuple[object, ...]
    number: int
    times: int

    def drawn(self, flow: nx.DiGraph) -> dict[str, str]:
        """What its box says, and the unit whose colour it has: that of all its ops, or none."""
        units = Counter(UNIT_WORDS.get(flow.nodes[op]["unit"], "unknown") for op in self.ops)
        places = ", ".join(f"{n} {word}" for word, n in units.most_common())
        places = f"all {places.partition(' ')[2]}" if len(units) == 1 else places
        coloured = any(flow.nodes[op]["unit"] for op in self.ops)
        only = flow.nodes[self.ops[0]]["unit"] if len(units) == 1 else ""
        words = f"block {self.number} of {self.times}\n{len(self.ops)} ops"
        return {"label": f"{words}\n{places}" if coloured else words, "unit": str(only)}


def repeats(kinds: Sequence[object]) -> list[Repeats]:
    """Stretches of a list that repeat, in order; the one that covers most is found first, then those beside it.

    Args:
        kinds: what is alike in two ops that may be folded together.
    """
    numbers = {kind: n for n, kind in enumerate(dict.fromkeys(kinds))}
    row = np.array([numbers[kind] for kind in kinds], dtype=np.int64)
    best = max(
        (found for length in range(LEAST, len(row) // 2 + 1) if (found := _repeated(row, length)) is not None),
        key=lambda one: (one.length * one.times, -one.length),
        default=None,
    )
    if best is None:
        return []
    behind = [Repeats(one.start + best.end, one.length, one.times) for one in repeats(kinds[best.end :])]
    return [*repeats(kinds[: best.start]), best, *behind]


def _repeated(row: np.ndarray, length: int) -> Repeats | None:
    """The longest stretch that repeats with this period, if it does so once at least."""
    alike = np.concatenate(([False], row[:-length] == row[length:], [False]))
    edges = np.flatnonzero(np.diff(alike.astype(np.int8)))
    starts, lengths = edges[::2], edges[1::2] - edges[::2]
    if not len(starts) or lengths.max() < length:
        return None
    at = int(lengths.argmax())
    return Repeats(int(starts[at]), length, int(lengths[at]) // length + 1)


def graph_page(flow: nx.DiGraph, heading: str, target: str | None) -> str:
    """An HTML document of ops and of who reads whom.

    Args:
        flow: nodes with `op` (false for an input), `kind`, `name`, `gives`, `line`, `unit` and `around`.
        heading: what is drawn.
        target: chip and OS by which boxes have the colour of their unit; None for no colours.
    """
    ops = [node for node, data in flow.nodes(data=True) if data["op"]]
    kinds = [(flow.nodes[node]["kind"], flow.nodes[node]["gives"]) for node in ops]
    folds = [
        Fold(tuple(ops[at : at + one.length]), n, one.times)
        for one in repeats(kinds)
        for n, at in enumerate(range(one.start, one.end, one.length), 1)
    ]
    fold_of = {node: n for n, fold in enumerate(folds) for node in fold.ops}
    nodes = [_node(flow.nodes[node], fold_of.get(node)) for node in flow]
    places = {node: n for n, node in enumerate(flow)}
    counts = Counter(data["unit"] for _, data in flow.nodes(data=True) if data["op"] and data["unit"])
    graph = {
        "nodes": nodes,
        "edges": [[places[a], places[b]] for a, b in flow.edges],
        "folds": [fold.drawn(flow) for fold in folds],
    }
    return (
        environment()
        .get_template("graph.html")
        .render(
            heading=heading,
            target=target,
            ops=len(ops),
            units=[(unit or "unknown", UNIT_WORDS[unit], counts[unit or "unknown"]) for unit in UNIT_WORDS],
            graph=graph,
            libraries="\n".join((VENDOR / name).read_text(encoding="utf-8") for name in LIBRARIES),
        )
    )


def _node(data: dict[str, object], fold: int | None) -> dict[str, object]:
    words = {key: printable(str(data[key])) for key in ("kind", "name", "gives", "line")}
    short = "\n".join(short_name(words[key], LETTERS) for key in ("kind", "name", "gives"))
    place = {"unit": data["unit"], "op": data["op"], "fold": fold, "around": data.get("around", False)}
    return {**words, "label": short, **place}
