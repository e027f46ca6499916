"""Numeric hazards that samples show: which op leaves fp16 or the engine's arithmetic, and with which value.

The other mode, without samples, is `numeric`. Here the interpreter runs the model three times on each sample,
in exact arithmetic, in fp16 and as the engine was measured to compute (`calibration`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from anesurgery.checking.ranges import Hazard, OpRange, ranges
from anesurgery.files.package import Loaded
from anesurgery.interpret.arithmetic.properties import CHIPS, FORGE, GUIDE, STUDY
from anesurgery.mil import Program, walk_ops
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


def hazards(
    model: Loaded | Program, inputs: Values | Iterable[Values], target: Target, function: str | None = None
) -> dict[str, tuple[Finding, ...]]:
    """What goes wrong on samples.

    Args:
        model: what is loaded, or a program.
        inputs: one set of inputs by name, or several.
        target: its chip gives the arithmetic, where it names just one that was measured; else only what holds
            on every chip measured is assumed.
        function: which function; `main` or the first by default.

    Returns:
        name of an op -> findings, each with the value found.

    Raises:
        InterpretError: inputs that do not fit.
        SurgeryError: no inputs.
    """
    loaded = Loaded.of(model)
    observed = ranges(loaded.program, inputs, chip=chip(target), function=function)
    names = {v.name: op.name for op in walk_ops(loaded.program) for v in op.outputs}
    by_op: dict[str, tuple[Finding, ...]] = {}
    for row in observed.rows:
        name = names.get(row.name, row.name)
        new = tuple(_finding(hazard, row, name, observed.samples) for hazard in row.hazards)
        if new:
            by_op[name] = by_op.get(name, ()) + new
    return by_op


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
