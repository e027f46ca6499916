"""The score of a model on a target, and what one score gains and loses over another, in words.

What decides is the expected time. A step loses where an op that was legal becomes illegal, the model gets
slower, or what it is made of grows without a clear gain in time (`LOSSES`). It gains where it gets faster or,
in equal time, less of it cannot run on the ANE, or there are fewer switches between units (`GAINS`). Times
whose difference cannot be told, with costs that do not rise, are equal; so that they do not add up, what a
search finds must not be slower than the model as given ("whole"). Shares of the ANE are shown, and decide
nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from anesurgery.byte_counts import MB, byte_words
from anesurgery.files.package import Loaded
from anesurgery.mil import Function, Program
from anesurgery.placement.durations import Time, from_to
from anesurgery.placement.expected import SAME, Expected, Ratio, multiple
from anesurgery.placement.inspection import Inspection, between
from anesurgery.placement.inspector import inspect_program
from anesurgery.placement.networks import CONSTANTS
from anesurgery.placement.target import Target


@dataclass(frozen=True)
class Bound:
    """How much one measure of a model may grow where no clear gain in time pays for it."""

    words: str
    times: float
    more: int
    """What counts for nothing in any model."""
    size: bool = False
    """Is it in bytes?"""


BOUNDS = {
    "weights": Bound("weights", 1.1, MB, size=True),
    "flop": Bound("flop", 1.1, 10_000_000),
    "moved": Bound("bytes moved", 1.25, MB, size=True),
    "ops": Bound("ops", 1.5, 16),
    "casts": Bound("casts", 1.5, 4),
    "transposes": Bound("transposes", 1.5, 8),
}
"""A choice: weights and flop cost on every device; ops, casts and transposes may be the price of legal ones."""


OFF = ("legal", "share")
"""Losses where no chip is named, and of a gain that was measured, which was with the products on the ANE."""
WORTH = ("loading", "enough time", "any switches", "weights", "layers")
"""What a plan as a whole must gain, of `GAINS`."""


@dataclass(frozen=True)
class Score:
    """All functions of a program together.

    Attributes:
        ops: number of ops, constants left out.
        on_ops: those that prefer the ANE.
        flop: floating point operations of all.
        on_flop: of the ops that prefer the ANE.
        perhaps_flop: of ops whose unit is unknown but may be the engine.
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
    def of(cls, inspections: Sequence[Inspection]) -> Score:
        """Return the score of the inspections of all functions."""
        rows = [(i, row) for i, part in enumerate(inspections) for row in part.ops]
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
        parts = [part for one in inspections for part in _parts(one)]
        constants = [{row.name for row in part.ops if row.op_type in CONSTANTS} for part in parts]
        return cls.of(list(map(_without, parts, constants)))

    @classmethod
    def of_upgraded(cls, loaded: Loaded, target: Target) -> Score:
        """Return the score to compare with layers, which have no casts of inputs and outputs."""
        ends = map(_casts_at_ends, loaded.program.functions.values())
        return cls.of(list(map(_without, placed(loaded, target), ends)))

    @property
    def share(self) -> dict[str, float]:
        """The shares of the flop and of the ops that are on the ANE; 1 where there are none."""
        return self._shares(self.on_flop, self.on_ops)

    @property
    def share_at_most(self) -> dict[str, float]:
        """The same if each op of which that is not known were on the ANE, where it may be."""
        return self._shares(self.on_flop + self.perhaps_flop, self.on_ops + self.perhaps_ops)

    @property
    def can_run(self) -> dict[str, float]:
        """The shares that the ANE can run, whether or not Core ML would choose it.

        By these a network and the ML Program made of it are compared: a network has no cost model, so nobody
        can say what Core ML would choose there.
        """
        return self._shares(self.legal_flop, len(self.legal))

    def _shares(self, flop: int, ops: int) -> dict[str, float]:
        return {"flop": flop / self.flop if self.flop else 1.0, "ops": ops / self.ops if self.ops else 1.0}

    @property
    def expected(self) -> Expected:
        """How long it takes."""
        return Expected(self.estimate, self.at_worst, self.time, self.doubt)

    def over(self, before: Score) -> Ratio:
        """The expected time, as a multiple of that before."""
        return self.expected.over(before.expected)

    def takes(self, before: Score, verb: str = "") -> str:
        """Both times in words, "expected time 2 ms -> 1.9 ms"; the relative cost where none is known."""
        return self.expected.words(before.expected, verb)

    def loss(self, before: Score, of: Iterable[str] = ("legal", "time", "size")) -> str:
        """The first of some `LOSSES` that it has, in words; "" for none."""
        return next(filter(None, (LOSSES[name](before, self) for name in of)), "")

    def gain(self, before: Score) -> str:
        """What a step gains, in words, with what grows for it; "" for nothing."""
        better = self.worth(before, ("time", "legal", "switches"))
        grown = self.outgrown(before) if better else []
        return f"{better}; {', '.join(grown)}" if grown else better

    def worth(self, before: Score, of: Iterable[str] = WORTH) -> str:
        """The first of some `GAINS` that it has, by default of those of a whole plan, in words; "" for none."""
        return next(filter(None, (GAINS[name](before, self) for name in of)), "")

    def paid(self, before: Score) -> list[str]:
        """What grew beyond its bound, weights also where they are few, and for what gain: one line, or none."""
        more = self.weights > before.weights * BOUNDS["weights"].times
        grown = self.outgrown(before, {"weights"} if more else ())
        return [f"{self.takes(before)}, for which the model grew: {', '.join(grown)}"] if grown else []

    def outgrows(self, before: Score, what: str) -> bool:
        """Is one measure beyond its bound?"""
        bound, old, new = BOUNDS[what], getattr(before, what), getattr(self, what)
        return bool(new > max(old * bound.times, old + bound.more))

    def outgrown(self, before: Score, more: Iterable[str] = ()) -> list[str]:
        """What is beyond its bound, or among `more`, in words."""
        return [_from(before, self, what) for what in BOUNDS if self.outgrows(before, what) or what in more]

    def grows(self, before: Score) -> bool:
        """Is it larger by any measure?"""
        return any(getattr(self, what) > getattr(before, what) for what in BOUNDS)

    def __str__(self) -> str:
        ops, flop = (between(self.share[what], self.share_at_most[what]) for what in ("ops", "flop"))
        most = f" to {self.on_ops + self.perhaps_ops}" if self.perhaps_ops else ""
        where = f"{self.on_ops}{most} of {self.ops} ops ({ops}) and {flop} of the work on the ANE"
        switches = f"{self.switches} {'switch' if self.switches == 1 else 'switches'}"
        return f"{where}, {switches}{'' if self.time is None else f', expected {self.time}'}"


