"""Integers that do nothing but mask scores: what `(1 - mask) * -10000` reads. They are taken to be 0 and 1."""

from __future__ import annotations

from anesurgery.facts.attention import MASKED, MASKING
from anesurgery.facts.reading import number, reaches_output, readers_after
from anesurgery.mil import Operation, Var, consumers, is_constant, is_output, np_dtype
from anesurgery.ops import CARRIERS


def fills_scores(op: Operation) -> bool:
    """Is it a product with a fill that a softmax alone reads, of bits that an integer input gives?"""
    if op.op_type != "mul":
        return False
    held = [(v, number(other)) for v, other in ((op.x, op.y), (op.y, op.x))]
    bits = next((v for v, fill in held if fill is not None and fill <= MASKED), None)
    (out,) = op.outputs
    readers = [r.op_type for r in readers_after(out, MASKING)]
    return bits is not None and set(readers) == {"softmax"} and not reaches_output(out, MASKING) and _bits(bits)


def masks_scores(var: Var) -> bool:
    """Does every way of a value lead to such a product?"""
    readers = list(consumers(var))
    return bool(readers) and not is_output(var) and all(_leads_there(op) for op in readers)


def _leads_there(op: Operation) -> bool:
    through = op.op_type in CARRIERS or _complement(op) is not None
    return masks_scores(op.outputs[0]) if through else fills_scores(op)


def _complement(op: Operation) -> Var | None:
    """What `1 - x` reads."""
    found: Var | None = op.y if op.op_type == "sub" and is_constant(op.x, 1) else None
    return found


def _bits(var: Var) -> bool:
    """Does an integer input give it, as it is or as `1 - x`?"""
    while var.op is not None:
        before = var.op.inputs.get("x") if var.op.op_type in CARRIERS else _complement(var.op)
        if not isinstance(before, Var):
            return False
        var = before
    return np_dtype(var).kind in "iu"
