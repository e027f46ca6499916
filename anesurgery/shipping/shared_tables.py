"""Store a table once that several sizes of a model share.

`sizes` calls `share_tables` on the functions of a model at several lengths. Converting at each length folds
position embeddings, masks and the like into one constant per size. Where the constant of a shorter size is, bit
for bit, the beginning of one of the largest size, the shorter size slices the longer table instead:
`pos[:64]` of a stored (512, 768) table. A slice costs a little time, so small tables are stored for each
size, unless that makes the weights more than `SHARE` larger than those of the largest size.
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
"""The share of the largest size's weights that tables of the other sizes may add. Beyond it, all tables that
can be sliced or computed are: such packages are promised to be hardly larger than one size."""
STORED, HEAD, GRAIN = 10, 64, 64
"""A constant of at least `STORED` elements is written to the weight file, after a header of `HEAD` bytes,
aligned to `GRAIN` bytes (`should_use_weight_file` and the storage of coremltools 9)."""


@dataclass(frozen=True)
class _TableSlice:
    """A table of a shorter size, and the longer table that begins with it."""

    size: str
    op: Operation
    longer: Array

    @property
    def table(self) -> Array:
        """Its array."""
        value: Array = self.op.outputs[0].val
        return value


def share_tables(functions: Mapping[str, Function]) -> dict[str, int]:
    """Replace tables of shorter sizes by slices of the tables of the largest size, in place.

    Args:
        functions: name of a size -> its function, which is edited; in rising order, the last is the largest.

    Returns:
        Name of a size -> bytes that need not be stored for it.
    """
    *shorter, longest = functions
    long_tables = [op for op in functions[longest].operations if _is_table(op)]
    own_tables = {
        name: [
            op for op in functions[name].operations if _is_table(op) and not _is_shared_already(op, long_tables)
        ]
        for name in shorter
    }
    slices = [part for name, ops in own_tables.items() for part in _possible_slices(name, ops, long_tables)]
    saved = dict.fromkeys(shorter, 0)
    for part in _worthwhile_slices(slices, own_tables, weights_of(functions[longest])):
        _slice(functions[part.size], part.op, part.longer)
        saved[part.size] += part.table.nbytes
    return saved


def weights_of(function: Function) -> int:
    """Return the bytes of a function's constants."""
    values = [op.outputs[0].val for op in walk_ops(function) if op.op_type == "const"]
    return sum(value.nbytes for value in values if isinstance(value, np.ndarray))


def _is_shared_already(op: Operation, long_tables: list[Operation]) -> bool:
    """Return whether the writer stores a table with another: same name and shape, or same bytes."""
    table, shape = op.outputs[0].val, op.outputs[0].shape
    same_shape = [one for one in long_tables if one.outputs[0].shape == shape]
    return any(one.name == op.name for one in same_shape) or any(
        one.outputs[0].val.tobytes() == table.tobytes() for one in same_shape
    )


def _possible_slices(size: str, ops: list[Operation], long_tables: list[Operation]) -> Iterator[_TableSlice]:
    """Yield the tables of a size that may be replaced by a slice of one of `long_tables`."""
    for op in ops:
        table = op.outputs[0].val
        longer = next(
            (one.outputs[0].val for one in long_tables if _begins_with(one.outputs[0].val, table)), None
        )
        if longer is not None and _is_read_elementwise(op.outputs[0]):
            yield _TableSlice(size, op, longer)


def _worthwhile_slices(
    slices: list[_TableSlice], own_tables: Mapping[str, list[Operation]], weights: int
) -> Iterator[_TableSlice]:
    """Yield the slices to make: all large ones; then small ones, largest first, until `SHARE` is kept."""
    small = [part for part in slices if part.table.nbytes < LEAST]
    large = {part.op for part in slices if part.table.nbytes >= LEAST}
    yield from (part for part in slices if part.op in large)
    stored = [op.outputs[0].val for ops in own_tables.values() for op in ops if op not in large]
    added_bytes = {table.tobytes(): _bytes_in_file(table) for table in stored}
    for part in sorted(small, key=lambda part: -part.table.nbytes):
        if sum(added_bytes.values()) <= SHARE * weights:
            return
        added_bytes.pop(part.table.tobytes(), None)
        yield part


def _bytes_in_file(table: Array) -> int:
    """Return the bytes that a table takes in the weight file."""
    return HEAD + -(-table.nbytes // GRAIN) * GRAIN


def _is_table(op: Operation) -> bool:
    """Return whether an op is a plain constant of floats in the weight file."""
    value = constant(op.outputs[0]) if op.outputs else None
    return isinstance(value, np.ndarray) and value.dtype.kind == "f" and value.size >= STORED


def _is_read_elementwise(var: Var) -> bool:
    """Return whether only element-wise ops, which need no constant operand, read a value."""
    return not is_output(var) and all(op.op_type in POINTWISE for op in consumers(var))


def _begins_with(longer: Array, table: Array) -> bool:
    """Return whether `longer` begins with `table`, bit for bit."""
    if longer.dtype != table.dtype or longer.ndim != table.ndim or longer.shape == table.shape:
        return False
    if any(n > m for n, m in zip(table.shape, longer.shape, strict=True)):
        return False
    beginning = longer[tuple(slice(n) for n in table.shape)]
    return beginning.tobytes() == table.tobytes()


def _slice(function: Function, op: Operation, longer: Array) -> None:
    """Replace a constant by a slice of a longer table."""
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
