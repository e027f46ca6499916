"""How a program stands on a target, and how long it takes there: what is compared, and said in words.

The score is the expected time (`expected`). `loss` and `gain` are the objective, in this order: no op becomes
illegal that was legal; the program is not slower than before; what it is made of does not grow, unless it is
clearly faster; it is faster; or, in equal time, less of it cannot run on the ANE, or there are fewer switches
between units. Times whose difference cannot be told, with costs that do not rise, are equal times; so that they
do not add up, no step may leave a model that is slower than the one as given (`dearer`).
Shares of the ANE are shown, and decide nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from anesurgery.files.package import Loaded
from anesurgery.mil import Program
from anesurgery.placement.cost import CPU_SUMS, MEMORY, SLOWER
from anesurgery.placement.durations import ALIKE, Time, change, from_to
from anesurgery.placement.inspection import Inspection, OpRow, between
from anesurgery.placement.inspector import inspect_program
from anesurgery.placement.networks import CONSTANTS
from anesurgery.placement.target import Target
from anesurgery.semantics.reading import in_words

RECURRENT = frozenset({"gru", "lstm", "rnn"})

SAME = 1e-6
"""Relative difference below which two estimates are one."""
CLEARLY = 0.9
"""Of the cost before, what a model may have to be clearly faster; where its time is known and the band does not
say so, of both. A choice, and not measured: a smaller gain is not told from none."""

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
    told: bool = True
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
        return not self.told and self.cost <= 1 + SAME

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


@dataclass(frozen=True)
class Bound:
    """How much one measure of a model may grow where no clear gain in time pays for it."""

    words: str
    times: float
    more: int
    """What counts for nothing in any model."""
    size: bool = False
    """Is it in bytes?"""


MIB = 1 << 20
BOUNDS = {
    "weights": Bound("weights", 1.1, MIB, size=True),
    "flop": Bound("flop", 1.1, 10_000_000),
    "moved": Bound("bytes moved", 1.25, MIB, size=True),
    "ops": Bound("ops", 1.5, 16),
    "casts": Bound("casts", 1.5, 4),
    "transposes": Bound("transposes", 1.5, 8),
}
"""A choice: weights and flop cost on every device; ops, casts and transposes may be the price of legal ones."""


@dataclass(frozen=True)
class Standing:
    """All functions of a program together.

    Attributes:
        ops: number of ops, constants left out.
        on_ops: those that prefer the ANE.
        flop: floating point operations of all.
        on_flop: of the ops that prefer the ANE.
        perhaps_flop: of those of which it is not known if they do, and which it may run.
        perhaps_ops: how many these are.
        switches: changes of the unit.
        estimate: the cost in microseconds, by which a model is compared with another form of itself.
        at_worst: the same in the view that is worst for many small ops.
        time: the expected time on the chip that the target names, which decides where both forms have one.
        doubt: the share of it that hangs on ops of which it is not known whether the ANE runs them.
        unknown: ops without a verdict or an estimate.
        findings: number of findings, where they were looked for.
        legal: function and name of the ops that are legal on the ANE.
        illegal: the same of those that are not.
        illegal_flop: of the latter.
        legal_flop: of the ops that are legal on the ANE.
        weights: bytes as stored, what is stored twice counted twice.
        moved: bytes that all ops read and write at run time.
        casts: ops of that type.
        transposes: likewise.
        unplaced: ops of which it is not known where they run.
        refused: why the OS does not load the model, in words; "" where nothing says so.
        untimed: why no time is known, in words; "" where one is, or nobody says.
    """

    ops: int
    on_ops: int
    flop: int
    on_flop: int
    switches: int
    estimate: float
    unknown: int
    findings: int
    legal: frozenset[tuple[int, str]]
    illegal: frozenset[tuple[int, str]]
    illegal_flop: int = 0
    legal_flop: int = 0
    weights: int = 0
    moved: int = 0
    casts: int = 0
    transposes: int = 0
    at_worst: float = 0.0
    time: Time | None = None
    doubt: float = 0.0
    perhaps_flop: int = 0
    unplaced: int = 0
    refused: str = ""
    untimed: str = ""
    perhaps_ops: int = 0

    @classmethod
    def of_layers(cls, inspection: Inspection) -> Standing:
        """Reads it off the inspection of a network, or of a pipeline of some."""
        return cls.of(cls.computing(inspection))

    @staticmethod
    def computing(inspection: Inspection) -> list[Inspection]:
        """The parts of a report on layers without the constants, which compute nothing."""
        return [
            replace(p, ops=tuple(r for r in p.ops if r.op_type not in CONSTANTS)) for p in _parts(inspection)
        ]

    @classmethod
    def of(cls, inspections: Sequence[Inspection]) -> Standing:
        """Reads it off the inspection of each function."""
        rows = [(i, row) for i, part in enumerate(inspections) for row in part.ops]
        on = [row for _, row in rows if row.preferred == "ane"]
        perhaps = [row for _, row in rows if row.preferred is None and row.legal is not False]
        expected = Expected.of(inspections)
        return cls(
            len(rows),
            len(on),
            sum(row.flop for _, row in rows),
            sum(row.flop for row in on),
            sum(part.switches for part in inspections),
            expected.cost,
            sum(row.legal is None or (row.legal and row.estimate is None) for _, row in rows),
            sum(len(part.all_findings) for part in inspections),
            frozenset((i, row.name) for i, row in rows if row.legal),
            frozenset((i, row.name) for i, row in rows if row.legal is False),
            sum(row.flop for _, row in rows if row.legal is False),
            sum(row.flop for _, row in rows if row.legal),
            sum(part.memory.weights for part in inspections if part.memory is not None),
            sum(row.bytes for _, row in rows),
            sum(row.op_type == "cast" for _, row in rows),
            sum(row.op_type == "transpose" for _, row in rows),
            expected.at_worst,
            expected.time,
            expected.doubt,
            sum(row.flop for row in perhaps),
            sum(row.preferred is None for _, row in rows),
            next((part.refused for part in inspections if part.refused), ""),
            next((part.untimed for part in inspections if part.untimed), ""),
            len(perhaps),
        )

    @property
    def share(self) -> dict[str, float]:
        """The shares of the flop and of the ops that are on the ANE; 1 where there are none."""
        return {
            "flop": self.on_flop / self.flop if self.flop else 1.0,
            "ops": self.on_ops / self.ops if self.ops else 1.0,
        }

    @property
    def share_at_most(self) -> dict[str, float]:
        """The same if each op of which that is not known were on the ANE, where it may be."""
        return {
            "flop": (self.on_flop + self.perhaps_flop) / self.flop if self.flop else 1.0,
            "ops": (self.on_ops + self.perhaps_ops) / self.ops if self.ops else 1.0,
        }

    @property
    def off(self) -> tuple[int, int]:
        """Flop and ops that are not on the ANE."""
        return self.flop - self.on_flop, self.ops - self.on_ops

    @property
    def legal_share(self) -> float:
        """Of the ops, those that the ANE can run, whether or not Core ML would choose it."""
        return self.can_run["ops"]

    @property
    def can_run(self) -> dict[str, float]:
        """Of the flop and of the ops, what the ANE can run, whether or not Core ML would choose it.

        The measure by which a neural network (`of_layers`) and the ML Program made of it (`of_upgraded`) are
        compared: a network has no cost model, so nobody can say what Core ML would choose there.
        """
        return {
            "flop": self.legal_flop / self.flop if self.flop else 1.0,
            "ops": len(self.legal) / self.ops if self.ops else 1.0,
        }

    @classmethod
    def of_upgraded(cls, model: Loaded | Program, target: Target) -> Standing:
        """To compare with layers: casts of inputs and outputs do not count, since no layer says them either."""
        loaded = Loaded.of(model)
        ends = {
            (i, op.outputs[0].name)
            for i, function in enumerate(loaded.program.functions.values())
            for op in function.operations
            if op.op_type == "cast" and (op.x.op is None or op.outputs[0] in function.outputs)
        }
        return cls.of(
            [
                replace(part, ops=tuple(row for row in part.ops if (i, row.name) not in ends))
                for i, part in enumerate(placed(loaded, target))
            ]
        )

    def can_run_less(self, layers: Standing) -> str:
        """Which share that can run on the ANE is lower than that of the layers, in words; "" for none."""
        return self._less(layers, "can_run", "that the ANE can run would fall")

    def shown_less(self, layers: Standing) -> str:
        """Which share that `inspect` shows is lower than that of the layers, in words; "" for none."""
        return self._less(layers, "share", "that inspect expects on the ANE would fall")

    def _less(self, layers: Standing, measure: str, words: str) -> str:
        for what, share in getattr(layers, measure).items():
            if (now := getattr(self, measure)[what]) < share and getattr(layers, what):
                return f"the share of the {what} {words} {_percents(share, now)}"
        return ""

    @property
    def barred(self) -> tuple[int, int]:
        """Flop and ops that are not legal on the ANE."""
        return self.illegal_flop, len(self.illegal)

    def barred_by(self, before: Standing) -> str:
        """Which op that was legal can no longer run on the ANE, in words; "" for none."""
        if lost := sorted(before.legal & self.illegal):
            more = f" and {len(lost) - 1} more" if len(lost) > 1 else ""
            return f"%{lost[0][1]}{more} would no longer be legal on the ANE"
        return ""

    def leaves(self, before: Standing) -> str:
        """What can no longer run on the ANE, or how its share of the flop falls, in words; "" for nothing.

        The premise of a gain that was measured, which was with the products on the ANE; and all that can be
        judged where no chip is named. A share that falls because less is left on the ANE, as where two layers
        became one, is no loss: more must be off it.
        """
        if barred := self.barred_by(before):
            return barred
        old, new = before.share["flop"], self.share["flop"]
        if before.flop and new < old and self.off[0] > before.off[0]:
            return f"the share of flop on the ANE would fall {_percents(old, new)}"
        if before.on_flop or not before.flop:
            return ""
        old, new = (one.perhaps_flop / one.flop if one.flop else 1.0 for one in (before, self))
        return f"the share of flop that may be on the ANE would fall {_percents(old, new)}" if new < old else ""

    @property
    def expected(self) -> Expected:
        """How long it takes."""
        return Expected(self.estimate, self.at_worst, self.time, self.doubt)

    def over(self, before: Standing) -> Ratio:
        """The expected time, as a multiple of that before."""
        return self.expected.over(before.expected)

    def takes(self, before: Standing, verb: str = "") -> str:
        """Both times in words, "expected time 2 ms -> 1.9 ms"; the relative cost where none is known."""
        return self.expected.words(before.expected, verb)

    def loss(self, before: Standing) -> str:
        """What is worse than before, in words; "" for nothing that counts."""
        if barred := self.barred_by(before):
            return barred
        if self.slower(before) and not self.over(before).equal:
            return f"the {self.takes(before, ' would rise')}"
        grown = [words for what, words in self.growth(before).items() if self.outgrows(before, what)]
        if grown and not self.clearly_faster(before):
            worst = multiple(self.at_worst, before.at_worst)
            more = f" (at worst, relative cost {from_to(1.0, worst, '')})" if worst > 1 else ""
            return f"{', '.join(grown)} would grow, and the {self.takes(before)}{more} is no clear gain"
        return ""

    def gain(self, before: Standing) -> str:
        """What is better than before, in words, with what grows for it; "" for nothing."""
        if not (better := self._better(before)):
            return ""
        grown = [words for what, words in self.growth(before).items() if self.outgrows(before, what)]
        return f"{better}; {', '.join(grown)}" if grown else better

    def paid(self, before: Standing) -> list[str]:
        """What grew beyond its bound, and the gain in time that it is for: one line, or none.

        Weights are said also where they are few.
        """
        more = self.weights > before.weights * BOUNDS["weights"].times
        grown = [
            words
            for what, words in self.growth(before).items()
            if self.outgrows(before, what) or (more and what == "weights")
        ]
        return [f"{self.takes(before)}, for which the model grew: {', '.join(grown)}"] if grown else []

    def smaller(self, before: Standing) -> str:
        """What is less than before, by more than its bound, in words; "" for nothing."""
        return ", ".join(self._from(before, what) for what in BOUNDS if before.outgrows(self, what))

    def dearer(self, before: Standing) -> str:
        """How it takes longer, or costs more, than the model as given, in words; "" where it does not."""
        verb, times = " of the whole would rise", self.expected.times(before.expected)
        if times is not None and times[1].ms > times[0].ms * (1 + SAME):
            return f"the expected time{verb} {from_to(times[0].ms, times[1].ms)}"
        if self.estimate > before.estimate * (1 + SAME):
            return f"the {self.expected.relative(before.expected, verb)}"
        return ""

    def _better(self, before: Standing) -> str:
        if self.faster(before):
            return self.takes(before)
        if self.slower(before) and not self.over(before).equal:
            return ""
        return self._helps(before)

    def _helps(self, before: Standing) -> str:
        """What is better where the time is the same, in words; "" for nothing."""
        if self.frees(before):
            rise = _percents(before.legal_share, self.legal_share)
            pairs = zip(("ops", "flop"), reversed(before.barred), reversed(self.barred), strict=True)
            what, old, new = next(pair for pair in pairs if pair[1] != pair[2])
            return f"{what} that cannot run on the ANE {_counts(old, new)} (share of the ops that can {rise})"
        if self.switches < before.switches:
            return f"switches between units {before.switches} -> {self.switches}"
        return ""

    def slower(self, before: Standing) -> bool:
        """Is it expected to take longer?"""
        return self.over(before).slower

    def faster(self, before: Standing) -> bool:
        """Is it expected to take less time, and not only since what became unknown is not priced?"""
        return self.over(before).faster and self.unknown <= before.unknown

    def clearly_faster(self, before: Standing) -> bool:
        """Is it faster by more than the error, whatever is taken for true of what is not known?"""
        return self.over(before).clear

    def growth(self, before: Standing) -> dict[str, str]:
        """What is more than before, in words, by the names of `BOUNDS`."""
        risen = [what for what in BOUNDS if getattr(self, what) > getattr(before, what)]
        return {what: self._from(before, what) for what in risen}

    def _from(self, before: Standing, what: str) -> str:
        """One measure of `BOUNDS` before and after: "weights 100 MiB -> 115 MiB"."""
        bound, pair = BOUNDS[what], (getattr(before, what), getattr(self, what))
        return f"{bound.words} {_sizes(*pair) if bound.size else _counts(*pair)}"

    def outgrows(self, before: Standing, what: str) -> bool:
        """Is one measure beyond its bound?"""
        bound, old, new = BOUNDS[what], getattr(before, what), getattr(self, what)
        return bool(new > max(old * bound.times, old + bound.more))

    def brings(self, before: Standing) -> bool:
        """Is more on the ANE than before? A share that rises since other ops went is no more."""
        return self.on_flop > before.on_flop or self.on_ops > before.on_ops

    def may_bring(self, before: Standing) -> bool:
        """Is more on the ANE, with the ops of which that is not known?"""
        return self.on_flop + self.perhaps_flop > before.on_flop + before.perhaps_flop

    def frees(self, before: Standing) -> bool:
        """Is less illegal on the ANE, and more than what became unknown?"""
        pairs = list(zip(self.barred, before.barred, strict=True))
        risen, freed = self.unknown - before.unknown, len(before.illegal) - len(self.illegal)
        return all(new <= old for new, old in pairs) and self.barred != before.barred and not 0 < risen >= freed

    def tidier(self, before: Standing) -> bool:
        """Are there fewer findings, at no higher estimate?"""
        dearer = self.slower(before) or self.unknown > before.unknown
        return self.findings < before.findings and not dearer and self.switches <= before.switches

    def __str__(self) -> str:
        ops, flop = (between(self.share[what], self.share_at_most[what]) for what in ("ops", "flop"))
        most = f" to {self.on_ops + self.perhaps_ops}" if self.perhaps_ops else ""
        where = f"{self.on_ops}{most} of {self.ops} ops ({ops}) and {flop} of the flop on the ANE"
        switches = f"{self.switches} {'switch' if self.switches == 1 else 'switches'}"
        return f"{where}, {switches}{'' if self.time is None else f', expected {self.time}'}"


def _parts(inspection: Inspection) -> list[Inspection]:
    """A report, and those of the parts of a pipeline."""
    return [inspection, *(one for part in inspection.parts.values() for one in _parts(part))]


def placed(model: Loaded | Program, target: Target, *, advice: bool = False) -> list[Inspection]:
    """The inspection of each function of a program; without advice, of what is legal and where it runs only.

    The specification of a loaded model says at which shapes a flexible one is judged.
    """
    loaded = Loaded.of(model)
    return [inspect_program(loaded, target, function=name, advice=advice) for name in loaded.program.functions]


def _sizes(old: int, new: int) -> str:
    """Two sizes in bytes."""
    return f"{in_words(old)} -> {in_words(new)}"


def _counts(old: int, new: int) -> str:
    """Two numbers with as many digits as it takes to tell them apart: "8.65 M -> 50.1 M", "12 -> 8"."""
    for unit, size in (("G", 10**9), ("M", 10**6), ("", 1)):
        if max(old, new) >= size:
            short = [
                f"{n / size:.3g} {unit}".strip() if size > 1 and n >= size / 100 else f"{n:,}"
                for n in (old, new)
            ]
            if short[0] != short[1]:
                return " -> ".join(short)
    return f"{old:,} -> {new:,}"


def _percents(old: float, new: float) -> str:
    """Two shares with as many digits as it takes to tell them apart."""
    digits = next((n for n in (1, 2, 4) if f"{old:.{n}%}" != f"{new:.{n}%}"), None)
    return f"stays {old:.1%}" if digits is None else f"{old:.{digits}%} -> {new:.{digits}%}"
