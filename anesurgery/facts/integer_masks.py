"""Integers that do nothing but mask scores: what `(1 - mask) * -10000` reads. They are taken to be 0 and 1.

So may be inputs that only say yes or no to a softmax, and perhaps to other floats: `is_mask`.
"""

from __future__ import annotations

from anesurgery.facts.attention import MASKED, MASKING
from anesurgery.facts.reading import number, reaches_output, readers_after
from anesurgery.mil import Operation, Var, consumers, is_constant, is_output, np_dtype, operands
from anesurgery.ops import CARRIERS, COMPARISONS, LOOKUPS, MOVING


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


def is_mask(var: Var) -> bool:
    """Does an integer say which scores a softmax keeps, and is it read for yes and no alone?

    It may be moved, multiplied with itself, subtracted from 1, compared with 0 or 1, and made a condition or a
    float. Ids that are looked up, segments that are compared with each other, and what is counted are none.
    """
    stack, keeps = [var], False
    while stack:
        value = stack.pop()
        if is_output(value):
            return False
        for op in consumers(value):
            (out,) = op.outputs if len(op.outputs) == 1 else (None,)
            if out is None or not (np_dtype(out).kind in "fb" or _stays_a_mask(op, value, var)):
                return False
            if op.op_type in COMPARISONS and number(op.y if op.x is value else op.x) not in (0, 1):
                return False
            if np_dtype(out).kind in "iu":
                stack.append(out)
            else:
                keeps |= any(reader.op_type == "softmax" for reader in readers_after(out, MASKING))
    return keeps


def _stays_a_mask(op: Operation, value: Var, mask: Var) -> bool:
    """Is an integer that is made of a mask of 0 and 1 one again?"""
    if op.op_type in MOVING | {"identity", "cast", "reverse"}:
        return op.op_type not in LOOKUPS or op.x is value
    if op.op_type == "mul":
        return all(_inputs_of(side) == {mask} for side in (op.x, op.y))
    return _complement(op) is value


def _inputs_of(var: Var) -> set[Var]:
    """The inputs that a value is computed from."""
    found, stack = set[Var](), [var]
    while stack:
        value = stack.pop()
        if value.op is None:
            found.add(value)
        else:
            stack += [v for _, v in operands(value.op)]
    return found
