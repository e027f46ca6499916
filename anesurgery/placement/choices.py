"""Outputs that are choices (topk, argmax, argsort, suppression, comparisons of floats), for `certify`.

A PSNR says nothing about a choice. What counts is how many choices change in fp16 or on the engine, the margin
between the chosen score and the next beside the error of the scores, and which ops must compute in fp32 so that
no choice changes (`exact_ops`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch

from anesurgery.checking.exactness import rounded_halves
from anesurgery.errors import InterpretError
from anesurgery.interpret import run
from anesurgery.interpret.arithmetic.neural_engine import chip_of, rounding
from anesurgery.interpret.arithmetic.precision import meaning
from anesurgery.interpret.several_arithmetics import OpResults
from anesurgery.interpret.table import Implementation
from anesurgery.mil import (
    Array,
    Function,
    Operation,
    Program,
    Var,
    consumers,
    function_of,
    is_output,
    is_stored,
    np_dtype,
    operands,
    walk_ops,
)
from anesurgery.ops import COMPARISONS, MOVING, names
from anesurgery.placement import verdicts
from anesurgery.placement.inspection import OpRow

Result = TypeVar("Result")

CHOOSING = names("topk reduce_argmax reduce_argmin argsort non_maximum_suppression") | COMPARISONS
"""Ops whose results are choices among floats."""
PASSING_ON = MOVING | names("cast concat stack one_hot")
"""Ops that pass a choice on without changing it."""
CHOICE_OUTPUT = {"topk": 1, "non_maximum_suppression": 2}
"""Op type -> index of the output that holds the indices of what was chosen; 0 for others."""
MOST_TRIALS = 24
"""Runs to find the ops for fp32: bisection of 4,000 ops takes 12, and 12 more try to leave single ops out."""


class Margin(NamedTuple):
    """Differences between the last chosen score and the next: the least and the median; NaN without a next."""

    least: float
    median: float


@dataclass(frozen=True)
class Choice:
    """An op that chooses, and how its choices change by rounding."""

    name: str
    """The name of the op."""
    op_type: str
    """MIL op type."""
    margin: Margin
    """Between the last chosen score and the next."""
    error: Mapping[str, float]
    """Arithmetic -> the largest error of its scores."""
    changed: Mapping[str, float]
    """Arithmetic -> the share of its choices that differ from exact arithmetic."""
    exact_ops: tuple[str, ...] = ()
    """Names of the ops that must compute in fp32 so that no choice changes; empty if nothing changes, or if
    none were found."""
    cost: str = field(default="", compare=False)
    """The time that computing them in fp32 costs, in words."""

    @property
    def worst(self) -> float:
        """The largest share of changed choices over all arithmetics."""
        return max(self.changed.values(), default=0.0)

    @property
    def words(self) -> str:
        """The margins, the error of the scores, and the share of choices that change."""
        arithmetic = max(self.changed, key=lambda a: self.changed[a])
        least, median = self.margin
        margins = "" if math.isnan(least) else f"margins from {least:.2g}, {median:.2g} in the middle; "
        error = f"scores are off by {self.error[arithmetic]:.2g} in {arithmetic}"
        return f"{self.op_type} {self.name}: {margins}{error}; {self.worst:.1%} of choices change"


def scores_of(op: Operation) -> tuple[Var, ...]:
    """Return the float operands that an op chooses by; () for ops that choose nothing, or among constants."""
    if op.op_type not in CHOOSING or len(op.outputs) <= CHOICE_OUTPUT.get(op.op_type, 0):  # a topk of values
        return ()
    ranked = op.scores if "scores" in op.inputs else op.x
    scores = (op.x, op.y) if op.op_type in COMPARISONS else (ranked,)
    floats = [v for v in scores if np_dtype(v).kind == "f"]
    return tuple(floats) if any(not is_stored(v) for v in floats) else ()


def chosen(op: Operation, results: Sequence[Result]) -> Result:
    """Return the result that holds an op's choice, or its name: indices, or booleans of a comparison."""
    return results[CHOICE_OUTPUT.get(op.op_type, 0)]


def changed_share(op: Operation, exact: torch.Tensor, other: torch.Tensor) -> float:
    """Return the share of choices that differ; for a topk of a part the order of the indices does not count."""
    if exact.shape != other.shape or not exact.numel():
        return float(exact.shape != other.shape)
    if op.op_type == "topk" and not _sorts(op):
        exact, other = (torch.sort(v.movedim(_axis(op), -1).long(), -1).values for v in (exact, other))
        places = torch.searchsorted(other, exact).clamp(max=other.shape[-1] - 1)
        return float((other.gather(-1, places) != exact).float().mean())
    return float((exact != other).float().mean())


