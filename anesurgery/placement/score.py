"""The score of a model on a target, and what one score gains and loses over another, in words.

The search of `apply` scores each trial and asks `new.loss(old)` and `new.gain(old)`; both return words for the
report ("" for none). The expected time decides (`Expected.over`). Times are known of some chips only, and each
has a band. Where no time is known, or its band is too wide to tell, Core ML's own estimate of the cost decides.

A step loses if a legal op becomes illegal, the model gets slower, or it grows without a clear gain in time
(`LOSSES`). It gains if it gets faster or, in equal time, fewer ops are illegal on the ANE or there are fewer
switches between units (`GAINS`). Times count as equal if the band is too wide to tell them apart and the cost
does not rise; so that small rises do not add up, the "whole" loss compares the end of a search with its start.
The share on the ANE is shown, but only in `OFF` does it decide.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from anesurgery.display import MB, byte_words
from anesurgery.files.package import Loaded
from anesurgery.mil import Function, Program
from anesurgery.placement.cost import ANE_MEMORY_RATE, CPU_MEMORY_RATIO, CPU_SUMS
from anesurgery.placement.durations import EQUAL_WITHIN, Time, change, from_to
from anesurgery.placement.findings_in_words import FAILING_LOADS
from anesurgery.placement.inspection import Inspection, OpRow, between, percent
from anesurgery.placement.inspector import inspect_program
from anesurgery.placement.networks import CONSTANTS
from anesurgery.placement.target import Target

_RECURRENT = frozenset({"gru", "lstm", "rnn"})

SAME = 1e-6
"""Relative difference below which two estimates are one."""
CLEARLY = 0.9
"""A model is clearly faster where its cost is at most this share of the cost before. Where a time is known and
its band cannot tell, cost and time must both be. A choice, not measured."""

_DOUBT = 0.1
"""Share of a time that may hang on ops of which it is not known whether the ANE runs them. A choice."""


@dataclass(frozen=True)
class _Assumptions:
    """Assumptions about facts of a chip that are not known."""

    op: float
    """Microseconds that each op of the longest chain takes beside its estimate, in each round of its loop."""
    reads_weights: bool
    """Does each product read its weights from the memory of the chip?"""
    fast_recurrent: bool
    """Do recurrent layers compute at the CPU's highest rate?"""


_ASSUMPTIONS = (
    _Assumptions(op=0.0, reads_weights=False, fast_recurrent=False),
    _Assumptions(op=5.0, reads_weights=True, fast_recurrent=True),
)
"""The likeliest assumptions, and those that are worst for many small ops."""


@dataclass(frozen=True)
class _Ratio:
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


class Times(NamedTuple):
    """The expected times of a model before and after steps."""

    before: Time
    after: Time


