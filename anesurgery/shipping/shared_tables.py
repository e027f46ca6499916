"""Tables of a shorter size that are the beginning of a longer one's are cut from it, so that it is stored once.

Position embeddings, masks and the like are folded for each size. Where one is, bit for bit, what stands at the
beginning of a table of the largest size, the smaller size reads the longer one and slices it. Small tables are
stored for each size, unless that makes the weights more than `SHARE` larger than those of the largest size.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from anesurgery.mil import (
    Array,
    Function,
    Operation,
    Var,
    constant,
    consumers,
    is_output,
    mb,
    next_op,
    replace_uses,
    walk_ops,
)
from anesurgery.ops import POINTWISE

LEAST = 1024
"""Bytes below which a slice costs more than it saves."""
SHARE = 0.02
"""Of the weights of the largest size, what the tables of the others may add before all that can be is cut or
computed: such packages are promised to be hardly larger than one size."""
STORED, HEAD, GRAIN = 10, 64, 64
"""A constant of at least so many numbers is in the file of weights, behind a head, and begins at a multiple of
the grain (`should_use_weight_file` and the storage of coremltools 9)."""


@dataclass(frozen=True)
class _Cut:
    """A table of a shorter size, and the longer one that begins with it."""

    size: str
    op: Operation
    longer: Array

    @property
    def table(self) -> Array:
        """Its numbers."""
        value: Array = self.op.outputs[0].val
        return value


def share_tables(functions: Mapping[str, Function]) -> dict[str, int]:
    """Let functions read the tables of the last one.

    Args:
        functions: name of a size -> what is edited; in rising order, the last is the largest.

    Returns:
        Name of a size -> bytes that are not stored for it.
    """
    *shorter, longest = functions
    whole = [op for op in functions[longest].operations if _is_table(op)]
    own = {
        name: [op for op in functions[name].operations if _is_table(op) and not _is_among(op, whole)]
        for name in shorter
    }
    cuts = [cut for name, ops in own.items() for cut in _cuts(name, ops, whole)]
    saved = dict.fromkeys(shorter, 0)
    for cut in _worth(cuts, own, weights_of(functions[longest])):
        _slice(functions[cut.size], cut.op, cut.longer)
        saved[cut.size] += cut.table.nbytes
    return saved


def weights_of(function: Function) -> int:
    """Bytes of the constants of a function."""
    values = [op.outputs[0].val for op in walk_ops(function) if op.op_type == "const"]
    return sum(value.nbytes for value in values if isinstance(value, np.ndarray))


def _is_among(op: Operation, whole: list[Operation]) -> bool:
    """Is a table one of some others, and stored with them? Those of one name and shape are."""
    table, shape = op.outputs[0].val, op.outputs[0].shape
    alike = [one for one in whole if one.outputs[0].shape == shape]
    return any(one.name == op.name for one in alike) or any(
        one.outputs[0].val.tobytes() == table.tobytes() for one in alike
    )


def _cuts(size: str, ops: list[Operation], whole: list[Operation]) -> Iterator[_Cut]:
    """The tables of a size that may be cut from others."""
    for op in ops:
        table = op.outputs[0].val
        longer = next((one.outputs[0].val for one in whole if _begins(one.outputs[0].val, table)), None)
        if longer is not None and _may_be_sliced(op.outputs[0]):
            yield _Cut(size, op, longer)


def _worth(cuts: list[_Cut], own: Mapping[str, list[Operation]], weights: int) -> Iterator[_Cut]:
    """The large tables; and of the others, the largest first, as many as the weights are to be without."""
    small = [cut for cut in cuts if cut.table.nbytes < LEAST]
    cut_ops = {cut.op for cut in cuts if cut.table.nbytes >= LEAST}
    yield from (cut for cut in cuts if cut.op in cut_ops)
    kept = [op.outputs[0].val for ops in own.values() for op in ops if op not in cut_ops]
    more = {table.tobytes(): _in_file(table) for table in kept}
    for cut in sorted(small, key=lambda cut: -cut.table.nbytes):
        if sum(more.values()) <= SHARE * weights:
            return
        more.pop(cut.table.tobytes(), None)
        yield cut


def _in_file(table: Array) -> int:
    """The bytes that a table takes in the file of weights."""
    return HEAD + -(-table.nbytes // GRAIN) * GRAIN


def _is_table(op: Operation) -> bool:
    """Is it a plain constant of floats that is in the file of weights?"""
    value = constant(op.outputs[0]) if op.outputs else None
    return isinstance(value, np.ndarray) and value.dtype.kind == "f" and value.size >= STORED


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
    replace_uses(function, anchor_op=new.op, old_var=old, new_var=new)
    function.remove_ops([op])
