"""How long a form of a model is expected to take beside another: in time, else in Core ML's cost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from anesurgery.placement.cost import CPU_SUMS, MEMORY, SLOWER
from anesurgery.placement.durations import ALIKE, Time, change, from_to
from anesurgery.placement.inspection import Inspection, OpRow

RECURRENT = frozenset({"gru", "lstm", "rnn"})

SAME = 1e-6
"""Relative difference below which two estimates are one."""
CLEARLY = 0.9
"""A model is clearly faster where its cost is at most this share of the cost before. Where a time is known and
its band cannot tell, cost and time must both be. A choice, not measured."""

DOUBT = 0.1
"""Share of a time that may hang on ops of which it is not known whether the ANE runs them. A choice."""


@dataclass(frozen=True)
class View:
    """What is taken for true where it is not known."""

    op: float
    """Microseconds that each op of the longest chain takes besides its estimate, in every round of its loop."""
    reads_weights: bool
    """Does each product read its weights from the memory of the chip?"""
    fast_recurrent: bool
    """Do recurrent layers compute at the CPU's highest rate?"""


VIEWS = (View(0.0, False, False), View(5.0, True, True))
"""The likeliest first."""


@dataclass(frozen=True)
class Ratio:
    """The expected time of a model, as a multiple of that of another."""

    best: float
    high: float
    """The most that it may be."""
    distinct: bool = True
    """Does its band leave out 1, or what is as good as 1, so that one of the two is faster?"""
    cost: float = 1.0
    """The ratio of what Core ML itself counts."""

    @property
    def slower(self) -> bool:
        """Is it expected to take longer?"""
        return self.best > 1 + SAME

    @property
    def faster(self) -> bool:
        """Is it expected to take less time?"""
        return self.best < 1 - SAME

    @property
    def equal(self) -> bool:
        """Can no difference in time be told, and does Core ML itself count no more?"""
        return not self.distinct and self.cost <= 1 + SAME

    @property
    def clear(self) -> bool:
        """Is it faster by more than the error, whatever is taken for true of what is not known?"""
        return self.high < 1


@dataclass(frozen=True)
class Expected:
    """How long all functions of a program take, one after the other.

    Attributes:
        cost: microseconds in the likeliest of `VIEWS`.
        at_worst: the same in the view that is worst for many small ops.
        time: that of its one function; None where there are several, or none is known.
        doubt: the share of the time by which it would be longer if ops of which it is not known whether the ANE
            runs them were on the CPU.
    """

    cost: float
    at_worst: float
    time: Time | None = None
    doubt: float = 0.0

    @classmethod
    def of(cls, parts: Sequence[Inspection]) -> Expected:
        """Reads it off the inspection of each function."""
        costs = [sum(_one(part, view) for part in parts) for view in VIEWS]
        time = parts[0].time if len(parts) == 1 else None
        return cls(costs[0], costs[-1], time, 0.0 if time is None else _doubt(parts[0]) / (1e3 * time.ms))

    def times(self, before: Expected) -> tuple[Time, Time] | None:
        """The times before and after by which the two are judged; None where cost decides.

        Of what runs on the CPU alone nothing but the cost is known: its time is that, within a wide band.
        """
        if self.time is None or before.time is None or max(self.doubt, before.doubt) > DOUBT:
            return None
        measured = self.time.measurements and before.time.measurements
        return (before.time, self.time) if measured else None

    def over(self, before: Expected) -> Ratio:
        """The ratio to the time before.

        What Core ML itself counts as dearer is taken only for a gain in time that its band can tell.
        """
        cost, worst = multiple(self.cost, before.cost), multiple(self.at_worst, before.at_worst)
        at_worst = worst if worst > 1 + SAME else 0.0
        if (pair := self.times(before)) is None:
            return Ratio(cost, max(cost / CLEARLY, at_worst), cost=cost)
        times = change(*pair)
        if not before.cost:  # layers of a network have none
            return Ratio(times.ratio, times.high, times.high < 1 / ALIKE or times.low > ALIKE, times.ratio)
        told = times.high < 1 / ALIKE or times.low > ALIKE
        best, both = times.ratio if told else max(times.ratio, cost), max(times.ratio, cost)
        return Ratio(best, max(min(times.high, both / CLEARLY), at_worst), told, cost)

    def words(self, before: Expected, verb: str = "") -> str:
        """The times: "expected time 2 ms -> 1.9 ms"; the cost where none is known, or it decides otherwise."""
        if self.time is None or before.time is None:
            return self.relative(before, verb)
        told, decides = self.time.ms / before.time.ms, self.over(before).best
        alike = self.times(before) is not None or (told <= CLEARLY) == (decides <= CLEARLY)
        if _sign(told) != _sign(decides) or not alike:
            return self.relative(before, verb)
        return f"expected time{verb} {from_to(before.time.ms, self.time.ms)}"

    def relative(self, before: Expected, verb: str = "") -> str:
        """The cost, as a multiple of that before: "relative cost 1 -> 0.72"."""
        return f"relative cost{verb} {from_to(1.0, multiple(self.cost, before.cost), '')}"


def _sign(ratio: float) -> int:
    """-1 where a ratio is of less, 1 of more, 0 of the same."""
    return (ratio > 1 + SAME) - (ratio < 1 - SAME)


def multiple(after: float, before: float) -> float:
    """A ratio of costs; nothing is as dear as nothing."""
    return after / before if before else 1.0 if not after else float("inf")


def _one(part: Inspection, view: View) -> float:
    if part.cost is None:
        return 0.0
    unpriced = sum(row.bytes for row in part.ops if row.estimate is None)
    read = sum(map(_read, part.ops)) if view.reads_weights else 0.0
    spared = sum(map(_spared, part.ops)) if view.fast_recurrent else 0.0
    return part.cost + unpriced * SLOWER / MEMORY + view.op * part.chain + read - spared


def _doubt(part: Inspection) -> float:
    """Microseconds that its time leaves out if the ANE runs nothing of which that is not known."""
    costs = [row.estimate for row in part.ops if row.legal is None and row.estimate is not None]
    return sum(max((cost.cpu or 0.0) - (cost.ane or 0.0), 0.0) for cost in costs)


def _read(row: OpRow) -> float:
    """What an op takes longer if it waits for its weights."""
    if row.op_type in RECURRENT or row.estimate is None or not row.flop:
        return 0.0
    told = row.estimate.cpu if row.preferred == "cpu" else row.estimate.ane
    return max(row.rounds * row.weights / MEMORY - (told or 0.0), 0.0)


def _spared(row: OpRow) -> float:
    """What a recurrent layer takes less at the highest rate."""
    if row.op_type not in RECURRENT or row.estimate is None or row.estimate.cpu is None:
        return 0.0
    return max(row.estimate.cpu - row.flop / CPU_SUMS, 0.0)