Compare = Callable[[Score, Score], str]
"""What the second score loses, or gains, over the first, in words; "" for nothing."""


def _barred(old: Score, new: Score) -> str:
    if lost := sorted(old.legal & new.illegal):
        more = f" and {len(lost) - 1} more" if len(lost) > 1 else ""
        return f"%{lost[0][1]}{more} would no longer be legal on the ANE"
    return ""


def _slower(old: Score, new: Score) -> str:
    ratio = new.over(old)
    return f"the {new.takes(old, ' would rise')}" if ratio.slower and not ratio.equal else ""


def _grown(old: Score, new: Score) -> str:
    if not (grown := new.outgrown(old)) or new.over(old).clear:
        return ""
    worst = multiple(new.at_worst, old.at_worst)
    more = f" (at worst, relative cost {from_to(1.0, worst, '')})" if worst > 1 else ""
    return f"{', '.join(grown)} would grow, and the {new.takes(old)}{more} is no clear gain"


def _dearer(old: Score, new: Score) -> str:
    verb, times = " of the whole would rise", new.expected.times(old.expected)
    if times is not None and times[1].ms > times[0].ms * (1 + SAME):
        return f"the expected time{verb} {from_to(times[0].ms, times[1].ms)}"
    dearer = new.estimate > old.estimate * (1 + SAME)
    return f"the {new.expected.relative(old.expected, verb)}" if dearer else ""


def _less_on_ane(old: Score, new: Score) -> str:
    """A share that falls because less is left on the ANE, as where two layers became one, is no loss."""
    was, now = old.share["flop"], new.share["flop"]
    if old.flop and now < was and new.flop - new.on_flop > old.flop - old.on_flop:
        return f"the share of the work on the ANE would fall {_percents(was, now)}"
    if old.on_flop or not old.flop:
        return ""
    was, now = (one.perhaps_flop / one.flop if one.flop else 1.0 for one in (old, new))
    return f"the share of the work that may be on the ANE would fall {_percents(was, now)}" if now < was else ""


def _falling(measure: str, words: str) -> Compare:
    """A loss of one share, of the flop or of the ops."""

    def less(old: Score, new: Score) -> str:
        pairs = [(what, was, getattr(new, measure)[what]) for what, was in getattr(old, measure).items()]
        fell = [one for one in pairs if one[2] < one[1] and getattr(old, one[0])]
        return next((f"the share of the {w} {words} would fall {_percents(a, b)}" for w, a, b in fell), "")

    return less


LOSSES: dict[str, Compare] = {
    "legal": _barred,
    "time": _slower,
    "size": _grown,
    "whole": _dearer,
    "share": _less_on_ane,
    "can run": _falling("can_run", "that the ANE can run"),
    "shown": _falling("share", "that inspect expects on the ANE"),
}


