"""How a program stands on a target: what `auto` and the gate of recipes compare, and say in words.

`loss` and `gain` are the objective, in this order: no op becomes illegal that was legal; the shares of the
flop and of the ops on the ANE, at no much higher estimate; what is not legal there, which is all that counts
of a model too small to be placed on the ANE; the bytes that ops off the ANE move; switches between units; the
estimate. A share that rises because there is more on the ANE is no gain by itself: less must be off it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from anesurgery.facts.reading import in_words
from anesurgery.files.package import Loaded
from anesurgery.loading import load
from anesurgery.mil import Program
from anesurgery.placement.inspection import Inspection
from anesurgery.placement.inspector import inspect_program
from anesurgery.placement.networks import CONSTANTS
from anesurgery.placement.partition import SWITCH
from anesurgery.placement.target import Target

DEARER = 1.5
"""How many times the estimate may grow for a better share: multiplying a table is no gain over a lookup."""
SAME = 1e-6
"""Relative difference below which two estimates are one."""


@dataclass(frozen=True)
class Standing:
    """All functions of a program together.

    Attributes:
        ops: number of ops, constants left out.
        on_ops: those that prefer the ANE.
        flop: floating point operations of all.
        on_flop: of the ops that prefer the ANE.
        switches: changes of the unit.
        estimate: microseconds; no run time.
        unknown: ops without a verdict or an estimate.
        findings: number of findings, where they were looked for.
        legal: function and name of the ops that are legal on the ANE.
        illegal: the same of those that are not.
        illegal_flop: of the latter.
        off_bytes: that ops read and write which do not prefer the ANE.
        legal_flop: of the ops that are legal on the ANE.
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
    off_bytes: int = 0
    legal_flop: int = 0

    @classmethod
    def of_layers(cls, found: Inspection) -> Standing:
        """From the inspection of a network, or of a pipeline of some; constants compute nothing."""
        parts = [replace(p, ops=tuple(r for r in p.ops if r.op_type not in CONSTANTS)) for p in _parts(found)]
        return cls.of(parts)

    @classmethod
    def of(cls, inspections: Sequence[Inspection]) -> Standing:
        """From the inspection of each function."""
        rows = [(i, row) for i, part in enumerate(inspections) for row in part.ops]
        on = [row for _, row in rows if row.preferred == "ane"]
        return cls(
            len(rows),
            len(on),
            sum(row.flop for _, row in rows),
            sum(row.flop for row in on),
            sum(part.switches for part in inspections),
            sum(part.cost or 0.0 for part in inspections),
            sum(row.legal is None or (row.legal and row.estimate is None) for _, row in rows),
            sum(len(part.all_findings) for part in inspections),
            frozenset((i, row.name) for i, row in rows if row.legal),
            frozenset((i, row.name) for i, row in rows if row.legal is False),
            sum(row.flop for _, row in rows if row.legal is False),
            sum(row.bytes for _, row in rows if row.preferred != "ane"),
            sum(row.flop for _, row in rows if row.legal),
        )

    @property
    def share(self) -> dict[str, float]:
        """Of the flop and of the ops on the ANE; 1 where there are none."""
        return {
            "flop": self.on_flop / self.flop if self.flop else 1.0,
            "ops": self.on_ops / self.ops if self.ops else 1.0,
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
        loaded = load(model)
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

    def lowered(self, before: Standing, shares: Sequence[str] = ("flop", "ops")) -> str:
        """What can no longer run on the ANE, or which share there falls, in words; "" for nothing.

        A share that falls because less is left on the ANE, as where two layers became one, is no loss: more
        must be off it.

        Args:
            before: the standing to compare with.
            shares: those that must not fall.
        """
        if lost := sorted(before.legal & self.illegal):
            more = f" and {len(lost) - 1} more" if len(lost) > 1 else ""
            return f"%{lost[0][1]}{more} would no longer be legal on the ANE"
        more_off = {"flop": self.off[0] > before.off[0], "ops": self.off[1] > before.off[1]}
        for what in shares:
            old, new = before.share[what], self.share[what]
            counts = what != "flop" or before.flop  # of nothing there is no share
            if counts and new < old and more_off[what]:
                return f"the share of {what} on the ANE would fall {_percents(old, new)}"
        return ""

    def loss(self, before: Standing) -> str:
        """What is worse than before, in words; "" for nothing that counts."""
        if lowered := self.lowered(before):
            return lowered
        if self.off[0] > before.off[0] and not self.frees(before):
            return f"flop off the ANE would rise {_counts(before.off[0], self.off[0])}"
        if self.estimate > DEARER * before.estimate and self.estimate - before.estimate > SWITCH:
            return f"the estimate would rise {in_time(before.estimate)} -> {in_time(self.estimate)}"
        return ""

    def gain(self, before: Standing) -> str:
        """What is better than before, in words; "" for nothing."""
        for what, old, new in zip(("flop", "ops"), before.off, self.off, strict=True):
            if new < old:
                rise = _percents(before.share[what], self.share[what])
                return f"{what} off the ANE {_counts(old, new)} (share on it {rise})"
        if self.frees(before):
            rise = _percents(before.legal_share, self.legal_share)
            pairs = zip(("ops", "flop"), reversed(before.barred), reversed(self.barred), strict=True)
            what, old, new = next(pair for pair in pairs if pair[1] != pair[2])
            return f"{what} that cannot run on the ANE {_counts(old, new)} (share of the ops that can {rise})"
        cheaper = self.estimate < before.estimate * (1 - SAME) and self.unknown <= before.unknown
        risen = self.off > before.off
        if not risen and self.moves_less(before):
            sizes = f"{in_words(before.off_bytes)} -> {in_words(self.off_bytes)}"
            rise = _percents(before.share["ops"], self.share["ops"])
            return f"data of ops off the ANE {sizes} (share of the ops on it {rise})"
        if not risen and self.switches != before.switches:
            fewer = self.switches < before.switches
            return f"switches between units {before.switches} -> {self.switches}" if fewer else ""
        if cheaper:
            return f"estimate {in_time(before.estimate)} -> {in_time(self.estimate)}"
        return ""

    def rises(self, before: Standing) -> bool:
        """Is a larger share of the flop or of the ops on the ANE?"""
        return any(self.share[what] > before.share[what] for what in ("flop", "ops") if self.on_ops)

    def frees(self, before: Standing) -> bool:
        """Is less illegal on the ANE, at no much higher estimate, and more than what became unknown?"""
        pairs = list(zip(self.barred, before.barred, strict=True))
        risen, freed = self.unknown - before.unknown, len(before.illegal) - len(self.illegal)
        dearer = self.estimate > DEARER * before.estimate or 0 < risen >= freed
        return all(new <= old for new, old in pairs) and self.barred != before.barred and not dearer

    def moves_less(self, before: Standing) -> bool:
        """Do the ops off the ANE move fewer bytes, where a larger share of the ops is on it?"""
        return self.off_bytes < before.off_bytes and self.share["ops"] > before.share["ops"]

    def tidier(self, before: Standing) -> bool:
        """Are there fewer findings, at no higher estimate?"""
        dearer = self.estimate > before.estimate * (1 + SAME) or self.unknown > before.unknown
        return self.findings < before.findings and not dearer and self.switches <= before.switches

    def __str__(self) -> str:
        shares, times = self.share, "switch" if self.switches == 1 else "switches"
        ops = f"{self.on_ops} of {self.ops} ops ({shares['ops']:.1%})"
        where = f"{ops} and {shares['flop']:.1%} of the flop on the ANE"
        return f"{where}, {self.switches} {times}, estimate {in_time(self.estimate)}"


def _parts(found: Inspection) -> list[Inspection]:
    """A report, and those of the parts of a pipeline."""
    return [found, *(one for part in found.parts.values() for one in _parts(part))]


def stand(program: Program, target: Target) -> tuple[Standing, list[Inspection]]:
    """The standing of a program, and the inspection of each of its functions."""
    found = placed(program, target, advice=True)
    return Standing.of(found), found


def placed(model: Loaded | Program, target: Target, *, advice: bool = False) -> list[Inspection]:
    """The inspection of each function of a program; without advice, of what is legal and where it runs only.

    The specification of a loaded model says at which shapes a flexible one is judged.
    """
    loaded = load(model)
    return [inspect_program(loaded, target, function=name, advice=advice) for name in loaded.program.functions]


def in_time(microseconds: float) -> str:
    """A duration with the unit that a person reads: "850 µs", "1.03 ms", "2.38 s"."""
    for unit, size in (("s", 1e6), ("ms", 1e3)):
        if microseconds >= size:
            return f"{microseconds / size:.3g} {unit}"
    return f"{microseconds:.3g} µs"


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
