"""Which ops a value depends on (`slice_back`), and which depend on no input (`fixed_ops`, `never_equal`)."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from anesurgery.facts.whole_numbers import WholeNumbers
from anesurgery.interpret.attentions import SHAPE_ONLY_OPERANDS
from anesurgery.mil import (
    Block,
    Operation,
    Var,
    constant,
    consumers,
    is_constexpr,
    is_output,
    np_dtype,
    reads,
    static_shape,
)
from anesurgery.ops import IMPURE, names
from anesurgery.semantics.reading import is_tensor, number


def slice_back(targets: Iterable[Var], stop: set[Var]) -> list[Operation]:
    """Return the ops that values depend on, in an order in which they can run; `stop` ends the search."""
    order: dict[Operation, None] = {}
    stack: list[tuple[Operation, bool]] = [(v.op, False) for v in targets if v.op is not None and v not in stop]
    while stack:
        op, operands_done = stack.pop()
        if op in order:
            continue
        if operands_done:
            order[op] = None
            continue
        stack.append((op, True))
        stack += [(v.op, False) for v in reads(op) if v.op is not None and v not in stop and v.op not in order]
    return list(order)


MOST_DEAD = 64
"""The most readers of readers that are looked at. A choice: larger parts that nobody reads are rare."""


def is_dead(op: Operation) -> bool:
    """Do the results of an op lead to no output, and to no op with effects, such as a write to a state?

    It is also False where more than `MOST_DEAD` ops depend on the op, so that the cost stays small.
    """
    found, pending = {op}, [op]
    while pending and len(found) <= MOST_DEAD:
        op = pending.pop()
        if op.op_type in IMPURE or any(map(is_output, op.outputs)):
            return False
        more = {reader for v in op.outputs for reader in consumers(v)} - found
        found |= more
        pending += more
    return not pending


ROW_LOOKUPS = names("gather gather_along_axis")
"""Ops that read rows along an axis."""

COMPRESSED = names("dequantize")
"""Ops that expand compressed numbers: they are never folded, since their result is larger."""


def fixed_ops(block: Block) -> dict[Operation, None]:
    """Return the ops of a block that depend on no input, in file order; neither constants nor nested ops.

    Ops with random numbers, states, lists, dynamic shapes or nested blocks do not count as fixed, nor do
    readers of compressed weights. A lookup in a table whose rows are all equal is fixed whatever its indices
    are.
    """
    fixed: dict[Operation, None] = {}
    known: set[Var] = set()
    for op in block.operations:
        if op.op_type == "const":
            known.update(op.outputs)
        elif _is_fixed(op, known):
            fixed[op] = None
            known.update(op.outputs)
    return fixed


def _is_fixed(op: Operation, known: set[Var]) -> bool:
    """Can the results of an op be computed from values that are known?"""
    if op.blocks or op.op_type in IMPURE | COMPRESSED or is_constexpr(op):
        return False
    if not all(is_tensor(v) and static_shape(v) is not None for v in op.outputs):
        return False
    unread = shape_only(op)  # its shape must be known all the same
    return known.issuperset(v for v in reads(op) if v is not unread or static_shape(v) is None)


def shape_only(op: Operation) -> Var | None:
    """Return the operand whose numbers change nothing, such as indices into a table of equal rows; or None."""
    name = SHAPE_ONLY_OPERANDS.get(op.op_type)
    if op.op_type in ROW_LOOKUPS and looks_up_equal_rows(op):
        name = "indices"
    return None if name is None else op.inputs[name]


def never_equal(op: Operation, numbers: WholeNumbers) -> bool:
    """Does a test of equality compare integers whose ranges do not overlap?"""
    if op.op_type not in ("equal", "not_equal") or any(np_dtype(v).kind not in "iu" for v in (op.x, op.y)):
        return False
    if static_shape(op.outputs[0]) is None:
        return False
    (low, high), (least, most) = numbers.known(op.x), numbers.known(op.y)
    return high < least or most < low


def looks_up_equal_rows(op: Operation) -> bool:
    """Does an op look up a row, by a computed index, in a stored table whose rows are all the same?"""
    table, axis = constant(op.x), number(op.inputs.get("axis"))
    if table is None or constant(op.indices) is not None or axis is None or not np.ndim(table):
        return False
    whole = np.ascontiguousarray(table)
    rows = np.moveaxis(whole.view(f"u{whole.itemsize}"), int(axis), 0)  # by their bits: -0 is not 0
    return len(rows) > 0 and np.array_equal(rows[0], rows[-1]) and bool((rows == rows[:1]).all())
