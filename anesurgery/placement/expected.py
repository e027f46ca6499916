"""Compare the expected speed of a model before and after an edit: by estimated time, else by Core ML's cost.

The search of `apply` asks `Expected.over` whether a step gains. Times are known of some chips only, and each
has a band. Where no time is known, or its band is too wide to tell, Core ML's own estimate of the cost decides.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from anesurgery.placement.cost import CPU_SUMS, MEMORY, SLOWER
from anesurgery.placement.durations import EQUAL_WITHIN, Time, change, from_to
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
    """Assumptions about facts of a chip that are not known."""

    op: float
    """Microseconds that each op of the longest chain takes beside its estimate, in each round of its loop."""
    reads_weights: bool
    """Does each product read its weights from the memory of the chip?"""
    fast_recurrent: bool
    """Do recurrent layers compute at the CPU's highest rate?"""


VIEWS = (View(0.0, False, False), View(5.0, True, True))
"""The likeliest assumptions, and those that are worst for many small ops."""


@dataclass(frozen=True)
class Ratio:
    """The expected time of a model, as a multiple of that of another."""

    best: float
    high: float
    """The upper end of its band."""
    distinct: bool = True
    """Is 1 outside the band, so that one of the two models is faster?"""
    cost: float = 1.0
    """The ratio of the costs that Core ML itself estimates."""

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
        """Is no difference in time certain, and the cost not higher?"""
        return not self.distinct and self.cost <= 1 + SAME

    @property
    def clear(self) -> bool:
        """Is it faster over the whole band, under all assumptions?"""
        return self.high < 1


@dataclass(frozen=True)
class Expected:
    """How long all functions of a program take, one after the other.

    Attributes:
        cost: microseconds under the first assumptions of `VIEWS`.
        at_worst: microseconds under the last.
        time: the time of its only function; None where there are several, or no time is known.
        doubt: the share by which the time would grow if all ops of unknown placement ran on the CPU.
    """

    cost: float
    at_worst: float
    time: Time | None = None
    doubt: float = 0.0

    @classmethod
    def of(cls, parts: Sequence[Inspection]) -> Expected:
        """Return the expectation from the inspection of each function."""
        costs = [sum(_cost(part, view) for part in parts) for view in VIEWS]
        time = parts[0].time if len(parts) == 1 else None
        return cls(costs[0], costs[-1], time, 0.0 if time is None else _doubt(parts[0]) / (1e3 * time.ms))

    def times(self, before: Expected) -> tuple[Time, Time] | None:
        """Return the times before and after by which the two are judged; None where cost decides.

        A model that runs on the CPU alone has no measured time, only its cost.
        """
        if self.time is None or before.time is None or max(self.doubt, before.doubt) > DOUBT:
            return None
        measured = self.time.measurements and before.time.measurements
        return (before.time, self.time) if measured else None

    def over(self, before: Expected) -> Ratio:
        """Return the ratio to the time before.

        A higher cost is accepted only for a gain in time that is outside the band.
        """
        cost, worst = multiple(self.cost, before.cost), multiple(self.at_worst, before.at_worst)
        at_worst = worst if worst > 1 + SAME else 0.0
        if (pair := self.times(before)) is None:
            return Ratio(cost, max(cost / CLEARLY, at_worst), cost=cost)
        times = change(*pair)
        certain = times.high < 1 / EQUAL_WITHIN or times.low > EQUAL_WITHIN
        if not before.cost:  # layers of a neural network have no cost
            return Ratio(times.ratio, times.high, certain, times.ratio)
        larger = max(times.ratio, cost)
        best = times.ratio if certain else larger
        return Ratio(best, max(min(times.high, larger / CLEARLY), at_worst), certain, cost)

    def words(self, before: Expected, verb: str = "") -> str:
        """Return "expected time 2 ms -> 1.9 ms"; the cost where no time is known, or cost decides otherwise."""
        if self.time is None or before.time is None:
            return self.relative(before, verb)
        by_time, decided = self.time.ms / before.time.ms, self.over(before).best
        same_verdict = self.times(before) is not None or (by_time <= CLEARLY) == (decided <= CLEARLY)
        if _sign(by_time) != _sign(decided) or not same_verdict:
            return self.relative(before, verb)
        return f"expected time{verb} {from_to(before.time.ms, self.time.ms)}"

    def relative(self, before: Expected, verb: str = "") -> str:
        """Return the cost as a multiple of the cost before: "relative cost 1 -> 0.72"."""
        return f"relative cost{verb} {from_to(1.0, multiple(self.cost, before.cost), '')}"


def _sign(ratio: float) -> int:
    """Return -1 for a ratio below 1, 1 for one above, 0 for equal costs."""
    return (ratio > 1 + SAME) - (ratio < 1 - SAME)


def multiple(after: float, before: float) -> float:
    """Return the ratio of two costs; of two that are 0 it is 1."""
    return after / before if before else 1.0 if not after else float("inf")


def _cost(part: Inspection, view: View) -> float:
    """Return the microseconds of a function, under assumptions."""
    if part.cost is None:
        return 0.0
    unpriced = sum(row.bytes for row in part.ops if row.estimate is None)
    reading = sum(map(_weight_reading, part.ops)) if view.reads_weights else 0.0
    saved = sum(map(_recurrent_saving, part.ops)) if view.fast_recurrent else 0.0
    return part.cost + unpriced * SLOWER / MEMORY + view.op * part.chain + reading - saved


def _doubt(part: Inspection) -> float:
    """Return the microseconds that the time lacks if the CPU runs all ops of unknown placement."""
    costs = [row.estimate for row in part.ops if row.legal is None and row.estimate is not None]
    return sum(max((cost.cpu or 0.0) - (cost.ane or 0.0), 0.0) for cost in costs)


def _weight_reading(row: OpRow) -> float:
    """Return the microseconds by which an op is slower if it reads its weights from memory."""
    if row.op_type in RECURRENT or row.estimate is None or not row.flop:
        return 0.0
    estimate = row.estimate.cpu if row.preferred == "cpu" else row.estimate.ane
    return max(row.rounds * row.weights / MEMORY - (estimate or 0.0), 0.0)


def _recurrent_saving(row: OpRow) -> float:
    """Return the microseconds that a recurrent layer saves at the CPU's highest rate."""
    if row.op_type not in RECURRENT or row.estimate is None or row.estimate.cpu is None:
        return 0.0
    return max(row.estimate.cpu - row.flop / CPU_SUMS, 0.0)
