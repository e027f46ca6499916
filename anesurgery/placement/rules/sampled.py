"""Numeric findings from samples: which op leaves the range of fp16 or of the engine, and with which value.

`inspect(..., inputs=samples)` calls `ranges_on_samples`. The interpreter runs the model three times on each
sample: in exact arithmetic, in fp16, and as the engine was measured to compute. Without samples `numeric.py`
looks for hazards in the program alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from anesurgery.checking.ranges import Hazard, OpRange, ranges, sets_of
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
class SampleRun:
    """The result of running a model on samples.

    Attributes:
        findings: name of an op -> findings about it, each with the value that was reached.
        largest: name of a value -> its largest magnitude in exact arithmetic.
        samples: the number of samples.
    """

    findings: Mapping[str, tuple[Finding, ...]]
    largest: Mapping[str, float]
    samples: int

    def with_magnitudes(self, finding: Finding, op: Operation) -> Finding:
        """Return a finding with the magnitudes on the samples in its message, if its kind is "numeric"."""
        read = [self.largest[v.name] for _, v in operands(op) if v.name in self.largest]
        results = [self.largest[v.name] for v in op.outputs if v.name in self.largest]
        if finding.kind != "numeric" or not read or not results:
            return finding
        count = _sample_words(self.samples)
        words = f"on {count} it reads magnitudes up to {max(read):.4g}, and gives up to {max(results):.4g}"
        return replace(finding, message=f"{finding.message}; {words}")


def ranges_on_samples(
    model: Loaded | Program, inputs: Values | Iterable[Values], target: Target, function: str | None = None
) -> SampleRun:
    """Run a model on samples and return what goes wrong, and how large its values become.

    Args:
        model: a loaded model or a program.
        inputs: one set of inputs by name, or several.
        target: if it names a single chip that was measured, the engine's arithmetic is that chip's; else only
            what holds on every measured chip is assumed.
        function: the name of the function; `main` or the first by default.

    Raises:
        InterpretError: inputs that do not fit.
        SurgeryError: no inputs.
    """
    loaded = Loaded.of(model)
    samples = sets_of(inputs)
    seen = ranges(loaded.program, samples, chip=measured_chip(target), function=function)
    names = {v.name: op.name for op in walk_ops(loaded.program) for v in op.outputs}
    by_op: dict[str, tuple[Finding, ...]] = {}
    for row in seen.rows:
        name = names.get(row.name, row.name)
        new = tuple(_finding(hazard, row, name, seen.samples) for hazard in row.hazards)
        if new:
            by_op[name] = by_op.get(name, ()) + new
    largest = {r.name: r.largest for r in seen.rows if r.reached}
    return SampleRun(by_op, _input_magnitudes(samples) | largest, seen.samples)


def _input_magnitudes(samples: Sequence[Values]) -> dict[str, float]:
    """Return the largest magnitude of each input of floats over all samples."""
    largest: dict[str, float] = {}
    for name, value in ((n, np.asarray(v)) for one in samples for n, v in one.items()):
        if value.dtype.kind == "f" and value.size:
            largest[name] = max(largest.get(name, 0.0), float(np.abs(value).max()))
    return largest


def measured_chip(target: Target) -> str | None:
    """Return the only chip of a target if its arithmetic was measured; else None."""
    return target.chips[0] if len(target.chips) == 1 and target.chips[0] in CHIPS else None


def _sample_words(count: int) -> str:
    return f"{count} sample{'' if count == 1 else 's'}"


def _finding(hazard: Hazard, row: OpRange, name: str, samples: int) -> Finding:
    """Return the finding about one hazard; `hazard.arithmetic` is "fp32", "fp16", "ane" or "ane:M1"."""
    on_engine = hazard.arithmetic.startswith("ane")
    engine_of_chip = hazard.arithmetic.replace("ane:", "the engine of ")
    arithmetic = "the engine" if engine_of_chip == "ane" else engine_of_chip
    what = "a partial sum of" if "saturate" in hazard.kind else "a magnitude of"
    seen = f"{what} {hazard.value:.4g}, values from {row.minimum:.4g} to {row.maximum:.4g}"
    return Finding(
        rule=f"sampled-{hazard.kind.replace(' ', '-')}",
        kind="numeric",
        message=f"{hazard.kind} in {arithmetic}: {seen if row.reached else 'fp32 takes another branch'}",
        because=BECAUSE[hazard.kind],
        source=f"{STUDY}; {GUIDE}; {FORGE}" if on_engine else "IEEE 754 half precision",
        grade=Grade.MEASURED if hazard.kind != "may saturate" else Grade.GUESS,
        scope=f"{_sample_words(samples)}, {arithmetic}",
        remedy=hazard.remedy,
        advice="" if hazard.remedy else ADVICE[hazard.kind],
        op=name,
    )
