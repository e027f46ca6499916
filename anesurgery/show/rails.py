"""The data flow of a list of ops as rails beside it: one line for each value that is read further down."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from anesurgery.placement.op_errors import OpError

LANES = 8
"""Rails that are drawn apart; further ones share the last, so that a narrow page has room for the names."""


@dataclass(frozen=True)
class Rail:
    """What is drawn beside an op.

    Attributes:
        lane: where the op stands.
        passing: lanes of values that come from above and are read below.
        incoming: lanes of the values that it reads.
        after: lanes that go on below it.
    """

    lane: int
    passing: tuple[int, ...]
    incoming: tuple[int, ...]
    after: tuple[int, ...]


def rails(rows: Sequence[OpError]) -> list[Rail]:
    """A rail for each row, in file order."""
    at = {row.name: k for k, row in enumerate(rows)}
    reads = [[at[name] for name in row.reads if name in at and at[name] < k] for k, row in enumerate(rows)]
    last = {source: k for k, sources in enumerate(reads) for source in sources}
    lanes: dict[int, int] = {}
    drawn = []
    for k, sources in enumerate(reads):
        incoming = _drawn(lanes[s] for s in sources)
        before = {s: lane for s, lane in lanes.items() if last[s] > k}
        lane = next(n for n in range(len(before) + 1) if n not in before.values())
        lanes = before | ({k: lane} if k in last else {})
        drawn.append(Rail(_drawn([lane])[0], _drawn(before.values()), incoming, _drawn(lanes.values())))
    return drawn


def _drawn(lanes: Iterable[int]) -> tuple[int, ...]:
    return tuple(sorted({min(lane, LANES - 1) for lane in lanes}))
