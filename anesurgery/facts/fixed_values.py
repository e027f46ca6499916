"""Which ops of a function compute the same numbers in every run: those that depend on no input."""

from __future__ import annotations

from anesurgery.facts.slices import reads
from anesurgery.facts.work import is_tensor
from anesurgery.mil import Block, Operation, Var, static_shape
from anesurgery.ops import IMPURE, names

OF_SHAPES = names("shape fill_like")
"""Ops that depend on the shape of their first operand and not on its numbers."""

COMPRESSED = names("dequantize")
"""What it makes of stored numbers is larger than they are: it stays as it is."""


def fixed_ops(block: Block) -> dict[Operation, None]:
    """The ops of a block, nested ones not included, that depend on no input, in file order.

    Constants are none of them. Ops with random numbers, states, lists, dynamic shapes or nested blocks do not
    count as fixed, nor does what reads compressed weights.
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
    if op.blocks or op.op_type in IMPURE | COMPRESSED or op.op_type.startswith("constexpr_"):
        return False
    if not all(is_tensor(v) and static_shape(v) is not None for v in op.outputs):
        return False
    needed = reads(op)
    if op.op_type in OF_SHAPES:
        first = op.inputs["x" if op.op_type == "shape" else "ref_tensor"]
        needed = [v for v in needed if v is not first or static_shape(v) is None]
    return known.issuperset(needed)
