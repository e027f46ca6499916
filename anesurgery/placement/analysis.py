"""`inspect`: say for each op whether the ANE can run it, which unit Core ML would choose, why, and what helps."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from anesurgery.mil import Block, Function, Operation, Var, any_symbolic, dtype_name, operands
from anesurgery.placement import cost, partition
from anesurgery.placement.evidence import Finding, Grade
from anesurgery.placement.inspection import Estimate, Inspection, OpRow, Segment
from anesurgery.placement.legality import Legality
from anesurgery.placement.target import Target
from anesurgery.placement.work import Work, is_stored, is_weight, shape_of, work_of
from anesurgery.program import Loaded, load
from anesurgery.sampling import function_of

NOT_MODELLED = (
    "estimates are Core ML's own, as far as their formula was found on an M4 (macOS 27.0.1); they are no run times",
    "nothing here promises a placement: a compute plan on the device decides",
)
ELSEWHERE = "what was measured on an M4 is extrapolated to {}"
GPU = "what goes to the GPU is a guess, fitted to four models of an M4 Pro (macOS 26.5.1)"
DYNAMIC = "lengths known at run time only count as 1"


@dataclass
class _Judged:
    """What is known of one op before units are chosen."""

    op: Operation
    depth: int
    legal: bool | None
    findings: tuple[Finding, ...]
    work: Work
    estimate: Estimate | None


def inspect(
    model: Any, target: Target | str | None = None, *, compute_units: Any = None,
    inputs: Any = None, function: str | None = None, measured: bool = False,
) -> Inspection:  # fmt: skip
    """Predict where each op of a model runs.

    Args:
        model: path, MLModel, MIL program, or what `load` gives.
        target: chips and OS, as "M1/macOS 14", "M4+", "any" (the default: every chip).
        compute_units: a name or a coremltools `ComputeUnit`; CPU_AND_NE by default.
        inputs: arrays by name, or a list of such mappings: numeric hazards are then looked for in a run.
        function: which function; `main` or the first by default.
        measured: ask Core ML itself too (on a Mac only).

    Raises:
        LoadError: the model cannot be read.
        UnknownName: an unknown chip, OS or function.
    """
    aim = Target.parse(target, compute_units)
    return inspect_program(load(model), aim, function=function)


def inspect_program(
    loaded: Loaded, target: Target, *, inputs: Any = None, function: str | None = None
) -> Inspection:
    """The inspection of an ML Program."""
    chosen = function_of(loaded.program, function)
    judged = _judge(chosen, target)
    units = _units(judged, target)
    segments, numbers = _segments(judged, units, chosen)
    rows = tuple(
        _row(i, j, unit, number)
        for i, (j, unit, number) in enumerate(zip(judged, units, numbers, strict=True))
    )
    return Inspection(_label(loaded), target, rows, segments, (), None, _notes(target, judged))


def _judge(function: Function, target: Target) -> list[_Judged]:
    legality = Legality(target)
    found: list[_Judged] = []

    def walk(block: Block, depth: int) -> None:
        for op in block.operations:
            if is_weight(op):
                continue
            legal, why = legality.verdict(op)
            if depth:
                legal, why = False, why or _nested(op)
            work = work_of(op)
            guess = cost.estimate(op, work)
            found.append(_Judged(op, depth, legal, (why,) if why else (), work, guess))
            for nested in op.blocks:
                walk(nested, depth + 1)

    walk(function, 0)
    return found


def _nested(op: Operation) -> Finding:
    return Finding(
        "control-flow", "legality", "inside control flow", "blocks of control flow stay on the CPU",
        "smpanaro/more-ane-transformers", Grade.REPORTED, advice="unroll it, or use select", op=op.name,
    )  # fmt: skip


UNIT_NAMES = {partition.CPU: "cpu", partition.ANE: "ane", partition.GPU: "gpu"}


def _units(judged: Sequence[_Judged], target: Target) -> list[str | None]:
    """The unit that each op prefers; None where it hangs on what is not known."""
    if target.compute_units == "CPU_ONLY":
        return ["cpu"] * len(judged)
    likely, unlikely = (
        partition.shortest([_costs(j, target, hopeful) for j in judged])
        for hopeful in (True, False)
    )
    return [
        UNIT_NAMES[a] if a == b and _is_known(j) else None
        for j, a, b in zip(judged, likely, unlikely, strict=True)
    ]


def _is_known(judged: _Judged) -> bool:
    """An op without an estimate has a place only where the ANE is out of the question."""
    return judged.legal is False or (judged.legal is True and judged.estimate is not None)


def _costs(judged: _Judged, target: Target, hopeful: bool) -> tuple[float, float, float]:
    """Of the op on each unit; what is not known of legality is taken for the best, or for the worst."""
    guess, kind = judged.estimate or Estimate(0.0, 0.0), judged.op.op_type
    legal = target.uses_ane and (judged.legal or (judged.legal is None and hopeful))
    ane = (guess.ane or 0.0) if legal else math.inf
    gpu = guess.gpu if target.uses_gpu and not (legal and kind in cost.SUMS) else None
    return guess.cpu or 0.0, ane, math.inf if gpu is None else gpu


def _segments(
    judged: Sequence[_Judged], units: Sequence[str | None], function: Function
) -> tuple[tuple[Segment, ...], list[int]]:
    """Runs of neighbours on one unit, and the number of the run of each op."""
    numbers: list[int] = []
    for i, unit in enumerate(units):
        numbers.append(0 if i == 0 else numbers[-1] + (unit != units[i - 1]))
    home = {v: n for j, n in zip(judged, numbers, strict=True) for v in j.op.outputs}
    members: dict[int, list[_Judged]] = {}
    for j, n in zip(judged, numbers, strict=True):
        members.setdefault(n, []).append(j)
    given = set(function.outputs)
    return tuple(
        _segment(n, ops, units[numbers.index(n)], home, given) for n, ops in members.items()
    ), numbers


def _segment(
    number: int, members: Sequence[_Judged], unit: str | None, home: dict[Var, int], given: set[Var]
) -> Segment:
    read = dict.fromkeys(v for j in members for _, v in operands(j.op) if not is_stored(v))
    made = [v for j in members for v in j.op.outputs]
    readers = {
        v: {home[o] for r in v.child_ops for o in r.outputs if o in home} - {number} for v in made
    }
    outside = [v for v in made if readers[v] or v in given]
    return Segment(
        number, unit, tuple(j.op.name for j in members),
        {v.name: shape_of(v) for v in read if home.get(v) != number},
        {v.name: shape_of(v) for v in outside},
        tuple(sorted({n for v in outside for n in readers[v]})),
    )  # fmt: skip


def _row(index: int, judged: _Judged, unit: str | None, segment: int) -> OpRow:
    op, first = judged.op, judged.op.outputs[0]
    return OpRow(
        index, op.name, op.op_type, "x".join(map(str, shape_of(first))), dtype_name(first),
        judged.legal, unit, segment, judged.findings, judged.work.flop, judged.work.moved,
        judged.estimate, depth=judged.depth,
    )  # fmt: skip


def _label(loaded: Loaded) -> str:
    return str(getattr(loaded, "source", None) or "MIL program")


def _notes(target: Target, judged: Sequence[_Judged]) -> tuple[str, ...]:
    notes = list(NOT_MODELLED)
    if not target.families <= cost.MEASURED_ON:
        notes.append(ELSEWHERE.format(target.label))
    if target.uses_gpu:
        notes.append(GPU)
    if any(any_symbolic(v.shape or ()) for j in judged for v in j.op.outputs):
        notes.append(DYNAMIC)
    return tuple(notes)
