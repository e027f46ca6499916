"""Sort passes by what they declare: what each must precede and follow."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from typing import Protocol, TypeVar

import networkx

from anesurgery.errors import PassError


class Ordered(Protocol):
    """Something with a name that declares its place among others."""

    @property
    def name(self) -> str:
        """The name."""

    @property
    def precedes(self) -> tuple[str, ...]:
        """Names of those that must come later, or patterns of names as of files: "legacy_*"."""

    @property
    def follows(self) -> tuple[str, ...]:
        """Names of those that must come earlier, likewise."""


T = TypeVar("T", bound=Ordered)


def in_order(steps: Sequence[T]) -> list[T]:
    """The steps, moved only as far as their declarations ask; of a repeated step the first counts.

    Raises:
        PassError: the declarations contradict each other; it names the steps.
    """
    first = {step.name: i for i, step in reversed(list(enumerate(steps)))}
    graph = networkx.DiGraph()
    graph.add_nodes_from(range(len(steps)))
    for i, step in enumerate(steps):
        graph.add_edges_from((first[name], i) for name in _named(step.follows, step, first))
        if first[step.name] == i:
            later = _named(step.precedes, step, first)
            graph.add_edges_from((i, j) for j, other in enumerate(steps) if other.name in later)
    try:
        return [steps[i] for i in networkx.lexicographical_topological_sort(graph)]
    except networkx.NetworkXUnfeasible:
        circle = [steps[a].name for a, _ in networkx.find_cycle(graph)]
        words = ", ".join(f"{a} before {b}" for a, b in zip(circle, [*circle[1:], circle[0]], strict=True))
        raise PassError(f"the declared order of passes contradicts itself: {words}") from None


def _named(patterns: Sequence[str], step: Ordered, names: Iterable[str]) -> set[str]:
    """The names, other than its own, that what a step declares is about."""
    return {n for n in names for pattern in patterns if n != step.name and fnmatchcase(n, pattern)}
