"""Ops that only move, merge or cut the axes of one operand, as edits of a weight."""

from __future__ import annotations

from anesurgery.facts.axis_slice import axis_slice
from anesurgery.mil import Operation, static_shape
from anesurgery.ops import VIEWS
from anesurgery.regions.weight_edits import Edit
from anesurgery.semantics.reading import permutation


def edit_of(op: Operation) -> Edit | None:
    """What an op does to its operand; None where that is no edit of axes."""
    old, new = (static_shape(v) for v in (op.inputs.get("x"), op.outputs[0]) if v is not None)
    if old is None or new is None:
        return None
    if op.op_type == "transpose":
        return Edit.of(old).transposed(permutation(op))
    if op.op_type in VIEWS:
        return Edit.reshaped(old, new)
    cut = axis_slice(op) if op.op_type == "slice_by_index" else None
    if cut is None or (cut.dropped and len(old) == 1):
        return None
    taken = Edit.of(old).taken(cut.axis, range(cut.begin, cut.end, cut.stride))
    return taken.squeezed(cut.axis) if cut.dropped else taken
