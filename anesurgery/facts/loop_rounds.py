"""How often the body of a `while_loop` runs, where single numbers that depend on no input decide."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from anesurgery.interpret.arithmetic.precision import finish, rounding, run_dtype
from anesurgery.interpret.table import TABLE
from anesurgery.mil import Block, Operation, Var, constant, operands, static_shape, types
from anesurgery.ops import POINTWISE, VIEWS

MOST = 4096
"""Rounds that are counted: more are not unrolled, and each takes some ten microseconds for each op."""


def rounds(op: Operation) -> int | None:
    """The number of rounds; None where an input decides, or after `MOST`."""
    condition, body = op.blocks
    values = [_number(v, {}) for v in op.loop_vars]
    for count in range(MOST + 1):
        more = _number(condition.outputs[0], dict(zip(condition.inputs, values, strict=True)))
        if more is None or not more:
            return None if more is None else count
        known = dict(zip(body.inputs, values, strict=True))
        values = [_number(v, known) for v in body.outputs]
    return None


def times_run(block: Block) -> Iterator[tuple[Operation, int]]:
    """Every op, nested blocks included, and how often a run computes it; once where an input decides."""
    pending = [(block, 1)]
    for inside, times in pending:
        for op in inside.operations:
            yield op, times
            inner = times * (rounds(op) or 1) if op.op_type == "while_loop" else times
            pending += [(nested, inner) for nested in op.blocks]


def _number(var: Var, known: dict[Var, Any]) -> Any:
    """A single number, computed of those that are known; None where that is not possible."""
    if var in known:
        return known[var]
    shape = None if types.is_list(var.sym_type) else static_shape(var)
    if shape is None or math.prod(shape) != 1:
        return None
    value, op = constant(var), var.op
    if value is not None:
        known[var] = np.ravel(value)[0].item()
    elif op is None or op.op_type not in POINTWISE | VIEWS or len(op.outputs) != 1:
        known[var] = None
    else:
        numbers = {k: _number(v, known) for k, v in operands(op) if not (op.op_type in VIEWS and k != "x")}
        known[var] = None if None in numbers.values() else _computed(op, numbers)
    return known[var]


def _computed(op: Operation, numbers: dict[str, Any]) -> Any:
    """What the interpreter makes of single numbers, rounded and wrapped around as in the program."""
    if op.op_type in VIEWS:
        return numbers["x"]
    (out,) = op.outputs
    given = {k: _tensor(op.inputs[k], n) for k, n in numbers.items()}
    return finish(TABLE[op.op_type].function(**given), run_dtype(out), rounding(out, "fp16")).item()


def _tensor(var: Var, number: Any) -> Any:
    """A number as ops compute with it; names, and parameters that are constants, as they are."""
    if types.is_str(var.dtype):
        return number
    return torch.tensor(number, dtype=run_dtype(var))
