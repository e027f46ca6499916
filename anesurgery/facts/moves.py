"""Ops that only move numbers: gathers at constant indices, read as slices, and ops before or after a transpose.

`gathered_rows(gather)` says which rows it takes of each axis, and along which axes of the result they lie;
passes build slices from it. `reduced_before` and `flattened_from` say how an op behind a transpose can do
without it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from anesurgery.errors import Refusal
from anesurgery.mil import Array, Operation, constant, ct, static_shape
from anesurgery.semantics.reading import axes_of, flag, permutation


@dataclass(frozen=True)
class Run:
    """An arithmetic progression of rows: `start`, `start + step`, ..., `length` of them; `step` is not 0."""

    start: int
    step: int
    length: int


@dataclass(frozen=True)
class AxisRows:
    """The rows that are taken of one axis of the source, and where they go."""

    rows: Array
    """Indices into the axis, none negative."""
    to: tuple[int, ...]
    """The axes of the result along which they lie, in order; none where one row is taken."""

    def runs(self) -> list[Run]:
        """Return the rows as arithmetic progressions, each as long as possible."""
        return list(_runs(self.rows.tolist()))

    def is_all(self, length: int) -> bool:
        """Is each row of the axis taken, in order?"""
        return len(self.rows) == length and bool((self.rows == np.arange(length)).all())


def gathered_rows(op: Operation) -> list[AxisRows] | Refusal:
    """Return what a gather takes of each axis of `x`; or why that cannot be told axis by axis."""
    indices, source, result = constant(op.indices), static_shape(op.x), static_shape(op.outputs[0])
    if indices is None:
        return Refusal(f"the indices %{op.indices.name} are dynamic")
    if source is None or result is None:
        return Refusal(f"%{op.x.name} has a dynamic shape")
    if batch := int(constant(op.inputs.get("batch_dims")) or 0):
        return Refusal(f"there are {batch} batch dimensions")
    indices = np.asarray(indices).astype(np.int64)
    if op.opset_version >= ct.target.iOS17 and indices.min(initial=0) < 0:
        return Refusal(f"the index {indices.min()}: from iOS 17 on, negative ones have no meaning")
    axis_rows = READERS[op.op_type](op, indices, source)
    if isinstance(axis_rows, Refusal):
        return axis_rows
    result_axes = [axis for part in axis_rows for axis in part.to]
    if len(result_axes) != len(set(result_axes)):
        return Refusal("two axes of the source are read along one axis of the result")
    if repeated := [axis for axis, n in enumerate(result) if n > 1 and axis not in result_axes]:
        return Refusal(f"elements are repeated along axis {repeated[0]} of the result")
    if any(
        part.rows.min(initial=0) < 0 or part.rows.max(initial=0) >= n
        for part, n in zip(axis_rows, source, strict=True)
    ):
        return Refusal("an index is outside its axis")
    return axis_rows


def _all_rows(length: int, *to: int) -> AxisRows:
    """Return all rows of an axis."""
    return AxisRows(np.arange(length), to)


def _gather(op: Operation, indices: Array, source: tuple[int, ...]) -> list[AxisRows] | Refusal:
    """Read x (A, B, C) at indices (I, J) along axis 1: its axes go to 0, (1, 2) and 3 of (A, I, J, C)."""
    axis, more = int(_number(op.axis)) % len(source), indices.ndim - 1
    rows = np.where(indices < 0, indices + source[axis], indices).ravel()
    axis_rows = [_all_rows(n, d if d < axis else d + more) for d, n in enumerate(source)]
    axis_rows[axis] = AxisRows(rows, tuple(range(axis, axis + indices.ndim)))
    return axis_rows


def _gather_nd(op: Operation, indices: Array, source: tuple[int, ...]) -> list[AxisRows] | Refusal:
    """Read x (A, B, C) at indices (I, J, 2): A and B go to those of the axes I, J along which they change."""
    depth, rank = indices.shape[-1], indices.ndim - 1
    axis_rows = []
    for d in range(depth):
        rows = indices[..., d]
        rows = np.where(rows < 0, rows + source[d], rows)
        to = tuple(a for a in range(rank) if (rows != rows.take([0], axis=a)).any())
        axis_rows.append(AxisRows(_rows_along(rows, to), to))
    return axis_rows + [_all_rows(n, rank + d) for d, n in enumerate(source[depth:])]


def _gather_along_axis(op: Operation, indices: Array, source: tuple[int, ...]) -> list[AxisRows] | Refusal:
    """Read x along an axis at indices that do not change along the other axes."""
    axis = int(_number(op.axis)) % len(source)
    rows = np.where(indices < 0, indices + source[axis], indices)
    if rows.shape[:axis] != source[:axis] or rows.shape[axis + 1 :] != source[axis + 1 :]:
        return Refusal("the indices are broadcast")
    one = _rows_along(rows, (axis,))
    if (rows != one.reshape([-1 if d == axis else 1 for d in range(rows.ndim)])).any():
        return Refusal(f"the rows taken of axis {axis} differ along another axis")
    axis_rows = [_all_rows(n, d) for d, n in enumerate(source)]
    axis_rows[axis] = AxisRows(one, (axis,))
    return axis_rows


READERS: dict[str, Any] = {"gather": _gather, "gather_nd": _gather_nd, "gather_along_axis": _gather_along_axis}
"""Op type -> the function that reads its indices."""


def _number(var: Any) -> int:
    return 0 if var is None else int(constant(var))


def _rows_along(rows: Array, axes: tuple[int, ...]) -> Array:
    """Return the rows along some axes, at index 0 of all others."""
    picked: Array = rows[tuple(slice(None) if a in axes else 0 for a in range(rows.ndim))]
    return np.asarray(picked).reshape(math.prod(rows.shape[a] for a in axes))


def _runs(rows: list[int]) -> Iterator[Run]:
    """Split rows into arithmetic progressions."""
    at = 0
    while at < len(rows):
        step = rows[at + 1] - rows[at] if at + 1 < len(rows) else 1
        end = at + 1
        while step and end < len(rows) and rows[end] - rows[end - 1] == step:
            end += 1
        yield Run(rows[at], step or 1, end - at)
        at = end


def reduced_before(op: Operation, turn: Operation) -> list[int] | None:
    """Return the axes of a reduction before a transpose; None if the remaining axes would be out of order."""
    perm, axes = permutation(turn), axes_of(op)
    remaining = [perm[axis] for axis in range(len(perm)) if axis not in axes]
    if flag(op, "keep_dims") or remaining != sorted(remaining):
        return None
    return sorted(perm[axis] for axis in axes)


def flattened_from(op: Operation, turn: Operation) -> int | None:
    """Return the first axis that a product reads as part of its rows; None where a row spans axes that moved.

    Args:
        op: the product; its `x` is what was transposed, through views that flatten the last axes into rows.
        turn: the transpose, of a static shape.
    """
    perm, turned = permutation(turn), static_shape(turn.outputs[0]) or ()
    shape = static_shape(op.x) or (0,)
    first_moved = next((n for n, axis in enumerate(perm) if axis != n), len(perm))  # axes before it stay
    first_flattened = next((n for n in range(first_moved + 1) if math.prod(turned[n:]) == shape[-1]), None)
    if first_flattened is None or math.prod(turned[:first_flattened]) != math.prod(shape[:-1]):
        return None
    return first_flattened
