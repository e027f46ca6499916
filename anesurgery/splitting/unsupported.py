"""Cut a program before and after the ops that the Neural Engine cannot run.

Ops are put in another order, so that there are as few chunks as the order of need allows. What passes from one
chunk to another is passed; only what no input can be, as a mask of booleans, is computed again or keeps its
makers and readers in one chunk. So do states.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection
from dataclasses import replace

from anesurgery.errors import SurgeryError
from anesurgery.splitting.graph import WRITING, Graph
from anesurgery.splitting.phases import joined, phases


def apart(graph: Graph, refused: Collection[str], words: str) -> tuple[Graph, tuple[int, ...]]:
    """The ops in phases, and the places between them.

    Args:
        graph: of the whole.
        refused: names of the ops that cannot run on the ANE.
        words: of the target, for errors.

    Returns:
        A graph whose nodes are in the order of the chunks, those that nobody reads left out; and the places.

    Raises:
        SurgeryError: there is no such op or no other, or they cannot be separated.
    """
    graph = replace(graph, nodes=tuple(graph.nodes[i] for i in _read(graph)))
    alone = [node.makes[0] in refused for node in graph.nodes]
    if not any(alone) or all(alone):
        word = "no op" if any(alone) else "every op"
        raise SurgeryError(f"{word} of the model can run on the ANE ({words}), so there is no cut")
    needed = [{graph.maker[name] for name in node.reads if name in graph.maker} for node in graph.nodes]
    together = list(graph.state_users.values())
    for users in together:
        for first, second in itertools.pairwise(users):
            needed[second].add(first)
    readers: dict[str, list[int]] = {}
    for number, node in enumerate(graph.nodes):
        for name in node.reads:
            readers.setdefault(name, []).append(number)
    again = {name: cone for name, cone in graph.again.items() if not graph.passes(name)}
    for name, maker in graph.maker.items():
        if name not in again and name in readers and not graph.passes(name):
            together.append([maker, *readers[name]])
    numbers = joined(phases(needed, alone), together)
    if not any(numbers):
        raise SurgeryError(
            "the ops that cannot run on the ANE share a state with the others, or values that no input can be; "
            "there is no cut"
        )
    order = sorted(range(len(numbers)), key=lambda i: (numbers[i], i))
    place = {old: new for new, old in enumerate(order)}
    ordered = replace(graph, nodes=tuple(graph.nodes[i] for i in order))
    ordered.again = {name: frozenset(place[i] for i in cone) for name, cone in again.items()}
    ends = [new for new in range(1, len(order)) if numbers[order[new]] != numbers[order[new - 1]]]
    return ordered, (0, *ends, len(order))


def _read(graph: Graph) -> list[int]:
    """The nodes that make what leaves the function, or change a state."""
    pending = [graph.maker[name] for name in graph.outputs if name in graph.maker]
    pending += [i for i, node in enumerate(graph.nodes) if node.op.type in WRITING]
    needed: set[int] = set()
    while pending:
        number = pending.pop()
        if number not in needed:
            needed.add(number)
            pending += [graph.maker[name] for name in graph.nodes[number].reads if name in graph.maker]
    return sorted(needed)
