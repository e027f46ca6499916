"""Runs of neighbouring ops on one unit, and what flows between them."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace

from anesurgery.mil import Function, Var, is_stored, operands
from anesurgery.placement.inspection import Segment
from anesurgery.placement.verdicts import Judged
from anesurgery.semantics.byte_sizes import shape_of


def segments_of(
    judged: Sequence[Judged], units: Sequence[str | None], function: Function
) -> tuple[tuple[Segment, ...], list[int]]:
    """The segments in file order, and the number of that of each op."""
    changed = [a != b for a, b in itertools.pairwise(units)]
    numbers = list(itertools.accumulate(changed, initial=0))[: len(units)]
    home = {v: n for j, n in zip(judged, numbers, strict=True) for v in j.op.outputs}
    members: dict[int, list[Judged]] = {}
    for j, n in zip(judged, numbers, strict=True):
        members.setdefault(n, []).append(j)
    unit = dict(zip(numbers, units, strict=True))
    results = set(function.outputs)
    segments = [_segment(n, ops, unit[n], home, results) for n, ops in members.items()]
    return tuple(segments), numbers


def with_times(
    segments: Iterable[Segment], numbers: Sequence[int], each: Sequence[float]
) -> tuple[Segment, ...]:
    """The segments with the milliseconds of their ops; `numbers` says to which an op belongs."""
    if not each:
        return tuple(segments)
    spent: defaultdict[int, float] = defaultdict(float)
    for number, ms in zip(numbers, each, strict=True):
        spent[number] += ms
    return tuple(replace(segment, ms=spent[segment.index]) for segment in segments)


def _segment(
    number: int, members: Sequence[Judged], unit: str | None, home: dict[Var, int], results: set[Var]
) -> Segment:
    read = dict.fromkeys(v for j in members for _, v in operands(j.op) if not is_stored(v))
    readers = {v: _readers(v, home) - {number} for j in members for v in j.op.outputs}
    outside = [v for v, others in readers.items() if others or v in results]
    return Segment(
        number,
        unit,
        tuple(j.name for j in members),
        {v.name: shape_of(v) for v in read if home.get(v) != number},
        {v.name: shape_of(v) for v in outside},
        tuple(sorted({n for v in outside for n in readers[v]})),
    )


def _readers(var: Var, home: dict[Var, int]) -> set[int]:
    return {home[out] for op in var.child_ops for out in op.outputs if out in home}
