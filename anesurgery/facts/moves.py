"""Ops that only move numbers: gathers at constant indices, reshapes and transposes in a row, one transpose.

`gathered_rows(gather)` says which rows it takes of each axis, and along which axes of the result they lie;
passes build slices from it. `moves_in_a_row(last)` says what reshapes and transposes do together.
`reduced_before` and `flattened_from` say how an op behind a transpose can do without it. `computed_cuts(slice)`
says what a slice takes whose ends are computed, but a constant distance apart.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from anesurgery.errors import Refusal
from anesurgery.mil import MOST_AXES, Array, Operation, Var, constant, consumers, ct, is_output, static_shape
from anesurgery.ops import MOVES
from anesurgery.semantics.reading import axes_of, each_axis, flag, number, permutation


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


# Reshapes and transposes in a row.

Digit = tuple[int, int]
"""A part of an axis: its length, and the distance of its neighbours in the source, counted in elements."""
Turn = tuple[tuple[int, ...], tuple[int, ...]]
"""A shape, and the order in which a transpose puts its axes."""


@dataclass(frozen=True)
class MovesInARow:
    """What reshapes and transposes in a row do together."""

    source: Var
    """The value before the first."""
    ops: tuple[Operation, ...]
    """The last op first."""
    turns: tuple[Turn, ...]
    """The fewest transposes found that do the same, each of a shape that the value before is reshaped to."""

    @property
    def transposes(self) -> int:
        """The number of transposes that are there."""
        return sum(op.op_type == "transpose" for op in self.ops)


def moves_in_a_row(last: Operation) -> MovesInARow | None:
    """Return what the reshapes and transposes that end at an op do; None if it is not the last of several.

    Only the last may be read elsewhere. None too if a shape is dynamic, the source is a constant, or a reshape
    divides an axis at a place that no factor of its length reaches.
    """
    readers = consumers(last.outputs[0])
    if last.op_type not in MOVES or (_is_inner(last) and readers[0].op_type in MOVES):
        return None
    ops = [last]
    while (before := ops[-1].x.op) is not None and before.op_type in MOVES and _is_inner(before):
        ops.append(before)
    source = ops[-1].x
    shapes = [static_shape(v) for v in (source, *(op.outputs[0] for op in ops))]
    if len(ops) == 1 or constant(source) is not None or any(shape is None or 0 in shape for shape in shapes):
        return None
    digits = [(math.prod(source.shape), 1)]
    for op in (op for op in reversed(ops) if op.op_type == "transpose"):
        if (moved := _transposed(digits, tuple(op.x.shape), permutation(op))) is None:
            return None
        digits = moved
    return MovesInARow(source, tuple(ops), tuple(_turns(digits)))


def _is_inner(op: Operation) -> bool:
    """Is the result read by one op alone?"""
    return len(consumers(op.outputs[0])) == 1 and not is_output(op.outputs[0])


def _transposed(digits: list[Digit], shape: tuple[int, ...], perm: list[int]) -> list[Digit] | None:
    """Transpose a value of a shape; None if its axes do not divide the digits."""
    remaining, axes = digits[::-1], list[list[Digit]]()
    for length in shape:
        axis = list[Digit]()
        while length > 1:
            size, step = remaining.pop()
            if size > length and size % length == 0:
                rest = size // length
                remaining.append((rest, step))
                size, step = length, step * rest
            if length % size:
                return None
            axis.append((size, step))
            length //= size
        axes.append(axis)
    return _merged([digit for axis in perm for digit in axes[axis]])


def _merged(digits: list[Digit]) -> list[Digit]:
    """Join neighbours that are neighbours in the source too."""
    merged = digits[:1]
    for size, step in digits[1:]:
        last_size, last_step = merged[-1]
        if last_step == size * step:
            merged[-1] = (last_size * size, step)
        else:
            merged.append((size, step))
    return merged


def _turns(digits: list[Digit]) -> Iterator[Turn]:
    """Yield transposes of at most `MOST_AXES` axes that put digits in their order.

    Of more digits, the first that is out of place moves to its place, past those before it, in a transpose of
    its own. Digits that are then neighbours for good count as one.
    """
    while len(digits) > 1:
        sources = sorted(digits, key=lambda digit: -digit[1])
        order = [sources.index(digit) for digit in digits]
        if len(digits) <= MOST_AXES:
            yield tuple(size for size, _ in sources), tuple(order)
            return
        at = next(n for n, origin in enumerate(order) if origin != n)
        origin = order[at]
        blocks = (sources[:at], sources[at:origin], [sources[origin]], sources[origin + 1 :])
        kept = [n for n in range(4) if blocks[n]]
        swapped = [n for n in (0, 2, 1, 3) if blocks[n]]
        shape = tuple(math.prod(size for size, _ in blocks[n]) for n in kept)
        yield shape, tuple(kept.index(n) for n in swapped)
        now = _numbered([size for n in swapped for size, _ in blocks[n]])
        place = dict(zip((digit for n in swapped for digit in blocks[n]), now, strict=True))
        digits = _merged([place[digit] for digit in digits])


def _numbered(sizes: list[int]) -> list[Digit]:
    """Return digits of some lengths, one after the other in the source."""
    return [(size, math.prod(sizes[n + 1 :])) for n, size in enumerate(sizes)]


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


class Cut(NamedTuple):
    """What a slice takes of one axis: `size` elements from `base + shift` on."""

    base: Var | None
    """The computed part of the start; None for 0."""
    shift: int
    size: int
    single: bool
    """Is the axis dropped?"""


def computed_cuts(op: Operation) -> list[Cut] | Refusal:
    """Return what a `slice_by_index` with computed ends takes of each axis; or why its size is not constant."""
    if (shape := static_shape(op.x)) is None:
        return Refusal(f"%{op.x.name} has the symbolic shape {tuple(op.x.shape)}", op)
    if any(stride != 1 for stride in each_axis(op, "stride", 1)):
        return Refusal("the slice has strides", op)
    if any(constant(ends) is None and not _joined(ends) for ends in (op.begin, op.end)):
        return Refusal("the ends are not computed axis by axis", op)
    cuts = []
    for axis, length in enumerate(shape):
        if isinstance(cut := _computed_cut(op, axis, length), Refusal):
            return cut
        cuts.append(cut)
    return cuts


def _computed_cut(op: Operation, axis: int, length: int) -> Cut | Refusal:
    """Return what a slice takes of one axis."""
    from_start, to_end, single = (
        each_axis(op, f"{name}_mask", False)[axis] for name in ("begin", "end", "squeeze")
    )
    base, shift = (None, 0) if from_start else _end_of(op.begin, axis, length)
    end_base, end = (None, length) if to_end else _end_of(op.end, axis, length)
    if base is not end_base and not single:
        return Refusal(f"the ends of axis {axis} are not a constant distance apart", op)
    size = 1 if single else end - shift
    if not 0 < size <= length:
        return Refusal(f"{size} elements are taken of axis {axis}, which has {length}", op)
    return Cut(base, shift, size, single)


def _end_of(ends: Var, axis: int, length: int) -> tuple[Var | None, int]:
    """Return the end of one axis as a computed number, None for 0, and a constant to add."""
    if (value := constant(ends)) is not None:
        place = int(np.ravel(value)[axis])
        return None, place + length if place < 0 else place
    var, shift = _joined(ends)[axis], 0
    while number(var) is None and var.op is not None and var.op.op_type in {"add", "sub"}:
        inner, term = (var.op.x, var.op.y) if number(var.op.x) is None else (var.op.y, var.op.x)
        if (by := number(term)) is None or (var.op.op_type == "sub" and term is var.op.x):
            break
        var, shift = inner, shift + int(by if var.op.op_type == "add" else -by)
    if number(var) is None:
        return var, shift
    place = int(number(var) or 0) + shift
    return None, place + length if place < 0 else place


def _joined(ends: Var) -> list[Var]:
    """Return the number of each axis that computed ends are joined of; [] where they are made otherwise."""
    values = list(ends.op.values) if ends.op is not None and ends.op.op_type == "concat" else [ends]
    return values if len(values) == ends.shape[0] else []
