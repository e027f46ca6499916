"""Numeric hazards that samples show: which op leaves fp16 or the engine's arithmetic, and with which value.

The other mode, without samples, is `numeric`. Here the interpreter runs the model three times on each sample,
in exact arithmetic, in fp16 and as the engine was measured to compute (`calibration`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from anesurgery.checking.ranges import Hazard, OpRange, ranges
from anesurgery.files.package import Loaded
from anesurgery.interpret.arithmetic.properties import CHIPS, FORGE, GUIDE, STUDY
from anesurgery.mil import Operation, Program, operands, walk_ops
from anesurgery.placement.evidence import Finding, Grade
from anesurgery.placement.target import Target

Values = Mapping[str, Any]

BECAUSE: dict[str, str] = {
    "overflow": "the largest number of fp16 is 65504",
    "saturates": "a result or partial sum of products of magnitude 32768 or more becomes infinite",
    "may saturate": "a partial sum of products of magnitude 32768 or more becomes infinite; whether it is "
    "reached depends on the order of its terms, which is not known",
    "nan": "it is a number in exact arithmetic",
    "infinite": "it is infinite in exact arithmetic already; the engine treats infinities as large numbers",
}
"""Kind of hazard -> why it matters."""

ADVICE: dict[str, str] = {
    "overflow": "scale the value down by a power of two and its readers up, or clip it",
    "saturates": "divide the weights (or the query) by a power of two and multiply the result by it",
    "may saturate": "divide the weights (or the query) by a power of two and multiply the result by it",
    "nan": "look at the operands: 0 times infinity, a root of a negative number, or an epsilon that is 0",
    "infinite": "use a finite number; -1e4 in masks",
}


@dataclass(frozen=True)
class Observed:
    """What a run on samples shows.

    Attributes:
        findings: name of an op -> what goes wrong, each with the value found.
        largest: name of a value -> the largest magnitude of it in exact arithmetic.
        samples: how many there were.
    """

    findings: Mapping[str, tuple[Finding, ...]]
    largest: Mapping[str, float]
    samples: int

    def beside(self, finding: Finding, op: Operation) -> Finding:
        """The same finding, with how far the samples come where it is about numbers."""
        read = [self.largest[v.name] for _, v in operands(op) if v.name in self.largest]
        given = [self.largest[v.name] for v in op.outputs if v.name in self.largest]
        if finding.kind != "numeric" or not read or not given:
            return finding
        many = f"{self.samples} sample{'s' * (self.samples != 1)}"
        words = f"on {many} it reads magnitudes up to {max(read):.4g}, and gives up to {max(given):.4g}"
        return replace(finding, message=f"{finding.message}; {words}")


def observed(
    model: Loaded | Program, inputs: Values | Iterable[Values], target: Target, function: str | None = None
) -> Observed:
    """What goes wrong on samples, and how large values are.

    Args:
        model: what is loaded, or a program.
        inputs: one set of inputs by name, or several.
        target: its chip gives the arithmetic, where it names just one that was measured; else only what holds
            on every chip measured is assumed.
        function: which function; `main` or the first by default.

    Raises:
        InterpretError: inputs that do not fit.
        SurgeryError: no inputs.
    """
    loaded = Loaded.of(model)
    samples = [inputs] if isinstance(inputs, Mapping) or not isinstance(inputs, Iterable) else list(inputs)
    seen = ranges(loaded.program, samples, chip=chip(target), function=function)
    names = {v.name: op.name for op in walk_ops(loaded.program) for v in op.outputs}
    by_op: dict[str, tuple[Finding, ...]] = {}
    for row in seen.rows:
        name = names.get(row.name, row.name)
        new = tuple(_finding(hazard, row, name, seen.samples) for hazard in row.hazards)
        if new:
            by_op[name] = by_op.get(name, ()) + new
    return Observed(by_op, {**_of_inputs(samples), **{r.name: r.largest for r in seen.rows}}, seen.samples)


def _of_inputs(samples: Sequence[Values]) -> dict[str, float]:
    """The largest magnitude of each input of floats."""
    largest: dict[str, float] = {}
    for name, value in ((n, np.asarray(v)) for one in samples for n, v in one.items()):
        if value.dtype.kind == "f" and value.size:
            largest[name] = max(largest.get(name, 0.0), float(np.abs(value).max()))
    return largest


def chip(target: Target) -> str | None:
    """The one chip of a target, if its arithmetic was measured."""
    return target.chips[0] if len(target.chips) == 1 and target.chips[0] in CHIPS else None


def _finding(hazard: Hazard, row: OpRange, name: str, samples: int) -> Finding:
    """The finding of one hazard; `hazard.arithmetic` is "fp32", "fp16", "ane" or "ane:M1"."""
    measured = hazard.arithmetic.startswith("ane")
    of_chip = hazard.arithmetic.replace("ane:", "the engine of ")
    arithmetic = "the engine" if of_chip == "ane" else of_chip
    what = "a partial sum of" if "saturate" in hazard.kind else "a magnitude of"
    return Finding(
        rule=f"sampled-{hazard.kind.replace(' ', '-')}",
        kind="numeric",
        message=f"{hazard.kind} in {arithmetic}: {what} {hazard.value:.4g}, values from {row.minimum:.4g} to "
        f"{row.maximum:.4g}",
        because=BECAUSE[hazard.kind],
        source=f"{STUDY}; {GUIDE}; {FORGE}" if measured else "IEEE 754 half precision",
        grade=Grade.MEASURED if hazard.kind != "may saturate" else Grade.GUESS,
        scope=f"{samples} sample{'s' * (samples != 1)}, {arithmetic}",
        remedy=hazard.remedy,
        advice="" if hazard.remedy else ADVICE[hazard.kind],
        op=name,
    )
