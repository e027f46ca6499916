"""How often ops run: the rounds of a `while_loop`, counted from constants before any input is known.

`loop_rounds` computes the single numbers that the condition reads, round by round, as the interpreter would.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from anesurgery.interpret.arithmetic.precision import in_run_dtype, rounding, run_dtype
from anesurgery.interpret.table import TABLE
from anesurgery.mil import Block, Operation, Var, constant, np_dtype, operands, static_shape, types
from anesurgery.ops import POINTWISE, VIEWS
from anesurgery.semantics.analysis_cache import cached

MOST_ROUNDS = 4096
"""The most rounds of a loop that are counted: longer loops are not unrolled, and a round takes 10 us per op."""

MOST_UNROLLED = 64
"""The most rounds of a loop that `unroll_loop` unrolls by default: each round is written out."""
MOST_WRITTEN = 2000
"""The most ops that it writes by default."""


@cached
def loop_rounds(op: Operation) -> int | None:
    """Return the number of rounds of a `while_loop`; None where an input decides, or above `MOST_ROUNDS`."""
    condition, body = op.blocks
    values = [_single_number(v, {}) for v in op.loop_vars]
    for count in range(MOST_ROUNDS + 1):
        condition_holds = _single_number(condition.outputs[0], dict(zip(condition.inputs, values, strict=True)))
        if condition_holds is None or not condition_holds:
            return None if condition_holds is None else count
        known = dict(zip(body.inputs, values, strict=True))
        values = [_single_number(v, known) for v in body.outputs]
    return None


def is_short(op: Operation) -> bool:
    """Return whether a `while_loop` has a known number of rounds, few enough for `unroll_loop`."""
    inside = (inner for inner in op.blocks[1].operations if inner.op_type != "const")
    ops = sum(np_dtype(inner.outputs[0]).kind == "f" for inner in inside)  # others count, and are folded
    rounds = loop_rounds(op)
    return rounds is not None and rounds <= MOST_UNROLLED and rounds * ops <= MOST_WRITTEN


def ops_with_run_counts(block: Block) -> Iterator[tuple[Operation, int]]:
    """Yield every op, also of nested blocks, and how often a run computes it; 1 where an input decides."""
    pending = [(block, 1)]
    for inside, times in pending:
        for op in inside.operations:
            yield op, times
            inner = times * (loop_rounds(op) or 1) if op.op_type == "while_loop" else times
            pending += [(nested, inner) for nested in op.blocks]


def _single_number(var: Var, known: dict[Var, Any]) -> Any:
    """Return the single number of a value, computed from `known` ones; None where that is not possible."""
    pending = [var]
    while pending:
        value = pending[-1]
        reads = _numbers_read(value) if value not in known else {}
        missing = [v for v in reads.values() if v not in known]
        if value in known:
            pending.pop()
        elif missing:
            pending += missing
        elif reads and value.op is not None:
            numbers = {name: known[v] for name, v in reads.items()}
            known[value] = None if None in numbers.values() else _interpreted(value.op, numbers)
        else:
            known[value] = _stored_number(value)
    return known[var]


def _holds_one_number(var: Var) -> bool:
    """Does a value have one element?"""
    shape = None if types.is_list(var.sym_type) else static_shape(var)
    return shape is not None and math.prod(shape) == 1


def _stored_number(var: Var) -> Any:
    """Return the number of a constant of one element; None for other values."""
    value = constant(var) if _holds_one_number(var) else None
    return None if value is None else np.ravel(value)[0].item()


def _numbers_read(var: Var) -> dict[str, Var]:
    """Return the operands from which a single number that is not stored can be computed; else {}."""
    op = var.op
    if op is None or not _holds_one_number(var) or constant(var) is not None:
        return {}
    if op.op_type not in POINTWISE | VIEWS or len(op.outputs) != 1:
        return {}
    return {name: v for name, v in operands(op) if op.op_type not in VIEWS or name == "x"}


def _interpreted(op: Operation, numbers: dict[str, Any]) -> Any:
    """Return what the interpreter computes from single numbers, rounded and wrapped as in the program."""
    if op.op_type in VIEWS:
        return numbers["x"]
    (out,) = op.outputs
    given = {k: _as_operand(op.inputs[k], n) for k, n in numbers.items()}
    return in_run_dtype(TABLE[op.op_type].function(**given), run_dtype(out), rounding(out, "fp16")).item()


def _as_operand(var: Var, number: Any) -> Any:
    """Return a number as a tensor of the value's dtype; strings stay as they are."""
    if types.is_str(var.dtype):
        return number
    return torch.tensor(number, dtype=run_dtype(var))