@dataclass(frozen=True)
class Expected:
    """How long all functions of a program take, one after the other."""

    cost: float
    """Microseconds under the first assumptions of `_ASSUMPTIONS`."""
    at_worst: float
    """Microseconds under the last."""
    time: Time | None = None
    """The time of its only function; None where there are several, or no time is known."""
    doubt: float = 0.0
    """The share by which the time would grow if all ops of unknown placement ran on the CPU."""

    @classmethod
    def of(cls, parts: Sequence[Inspection]) -> Expected:
        """Return the expectation from the inspection of each function."""
        cost, at_worst = (sum(_cost(part, assumed) for part in parts) for assumed in _ASSUMPTIONS)
        time = parts[0].time if len(parts) == 1 else None
        doubt = 0.0 if time is None else _doubt(parts[0]) / (1e3 * time.ms)
        return cls(cost=cost, at_worst=at_worst, time=time, doubt=doubt)

    def times(self, before: Expected) -> Times | None:
        """Return the times by which the two are judged; None where cost decides.

        A model that runs on the CPU alone has no measured time, only its cost.
        """
        times = self._known_times(before)
        return times if times is not None and all(time.measurements for time in times) else None

    def _known_times(self, before: Expected) -> Times | None:
        """Return the times, measured or not; None where too many units are unknown."""
        if self.time is None or before.time is None or max(self.doubt, before.doubt) > _DOUBT:
            return None
        return Times(before.time, self.time)

    def over(self, before: Expected) -> _Ratio:
        """Return the ratio to the time before.

        A higher cost is accepted only for a gain in time that is outside the band. A longer time, measured or
        not, is accepted for no lower cost.
        """
        cost, at_worst = _multiple(self.cost, before.cost), _multiple(self.at_worst, before.at_worst)
        least_high = (
            at_worst if at_worst > 1 + SAME else 0.0
        )  # the band includes a rise under the worst assumptions
        known = self._known_times(before)
        by_time = None if known is None else change(*known)
        larger = cost if by_time is None else max(cost, by_time.ratio)
        if by_time is None or self.times(before) is None:
            return _Ratio(best=larger, high=max(larger / CLEARLY, least_high), cost=cost)
        distinct = by_time.high < 1 / EQUAL_WITHIN or by_time.low > EQUAL_WITHIN
        if not before.cost:  # layers of a neural network have no cost
            return _Ratio(best=by_time.ratio, high=by_time.high, distinct=distinct, cost=by_time.ratio)
        high = max(min(by_time.high, larger / CLEARLY), least_high)
        return _Ratio(best=by_time.ratio if distinct else larger, high=high, distinct=distinct, cost=cost)

    def words(self, before: Expected, verb: str = "") -> str:
        """Return "expected time 2 ms -> 1.9 ms"; the relative cost if there are no times to show."""
        if (times := self.shown_times(before)) is None:
            return self.relative(before, verb)
        return f"expected time{verb} {from_to(times.before.ms, times.after.ms)}"

    def shown_times(self, before: Expected) -> Times | None:
        """Return the times that `words` shows; None where one is unknown, or cost decides otherwise."""
        if self.time is None or before.time is None:
            return None
        by_time, decided = self.time.ms / before.time.ms, self.over(before).best
        same_verdict = self.times(before) is not None or (by_time <= CLEARLY) == (decided <= CLEARLY)
        agree = _sign(by_time) == _sign(decided) and same_verdict
        return Times(before.time, self.time) if agree else None

    def relative(self, before: Expected, verb: str = "") -> str:
        """Return the cost as a multiple of the cost before: "relative cost 1 -> 0.72"."""
        return f"relative cost{verb} {from_to(1.0, _multiple(self.cost, before.cost), '')}"


def _sign(ratio: float) -> int:
    """Return -1 for a ratio below 1, 1 for one above, 0 for equal costs."""
    return (ratio > 1 + SAME) - (ratio < 1 - SAME)


def _multiple(after: float, before: float) -> float:
    """Return the ratio of two costs; of two that are 0 it is 1."""
    if before:
        return after / before
    return float("inf") if after else 1.0


def _cost(part: Inspection, assumed: _Assumptions) -> float:
    """Return the microseconds of a function, under assumptions."""
    if part.cost is None:
        return 0.0
    unpriced = sum(row.bytes for row in part.ops if row.estimate is None)
    reading = sum(map(_weight_reading, part.ops)) if assumed.reads_weights else 0.0
    saved = sum(map(_recurrent_saving, part.ops)) if assumed.fast_recurrent else 0.0
    return part.cost + unpriced * CPU_MEMORY_RATIO / ANE_MEMORY_RATE + assumed.op * part.chain + reading - saved


def _doubt(part: Inspection) -> float:
    """Return the microseconds that the time lacks if the CPU runs all ops of unknown placement."""
    costs = [row.estimate for row in part.ops if row.legal is None and row.estimate is not None]
    return sum(max((cost.cpu or 0.0) - (cost.ane or 0.0), 0.0) for cost in costs)


def _weight_reading(row: OpRow) -> float:
    """Return the microseconds by which an op is slower if it reads its weights from memory."""
    if row.op_type in _RECURRENT or row.estimate is None or not row.flop:
        return 0.0
    estimate = row.estimate.cpu if row.preferred == "cpu" else row.estimate.ane
    return max(row.rounds * row.weights / ANE_MEMORY_RATE - (estimate or 0.0), 0.0)


def _recurrent_saving(row: OpRow) -> float:
    """Return the microseconds that a recurrent layer saves at the CPU's highest rate."""
    if row.op_type not in _RECURRENT or row.estimate is None or row.estimate.cpu is None:
        return 0.0
    return max(row.estimate.cpu - row.flop / CPU_SUMS, 0.0)


