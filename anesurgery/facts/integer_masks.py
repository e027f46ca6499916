"""Find inputs and values that only mask scores, as in `(1 - mask) * -10000`; they are taken to hold 0 and 1.

`half` asks about casts of such values (`masks_scores`), `integers_as_floats` about inputs (`is_mask`).
"""

from __future__ import annotations

from anesurgery.facts.attention import MASKED, MASKING, runtime_inputs
from anesurgery.mil import Operation, Var, consumers, is_constant, is_output, np_dtype, operands
from anesurgery.ops import CARRIERS, COMPARISONS, LOOKUPS, MOVING
from anesurgery.semantics.reading import number, readers_after, value_before

Bits = tuple[int, int]
"""The two numbers that a value may hold: (0, 1) or (-1, 0)."""


def only_softmax_reads(var: Var) -> bool:
    """Does every path from a value lead through mask ops to a softmax, or to the mask of fused attention?

    Readers of its shape do not count.
    """
    stack, seen, read = [var], {var}, False
    while stack:
        value = stack.pop()
        if is_output(value):
            return False
        for op in consumers(value):
            if op.op_type in MASKING:
                stack += [v for v in op.outputs if v not in seen]
                seen.update(op.outputs)
            elif op.op_type == "softmax" or _is_mask_of(value, op):
                read = True
            elif op.op_type != "shape":
                return False
    return read


def _is_mask_of(value: Var, op: Operation) -> bool:
    """Is a value the mask of a fused attention, and no other operand of it?"""
    names = [name for name, v in operands(op) if v is value]
    return op.op_type == "scaled_dot_product_attention" and names == ["attn_mask"]


def fills_scores(op: Operation) -> bool:
    """Does an op turn bits of an input into a fill that only masks scores of a softmax?

    That is a product of the bits with a fill, or a select between bits and a fill.
    """
    if op.op_type not in ("mul", "select") or not only_softmax_reads(op.outputs[0]):
        return False
    pair = (op.x, op.y) if op.op_type == "mul" else (op.a, op.b)
    for value, other in (pair, pair[::-1]):
        fill, held_bits = number(other), bits(value)
        if fill is None or held_bits is None:
            continue
        masked = fill if op.op_type == "select" else fill * (held_bits[0] + held_bits[1])
        if masked <= MASKED or (masked >= -MASKED and _is_subtracted(op.outputs[0])):
            return True
    return False


def _is_subtracted(var: Var) -> bool:
    """Is a value only ever subtracted from others?"""
    readers = list(readers_after(var, CARRIERS | {"tile"}))
    copies = _moved_copies(var)
    return all(op.op_type == "sub" and op.y in copies and op.x not in copies for op in readers)


def _moved_copies(var: Var) -> list[Var]:
    """Return a value and all values that it is moved to."""
    copies = [var]
    for value in copies:
        moved = [op for op in consumers(value) if op.op_type in CARRIERS | {"tile"}]
        copies += [v for op in moved for v in op.outputs if v not in copies]
    return copies


def masks_scores(var: Var) -> bool:
    """Does every path of a value lead to a mask of scores (`fills_scores`), to a boolean or to its shape?"""
    values = [var]
    for value in values:
        readers = list(consumers(value))
        if not readers or is_output(value):
            return False
        for op in readers:
            out = op.outputs[0]
            if np_dtype(out).kind == "b" or op.op_type == "shape" or out in values:
                continue
            if _keeps_bits(op, value):
                values.append(out)
            elif not fills_scores(op):
                return False
    return True


def _keeps_bits(op: Operation, var: Var) -> bool:
    """Does an op move the bits of a value, subtract them from 1 or multiply them with bits?"""
    if _only_moves(op, var) or _complement_operand(op) is not None:
        return True
    return op.op_type == "mul" and bits(op.outputs[0]) is not None


def _only_moves(op: Operation, var: Var) -> bool:
    """Does an op pass the numbers of a value on unchanged?"""
    return op.op_type in CARRIERS | MOVING and op.inputs.get("x") is var


def _complement_operand(op: Operation) -> Var | None:
    """Return the x of `1 - x` or `x - 1`; None for other ops."""
    if op.op_type != "sub":
        return None
    return op.y if is_constant(op.x, 1) else op.x if is_constant(op.y, 1) else None


def bits(var: Var, nested: int = 12) -> Bits | None:
    """Return the two numbers of a value that is computed from one input of bits; None for other values.

    Integers may be read as they are. Floats count as bits where they are subtracted from 1, or 1 from them.
    At most `nested` subtractions and products are looked through: masks have one or two.
    """
    var = value_before(var, CARRIERS | MOVING)
    op = var.op
    if op is None:
        return (0, 1) if np_dtype(var).kind in "iub" else None
    inner = _complement_operand(op)
    if inner is not None and nested and (_is_float_input(inner) or bits(inner, nested - 1) == (0, 1)):
        return (0, 1) if is_constant(op.x, 1) else (-1, 0)
    if op.op_type == "mul" and nested and all(bits(v, nested - 1) == (0, 1) for v in {op.x, op.y}):
        return 0, 1
    return (0, 1) if np_dtype(var).kind == "b" else None


def _is_float_input(var: Var) -> bool:
    """Is a value a float input, perhaps moved or multiplied with itself?"""
    values = [var]
    for value in values:
        op = value.op
        if op is not None and op.op_type not in CARRIERS | MOVING | {"mul"}:
            return False
        read = () if op is None else (op.x, op.y) if op.op_type == "mul" else (op.x,)
        values += [v for v in read if v not in values]
    return all(np_dtype(value).kind == "f" for value in values if value.op is None)


def is_mask(var: Var) -> bool:
    """Does an integer input only say which scores a softmax keeps?

    It may be moved, multiplied with itself, subtracted from 1, compared with 0 or 1, and cast to bool or float.
    Token ids, segments that are compared with each other, and counted numbers are no masks.
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
    """Is an integer that an op computes from a mask of 0 and 1 such a mask again?"""
    if op.op_type in MOVING | {"identity", "cast", "reverse"}:
        return op.op_type not in LOOKUPS or op.x is value
    if op.op_type == "mul":
        return all(runtime_inputs([side]) == [mask] for side in (op.x, op.y))
    return _complement_operand(op) is value
