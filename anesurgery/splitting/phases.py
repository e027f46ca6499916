"""Put ops into phases: those that the Neural Engine cannot run stand apart, in as few chunks as possible.

`phases_of` and `merged_phases` work on numbers of ops, and are used for layers of neural networks too.
`engine_phases` applies them to a program. Ops are reordered, as far as their dependences allow. A value that
cannot be an input, such as a boolean mask, is computed again, or keeps its makers and readers in one chunk. So
do states.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace

from anesurgery.errors import SurgeryError
from anesurgery.splitting.graph import WRITING, Graph


def phases_of(before: Sequence[Collection[int]], apart: Sequence[bool]) -> list[int]:
    """Return the phase of each op, from 0: ops that stand apart are in odd phases, the others in even ones.

    Args:
        before: for each op, the earlier ops that must run first.
        apart: for each op, whether it stands apart, as ops that the engine cannot run.
    """
    phase_of: list[int] = []
    for needed, is_apart in zip(before, apart, strict=True):
        least = max((phase_of[n] for n in needed), default=0)
        phase_of.append(least + (least % 2 != is_apart))  # the first phase from `least` on that is odd or even
    return phase_of


def merged_phases(numbers: Sequence[int], together: Iterable[Collection[int]]) -> list[int]:
    """Renumber phases without gaps, where some ops must stay in one phase: phases between them are merged.

    Ops in the phases 0, 1, 2, 1, 2, of which the second and third must stay together, get 0, 1, 1, 1, 1.

    Args:
        numbers: the phase of each op.
        together: sets of ops, each to stay in one phase.
    """
    phases_of_sets = [[numbers[i] for i in ops] for ops in together if ops]
    spans = [(min(phases), max(phases)) for phases in phases_of_sets]
    new: dict[int, int] = {}
    number = -1
    for phase in sorted(set(numbers)):
        is_joined_to_last = any(first < phase <= last for first, last in spans)
        number += not is_joined_to_last
        new[phase] = number
    return [new[phase] for phase in numbers]


def engine_phases(graph: Graph, refused: Collection[str], target: str) -> tuple[Graph, tuple[int, ...]]:
    """Return a graph with its ops in phases, and the places between the phases.

    Args:
        graph: the graph of the whole function.
        refused: names of the ops that cannot run on the ANE.
        target: in words, for errors.

    Returns:
        A graph whose nodes are in the order of the chunks, without nodes that nobody reads; and the places.

    Raises:
        SurgeryError: the ANE can run all ops or none, or they cannot be separated.
    """
    graph = replace(graph, nodes=tuple(graph.nodes[i] for i in _needed_nodes(graph)))
    apart = [node.makes[0] in refused for node in graph.nodes]
    if not any(apart) or all(apart):
        word = "no op" if any(apart) else "every op"
        raise SurgeryError(f"{word} of the model can run on the ANE ({target}), so there is no cut")
    before = [{graph.maker[name] for name in node.reads if name in graph.maker} for node in graph.nodes]
    together = list(graph.state_users.values())
    for users in together:  # users of a state stay in their order
        for first, second in itertools.pairwise(users):
            before[second].add(first)
    readers: dict[str, list[int]] = {}
    for number, node in enumerate(graph.nodes):
        for name in node.reads:
            readers.setdefault(name, []).append(number)
    repeated = {name: nodes for name, nodes in graph.repeated.items() if not graph.can_pass(name)}
    for name, maker in graph.maker.items():
        if name not in repeated and name in readers and not graph.can_pass(name):
            together.append([maker, *readers[name]])
    numbers = merged_phases(phases_of(before, apart), together)
    if not any(numbers):
        raise SurgeryError(
            "the ops that cannot run on the ANE share a state with the others, or values that no input can be; "
            "there is no cut"
        )
    order = sorted(range(len(numbers)), key=lambda i: numbers[i])
    new_index = {old: new for new, old in enumerate(order)}
    ordered = replace(graph, nodes=tuple(graph.nodes[i] for i in order))
    # values that can pass are passed here, so that each op runs in its own phase
    ordered.repeated = {name: frozenset(new_index[i] for i in nodes) for name, nodes in repeated.items()}
    begins = [new for new in range(1, len(order)) if numbers[order[new]] != numbers[order[new - 1]]]
    return ordered, (0, *begins, len(order))


def _needed_nodes(graph: Graph) -> list[int]:
    """Return the nodes that an output needs, or that change a state."""
    pending = [graph.maker[name] for name in graph.outputs if name in graph.maker]
    pending += [i for i, node in enumerate(graph.nodes) if node.op.type in WRITING]
    needed: set[int] = set()
    while pending:
        number = pending.pop()
        if number not in needed:
            needed.add(number)
            pending += [graph.maker[name] for name in graph.nodes[number].reads if name in graph.maker]
    return sorted(needed)