@dataclass(frozen=True)
class Bound:
    """How much one measure of a model may grow without a clear gain in time."""

    words: str
    times: float
    """The largest ratio to the measure before."""
    more: int
    """A rise up to this amount is always allowed."""
    in_bytes: bool = False


BOUNDS = {
    "weights": Bound("weights", 1.1, MB, in_bytes=True),
    "flop": Bound("flop", 1.1, 10_000_000),
    "moved": Bound("bytes moved", 1.25, MB, in_bytes=True),
    "ops": Bound("ops", 1.5, 16),
    "casts": Bound("casts", 1.5, 4),
    "transposes": Bound("transposes", 1.5, 8),
}
"""Field of `Score` -> its bound. A choice: weights and flop cost on every device, so they get least; more
ops, casts and transposes may be the price of legal ops."""


WOULD_RISE = " would rise"
"""What a refusal says of the time or the cost, if a step was undone because of it."""
OFF = ("legal", "share")
"""The losses that count if no chip is named, or if a gain was measured: it was measured with products on the
ANE."""
WORTH = ("loading", "failing", "enough time", "any switches", "weights", "layers")
"""The gains of `GAINS` of which a whole plan needs one."""


@dataclass(frozen=True)
class Score:
    """The measures of a model on a target, summed over all functions of its program."""

    ops: int
    """Number of ops, without constants."""
    on_ops: int
    """Number of ops that prefer the ANE."""
    flop: int
    """Floating point operations of all ops."""
    on_flop: int
    """Floating point operations of the ops that prefer the ANE."""
    switches: int
    """Number of changes of the unit."""
    estimate: float
    """Core ML's cost in microseconds, to compare forms of one model; not a run time."""
    unknown: int
    """Number of ops without a verdict or an estimate."""
    findings: int
    """Number of findings, if the inspection looked for them."""
    legal: frozenset[tuple[int, str]]
    """(number of the function, name) of the ops that the ANE can run."""
    illegal: frozenset[tuple[int, str]]
    """(number of the function, name) of the ops that it cannot run."""
    illegal_flop: int = 0
    """Floating point operations of the illegal ops."""
    legal_flop: int = 0
    """Floating point operations of the legal ops."""
    weights: int = 0
    """Bytes as stored; functions that share weights each count them."""
    moved: int = 0
    """Bytes that all ops read and write at run time."""
    casts: int = 0
    """Number of casts."""
    transposes: int = 0
    """Number of transpositions."""
    at_worst: float = 0.0
    """The cost under the assumptions that are worst for many small ops."""
    time: Time | None = None
    """The expected time on the target's chip; it decides if both models have one."""
    doubt: float = 0.0
    """The share by which the time would grow if all ops of unknown unit ran on the CPU."""
    perhaps_flop: int = 0
    """Floating point operations of the ops whose unit is unknown but may be the ANE."""
    unplaced: int = 0
    """Number of ops whose unit is unknown."""
    refused: str = ""
    """Why the OS does not load the model, in words; "" if it does, as far as known."""
    failing: int = 0
    """Number of findings about forms that were reported to fail at load."""
    untimed: str = ""
    """Why there is no time, in words; "" if there is one, or no reason is known."""
    perhaps_ops: int = 0
    """Number of those ops."""

    @classmethod
    def of(cls, inspections: Sequence[Inspection]) -> Score:
        """Return the score of the inspections of all functions."""
        rows = [
            (i, row) for i, part in enumerate(inspections) for row in part.ops
        ]  # (number of the function, op)
        on = [row for _, row in rows if row.preferred == "ane"]
        perhaps = [row for _, row in rows if row.preferred is None and row.legal is not False]
        expected = Expected.of(inspections)
        return cls(
            ops=len(rows),
            on_ops=len(on),
            perhaps_ops=len(perhaps),
            flop=sum(row.flop for _, row in rows),
            on_flop=sum(row.flop for row in on),
            perhaps_flop=sum(row.flop for row in perhaps),
            switches=sum(part.switches for part in inspections),
            estimate=expected.cost,
            at_worst=expected.at_worst,
            time=expected.time,
            doubt=expected.doubt,
            unknown=sum(row.legal is None or (row.legal and row.estimate is None) for _, row in rows),
            unplaced=sum(row.preferred is None for _, row in rows),
            findings=sum(len(part.all_findings) for part in inspections),
            failing=sum(f.rule in FAILING_LOADS for part in inspections for f in part.all_findings),
            legal=frozenset((i, row.name) for i, row in rows if row.legal),
            illegal=frozenset((i, row.name) for i, row in rows if row.legal is False),
            legal_flop=sum(row.flop for _, row in rows if row.legal),
            illegal_flop=sum(row.flop for _, row in rows if row.legal is False),
            weights=sum(part.memory.weights for part in inspections if part.memory is not None),
            moved=sum(row.bytes for _, row in rows),
            casts=sum(row.op_type == "cast" for _, row in rows),
            transposes=sum(row.op_type == "transpose" for _, row in rows),
            refused=next((part.refused for part in inspections if part.refused), ""),
            untimed=next((part.untimed for part in inspections if part.untimed), ""),
        )

    @classmethod
    def of_layers(cls, *inspections: Inspection) -> Score:
        """Return the score of networks, or of pipelines of networks, without constants."""
        parts = [part for one in inspections for part in _with_parts(one)]
        constants = [{row.name for row in part.ops if row.op_type in CONSTANTS} for part in parts]
        return cls.of(list(map(_without_ops, parts, constants)))

    @classmethod
    def of_upgraded(cls, loaded: Loaded, target: Target) -> Score:
        """Return the score to compare with layers, which have no casts of inputs and outputs."""
        ends = map(_casts_at_ends, loaded.program.functions.values())
        return cls.of(list(map(_without_ops, placed(loaded, target), ends)))

    @property
    def share(self) -> dict[str, float]:
        """The shares of the flop and of the ops that are on the ANE; 1 for a model without any."""
        return self._shares(self.on_flop, self.on_ops)

    @property
    def share_at_most(self) -> dict[str, float]:
        """The shares if each op of unknown unit that the ANE may run is on it."""
        return self._shares(_possible_ane_flop(self), _possible_ane_ops(self))

    @property
    def can_run(self) -> dict[str, float]:
        """The shares that the ANE can run, whether or not Core ML would choose it.

        They compare a neural network with the ML Program made of it: without a cost model of networks, Core
        ML's choice is unknown.
        """
        return self._shares(self.legal_flop, len(self.legal))

    def _shares(self, flop: int, ops: int) -> dict[str, float]:
        return {"flop": flop / self.flop if self.flop else 1.0, "ops": ops / self.ops if self.ops else 1.0}

    @property
    def on_cpu(self) -> bool:
        """Does all work run on the CPU, for certain?"""
        return bool(self.flop) and not (self.on_flop or self.perhaps_flop or self.on_ops)

    def does_same_on_cpu(self, before: Score) -> bool:
        """Does the CPU alone compute and move about as much as all units did before?

        What Core ML counts for an op on the CPU is no run time: a linear op costs it several times the
        convolution that is equal. So a lower sum for the same work is no gain, and pays for no growth.
        """
        same = self.flop > CLEARLY * before.flop and self.moved > CLEARLY * before.moved
        return self.on_cpu and same

    @property
    def expected(self) -> Expected:
        """The expected speed, to compare with that of another model."""
        return Expected(self.estimate, self.at_worst, self.time, self.doubt)

    def over(self, before: Score) -> _Ratio:
        """Return the expected time as a multiple of the time before."""
        return self.expected.over(before.expected)

    def takes(self, before: Score, verb: str = "") -> str:
        """Return both times, "expected time 2 ms -> 1.9 ms"; the relative cost if a time is unknown."""
        return self.expected.words(before.expected, verb)

    def loss(self, before: Score, of: Iterable[str] = ("legal", "time", "size")) -> str:
        """Return the first of some `LOSSES` against the model before, in words; "" for none.

        A model that loads loses nothing against one that does not.
        """
        if before.refused and not self.refused:
            return ""
        return next(filter(None, (LOSSES[name](before, self) for name in of)), "")

    def gain(self, before: Score) -> str:
        """Return what a step gains, in words, with the measures beyond their bounds; "" for nothing."""
        better = self.worth(before, ("loading", "failing", "time", "legal", "switches"))
        growth = self.over_bounds(before) if better else []
        return f"{better}; {', '.join(growth)}" if growth else better

    def worth(self, before: Score, of: Iterable[str] = WORTH) -> str:
        """Return the first of some `GAINS`, by default those of a whole plan, in words; "" for none."""
        return next(filter(None, (GAINS[name](before, self) for name in of)), "")

    def paid(self, before: Score) -> list[str]:
        """Return a line on what grew beyond its bound for a gain; no line if nothing grew so.

        A ratio of weights beyond the bound is told even in small models.
        """
        more_weights = self.weights > before.weights * BOUNDS["weights"].times
        growth = self.over_bounds(before, {"weights"} if more_weights else ())
        return [f"{self.takes(before)}, for which the model grew: {', '.join(growth)}"] if growth else []

    def is_over_bound(self, before: Score, what: str) -> bool:
        """Has one measure grown beyond its bound? Work that was not known before cannot have grown."""
        if what == "flop" and not before.flop and before.unknown:
            return False
        bound, old, new = BOUNDS[what], getattr(before, what), getattr(self, what)
        return bool(new > max(old * bound.times, old + bound.more))

    def over_bounds(self, before: Score, more: Iterable[str] = ()) -> list[str]:
        """Return the measures that are beyond their bounds, or among `more`, in words."""
        return [
            _change_of_measure(before, self, what)
            for what in BOUNDS
            if self.is_over_bound(before, what) or what in more
        ]

    def grows(self, before: Score) -> bool:
        """Is any measure of `BOUNDS` larger than before?"""
        return any(getattr(self, what) > getattr(before, what) for what in BOUNDS)

    def __str__(self) -> str:
        ops, flop = (between(self.share[what], self.share_at_most[what]) for what in ("ops", "flop"))
        most = f" to {_possible_ane_ops(self)}" if self.perhaps_ops else ""
        work = f" and {flop} of the work" if self.flop else ""
        where = f"{self.on_ops}{most} of {self.ops} ops ({ops}){work} on the ANE"
        switches = f"{self.switches} {'switch' if self.switches == 1 else 'switches'}"
        return f"{where}, {switches}{'' if self.time is None else f', expected {self.time}'}"


