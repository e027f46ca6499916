"""Outputs that are choices: topk, argmax, sorting, suppression, comparisons of floats.

Of a choice no PSNR is of use. What counts is the margin between what was chosen and the next, beside the error
of the scores, and how many choices change; and which ops must compute in fp32 to keep them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

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
    walk_ops,
)
from anesurgery.ops import COMPARISONS, MOVING, names
from anesurgery.placement import verdicts
from anesurgery.placement.inspection import OpRow

CHOOSING = names("topk reduce_argmax reduce_argmin argsort non_maximum_suppression") | COMPARISONS
"""Ops whose results are choices among floats."""
GIVEN = MOVING | names("cast concat stack one_hot")
"""Ops that hand a choice on as it is."""
PLACES = {"topk": 1, "non_maximum_suppression": 2}
"""The output that holds what was chosen, where it is not the first."""
MOST_TRIALS = 24
"""Runs in which ops of fp32 are sought: bisection of 4,000 ops takes 12, and as many try to leave one out."""


@dataclass(frozen=True)
class Choice:
    """One op that chooses.

    Attributes:
        name: of the op.
        op_type: MIL op type.
        margin: the least and the median distance between the last that was chosen and the next; NaN where an op
            has none.
        error: arithmetic -> the largest error of its scores.
        changed: arithmetic -> the share of its choices that differ.
        exact_ops: names of the ops that keep the choices if they compute in fp32; none where nothing changes,
            or where none were found.
        cost: what they cost in time, in words.
    """

    name: str
    op_type: str
    margin: tuple[float, float]
    error: Mapping[str, float]
    changed: Mapping[str, float]
    exact_ops: tuple[str, ...] = ()
    cost: str = field(default="", compare=False)

    @property
    def worst(self) -> float:
        """The largest share that changes in an arithmetic."""
        return max(self.changed.values(), default=0.0)

    @property
    def words(self) -> str:
        """The margin beside the error, and how many choices change."""
        arithmetic = max(self.changed, key=lambda a: self.changed[a])
        least, median = self.margin
        gap = "" if math.isnan(least) else f"margins from {least:.2g}, {median:.2g} in the middle; "
        said = (
            f"{self.op_type} {self.name}: {gap}scores are off by {self.error[arithmetic]:.2g} in {arithmetic}"
        )
        return f"{said}; {self.worst:.1%} of choices change"


def scores_of(op: Operation) -> tuple[Var, ...]:
    """What an op chooses by; none where it chooses nothing, or among integers or constants alone."""
    if op.op_type not in CHOOSING:
        return ()
    read = (op.x, op.y) if op.op_type in COMPARISONS else (op.scores,) if "scores" in op.inputs else (op.x,)
    floats = [v for v in read if np_dtype(v).kind == "f"]
    return tuple(floats) if any(not is_stored(v) for v in floats) else ()


def chosen(op: Operation, results: Sequence[Any]) -> torch.Tensor:
    """What an op chose: places, or booleans."""
    value: torch.Tensor = results[PLACES.get(op.op_type, 0)]
    return value


def changed_share(op: Operation, exact: torch.Tensor, other: torch.Tensor) -> float:
    """The share of choices that differ; of a topk, of the set of places in each row."""
    if exact.shape != other.shape or not exact.numel():
        return float(exact.shape != other.shape)
    if op.op_type == "topk":
        exact, other = (torch.sort(v.movedim(_axis(op), -1), -1).values for v in (exact, other))
        same = (exact[..., :, None] == other[..., None, :]).any(-1)
        return float((~same).float().mean())
    return float((exact != other).float().mean())


def _axis(op: Operation) -> int:
    value = op.inputs.get("axis")
    return -1 if value is None or value.val is None else int(value.val)


def margin(op: Operation, scores: Sequence[torch.Tensor]) -> tuple[float, float]:
    """The least and the median distance between what was chosen and the next; NaN where there is no next."""
    if op.op_type in COMPARISONS:
        gaps = (scores[0] - scores[-1]).abs() if len(scores) > 1 else scores[0].abs()
    elif op.op_type == "non_maximum_suppression":
        return math.nan, math.nan
    else:
        ordered = torch.sort(
            scores[0].movedim(_axis(op), -1), -1, descending=op.op_type != "reduce_argmin"
        ).values
        apart = (ordered[..., :-1] - ordered[..., 1:]).abs()
        count = int(op.k.val) if op.op_type == "topk" and op.k.val is not None else 1
        if not 0 < count <= apart.shape[-1]:
            return math.nan, math.nan
        gaps = apart.amin(-1) if op.op_type == "argsort" else apart[..., count - 1]
    gaps = gaps[torch.isfinite(gaps)]
    return (float(gaps.min()), float(gaps.median())) if gaps.numel() else (math.nan, math.nan)


@dataclass(frozen=True)
class Partly:
    """An arithmetic in which some ops compute in fp32, between casts, and all others as it says."""

    rest: str
    exact: frozenset[Operation]

    def meaning(self, op: Operation, row: Implementation) -> Callable[..., Any]:
        """The exact function; or that of the arithmetic, of operands in fp16."""
        if op in self.exact:
            return row.function
        function = meaning(op, row, self.rest)
        halves = any(np_dtype(v) == np.float16 for v in op.outputs)
        if not halves:
            return function
        chip = None if self.rest == "fp16" else rounding(chip_of(self.rest), op.op_type)
        return lambda **operands: rounded_halves(
            function(**{k: rounded_halves(v) for k, v in operands.items()}), chip
        )


def upstream(function: Function, scores: Sequence[Var]) -> list[Operation]:
    """The ops of fp16 that make some values, in file order; what is in a nested block is not among them."""
    reached, pending = set[Operation](), [v.op for v in scores if v.op is not None]
    while pending:
        op = pending.pop()
        if op not in reached and op.op_type != "const":
            reached.add(op)
            pending += [v.op for v in _read(op) if v.op is not None]
    return [op for op in function.operations if op in reached and _is_half(op)]


def _read(op: Operation) -> list[Var]:
    values = (
        v for value in op.inputs.values() for v in (value if isinstance(value, (list, tuple)) else [value])
    )
    return [v for v in values if isinstance(v, Var)]


def _is_half(op: Operation) -> bool:
    return not op.blocks and any(np_dtype(v) == np.float16 for v in op.outputs)


def exact_ops(
    program: Program, function: str | None, values: Mapping[str, Array], op: Operation, arithmetic: str
) -> list[Operation]:
    """The ops that keep a choice if they compute in fp32: the fewest before it, less those that may go.

    Args:
        program: the program.
        function: which function.
        values: its inputs.
        op: the op that chooses.
        arithmetic: of all other ops.

    Returns:
        The ops in file order, with the op itself at the end; none where all of them do not keep the choices, or
        cannot be run so.
    """
    place = op.outputs[PLACES.get(op.op_type, 0)].name
    meant = run(program, values, function=function, outputs=[place])[place]
    before = upstream(function_of(program, function), scores_of(op))
    trials = 0

    def keeps(ops: Sequence[Operation]) -> bool:
        nonlocal trials
        trials += 1
        how: Any = Partly(arithmetic, frozenset((*ops, op)))
        got = run(program, values, function=function, outputs=[place], precision=how)[place]
        return changed_share(op, torch.as_tensor(np.asarray(meant)), torch.as_tensor(np.asarray(got))) == 0

    try:
        if not before or not keeps(before):
            return []
        low, high = 0, len(before)  # all from `low` on keep them, from `high` on do not
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if keeps(before[middle:]) else (low, middle)
        ops = before[low:]
        for one in list(ops):
            left = [other for other in ops if other is not one]
            if trials < MOST_TRIALS and left and keeps(left):
                ops = left
    except InterpretError:
        return []
    return [*ops, op]


def choosing_ops(function: Function) -> list[Operation]:
    """The ops of a function that choose among floats for an output, and not for a computation."""
    return [op for op in walk_ops(function) if scores_of(op) and _is_given(op)]


def _is_given(op: Operation) -> bool:
    """Does what an op chose come to an output, moved, cast or as the places of a gather?"""
    reached, pending = set[Var](), [op.outputs[PLACES.get(op.op_type, 0)]]
    while pending:
        var = pending.pop()
        if is_output(var):
            return True
        for reader in (r for r in consumers(var) if r.op_type in GIVEN):
            fresh = [v for v in reader.outputs if v not in reached]
            reached.update(fresh)
            pending += fresh
    return False


class ChoiceWatch:
    """Watches the ops that choose (argmax, topk, sort) in a run: what did rounding change?"""

    def __init__(self, function: Function, values: Mapping[str, Any]) -> None:
        self._scores = {op: scores_of(op) for op in choosing_ops(function)}
        self._wanted = {v for scores in self._scores.values() for v in scores}
        self._seen: dict[Var, tuple[Any, Mapping[str, Any]]] = {}
        self.choices: tuple[Choice, ...] = ()
        for name, var in function.inputs.items():
            if var in self._wanted and name in values:
                value = torch.as_tensor(np.asarray(values[name])).float()
                self._seen[var] = (value, {})

    def see(self, results: OpResults) -> None:
        """Keep scores, and compare what was chosen by them."""
        for k, var in enumerate(results.op.outputs):
            if var in self._wanted:
                self._seen[var] = (results.exact[k], {a: v[k] for a, v in results.grown.items()})
        scores = self._scores.get(results.op, ())
        if not scores or any(v not in self._seen for v in scores if not is_stored(v)):
            return
        op, exact = results.op, [_value(v, self._seen) for v in scores]
        changed = {
            a: changed_share(op, chosen(op, results.exact), chosen(op, v)) for a, v in results.grown.items()
        }
        error = {
            a: max(_off(self._seen[v][0], self._seen[v][1].get(a)) for v in scores if v in self._seen)
            for a in results.grown
        }
        choice = Choice(op.outputs[0].name, op.op_type, margin(op, exact), error, changed)
        self.choices = (*self.choices, choice)


def _value(var: Var, seen: Mapping[Var, tuple[Any, Any]]) -> torch.Tensor:
    """A value in exact arithmetic; a constant as it is stored."""
    return seen[var][0] if var in seen else torch.as_tensor(np.asarray(var.val)).float()


def _off(exact: torch.Tensor, other: torch.Tensor | None) -> float:
    """The largest difference of finite numbers; 0 of an input, which is given."""
    if other is None or exact.shape != other.shape:
        return 0.0
    difference = (exact.float() - other.float()).abs()
    return float(torch.nan_to_num(difference, posinf=0.0).max()) if difference.numel() else 0.0


def cost_in_words(rows: Sequence[OpRow], ops: Sequence[Operation]) -> str:
    """What Core ML would estimate of a model with these ops in fp32, off the engine; "" without estimates."""
    exact = {v.name for op in ops for v in op.outputs}
    if any(row.estimate is None for row in rows if row.depth == 0):
        return "nothing is known of their time"
    totals = []
    for kept in (frozenset[str](), exact):
        steps = [
            (float(e.cpu or 0), float(e.ane or 0) if row.legal and row.name not in kept else math.inf)
            for row in rows
            if row.depth == 0 and (e := row.estimate) is not None
        ]
        totals.append(verdicts.path_cost(steps, verdicts.cheapest_path(steps)))
    return f"Core ML's estimate {_milliseconds(totals[0])} -> {_milliseconds(totals[1])}"


def _milliseconds(microseconds: float) -> str:
    return f"{microseconds / 1000:.3g} ms"
