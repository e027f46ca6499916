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
from collections.abc import Sequence

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
    units = range(len(steps[0]))
    costs, came = [_enter(u) + steps[0][u] for u in units], list[list[int]]()
    moves = [[_move(old, new) for old in units] for new in units]
    for step in steps[1:]:
        ways = [[cost + move for cost, move in zip(costs, row, strict=True)] for row in moves]
        least = list(map(min, ways))
        came.append([way.index(one) for way, one in zip(ways, least, strict=True)])
        costs = [one + work for one, work in zip(least, step, strict=True)]
    path = [min(units, key=lambda u: costs[u] + _end(u))]
    for origin in reversed(came):
        path.append(origin[path[-1]])
    return path[::-1]


def total(steps: Sequence[Costs], path: Sequence[int]) -> float:
    """The cost of a path in microseconds."""
    if not steps:
        return 0.0
    work = sum(step[unit] for step, unit in zip(steps, path, strict=True))
    moves = sum(_move(a, b) for a, b in itertools.pairwise(path))
    return _enter(path[0]) + work + moves + _end(path[-1])
