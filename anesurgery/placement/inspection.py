"""The report of `inspect`: rows of ops, segments, findings, memory, time, and a summary in words.

`inspector` builds it; `anesurgery.show` draws it as text, Markdown and HTML, and `to_json` gives it as plain
data.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from anesurgery.display import Drawn, drawn
from anesurgery.files import arrays
from anesurgery.placement.durations import Time
from anesurgery.placement.evidence import Finding
from anesurgery.placement.findings_in_words import in_short, is_fault_elsewhere
from anesurgery.placement.flexible import AtShape
from anesurgery.placement.rules.loading import refusal
from anesurgery.placement.target import Target
from anesurgery.placement.unit_advice import UnitAdvice

MOST_NAMED = 3
"""The most passes that a summary names: they fit one line of a terminal, and the report has the rest."""
SOFT = ("speed", "numeric", "conversion")
"""Kinds of findings that do not take an op off the ANE."""
NO_TIME = "no time: "
"""The start of the note that says why there is no time."""
FORMAT, VERSION = "anesurgery.inspection", 1
"""The format of an inspection's JSON. The version rises when a key is removed or changes its meaning."""
UNITS = ("ane", "gpu", "cpu", None)
"""Compute units; None where nothing allows a verdict."""


@dataclass(frozen=True)
class Estimate:
    """Core ML's own estimate of an op, as far as its formula is known; microseconds, and not run times."""

    ane: float | None
    """None where the ANE cannot run it, or where there is no data."""
    cpu: float | None
    gpu: float | None = None
    """A guess fitted to four models of an M4 Pro, for runs that may use the GPU; None where it fits nothing."""
    off: tuple[float, float] = (1.0, 1.0)
    """(ANE, CPU): how many times too large or too small the estimates may be."""
    or_else: tuple[tuple[float, float], ...] = ()
    """Other estimates (ANE, CPU) that are as likely, by other classes of ops that published cases allow."""

    def times(self, count: int) -> Estimate:
        """Return the estimate of several runs."""
        if count == 1:
            return self
        ane, cpu, gpu = (None if value is None else value * count for value in (self.ane, self.cpu, self.gpu))
        return Estimate(ane, cpu, gpu, self.off, tuple((a * count, c * count) for a, c in self.or_else))


@dataclass(frozen=True)
class OpRow:
    """One op with its verdict, unit, findings and estimates."""

    index: int
    """Place in file order."""
    name: str
    """The name of its first output."""
    op_type: str
    """MIL op type, or layer type of a neural network."""
    shape: str
    """The shape of the first output, in words ("1x64x32x32")."""
    dtype: str
    """The dtype of the first output."""
    legal: bool | None
    """Can the ANE run it? None: unknown."""
    preferred: str | None
    """"ane", "cpu", "gpu", or None: unknown."""
    segment: int
    """Number of the segment it belongs to."""
    findings: tuple[Finding, ...] = ()
    """What rules found in it."""
    flop: int = 0
    """Floating point operations; a multiply and an add count as two."""
    bytes: int = 0
    """Read and written at run time."""
    estimate: Estimate | None = None
    """None where there is no data."""
    measured: str | None = None
    """The unit that Core ML's own plan names, when it was asked."""
    depth: int = 0
    """Nesting in control flow; 0 outside."""
    rounds: int = 1
    """How often it runs in one prediction: the number of rounds of the loops around it."""
    ms: float | None = None
    """Milliseconds of all its runs in one prediction, estimated as `Inspection.time` is; None without that."""
    weights: int = 0
    """Bytes of the constants that it reads."""

    def to_json(self) -> dict[str, Any]:
        """Return plain data."""
        own = {**vars(self), "findings": [f.to_json() for f in self.findings]}
        e = self.estimate
        # `gpu` is a guess, and so no part of the format
        times = None if e is None else {k: v for k, v in vars(e).items() if k != "gpu"}
        return {**own, "estimate": times}


@dataclass(frozen=True)
class Segment:
    """Neighbouring ops that run on one unit."""

    index: int
    """Number in file order, over all units."""
    unit: str | None
    """"ane", "cpu", "gpu" or None."""
    ops: tuple[str, ...]
    """Names of its ops in file order."""
    inputs: dict[str, tuple[int, ...]]
    """Name -> shape of what it reads from outside; constants are not counted."""
    outputs: dict[str, tuple[int, ...]]
    """Name -> shape of what is read outside."""
    readers: tuple[int, ...] = ()
    """Numbers of the segments that read its outputs."""
    ms: float | None = None
    """Milliseconds of its ops, estimated as `Inspection.time` is; None without that."""

    def to_json(self) -> dict[str, Any]:
        """Return plain data."""
        return {k: list(v) if isinstance(v, tuple) else v for k, v in vars(self).items()}


