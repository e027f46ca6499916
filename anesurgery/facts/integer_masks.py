"""Numbers that do nothing but mask scores: what `(1 - mask) * -10000` reads. They are taken to be 0 and 1.

So may be inputs that only say yes or no to a softmax, and perhaps to other floats: `is_mask`.
"""

from __future__ import annotations

from anesurgery.facts.attention import MASKED, MASKING
from anesurgery.mil import Operation, Var, consumers, is_constant, is_output, np_dtype, operands
from anesurgery.ops import CARRIERS, COMPARISONS, LOOKUPS, MOVING
from anesurgery.semantics.reading import number, readers_after

FILLING = MASKING | {"tile"}
"""Ops that may stand between a fill and the softmax."""

Bits = tuple[int, int]
"""The two numbers that a value may hold: (0, 1), or (-1, 0)."""


def only_softmax_reads(var: Var) -> bool:
    """Does every way of a value lead through masking to a softmax or to the mask of an attention?

    Questions of its shape do not count.
    """
    stack, seen, read = [var], {var}, False
    while stack:
        value = stack.pop()
        if is_output(value):
            return False
        for op in consumers(value):
            if op.op_type in FILLING:
                stack += [v for v in op.outputs if v not in seen]
                seen.update(op.outputs)
            elif op.op_type == "softmax" or _is_mask_of(value, op):
                read = True
            elif op.op_type != "shape":
                return False
    return read


def _is_mask_of(value: Var, op: Operation) -> bool:
    """Is a value the mask of a fused attention, and nothing else of it?"""
    names = [name for name, v in operands(op) if v is value]
    return op.op_type == "scaled_dot_product_attention" and names == ["attn_mask"]


def fills_scores(op: Operation) -> bool:
    """Does it make, of bits that an input gives, what masks the scores of a softmax and is read by it alone?

    That is a product with a fill, or a choice between bits and a fill.
    """
    if op.op_type not in ("mul", "select") or not only_softmax_reads(op.outputs[0]):
        return False
    pair = (op.x, op.y) if op.op_type == "mul" else (op.a, op.b)
    for value, other in (pair, pair[::-1]):
        fill, held = number(other), bits(value)
        if fill is None or held is None:
            continue
        masked = fill if op.op_type == "select" else fill * (held[0] + held[1])
        if masked <= MASKED or (masked >= -MASKED and _is_subtracted(op.outputs[0])):
            return True
    return False


def _is_subtracted(var: Var) -> bool:
    """Is a value taken away from others, and nothing else?"""
    readers = list(readers_after(var, CARRIERS | {"tile"}))
    ways = {v for _, v in _ways(var)}
    return all(op.op_type == "sub" and op.y in ways and op.x not in ways for op in readers)


def _ways(var: Var) -> list[tuple[Operation | None, Var]]:
    """The value and all that only moves it, each with what made it."""
    found: list[tuple[Operation | None, Var]] = [(var.op, var)]
    for _, value in found:
        moved = [op for op in consumers(value) if op.op_type in CARRIERS | {"tile"}]
        found += [(op, v) for op in moved for v in op.outputs if all(v is not w for _, w in found)]
    return found


def masks_scores(var: Var) -> bool:
    """Does every way of a value lead to such a product or choice, or to no more than yes and no?"""
    readers = list(consumers(var))
    return bool(readers) and not is_output(var) and all(_leads_there(op, var) for op in readers)


def _leads_there(op: Operation, var: Var) -> bool:
    if np_dtype(op.outputs[0]).kind == "b" or op.op_type == "shape":
        return True
    if _moves(op, var) or _complement(op) is not None or (op.op_type == "mul" and bits(op.outputs[0])):
        return masks_scores(op.outputs[0])
    return fills_scores(op)


def _moves(op: Operation, var: Var) -> bool:
    """Does an op hand the numbers of a value on as they are?"""
    return op.op_type in CARRIERS | MOVING and op.inputs.get("x") is var


def _complement(op: Operation) -> Var | None:
    """What `1 - x` or `x - 1` reads."""
    if op.op_type != "sub":
        return None
    return op.y if is_constant(op.x, 1) else op.x if is_constant(op.y, 1) else None


def bits(var: Var) -> Bits | None:
    """The two numbers of a value that is made of one input of bits; None where it is made otherwise.

    Integers may be read as they are. Floats count as bits where they are subtracted from 1, or 1 from them.
    """
    op = var.op
    if op is None:
        return (0, 1) if np_dtype(var).kind in "iub" else None
    if op.op_type in CARRIERS | MOVING:
        return bits(op.x)
    inner = _complement(op)
    if inner is not None and (_is_float_input(inner) or bits(inner) == (0, 1)):
        return (0, 1) if is_constant(op.x, 1) else (-1, 0)
    if op.op_type == "mul" and bits(op.x) == bits(op.y) == (0, 1):
        return 0, 1
    return (0, 1) if np_dtype(var).kind == "b" else None


def _is_float_input(var: Var) -> bool:
    """Is it a float input, perhaps moved or multiplied with itself?"""
    while var.op is not None and var.op.op_type in CARRIERS | MOVING:
        var = var.op.x
    if var.op is not None and var.op.op_type == "mul":
        return _is_float_input(var.op.x) and _is_float_input(var.op.y)
    return var.op is None and np_dtype(var).kind == "f"


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