Compare = Callable[[Score, Score], str]
"""Compare an old score with a new one; returns what the new one loses, or gains, in words, "" for nothing."""


def _lost_legality(old: Score, new: Score) -> str:
    lost = [name for _, name in sorted(old.legal & new.illegal)]
    more = f" and {len(lost) - 1} more" if len(lost) > 1 else ""
    return f"%{lost[0]}{more} would no longer be legal on the ANE" if lost else ""


def _slower(old: Score, new: Score) -> str:
    ratio = new.over(old)
    return f"the {new.takes(old, WOULD_RISE)}" if ratio.slower and not ratio.equal else ""


def _unpaid_growth(old: Score, new: Score) -> str:
    growth = new.over_bounds(old)
    is_paid = new.over(old).clear and not new.does_same_on_cpu(old)
    if not growth or is_paid:
        return ""
    worst = _multiple(new.at_worst, old.at_worst)
    more = f" (at worst {percent(worst - 1)} slower)" if worst > 1 + SAME else ""
    return f"{', '.join(growth)} and the {new.takes(old)}{more} is no clear gain"


def _slower_overall(old: Score, new: Score) -> str:
    verb, times = f" of the whole{WOULD_RISE}", new.expected.times(old.expected)
    if times is not None and times.after.ms > times.before.ms * (1 + SAME):
        return f"the expected time{verb} {from_to(times.before.ms, times.after.ms)}"
    costs_more = new.estimate > old.estimate * (1 + SAME)
    return f"the {new.expected.relative(old.expected, verb)}" if costs_more else ""