@dataclass(frozen=True)
class Memory:
    """The memory that a model needs, in bytes."""

    weights: int
    """All weights as stored: compressed ones count as compressed."""
    activations: int
    """The largest sum of values that live at the same time, without padding of the last axis."""
    largest: int
    """The largest single value."""
    limit: int | None
    """The weights that one program may hold on the target; None if unknown."""
    chunks: int
    """The number of programs of equal weight that would fit the limit."""
    states: int = 0
    """All states."""
    state_traffic: int = 0
    """What one call reads from states and writes to them; slices count by their own size."""
    expanded: int = 0
    """The weights decompressed, as on units that compute with fp16; 0 if no weight is compressed."""
    app: int | None = None
    """What an app may take on the target before iOS ends it, as was seen of one; None if unknown."""

    @property
    def needed(self) -> int:
        """Weights as stored and as expanded, activations and states: apps that iOS ended held all of them."""
        return self.weights + self.expanded + self.activations + self.states

    @property
    def left(self) -> int | None:
        """The part of `app` that is left for everything else, negative if none; None if unknown."""
        return None if self.app is None else self.app - self.needed

    def to_json(self) -> dict[str, int | None]:
        """Return plain data."""
        return {**vars(self), "needed": self.needed, "left": self.left}


@dataclass(frozen=True)
class Inspection(Drawn):
    """Where each op of a model runs, why, and which pass repairs it.

    Attributes:
        model: what was inspected, in words.
        target: chips, OS and compute units.
        ops: one row for each op in file order, without constants.
        segments: runs of ops on one unit.
        findings: about the model as a whole. Findings about an op are in its row.
        memory: None if it is unknown.
        notes: limits of this report: parts that are not modelled or were not measured.
        measured: does each row have the unit of Core ML's own plan?
        parts: the reports of the parts of a pipeline, by name.
        cost: cost of the chosen path in microseconds, as Core ML's segmenter counts it: estimates, launches
            and switches. It is not a run time. None if there is none.
        at_shapes: the units at each enumerated shape; the ops are those of the default one.
        functions: of a package with several functions, and of a folder of sizes, the inspection of each by
            name; the ops are those of the default function, and of the largest size.
        time: milliseconds of one prediction on one chip (`.ms`), with a band of 80 % (`.low`, `.high`), the
            number of published times behind it (`.measurements`) and their `.source`. None if there is no
            estimate; a note says why.
        advice: the compute units that were fastest for measured models of this kind on this chip. None if
            nothing was measured, or if the measurements disagree.
        chain: number of ops on the longest chain, with each round of a loop.
        fixing: the command that fixes the sizes of flexible inputs; "" if there is none.
    """

    model: str
    target: Target
    ops: tuple[OpRow, ...]
    segments: tuple[Segment, ...] = ()
    findings: tuple[Finding, ...] = ()
    memory: Memory | None = None
    notes: tuple[str, ...] = ()
    measured: bool = False
    parts: dict[str, Inspection] = field(default_factory=dict)
    cost: float | None = None
    at_shapes: tuple[AtShape, ...] = ()
    functions: dict[str, Inspection] = field(default_factory=dict)
    time: Time | None = None
    advice: UnitAdvice | None = None
    chain: int = 0
    fixing: str = ""

    @classmethod
    def of_parts(cls, parts: Sequence[Inspection], target: Target) -> Inspection:
        """Join the reports of several functions or models."""
        if len(parts) == 1:
            return parts[0]
        return cls("the model", target, (), parts={str(k): part for k, part in enumerate(parts, 1)})

    @property
    def status(self) -> int:
        """0: every op prefers the ANE. 1: some do. 2: none does, or the model does not load."""
        if self.refused:
            return 2
        units = {row.preferred for row in self._rows()}
        if units == {"ane"}:
            return 0
        return 1 if "ane" in units else 2

    @property
    def summary(self) -> str:
        """The report in one sentence: share, time, ops that run elsewhere and why, and passes that may help."""
        return _summary_of(self)

    @property
    def headline(self) -> str:
        """The headline: how many ops run on the Neural Engine, and the time."""
        return _headline_of(self)

    @property
    def details(self) -> str:
        """The whole report: the time by part, every op that needs attention, every finding, the notes."""
        return str(drawn(self, "details"))

    @property
    def refused(self) -> str:
        """Why the target's OS cannot load the model; "" if it can, as far as known."""
        return refusal(self.all_findings)

    @property
    def counts(self) -> dict[str, int]:
        """Number of ops by preferred unit, "unknown" among them."""
        return dict(Counter(row.preferred or "unknown" for row in self._rows()))

    @property
    def residency(self) -> dict[str, float]:
        """The share of the ANE: of the ops, and of the floating point operations."""
        return self._shares_of(lambda row: row.preferred == "ane")

    @property
    def residency_at_most(self) -> dict[str, float]:
        """The share if every op of unknown unit ran on the ANE."""
        return self._shares_of(_may_run_on_ane)

    @property
    def untimed(self) -> str:
        """Why there is no time, in words; "" if there is one."""
        return next((n.removeprefix(NO_TIME) for n in self.notes if n.startswith(NO_TIME)), "")

    def _shares_of(self, counts: Callable[[OpRow], bool]) -> dict[str, float]:
        rows = self._rows()
        flop = sum(r.flop for r in rows)
        mine = [r for r in rows if counts(r)]
        return {
            "ops": len(mine) / len(rows) if rows else 0.0,
            "flop": sum(r.flop for r in mine) / flop if flop else 0.0,
        }

    @property
    def switches(self) -> int:
        """The number of changes of unit between neighbouring segments."""
        if self.parts:
            return sum(part.switches for part in self.parts.values())
        return max(len(self.segments) - 1, 0)

    @property
    def all_findings(self) -> tuple[Finding, ...]:
        """Findings about the model, then those about its ops in file order."""
        own = [*self.findings, *(f for row in self.ops for f in row.findings)]
        return tuple(own + [f for part in self.parts.values() for f in part.all_findings])

    def row(self, name: str) -> OpRow:
        """The row of an op.

        Raises:
            KeyError: no op of that name.
        """
        for row in self._rows():
            if row.name == name:
                return row
        raise KeyError(f"no op {name!r} in this inspection")

    def __repr__(self) -> str:
        share, ops = between(self.residency["ops"], self.residency_at_most["ops"]), len(self._rows())
        where = self.refused or f"{share} of {ops} ops on the ANE, {self.switches} switches"
        return f"<Inspection of {Path(self.model).name!r} on {self.target}: {where}>"

    def save_html(self, path: str | os.PathLike[str], after: Inspection | None = None) -> Path:
        """Write the report as one HTML file that needs no network, atomically.

        Args:
            path: of the file; an existing one is replaced.
            after: an inspection of the same model after a surgery, to show beside this one.

        Returns:
            The path as written.

        Raises:
            SurgeryError: it cannot be written.
        """
        return arrays.write_text(Path(path).expanduser(), drawn(self, "page", after))

    def _rows(self) -> tuple[OpRow, ...]:
        return self.ops + tuple(r for part in self.parts.values() for r in part._rows())

    def to_json(self) -> dict[str, Any]:
        """Return plain data: what `--json` prints; docs/static/inspect.schema.json describes it."""
        return {
            "format": FORMAT,
            "version": VERSION,
            "model": self.model,
            "target": str(self.target),
            "summary": self.summary,
            "status": self.status,
            "counts": self.counts,
            "residency": self.residency,
            "residency_at_most": self.residency_at_most,
            "switches": self.switches,
            "cost_us": None if "gpu" in self.counts else self.cost,
            "time": None if self.time is None else self.time.to_json(),
            "advice": None if self.advice is None else self.advice.to_json(),
            "chain": self.chain,
            "segments": [s.to_json() for s in self.segments],
            "findings": [f.to_json() for f in self.findings],
            "ops": [r.to_json() for r in self.ops],
            "memory": None if self.memory is None else self.memory.to_json(),
            "notes": list(self.notes),
            "measured": self.measured,
            "at_shapes": [vars(one) for one in self.at_shapes],
            "functions": {name: one.to_json() for name, one in self.functions.items()},
            "parts": {name: part.to_json() for name, part in self.parts.items()},
        }


