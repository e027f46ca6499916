"""Tables of a shorter size that are the beginning of a longer one's are cut from it, so that it is stored once.

Position embeddings, masks and the like are folded for each size. Where one is, bit for bit, what stands at the
beginning of a table of the largest size, the smaller size reads the longer one and slices it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from anesurgery.mil import Array, Function, Operation, Var, constant, consumers, is_output, mb, next_op
from anesurgery.ops import POINTWISE

LEAST = 1024
"""Bytes below which a slice costs more than it saves."""


def share_tables(functions: Mapping[str, Function]) -> dict[str, int]:
    """Let functions read the tables of the last one.

    Args:
        functions: name of a size -> what is edited; in rising order, the last is the largest.

    Returns:
        Name of a size -> bytes that are not stored for it.
    """
    *shorter, longest = functions
    whole = [op for op in functions[longest].operations if _is_table(op)]
    return {name: sum(_shared(functions[name], whole)) for name in shorter}


def _shared(function: Function, whole: list[Operation]) -> Iterator[int]:
    """Cut the tables of a function from others; the bytes of each."""
    same = {(op.name, op.outputs[0].shape) for op in whole}
    for op in list(function.operations):
        if not _is_table(op) or (op.name, op.outputs[0].shape) in same or not _may_be_sliced(op.outputs[0]):
            continue
        table = op.outputs[0].val
        longer = next((one.outputs[0].val for one in whole if _begins(one.outputs[0].val, table)), None)
        if longer is not None:
            _slice(function, op, longer)
            yield table.nbytes


def _is_table(op: Operation) -> bool:
    """Is it a plain constant of floats that is worth a slice?"""
    value = constant(op.outputs[0]) if op.outputs else None
    return isinstance(value, np.ndarray) and value.dtype.kind == "f" and value.nbytes >= LEAST


def _may_be_sliced(var: Var) -> bool:
    """Is it read by ops on single elements only, which take what is computed as well as constants?"""
    return not is_output(var) and all(op.op_type in POINTWISE for op in consumers(var))


def _begins(longer: Array, table: Array) -> bool:
    """Does one table begin with another, bit for bit?"""
    if longer.dtype != table.dtype or longer.ndim != table.ndim or longer.shape == table.shape:
        return False
    if any(n > m for n, m in zip(table.shape, longer.shape, strict=True)):
        return False
    cut = longer[tuple(slice(n) for n in table.shape)]
    return cut.tobytes() == table.tobytes()


def _slice(function: Function, op: Operation, longer: Array) -> None:
    """Put a slice of a longer table in place of a constant."""
    old = op.outputs[0]
    with function:
        new = mb.slice_by_index(
            x=longer,
            begin=np.zeros(longer.ndim, np.int32),
            end=np.array(old.shape, np.int32),
            before_op=next_op(op),
            name=f"{op.name}_rows",
        )
    function.replace_uses_of_var_after_op(anchor_op=new.op, old_var=old, new_var=new)
    function.remove_ops([op])