def _sorts(op: Operation) -> bool:
    """Is the choice the order of all elements, as of argsort, and of the topk that torch.sort becomes?"""
    takes_all = op.op_type == "topk" and op.outputs[0].shape == op.x.shape
    return takes_all or op.op_type == "argsort"


def _axis(op: Operation) -> int:
    value = op.inputs.get("axis")
    return -1 if value is None or value.val is None else int(value.val)


def margin(op: Operation, scores: Sequence[torch.Tensor]) -> Margin:
    """Return the margins of an op over all its choices."""
    none = Margin(math.nan, math.nan)
    if op.op_type in COMPARISONS:
        gaps = (scores[0] - scores[-1]).abs() if len(scores) > 1 else scores[0].abs()
    elif op.op_type == "non_maximum_suppression":
        return none
    else:
        ascending = op.inputs.get("ascending")
        takes_least = op.op_type == "reduce_argmin" or (ascending is not None and bool(ascending.val))
        ordered = torch.sort(scores[0].movedim(_axis(op), -1), -1, descending=not takes_least).values
        differences = (ordered[..., :-1] - ordered[..., 1:]).abs()
        sorts = _sorts(op)
        count = int(op.k.val) if op.op_type == "topk" and not sorts and op.k.val is not None else 1
        if not 0 < count <= differences.shape[-1]:
            return none
        gaps = differences.amin(-1) if sorts else differences[..., count - 1]
    gaps = gaps[torch.isfinite(gaps)]
    return Margin(float(gaps.min()), float(gaps.median())) if gaps.numel() else none


@dataclass(frozen=True)
class PartlyExact:
    """An arithmetic for the interpreter: the ops in `exact` compute in fp32, all others as `rest` names."""

    rest: str
    exact: frozenset[Operation]

    def meaning(self, op: Operation, row: Implementation) -> Callable[..., Any]:
        """Return the function of an op; outside `exact`, its operands and results are rounded to fp16."""
        if op in self.exact:
            return row.function
        function = meaning(op, row, self.rest)
        if not any(np_dtype(v) == np.float16 for v in op.outputs):
            return function
        chip = None if self.rest == "fp16" else rounding(chip_of(self.rest), op.op_type)
        return lambda **operands: rounded_halves(
            function(**{k: rounded_halves(v) for k, v in operands.items()}), chip
        )


def upstream(function: Function, scores: Sequence[Var]) -> list[Operation]:
    """Return the fp16 ops that some values depend on, in file order, without those of nested blocks."""
    reached, pending = set[Operation](), [v.op for v in scores if v.op is not None]
    while pending:
        op = pending.pop()
        if op not in reached and op.op_type != "const":
            reached.add(op)
            pending += [v.op for _, v in operands(op) if v.op is not None]
    return [op for op in function.operations if op in reached and _is_half(op)]


def _is_half(op: Operation) -> bool:
    return not op.blocks and any(np_dtype(v) == np.float16 for v in op.outputs)


def exact_ops(
    program: Program, function: str | None, values: Mapping[str, Array], op: Operation, arithmetic: str
) -> list[Operation]:
    """Return ops that keep a choice unchanged if they compute in fp32, and as few as the search finds.

    Bisection finds the shortest run of ops before the choice that suffices; then single ops of it are left out
    while the choice stays the same.

    Args:
        program: the program.
        function: the name of the function.
        values: its inputs.
        op: the op that chooses.
        arithmetic: the arithmetic of all other ops.

    Returns:
        The ops in file order, with the op itself at the end; [] if all ops before it do not suffice, or if the
        program cannot run so.
    """
    name = chosen(op, op.outputs).name
    exact = torch.as_tensor(np.asarray(run(program, values, function=function, outputs=[name])[name]))
    before = upstream(function_of(program, function), scores_of(op))
    trials = 0

    def keeps_choice(ops: Sequence[Operation]) -> bool:
        nonlocal trials
        trials += 1
        precision: Any = PartlyExact(arithmetic, frozenset((*ops, op)))
        result = run(program, values, function=function, outputs=[name], precision=precision)[name]
        return changed_share(op, exact, torch.as_tensor(np.asarray(result))) == 0

    try:
        if not before or not keeps_choice(before):
            return []
        low, high = 0, len(before)  # fp32 from `low` on suffices, from `high` on it does not
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if keeps_choice(before[middle:]) else (low, middle)
        ops = before[low:]
        for candidate in list(ops):
            remaining = [other for other in ops if other is not candidate]
            if trials < MOST_TRIALS and remaining and keeps_choice(remaining):
                ops = remaining
    except InterpretError:
        return []
    return [*ops, op]


