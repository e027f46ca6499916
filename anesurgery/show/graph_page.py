"""Show the ops of a program as an HTML page with pan, zoom, search, and repeated blocks folded into one box.

`Picture.save("x.html")` calls `graph_page`. In the browser, Cytoscape.js draws and dagre places the boxes; both
are embedded in the page, which needs no network.
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
"""The scripts, in the order in which a page loads them."""
LEAST = 4
"""The fewest ops of a block that is folded. A choice: fewer are read as quickly as the words on a fold."""
LETTERS = 28
"""The most characters on a line in a box."""


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
class Fold:
    """One of several equal blocks of ops: its ops, its number from 1, and how many blocks there are."""

    ops: tuple[object, ...]
    number: int
    times: int

    def as_box(self, flow: nx.DiGraph) -> dict[str, str]:
        """Return the words in its box, and the unit that gives its colour, if all its ops have one."""
        units = Counter(UNIT_WORDS.get(flow.nodes[op]["unit"], "unknown") for op in self.ops)
        places = ", ".join(f"{n} {word}" for word, n in units.most_common())
        places = f"all {places.partition(' ')[2]}" if len(units) == 1 else places
        coloured = any(flow.nodes[op]["unit"] for op in self.ops)
        only = flow.nodes[self.ops[0]]["unit"] if len(units) == 1 else ""
        words = f"block {self.number} of {self.times}\n{len(self.ops)} ops"
        return {"label": f"{words}\n{places}" if coloured else words, "unit": str(only)}


def repeated_blocks(kinds: Sequence[object]) -> list[Repeats]:
    """Return the blocks of a list that repeat, in order; the block that covers most is found first.

    Args:
        kinds: a value for each op, equal for ops that may be folded together.
    """
    numbers = {kind: n for n, kind in enumerate(dict.fromkeys(kinds))}
    row = np.array([numbers[kind] for kind in kinds], dtype=np.int64)
    best = max(
        (
            found
            for length in range(LEAST, len(row) // 2 + 1)
            if (found := _longest_repetition(row, length)) is not None
        ),
        key=lambda one: (one.length * one.times, -one.length),
        default=None,
    )
    if best is None:
        return []
    behind = [
        Repeats(one.start + best.end, one.length, one.times) for one in repeated_blocks(kinds[best.end :])
    ]
    return [*repeated_blocks(kinds[: best.start]), best, *behind]


def _longest_repetition(row: np.ndarray, length: int) -> Repeats | None:
    """Return the longest stretch with this period; None where it does not repeat once."""
    alike = np.concatenate(([False], row[:-length] == row[length:], [False]))
    edges = np.flatnonzero(np.diff(alike.astype(np.int8)))
    starts, lengths = edges[::2], edges[1::2] - edges[::2]
    if not len(starts) or lengths.max() < length:
        return None
    at = int(lengths.argmax())
    return Repeats(int(starts[at]), length, int(lengths[at]) // length + 1)


def graph_page(flow: nx.DiGraph, heading: str, target: str | None) -> str:
    """Return an HTML document of ops and their connections.

    Args:
        flow: nodes with `op` (False for an input), `kind`, `name`, `gives`, `line`, `unit` and `around`.
        heading: the heading of the page.
        target: chip and OS for which boxes are coloured by unit; None for no colours.
    """
    ops = [node for node, data in flow.nodes(data=True) if data["op"]]
    kinds = [(flow.nodes[node]["kind"], flow.nodes[node]["gives"]) for node in ops]
    folds = [
        Fold(tuple(ops[at : at + one.length]), n, one.times)
        for one in repeated_blocks(kinds)
        for n, at in enumerate(range(one.start, one.end, one.length), 1)
    ]
    fold_of = {node: n for n, fold in enumerate(folds) for node in fold.ops}
    nodes = [_node(flow.nodes[node], fold_of.get(node)) for node in flow]
    places = {node: n for n, node in enumerate(flow)}
    counts = Counter(data["unit"] for _, data in flow.nodes(data=True) if data["op"] and data["unit"])
    graph = {
        "nodes": nodes,
        "edges": [[places[a], places[b]] for a, b in flow.edges],
        "folds": [fold.as_box(flow) for fold in folds],
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
