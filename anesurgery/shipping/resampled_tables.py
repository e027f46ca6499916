"""Tables that are one stored table resampled to each size are computed from it, where storing them costs much.

Positions of pictures are interpolated to the size of each: a table for each size, of which none begins another.
The table that is given is stored once instead, and each size multiplies it by the matrix of its rows and that
of its columns. In fp16 this rounds in another way than the stored table did, so that it is done only where the
tables make the weights more than `SHARE` larger than those of the largest size; how near is said.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from anesurgery.checking.exactness import nearness
from anesurgery.facts.dependence import slice_back
from anesurgery.frontend.resampling import Resampled
from anesurgery.interpret.core import evaluate
from anesurgery.mil import Array, Function, Operation, Var, consumers, is_output, mb, next_op, replace_uses
from anesurgery.ops import POINTWISE
from anesurgery.shipping.shared_tables import SHARE, weights_of

LEAST = 70.0
"""Decibels: a computed table that is further from the stored one is not used. Rounding leaves about 80."""


@dataclass(frozen=True)
class _Table:
    """A stored table that holds a resampled one at its end.

    Attributes:
        op: the constant.
        source: what was resampled to make it.
        head: the numbers before it, as the positions of class tokens are: (rows, channels), or empty.
        channels_last: is it (height, width, channels)?
    """

    op: Operation
    source: Resampled
    head: Array
    channels_last: bool

    @property
    def array(self) -> Array:
        """Its numbers."""
        value: Array = self.op.outputs[0].val
        return value

    @property
    def grid(self) -> Array:
        """What was resampled, in the order and the type of the table."""
        grid = self.source.x[0].transpose(1, 2, 0) if self.channels_last else self.source.x[0]
        return np.ascontiguousarray(grid.astype(self.array.dtype))

    @property
    def matrices(self) -> list[Array]:
        """The matrix of the rows and that of the columns, in its type."""
        return [m.astype(self.array.dtype) for m in (self.source.rows, self.source.columns)]


def compute_tables(
    functions: Mapping[str, Function], resampled: Mapping[str, Sequence[Resampled]]
) -> list[str]:
    """Let functions compute their resampled tables from the one that was given, where that is worth it.

    Args:
        functions: name of a size -> what is edited; in rising order, the last is the largest.
        resampled: name of a size -> the constants that its conversion resampled.

    Returns:
        What is said of each table that is computed.
    """
    tables = {
        name: [t for one in resampled[name] if (t := _table_of(function, one)) is not None]
        for name, function in functions.items()
    }
    every = [t for listed in tables.values() for t in listed]
    last = list(functions)[-1]
    more = sum(t.array.nbytes for t in every) - sum(t.array.nbytes for t in tables[last])
    if more <= SHARE * weights_of(functions[last]) or _computed_bytes(every) >= sum(
        t.array.nbytes for t in every
    ):
        return []
    return [
        words
        for name, function in functions.items()
        for table in tables[name]
        if (words := _compute(function, name, table))
    ]


def _computed_bytes(tables: Sequence[_Table]) -> int:
    """Bytes of what tables are computed from; what is equal is stored once."""
    parts = [part for t in tables for part in (t.grid, t.head, *t.matrices)]
    return sum({part.tobytes(): part.nbytes for part in parts}.values())


def _table_of(function: Function, source: Resampled) -> _Table | None:
    """The table of a function that ends with what was resampled, bit for bit."""
    for op in function.operations:
        value = op.outputs[0].val if op.op_type == "const" else None
        if isinstance(value, np.ndarray) and value.dtype.kind == "f" and _may_be_computed(op.outputs[0]):
            for last in (True, False):
                if (head := _head(value, source, last)) is not None:
                    return _Table(op, source, head, last)
    return None


def _may_be_computed(var: Var) -> bool:
    """Is it read by ops on single elements only, which take what is computed as well as constants?"""
    return not is_output(var) and all(op.op_type in POINTWISE for op in consumers(var))


def _head(value: Array, source: Resampled, channels_last: bool) -> Array | None:
    """The rows before what was resampled; None where a table does not end with it."""
    picture = source.result[0]
    tail = (picture.transpose(1, 2, 0) if channels_last else picture).astype(value.dtype).ravel()
    flat, channels = value.ravel(), picture.shape[0]
    if len(source.x) != 1 or flat.size < tail.size or flat[-tail.size :].tobytes() != tail.tobytes():
        return None
    head = flat[: -tail.size]
    rows = channels_last and value.ndim > 1 and value.shape[-1] == channels
    whole = rows and value.shape[-2] * channels == value.size
    return head.reshape(-1, channels) if whole else head if not head.size else None


def _compute(function: Function, name: str, table: _Table) -> str:
    """Put the computation in the place of a table; what is said of it, or "" where it is too far off."""
    op, array = table.op, table.array
    with function:
        new = _built(table, next_op(op))
    (value,) = evaluate(slice_back([new], set()), {}, [new], "fp16")
    near = nearness({"table": array.astype(np.float64)}, {"table": value.to(torch.float64).numpy()})
    added = slice_back([new], set())
    if near < LEAST:
        function.remove_ops(added[::-1])
        return ""
    replace_uses(function, anchor_op=new.op, old_var=op.outputs[0], new_var=new)
    function.remove_ops([op])
    size = "bit for bit" if np.isinf(near) else f"{near:.0f} dB near the table"
    return f"{name} computes %{op.name} at each call, from the one table that all sizes store: {size}"


def _built(table: _Table, before: Operation) -> Var:
    """The table, computed."""
    grid, name, shape = table.grid, table.op.name, table.array.shape
    (rows, columns), height = table.matrices, table.source.x.shape[2]
    kept = [np.array_equal(m, np.eye(*m.shape)) for m in (rows, columns)]
    if table.channels_last:
        value = mb.const(val=grid.reshape(height, -1), before_op=before, name=f"{name}_grid")
        if not kept[0]:
            value = mb.matmul(x=rows, y=value, before_op=before, name=f"{name}_rows")
        picture = (len(rows), grid.shape[1], grid.shape[2])
        value = mb.reshape(x=value, shape=picture, before_op=before, name=f"{name}_picture")
        if not kept[1]:
            value = mb.matmul(x=columns[None], y=value, before_op=before, name=f"{name}_columns")
    else:
        value = mb.const(val=grid, before_op=before, name=f"{name}_grid")
        if not kept[0]:
            value = mb.matmul(x=rows[None], y=value, before_op=before, name=f"{name}_rows")
        if not kept[1]:
            value = mb.matmul(x=value, y=columns.T[None], before_op=before, name=f"{name}_columns")
    if not table.head.size:
        return mb.reshape(x=value, shape=shape, before_op=before, name=f"{name}_computed")
    lead = shape[:-2]
    tail = mb.reshape(x=value, shape=(*lead, -1, shape[-1]), before_op=before, name=f"{name}_places")
    head = table.head.reshape(*lead, -1, shape[-1])
    return mb.concat(values=[head, tail], axis=len(shape) - 2, before_op=before, name=f"{name}_computed")
