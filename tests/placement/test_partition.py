"""The segmenter: the cheapest of all paths, by brute force and by networkx."""

from __future__ import annotations

import itertools
import math

import networkx as nx
import pytest
from counting import assert_linear
from hypothesis import given, settings
from hypothesis import strategies as st

from anesurgery.placement.verdicts import ANE, CPU, GPU, LAUNCH, OUTPUT, SWITCH, cheapest_path, path_cost

MICROSECONDS = st.one_of(st.floats(0, 1000), st.just(math.inf))
OPS = st.lists(st.tuples(st.floats(0, 1000), MICROSECONDS, MICROSECONDS), min_size=1, max_size=6)


@given(OPS)
@settings(max_examples=150, deadline=None)
def test_no_path_is_cheaper(steps: list[tuple[float, float, float]]) -> None:
    best = min(path_cost(steps, path) for path in itertools.product(range(3), repeat=len(steps)))
    assert path_cost(steps, cheapest_path(steps)) == pytest.approx(best)


@given(OPS)
@settings(max_examples=60, deadline=None)
def test_the_same_as_a_shortest_path_through_a_graph(steps: list[tuple[float, float, float]]) -> None:
    graph = nx.DiGraph()
    for unit in range(3):
        graph.add_edge("begin", (0, unit), weight=path_cost([(0, 0, 0)], [unit]) - _end(unit) + steps[0][unit])
        graph.add_edge((len(steps) - 1, unit), "end", weight=_end(unit))
    for i in range(1, len(steps)):
        for old, new in itertools.product(range(3), repeat=2):
            move = (
                path_cost([(0, 0, 0)] * 2, [old, new]) - path_cost([(0, 0, 0)], [old]) + _end(old) - _end(new)
            )
            graph.add_edge((i - 1, old), (i, new), weight=move + steps[i][new])
    length = nx.shortest_path_length(graph, "begin", "end", weight="weight")
    assert path_cost(steps, cheapest_path(steps)) == pytest.approx(length)


def _end(unit: int) -> float:
    return 0.0 if unit == CPU else OUTPUT


def test_the_thresholds_that_were_measured() -> None:
    """The whole graph goes to the ANE for 0.250 ms saved, an island in the middle for 0.375 ms."""
    assert cheapest_path([(249.0, 0.0)]) == [CPU]
    assert cheapest_path([(251.0, 0.0)]) == [ANE]
    island = [(1.0, math.inf), (374.0, 0.0), (1.0, math.inf)]
    assert cheapest_path(island) == [CPU, CPU, CPU]
    island[1] = (376.0, 0.0)
    assert cheapest_path(island) == [CPU, ANE, CPU]
    assert path_cost(island, [CPU, ANE, CPU]) == 2 + LAUNCH + 2 * SWITCH


def test_nothing_and_units() -> None:
    assert cheapest_path([]) == []
    assert path_cost([], []) == 0
    assert cheapest_path([(500.0, math.inf, 1.0)]) == [GPU]


def test_the_work_is_linear_in_the_number_of_ops() -> None:
    steps = [(5.0, 2.0, 3.0)]
    assert_linear(cheapest_path, steps * 500, steps * 1000)
    assert len(cheapest_path(steps * 10_000)) == 10_000
