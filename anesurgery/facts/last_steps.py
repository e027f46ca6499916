"""Along which axes of a value the steps of a recurrent layer go."""

from __future__ import annotations

from anesurgery.mil import Operation, Var, constant
from anesurgery.ops import RECURRENT
from anesurgery.semantics.rows import places_of

DEPTH = 16
"""Ops between a recurrent layer and a slice of its steps, which turn them, say, or join both
directions. A choice: two layers on each other have six."""


def steps_of(var: Var, axis: int, depth: int = DEPTH) -> Operation | None:
    """The recurrent layer that runs forward along an axis, so that the last step is its last state; or None."""
    op = var.op
    if op is None or not depth:
        return None
    if op.op_type in RECURRENT:
        forward = op.inputs.get("direction") is None or constant(op.direction) in ("forward", "bidirectional")
        return op if forward and axis == 0 and var is op.outputs[0] else None
    for operand in places_of(op) or ():
        if axis in operand.places:
            layer = steps_of(operand.var, operand.places.index(axis), depth - 1)
            if layer is not None:
                return layer
    return None
