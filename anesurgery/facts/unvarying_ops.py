"""Which ops of a function compute the same numbers in every run: those that depend on no input."""

from __future__ import annotations

import numpy as np

from anesurgery.facts.whole_numbers import WholeNumbers
from anesurgery.mil import Block, Operation, Var, constant, is_constexpr, np_dtype, reads, static_shape
from anesurgery.ops import IMPURE, names
from anesurgery.semantics.reading import is_tensor, number

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
    elif op.op_type in ROW_LOOKUPS and _same_rows(op):
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


def _same_rows(op: Operation) -> bool:
    table, axis = constant(op.x), number(op.inputs.get("axis"))
    if table is None or constant(op.indices) is not None or axis is None or not np.ndim(table):
        return False
    whole = np.ascontiguousarray(table)
    rows = np.moveaxis(whole.view(f"u{whole.itemsize}"), int(axis), 0)  # by their bits: -0 is not 0
    return len(rows) > 0 and np.array_equal(rows[0], rows[-1]) and bool((rows == rows[:1]).all())