def _faster(old: Score, new: Score, most: float = 1 - SAME) -> str:
    """Unless only since what became unknown is not priced."""
    return new.takes(old) if new.over(old).best < most and new.unknown <= old.unknown else ""


def _freed(old: Score, new: Score) -> str:
    """Less is illegal on the ANE, and more of it than what became unknown."""
    was, now = (old.illegal_flop, len(old.illegal)), (new.illegal_flop, len(new.illegal))
    risen, freed = new.unknown - old.unknown, was[1] - now[1]
    if was == now or now[0] > was[0] or now[1] > was[1] or 0 < risen >= freed:
        return ""
    at = 1 if freed else 0
    rise = _percents(old.can_run["ops"], new.can_run["ops"])
    words = f"{('flop', 'ops')[at]} that cannot run on the ANE {_counts(was[at], now[at])}"
    return f"{words} (share of the ops that can {rise})"


def _fewer_switches(old: Score, new: Score) -> str:
    fewer = new.switches < old.switches
    return f"switches between units {old.switches} -> {new.switches}" if fewer else ""


def _fewer_findings(old: Score, new: Score) -> str:
    """At no higher estimate."""
    dearer = new.over(old).slower or new.unknown > old.unknown or new.switches > old.switches
    return f"findings {old.findings} -> {new.findings}" if new.findings < old.findings and not dearer else ""


def _smaller(old: Score, new: Score) -> str:
    return ", ".join(_from(old, new, what) for what in BOUNDS if old.outgrows(new, what))


LEAST = 0.02
"""The share of the expected time, or of the weights, that a plan must gain: less is nothing."""


def _lighter(old: Score, new: Score) -> str:
    return _smaller(old, new) if new.weights < (1 - LEAST) * old.weights and new.unknown <= old.unknown else ""


def _more_layers(old: Score, new: Score) -> str:
    """Of the layers of a network, which have no cost, more can run on the ANE, and it takes no longer."""
    slower = None not in (old.time, new.time) and new.time.ms > old.time.ms  # type: ignore[union-attr]
    if old.estimate or slower or len(new.illegal) >= len(old.illegal) or _barred(old, new):
        return ""
    return f"layers that cannot run on the ANE {len(old.illegal)} -> {len(new.illegal)}"


def _in_equal_time(gain: Compare) -> Compare:
    """A gain that counts only where the model gets no slower."""
    return lambda old, new: "" if _slower(old, new) else gain(old, new)


def _may_run(score: Score) -> int:
    return score.on_flop + score.perhaps_flop


GAINS: dict[str, Compare] = {
    "loading": lambda old, new: f"it loads, where {old.refused}" if old.refused and not new.refused else "",
    "time": _faster,
    "enough time": lambda old, new: _faster(old, new, 1 - LEAST),
    "legal": _in_equal_time(_freed),
    "switches": _in_equal_time(_fewer_switches),
    "any switches": _fewer_switches,
    "on the ANE": lambda old, new: "more" if new.on_flop > old.on_flop or new.on_ops > old.on_ops else "",
    "perhaps": lambda old, new: "more" if _may_run(new) > _may_run(old) else "",
    "findings": _fewer_findings,
    "size": _smaller,
    "weights": _lighter,
    "layers": _more_layers,
}


def _from(old: Score, new: Score, what: str) -> str:
    """One measure of `BOUNDS` before and after: "weights 100 MB -> 115 MB"."""
    bound, pair = BOUNDS[what], (getattr(old, what), getattr(new, what))
    return f"{bound.words} {' -> '.join(map(byte_words, pair)) if bound.size else _counts(*pair)}"


def _parts(inspection: Inspection) -> list[Inspection]:
    """A report, and those of the parts of a pipeline."""
    return [inspection, *(one for part in inspection.parts.values() for one in _parts(part))]


def _without(part: Inspection, names: set[str]) -> Inspection:
    """A report without some ops."""
    return replace(part, ops=tuple(row for row in part.ops if row.name not in names))


def _casts_at_ends(function: Function) -> set[str]:
    """The names of the casts of inputs and outputs."""
    casts = [op for op in function.operations if op.op_type == "cast"]
    return {op.outputs[0].name for op in casts if op.x.op is None or op.outputs[0] in function.outputs}


def placed(model: Loaded | Program, target: Target, *, advice: bool = False) -> list[Inspection]:
    """The inspection of each function of a program; without advice, of what is legal and where it runs only.

    The specification of a loaded model says at which shapes a flexible one is judged.
    """
    loaded = Loaded.of(model)
    return [inspect_program(loaded, target, function=name, advice=advice) for name in loaded.program.functions]


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