def choosing_ops(function: Function) -> list[Operation]:
    """Return the ops that choose among floats and whose choice is an output, not just used in a computation."""
    return [op for op in walk_ops(function) if scores_of(op) and _reaches_output(op)]


def _reaches_output(op: Operation) -> bool:
    """Does the choice of an op reach an output, apart from moves, casts and one_hot?"""
    reached, pending = set[Var](), [chosen(op, op.outputs)]
    while pending:
        var = pending.pop()
        if is_output(var):
            return True
        for reader in (r for r in consumers(var) if r.op_type in PASSING_ON):
            fresh = [v for v in reader.outputs if v not in reached]
            reached.update(fresh)
            pending += fresh
    return False


class _SeenScores(NamedTuple):
    """Scores in exact arithmetic, and by name of the other arithmetics; an input has only the first."""

    exact: torch.Tensor
    others: Mapping[str, torch.Tensor]


class ChoiceWatch:
    """Collects the `Choice` of each choosing op of a function; `see` gets the results of op after op."""

    def __init__(self, function: Function, values: Mapping[str, Any]) -> None:
        self._scores = {op: scores_of(op) for op in choosing_ops(function)}
        self._watched = {v for scores in self._scores.values() for v in scores}
        self._seen: dict[Var, _SeenScores] = {}
        self.choices: tuple[Choice, ...] = ()
        for name, var in function.inputs.items():
            if var in self._watched and name in values:
                value = torch.as_tensor(np.asarray(values[name])).float()
                self._seen[var] = _SeenScores(value, {})

    def see(self, results: OpResults) -> None:
        """Remember scores, and compare the choices made by them."""
        for k, var in enumerate(results.op.outputs):
            if var in self._watched:
                self._seen[var] = _SeenScores(results.exact[k], {a: v[k] for a, v in results.grown.items()})
        scores = self._scores.get(results.op, ())
        if not scores or any(v not in self._seen for v in scores if not is_stored(v)):
            return
        op = results.op
        stored = (None if v in self._seen else torch.as_tensor(np.asarray(v.val)).float() for v in scores)
        exact = [self._seen[v].exact if s is None else s for v, s in zip(scores, stored, strict=True)]
        changed = {
            a: changed_share(op, chosen(op, results.exact), chosen(op, v)) for a, v in results.grown.items()
        }
        error = {
            a: max(
                _largest_error(seen.exact, seen.others.get(a)) for v in scores if (seen := self._seen.get(v))
            )
            for a in results.grown
        }
        choice = Choice(
            name=op.outputs[0].name, op_type=op.op_type, margin=margin(op, exact), error=error, changed=changed
        )
        self.choices = (*self.choices, choice)


def _largest_error(exact: torch.Tensor, other: torch.Tensor | None) -> float:
    """Return the largest difference of finite numbers; 0 for an input, which has no error."""
    if other is None or exact.shape != other.shape:
        return 0.0
    difference = (exact.float() - other.float()).abs()
    return float(torch.nan_to_num(difference, posinf=0.0).max()) if difference.numel() else 0.0


def cost_in_words(rows: Sequence[OpRow], ops: Sequence[Operation]) -> str:
    """Return Core ML's estimate of the model before and after these ops compute in fp32, off the engine."""
    in_fp32 = {v.name for op in ops for v in op.outputs}
    if any(row.estimate is None for row in rows if row.depth == 0):
        return "nothing is known of their time"
    totals = []
    for off_engine in (frozenset[str](), in_fp32):
        steps = [
            (float(e.cpu or 0), float(e.ane or 0) if row.legal and row.name not in off_engine else math.inf)
            for row in rows
            if row.depth == 0 and (e := row.estimate) is not None
        ]
        totals.append(verdicts.path_cost(steps, verdicts.cheapest_path(steps)))
    return f"Core ML's estimate {_milliseconds(totals[0])} -> {_milliseconds(totals[1])}"


def _milliseconds(microseconds: float) -> str:
    return f"{microseconds / 1000:.3g} ms"
