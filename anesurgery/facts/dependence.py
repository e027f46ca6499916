"""What values depend on: the ops upstream, those that no input changes, and how often a loop then runs."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch

from anesurgery.facts.whole_numbers import WholeNumbers
from anesurgery.interpret.arithmetic.precision import finish, rounding, run_dtype
from anesurgery.interpret.table import TABLE
from anesurgery.mil import (
    Block,
    Operation,
    Var,
    constant,
    is_constexpr,
    np_dtype,
    operands,
    reads,
    static_shape,
    types,
)
from anesurgery.ops import IMPURE, POINTWISE, VIEWS, names
from anesurgery.semantics.reading import is_tensor, number


def slice_back(targets: Iterable[Var], stop: set[Var]) -> list[Operation]:
    """The ops that `targets` depend on, in an order in which they can run, not going beyond `stop`."""
    order: dict[Operation, None] = {}
    stack: list[tuple[Operation, bool]] = [(v.op, False) for v in targets if v.op is not None and v not in stop]
    while stack:
        op, ready = stack.pop()
        if op in order:
            continue
        if ready:
            order[op] = None
            continue
        stack.append((op, True))
        stack += [(v.op, False) for v in reads(op) if v.op is not None and v not in stop and v.op not in order]
    return list(order)


OF_SHAPES = {"shape": "x", "fill_like": "ref_tensor"}
"""Op type -> the operand of which only the shape is read."""
ROW_LOOKUPS = names("gather gather_along_axis")
"""Ops that read rows along an axis."""

COMPRESSED = names("dequantize")
"""What it makes of stored numbers is larger than they are: it stays as it is."""


def fixed_ops(block: Block) -> dict[Operation, None]:
    """The ops of a block, nested ones not included, that depend on no input, in file order.

    Constants are none of them. Ops with random numbers, states, lists, dynamic shapes or nested blocks do not
    count as fixed, nor does what reads compressed weights. A lookup in a table whose rows are all the
    same does, whatever its indices.
    """
    found: dict[Operation, None] = {}
    known: set[Var] = set()
    for op in block.operations:
        if op.op_type == "const":
            known.update(op.outputs)
        elif _is_fixed(op, known):
            found[op] = None
            known.update(op.outputs)
    return found


def _is_fixed(op: Operation, known: set[Var]) -> bool:
    if op.blocks or op.op_type in IMPURE | COMPRESSED or is_constexpr(op):
        return False
    if not all(is_tensor(v) and static_shape(v) is not None for v in op.outputs):
        return False
    unread = shape_only(op)
    return known.issuperset(v for v in reads(op) if v is not unread or static_shape(v) is None)


def shape_only(op: Operation) -> Var | None:
    """The operand whose numbers change nothing, as the indices of a table whose rows are all the same."""
    operand: Var | None = None
    if op.op_type in OF_SHAPES:
        operand = op.inputs[OF_SHAPES[op.op_type]]
    elif op.op_type in ROW_LOOKUPS and same_rows(op):
        operand = op.indices
    return operand


def differ(op: Operation, numbers: WholeNumbers) -> bool:
    """Does a test of equality compare integers whose ranges have nothing in common?"""
    if op.op_type not in ("equal", "not_equal") or any(np_dtype(v).kind not in "iu" for v in (op.x, op.y)):
        return False
    if static_shape(op.outputs[0]) is None:
        return False
    (low, high), (least, most) = numbers.known(op.x), numbers.known(op.y)
    return high < least or most < low


def same_rows(op: Operation) -> bool:
    """Does an op look a row up in a stored table whose rows are all the same?"""
    table, axis = constant(op.x), number(op.inputs.get("axis"))
    if table is None or constant(op.indices) is not None or axis is None or not np.ndim(table):
        return False
    whole = np.ascontiguousarray(table)
    rows = np.moveaxis(whole.view(f"u{whole.itemsize}"), int(axis), 0)  # by their bits: -0 is not 0
    return len(rows) > 0 and np.array_equal(rows[0], rows[-1]) and bool((rows == rows[:1]).all())


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
