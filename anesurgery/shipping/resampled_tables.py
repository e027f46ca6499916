"""Compute tables at each call that are one stored table, resampled to each size.

Vision models interpolate position embeddings to the size of the image, which gives one constant per size, and
none begins another (see `shared_tables` for those). Instead the original table is stored once, and each size
multiplies it by two matrices: table = rows @ grid @ columns. In fp16 this rounds in another way than the stored
table did, so `sizes` does it only where the tables add more than `SHARE` to the weights of the largest size,
and reports how near each computed table is.
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
"""Lowest accepted PSNR in dB of a computed table beside the stored one. Rounding to fp16 gives about 80."""


@dataclass(frozen=True)
class _ResampledTable:
    """A constant that ends with a resampled table.

    Attributes:
        op: the constant.
        source: the original table and the matrices that resample it.
        head: the rows before it, such as the positions of class tokens: (rows, channels), or empty.
        channels_last: whether the resampled part is (height, width, channels).
    """

    op: Operation
    source: Resampled
    head: Array
    channels_last: bool

    @property
    def array(self) -> Array:
        """The constant's array."""
        value: Array = self.op.outputs[0].val
        return value

    @property
    def grid(self) -> Array:
        """The original table, in the axis order and dtype of the constant."""
        grid = self.source.x[0].transpose(1, 2, 0) if self.channels_last else self.source.x[0]
        return np.ascontiguousarray(grid.astype(self.array.dtype))

    @property
    def matrices(self) -> list[Array]:
        """The matrix of the rows and that of the columns, in the constant's dtype."""
        return [m.astype(self.array.dtype) for m in (self.source.rows, self.source.columns)]


def compute_tables(
    functions: Mapping[str, Function], resampled: Mapping[str, Sequence[Resampled]]
) -> list[str]:
    """Replace resampled constants by computations from the original table, where that is worth it.

    Args:
        functions: name of a size -> its function, which is edited; in rising order, the last is the largest.
        resampled: name of a size -> the constants that its conversion resampled.

    Returns:
        A sentence for each table that is computed.
    """
    tables = {
        name: [t for one in resampled[name] if (t := _table_of(function, one)) is not None]
        for name, function in functions.items()
    }
    all_tables = [t for listed in tables.values() for t in listed]
    last = list(functions)[-1]
    added_bytes = sum(t.array.nbytes for t in all_tables) - sum(t.array.nbytes for t in tables[last])
    stored_bytes = sum(t.array.nbytes for t in all_tables)
    if added_bytes <= SHARE * weights_of(functions[last]) or _computed_bytes(all_tables) >= stored_bytes:
        return []
    return [
        words
        for name, function in functions.items()
        for table in tables[name]
        if (words := _replace_by_computation(function, name, table))
    ]


def _computed_bytes(tables: Sequence[_ResampledTable]) -> int:
    """Return the bytes from which tables are computed; equal parts are stored once."""
    parts = [part for t in tables for part in (t.grid, t.head, *t.matrices)]
    return sum({part.tobytes(): part.nbytes for part in parts}.values())


def _table_of(function: Function, source: Resampled) -> _ResampledTable | None:
    """Return the constant of a function that ends, bit for bit, with a resampled table."""
    for op in function.operations:
        value = op.outputs[0].val if op.op_type == "const" else None
        if isinstance(value, np.ndarray) and value.dtype.kind == "f" and _may_be_computed(op.outputs[0]):
            for last in (True, False):
                if (head := _rows_before(value, source, last)) is not None:
                    return _ResampledTable(op, source, head, last)
    return None


def _may_be_computed(var: Var) -> bool:
    """Return whether only element-wise ops, which need no constant operand, read a value."""
    return not is_output(var) and all(op.op_type in POINTWISE for op in consumers(var))


def _rows_before(value: Array, source: Resampled, channels_last: bool) -> Array | None:
    """Return the rows before the resampled part; None where a constant does not end with it."""
    picture = source.result[0]
    tail = (picture.transpose(1, 2, 0) if channels_last else picture).astype(value.dtype).ravel()
    flat, channels = value.ravel(), picture.shape[0]
    if len(source.x) != 1 or flat.size < tail.size or flat[-tail.size :].tobytes() != tail.tobytes():
        return None
    head = flat[: -tail.size]
    rows = channels_last and value.ndim > 1 and value.shape[-1] == channels
    is_grid_of_rows = rows and value.shape[-2] * channels == value.size
    if is_grid_of_rows:
        return head.reshape(-1, channels)
    return None if head.size else head


def _replace_by_computation(function: Function, name: str, table: _ResampledTable) -> str:
    """Replace a table by its computation; return a sentence, or "" where that is too inexact."""
    op, array = table.op, table.array
    with function:
        new = _build_computation(table, next_op(op))
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


def _build_computation(table: _ResampledTable, before: Operation) -> Var:
    """Build the ops that compute a table."""
    grid, name, shape = table.grid, table.op.name, table.array.shape
    (rows, columns), height = table.matrices, table.source.x.shape[2]
    is_identity = [np.array_equal(m, np.eye(*m.shape)) for m in (rows, columns)]
    if table.channels_last:
        value = mb.const(val=grid.reshape(height, -1), before_op=before, name=f"{name}_grid")
        if not is_identity[0]:
            value = mb.matmul(x=rows, y=value, before_op=before, name=f"{name}_rows")
        picture = (len(rows), grid.shape[1], grid.shape[2])
        value = mb.reshape(x=value, shape=picture, before_op=before, name=f"{name}_picture")
        if not is_identity[1]:
            value = mb.matmul(x=columns[None], y=value, before_op=before, name=f"{name}_columns")
    else:
        value = mb.const(val=grid, before_op=before, name=f"{name}_grid")
        if not is_identity[0]:
            value = mb.matmul(x=rows[None], y=value, before_op=before, name=f"{name}_rows")
        if not is_identity[1]:
            value = mb.matmul(x=value, y=columns.T[None], before_op=before, name=f"{name}_columns")
    if not table.head.size:
        return mb.reshape(x=value, shape=shape, before_op=before, name=f"{name}_computed")
    lead = shape[:-2]
    tail = mb.reshape(x=value, shape=(*lead, -1, shape[-1]), before_op=before, name=f"{name}_places")
    head = table.head.reshape(*lead, -1, shape[-1])
    return mb.concat(values=[head, tail], axis=len(shape) - 2, before_op=before, name=f"{name}_computed")