def _may_run_on_ane(row: OpRow) -> bool:
    return row.preferred == "ane" or (row.preferred is None and row.legal is not False)


def _headline_of(inspection: Inspection) -> str:
    """``On iPhone 13 (A15), 97 of 100 ops run on the Neural Engine; 14.9 ms (6.2 to 36) by estimate``."""
    rows = inspection._rows()
    if inspection.refused:
        return f"{inspection.refused}."
    if not rows:
        why = dict.fromkeys(part.notes[0] for part in _leaves(inspection) if part.notes)
        return f"There are no ops to place{': ' * bool(why)}{'; '.join(why)}."
    time = "" if inspection.time is None else f"; {inspection.time} by estimate"
    return f"On {inspection.target.words}, {_ops_on_engine(inspection)}{time}"


def _leaves(inspection: Inspection) -> Iterator[Inspection]:
    """Yield the parts without parts of their own, or the inspection itself."""
    if not inspection.parts:
        yield inspection
    for part in inspection.parts.values():
        yield from _leaves(part)


def _summary_of(inspection: Inspection) -> str:
    """Return the headline, what may be wrong, the costliest op off the engine, and passes to try."""
    rows = inspection._rows()
    if inspection.refused or not rows:
        return inspection.headline
    elsewhere = {f for row in rows for f in row.findings if is_fault_elsewhere(f, row.legal, row.preferred)}
    short = in_short(f for f in inspection.all_findings if f not in elsewhere)
    if inspection.fixing:
        first = replace(inspection, time=None).headline
        words = [first, short, f"its sizes vary, so fix them first: {inspection.fixing}"]
    else:
        words = [inspection.headline, short, _costliest_op_elsewhere(rows), _passes_to_try(rows)]
    return "; ".join(filter(None, words))