def _lower_ane_share(old: Score, new: Score) -> str:
    """Report that the share of the work on the ANE falls while the work elsewhere rises.

    A share that falls only because work on the ANE was removed, as by fusing two layers, is not a loss.
    """
    what, was, now = "on the ANE", old.share["flop"], new.share["flop"]
    falls = now < was and new.flop - new.on_flop > old.flop - old.on_flop
    if not falls and not old.on_flop:
        what = "that may be on the ANE"
        was, now = (score.perhaps_flop / score.flop if score.flop else 1.0 for score in (old, new))
        falls = now < was
    return f"the share of the work {what} would fall {_share_change(was, now)}" if old.flop and falls else ""


def _falling_share(measure: str, words: str) -> Compare:
    """Return a comparison that finds the first share of a property, of the flop or of the ops, that falls."""

    def compare(old: Score, new: Score) -> str:
        for what, was in getattr(old, measure).items():
            now = getattr(new, measure)[what]
            if now < was and getattr(old, what):
                return f"the share of the {what} {words} would fall {_share_change(was, now)}"
        return ""

    return compare


LOSSES: dict[str, Compare] = {
    "legal": _lost_legality,
    "time": _slower,
    "size": _unpaid_growth,
    "whole": _slower_overall,
    "share": _lower_ane_share,
    "can run": _falling_share("can_run", "that the ANE can run"),
    "shown": _falling_share("share", "that inspect expects on the ANE"),
}


