"""Recognise the parts of rotary position embeddings: tables of cosines and sines, exchanged halves of heads.

`of_positions` finds values each of whose rows is computed from one position, so that a pass can store them as a
table. `table_product` and `cos_or_sin` recognise stored tables of cosines or sines. `exchange` reads the concat
that swaps and negates halves of heads as a matrix.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from anesurgery.errors import NO_MATCH, Refusal
from anesurgery.facts.dependence import slice_back
from anesurgery.facts.row_tails import rows_read
from anesurgery.interpret import evaluate
from anesurgery.mil import (
    Array,
    Maker,
    Operation,
    Var,
    constant,
    consumers,
    fixed_shape,
    is_output,
    np_dtype,
    producer,
    static_shape,
)
from anesurgery.ops import VIEWS
from anesurgery.regions.views import seen_as
from anesurgery.semantics.reading import AxisSlice, axis_of, axis_slice, flag, number

LEAST_ROWS = 4
"""The fewest positions of a table that is recognised: fewer rows would fit other formulas as well."""
ROUNDING = 4e-3
"""Rounding error of a sum that should be 0 (in fp16, or in fp32 for large angles): four steps of fp16 at 1."""


@dataclass(frozen=True)
class PositionRows:
    """A value each of whose rows is computed from one position."""

    value: Var
    axis: int
    """The axis of the rows."""
    positions: Var
    """Integers, one for each row."""

    def table(self, count: int) -> Array:
        """Return the rows of positions 0 to count - 1, [count, elements of a row], in fp32 arithmetic."""
        shape = fixed_shape(self.positions)
        length = fixed_shape(self.value)[self.axis]
        ops = [op for op in slice_back([self.value], {self.positions}) if op.op_type != "const"]
        rows = list[Array]()
        for start in range(0, count, length):
            places = np.arange(start, start + length, dtype=np.int32).reshape(shape)
            (tensor,) = evaluate(ops, {self.positions: torch.from_numpy(places)}, [self.value])
            rows.append(np.moveaxis(tensor.numpy(), self.axis, 0).reshape(length, -1))
        return np.concatenate(rows)[:count]

    def shaped(self, rows: Array) -> Array:
        """Return flat rows in the shape of the value."""
        shape = fixed_shape(self.value)
        others = [size for axis, size in enumerate(shape) if axis != self.axis]
        return np.moveaxis(rows.reshape([shape[self.axis], *others]), 0, self.axis)

    def placed(self, mb: Maker, rows: Var) -> Var:
        """Build the value from `rows` [length, elements of a row], the result of an op."""
        shape, at = fixed_shape(self.value), self.axis
        seen = seen_as(mb, rows, (shape[at], *(size for axis, size in enumerate(shape) if axis != at)))
        if any(size > 1 for size in shape[:at]):
            perm = [0 if axis == at else axis + (axis < at) for axis in range(len(shape))]
            seen = mb.transpose(x=seen, perm=perm)
        return seen_as(mb, seen, shape)

    def serve_only(self, root: Operation) -> bool:
        """Does nothing else read the positions, or the values between them and `root`?"""
        ops = set(slice_back([self.value], {self.positions}))
        results = [v for op in ops - {root} if op.op_type != "const" for v in op.outputs]
        return all(not is_output(v) and set(consumers(v)) <= ops for v in (self.positions, *results))


def of_positions(value: Var) -> PositionRows | Refusal:
    """Return a value each of whose rows is computed from one integer, with these integers.

    Returns:
        The value with its positions; a refusal where a length is dynamic, or a row has several positions;
        `NO_MATCH` where it is not computed from integers.
    """
    shape = static_shape(value)
    source = _integer_source(value)
    if source is None:
        return NO_MATCH
    places = static_shape(source)
    if shape is None or places is None:
        return Refusal(f"%{source.name} has a dynamic shape")
    length = int(np.prod(places))
    if not places or max(places) != length:
        return Refusal(f"%{source.name} of shape {places} has more than one axis of positions")
    why = Refusal(f"the rows of %{value.name} are not made from one position each")
    for axis in (a for a, size in enumerate(shape) if size == length):
        followed = _row_axis_of_source(value, axis, source)
        if followed is not None and places[followed] == length:
            return PositionRows(value, axis, source)
    return why


def _integer_source(value: Var) -> Var | None:
    """Return the only dynamic value that floats are computed from, if it holds integers; else None."""
    ends, stack, seen = set[Var](), [value], {value}
    while stack:
        var = stack.pop()
        if var.op is None or (np_dtype(var).kind in "iu" and var.op.op_type not in VIEWS):
            ends.add(var)
            continue
        fresh = [v for v in _dynamic_operands(var.op) if v not in seen]
        seen.update(fresh)
        stack += fresh
    source = ends.pop() if len(ends) == 1 else None
    return source if source is not None and np_dtype(source).kind in "iu" else None


def _dynamic_operands(op: Operation) -> list[Var]:
    """Return the operands of an op that are not constants."""
    return [v for v in op.inputs.values() if isinstance(v, Var) and not _is_constant_op(v)] + [
        v
        for values in op.inputs.values()
        if isinstance(values, (list, tuple))
        for v in values
        if not _is_constant_op(v)
    ]


def _is_constant_op(var: Var) -> bool:
    return var.op is not None and var.op.op_type.startswith("const")


def _row_axis_of_source(value: Var, axis: int, source: Var) -> int | None:
    """Return the axis of the source that holds the rows of a value; None if rows are mixed on the way."""
    row_axes, stack = {value: axis}, [value]
    while stack:
        var = stack.pop()
        if var is source or var.op is None:
            continue
        rows = _rows(var.op, row_axes[var])
        if rows is None or set(rows) != {v for v in _dynamic_operands(var.op) if v in rows or v.rank}:
            return None
        for other, at in rows.items():
            if row_axes.setdefault(other, at) != at:
                return None
            stack.append(other)
    return row_axes.get(source)


def _rows(op: Operation, axis: int) -> dict[Var, int] | None:
    """Return `rows_read`, or the columns of a product with a constant on the left."""
    if op.op_type == "matmul" and constant(op.x) is not None and axis == op.outputs[0].rank - 1:
        return {op.y: op.y.rank - (2 if flag(op, "transpose_y") else 1)}
    return rows_read(op, axis)


@dataclass(frozen=True)
class TableProduct:
    """A product with a constant table of cosines or sines that has a row for each position."""

    other: Var
    table: Array
    axis: int
    """The axis of the positions."""
    word: str
    """Either "cos" or "sin"."""

    @property
    def rows(self) -> Array:
        """The table as [positions, elements of a row]."""
        return np.moveaxis(self.table, self.axis, 0).reshape(self.table.shape[self.axis], -1)


def table_product(op: Operation) -> TableProduct | None:
    """Return the constant cosines or sines that a product reads; None for other products."""
    for other, var in ((op.x, op.y), (op.y, op.x)):
        table = np.asarray(constant(var))
        if table.dtype.kind != "f" or constant(other) is not None or not np.isfinite(table).all():
            continue
        for axis in (a for a, size in enumerate(table.shape) if size >= LEAST_ROWS):
            turn = TableProduct(other, table, axis, "")
            if word := cos_or_sin(turn.rows.astype(np.float64)):
                return replace(turn, word=word)
    return None


def cos_or_sin(rows: Array) -> str:
    """Return "cos" or "sin" if rows are a factor times the cosines or sines of position * speed; else "".

    Both follow `row[p + 1] + row[p - 1] = 2 c row[p]`, with the cosine of the speed as c, in each column.
    """
    middle, around = rows[1:-1], rows[2:] + rows[:-2]
    squares = (middle**2).sum(0)
    step = np.divide((middle * around).sum(0), 2 * squares, out=np.ones_like(squares), where=squares > 0)
    rest = np.abs(around - 2 * step * middle).max()
    follows = rest <= ROUNDING * np.abs(rows).max() and np.abs(step).max() <= 1 + ROUNDING
    if not follows or rows.std(0).max() <= ROUNDING:
        return ""
    return "cos" if np.abs(rows[0]).max() > ROUNDING else "sin"


def signed_part(var: Var, axis: int) -> tuple[Var, AxisSlice, float] | None:
    """Return a value, the part of its axis that is read, and the factor 1 or -1; None for other values."""
    factor = 1.0
    while (op := producer(var, "mul")) is not None:
        value, var = (number(op.y), op.x) if constant(op.x) is None else (number(op.x), op.y)
        if value is None:
            return None
        factor *= value
    op = producer(var, "slice_by_index")
    part = None if op is None else axis_slice(op)
    if op is None or part is None or part.axis != axis or part.dropped or abs(factor) != 1:
        return None
    return op.x, part, factor


def exchange(op: Operation) -> tuple[Var, Array] | None:
    """Return the value whose parts a concat exchanges, and the matrix that does the same; else None."""
    axis, whole = axis_of(op), static_shape(op.outputs[0])
    parts: Sequence[tuple[Var, AxisSlice, float] | None] = [signed_part(v, axis) for v in op.values]
    source = parts[0][0] if parts and parts[0] is not None else None
    if source is None or any(p is None or p[0] is not source for p in parts) or flag(op, "interleave"):
        return None
    if whole is None or static_shape(source) != whole:
        return None
    return source, np.concatenate(
        [p[2] * np.eye(whole[axis])[p[1].begin : p[1].end : p[1].stride] for p in parts if p]
    )