def _ops_on_engine(inspection: Inspection) -> str:
    """Return in words how many ops run on the engine, "6 to 8" if two are unknown, and their work."""
    rows = inspection._rows()
    mine, most = sum(row.preferred == "ane" for row in rows), sum(map(_may_run_on_ane, rows))
    if mine == len(rows):
        return "every op runs on the Neural Engine"
    if all(row.preferred is None for row in rows):
        return "it is not known where the ops run"
    if not most:
        legal = sum(row.legal is True for row in rows) if inspection.target.uses_ane else 0
        reason = f": {legal:,} of {len(rows):,} could, but would not be faster there, by estimate"
        reason = ": by estimate, it would not be faster there" if legal == len(rows) else reason
        return f"no op runs on the Neural Engine{reason if 2 * legal >= len(rows) else ''}"
    count = f"{mine:,}" if mine == most else f"{mine:,} to {most:,}"
    work = between(inspection.residency["flop"], inspection.residency_at_most["flop"])
    share = f" ({work} of the work)" if any(row.flop for row in rows) else ""
    return f"{count} of {len(rows):,} ops{share} {'runs' if count == '1' else 'run'} on the Neural Engine"


UNIT_NAMES = {"ane": "Neural Engine", "cpu": "CPU", "gpu": "GPU"}


def _costliest_op_elsewhere(rows: Sequence[OpRow]) -> str:
    """Return in words the op off the engine that takes the most time, by the estimate, and why it is there.

    Without times, it is the op with the most floating point operations.
    """
    away = [row for row in rows if row.preferred not in ("ane", None) and _findings_off_engine(row)]
    if not away:
        return ""
    row = max(away, key=lambda r: (r.ms or 0.0, r.flop))
    why = _findings_off_engine(row)[0].message
    for verb in ("is", "has"):
        why = why.replace(f"%{row.name} {verb} ", f"its output {verb} ", 1)
    return f"{row.op_type} {row.name} runs on the {UNIT_NAMES[row.preferred or '']}: {why}"


LEAST_SHARE_OF_TIME = 0.001
"""An op with a smaller share of the time is not worth a pass."""


def _passes_to_try(rows: Sequence[OpRow]) -> str:
    """Return in words the passes that move ops to the engine, those for the most time first.

    Ops that take less than `LEAST_SHARE_OF_TIME` do not count.
    """
    saved: dict[str, float] = {}
    total = sum(row.ms or 0.0 for row in rows)
    for row in rows:
        remedies = [finding.remedy for finding in _findings_off_engine(row) if finding.remedy]
        if remedies and (row.ms is None or row.ms >= LEAST_SHARE_OF_TIME * total):
            saved[remedies[0]] = saved.get(remedies[0], 0.0) + (row.ms or 0.0)
    named = sorted(saved, key=lambda name: -saved[name])
    more = f" and {len(named) - MOST_NAMED} more" if len(named) > MOST_NAMED else ""
    return f"try {', '.join(named[:MOST_NAMED])}{more}" if named else ""


def _findings_off_engine(row: OpRow) -> list[Finding]:
    """Return the findings that keep an op off the engine."""
    return [f for f in row.findings if f.kind not in SOFT] if row.preferred != "ane" else []


def between(least: float, most: float) -> str:
    """Return a share in percent, or a range if the unit of some ops is unknown: "0 to 92%"."""
    low, high = percent(least), percent(most)
    return high if low == high else f"{low.removesuffix('%')} to {high}"


def percent(share: float) -> str:
    """Return a share in whole percent; near 0 and 100 with one digit more, so that both are exact."""
    digits = 1 if 0 < share < 0.01 or 0.99 <= share < 1 else 0
    shown = f"{100 * share:.{digits}f}"
    if shown == "100.0":  # rounded up: the share is below 1
        return "99.9%"
    if share and shown == "0.0":
        return "<0.1%"
    return f"{shown}%"