def _less_may_run(old: Score, new: Score) -> bool:
    """Does a smaller share of the ops or of the flop remain that may be on the ANE, and as much elsewhere?"""
    was, now = old.share_at_most, new.share_at_most
    as_much = new.ops - _possible_ane_ops(new) >= old.ops - _possible_ane_ops(old)
    return as_much and any(now[what] < was[what] for what in was)


LEAST_STEP = 0.001
"""The share of the expected time that one step must gain to be worth it for its time. A choice."""


def _faster(old: Score, new: Score, most: float = 1 - LEAST_STEP) -> str:
    """Report a time below a share of the old one; not if more ops are unknown, since these have no cost.

    The time of ops of unknown unit is in doubt: if less may run on the ANE because these are gone, the time
    must fall over the whole band. On the CPU alone, clearly less must be computed or moved.
    """
    ratio = new.over(old)
    if new.does_same_on_cpu(old) or new.unknown > old.unknown or ratio.best >= most:
        return ""
    is_doubtful = new.perhaps_ops < old.perhaps_ops and _less_may_run(old, new) and not ratio.clear
    return "" if is_doubtful else new.takes(old)


def _fewer_illegal(old: Score, new: Score) -> str:
    """Report fewer illegal ops, or illegal ops of less flop, if fewer ops became unknown than legal."""
    newly_unknown, newly_legal = new.unknown - old.unknown, len(old.illegal) - len(new.illegal)
    flop_falls = old.illegal_flop - new.illegal_flop
    if newly_legal < 0 or flop_falls < 0 or not (newly_legal or flop_falls):
        return ""
    if newly_unknown > 0 and newly_unknown >= newly_legal:
        return ""
    if newly_legal:
        what = f"ops that cannot run on the ANE {_count_change(len(old.illegal), len(new.illegal))}"
    else:
        what = f"flop that cannot run on the ANE {_count_change(old.illegal_flop, new.illegal_flop)}"
    return f"{what} (share of the ops that can {_share_change(old.can_run['ops'], new.can_run['ops'])})"


def _fewer_switches(old: Score, new: Score) -> str:
    """Report fewer switches between units, unless that is because less may run on the ANE."""
    fewer = new.switches < old.switches and not _less_may_run(old, new)
    return f"switches between units {old.switches} -> {new.switches}" if fewer else ""


def _fewer_findings(old: Score, new: Score) -> str:
    """Report fewer findings, at no higher time, unknown ops or switches."""
    worse = new.over(old).slower or new.unknown > old.unknown or new.switches > old.switches
    return f"findings {old.findings} -> {new.findings}" if new.findings < old.findings and not worse else ""


def _smaller_measures(old: Score, new: Score) -> str:
    return ", ".join(_change_of_measure(old, new, what) for what in BOUNDS if old.is_over_bound(new, what))


LEAST_GAIN = 0.02
"""The share of the expected time, or of the weights, that a plan must gain to be worth it. A choice."""


def _smaller_weights(old: Score, new: Score) -> str:
    is_enough = new.weights < (1 - LEAST_GAIN) * old.weights and new.unknown <= old.unknown
    return _smaller_measures(old, new) if is_enough else ""


def _more_layers(old: Score, new: Score) -> str:
    """Report more layers of a neural network that can run on the ANE, if it takes no longer."""
    is_slower = old.time is not None and new.time is not None and new.time.ms > old.time.ms
    is_network = not old.estimate
    if not is_network or is_slower or len(new.illegal) >= len(old.illegal) or _lost_legality(old, new):
        return ""
    return f"layers that cannot run on the ANE {len(old.illegal)} -> {len(new.illegal)}"


def _in_equal_time(gain: Compare) -> Compare:
    """Return a comparison whose gain counts only if the model gets no slower."""
    return lambda old, new: "" if _slower(old, new) else gain(old, new)


def _fewer_failing(old: Score, new: Score) -> str:
    change_words = _count_change(old.failing, new.failing)
    return f"forms that were reported to fail at load: {change_words}" if old.failing > new.failing else ""


def _possible_ane_flop(score: Score) -> int:
    return score.on_flop + score.perhaps_flop


def _possible_ane_ops(score: Score) -> int:
    return score.on_ops + score.perhaps_ops


GAINS: dict[str, Compare] = {
    "loading": lambda old, new: f"it loads, where {old.refused}" if old.refused and not new.refused else "",
    "failing": _in_equal_time(_fewer_failing),
    "time": _faster,
    "enough time": lambda old, new: _faster(old, new, 1 - LEAST_GAIN),
    "legal": _in_equal_time(_fewer_illegal),
    "switches": _in_equal_time(_fewer_switches),
    "any switches": _fewer_switches,
    "on the ANE": lambda old, new: "more" if new.on_flop > old.on_flop or new.on_ops > old.on_ops else "",
    "perhaps": lambda old, new: "more" if _possible_ane_flop(new) > _possible_ane_flop(old) else "",
    "findings": _fewer_findings,
    "size": _smaller_measures,
    "weights": _smaller_weights,
    "layers": _more_layers,
}


def _change_of_measure(old: Score, new: Score, what: str) -> str:
    """Return one measure of `BOUNDS` before and after: "weights 100 MB -> 115 MB"."""
    bound, was, now = BOUNDS[what], getattr(old, what), getattr(new, what)
    change_words = f"{byte_words(was)} -> {byte_words(now)}" if bound.in_bytes else _count_change(was, now)
    return f"{bound.words} {change_words}"


def _with_parts(inspection: Inspection) -> list[Inspection]:
    """Return an inspection, followed by those of the parts of a pipeline."""
    return [inspection, *(one for part in inspection.parts.values() for one in _with_parts(part))]


def _without_ops(part: Inspection, names: set[str]) -> Inspection:
    """Return an inspection without the rows of some ops."""
    return replace(part, ops=tuple(row for row in part.ops if row.name not in names))


def _casts_at_ends(function: Function) -> set[str]:
    """Return the names of the casts of inputs and outputs."""
    casts = [op for op in function.operations if op.op_type == "cast"]
    return {op.outputs[0].name for op in casts if op.x.op is None or op.outputs[0] in function.outputs}


def placed(model: Loaded | Program, target: Target, *, advice: bool = False) -> list[Inspection]:
    """Return the inspection of each function of a program; without advice only verdicts and units.

    Of a loaded model with flexible inputs, the specification gives the default shape, at which it is judged.
    """
    loaded = Loaded.of(model)
    return [
        inspect_program(loaded, target, function=name, advice=advice, each_shape=False)
        for name in loaded.program.functions
    ]


def _count_change(old: int, new: int) -> str:
    """Return two numbers with as many digits as it takes to tell them apart: "8.65 M -> 50.1 M", "12 -> 8"."""
    for unit, size in (("G", 10**9), ("M", 10**6), ("", 1)):
        if max(old, new) >= size:
            short = [
                f"{n / size:.3g} {unit}".strip() if size > 1 and n >= size / 100 else f"{n:,}"
                for n in (old, new)
            ]
            if short[0] != short[1]:
                return " -> ".join(short)
    return f"{old:,} -> {new:,}"


def _share_change(old: float, new: float) -> str:
    """Return two shares with as many digits as it takes to tell them apart: "81.2% -> 96.4%"."""
    digits = next((n for n in (1, 2, 4) if f"{old:.{n}%}" != f"{new:.{n}%}"), None)
    return f"stays {old:.1%}" if digits is None else f"{old:.{digits}%} -> {new:.{digits}%}"
