"""Lower ops that read or write at indices: gather and scatter.

A negative index counts from the end in MIL up to iOS 16, and is undefined from iOS 17 on. Core AI's gathers and
scatters count it from the end, too (seen in the runtime of coreai-core on Linux); `slice_update` and sums of
coordinates do not, so `from_front` comes before them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from anesurgery.coreai.lowerings import lowers
from anesurgery.coreai.toolkit import ops
from anesurgery.coreai.values import Value, attribute, call, concat, where
from anesurgery.coreai.values import indices as as_indices


def take(x: Value, index: Value, axis: int) -> Value:
    """Take slices of x along an axis, from 0 on; the axes of the index replace it."""
    others = [a for a in range(x.ndim) if a != axis]
    n = index.ndim
    y = call("gather_nd", x.permute([axis, *others]), index.expand([n]))
    # x (A, B, C), axis 1, index (I, J): y is (I, J, A, C), and the result (A, I, J, C)
    return y.permute([*range(n, n + axis), *range(n), *range(n + axis, y.ndim)])


def _batch_coordinates(shape: Sequence[int], batch: int) -> list[Value]:
    """Return the position of each element of a shape along each of the first axes, as Values (*shape, 1)."""
    grids = np.meshgrid(*map(np.arange, shape), indexing="ij")
    return [as_indices(grid[..., None]) for grid in grids[:batch]]


def from_front(index: Value, lengths: Value | int | Sequence[int]) -> Value:
    """Return indices that count from the first element; `lengths` are those of the axes that they index."""
    return where(index < 0, index + as_indices(lengths), index)


@lowers("gather")
def gather(x: Value, indices: Value, axis: int = 0, batch_dims: int = 0) -> Value:
    """Write a gather; its shape is x.shape[:axis] + indices.shape[batch_dims:] + x.shape[axis + 1:]."""
    axis, batch, index = axis % x.ndim, batch_dims, indices.long()
    if not batch:
        return take(x, index, axis)
    n, between = index.ndim, axis - batch
    others = [a for a in range(batch, x.ndim) if a != axis]
    moved = x.permute([*range(batch), axis, *others])
    coordinates = concat([*_batch_coordinates(index.fixed_lengths(), batch), index.expand([n])], n)
    y = call("gather_nd", moved, coordinates)
    # x (N, A, B), axis 2, batch 1, index (N, I): moved is (N, B, A), y (N, I, A), and the result (N, A, I)
    return y.permute([*range(batch), *range(n, n + between), *range(batch, n), *range(n + between, y.ndim)])


@lowers("gather_nd")
def gather_nd(x: Value, indices: Value, batch_dims: int = 0) -> Value:
    """Write a gather at the coordinates in the last axis of the indices."""
    index = indices.long()
    if batch_dims:
        coordinates = _batch_coordinates(index.fixed_lengths()[:-1], batch_dims)
        index = concat([*coordinates, index], index.ndim - 1)
    return call("gather_nd", x, index)


@lowers("gather_along_axis")
def _gather_along_axis(x: Value, indices: Value, axis: int = 0) -> Value:
    return Value(ops.gather_along_axis(x.node, indices.long().node, axis % x.ndim))


@lowers("reverse_sequence")
def reverse_sequence(x: Value, lengths: Value, seq_axis: int = 0, batch_axis: int = 0) -> Value:
    """Reverse the first `lengths[i]` elements of one axis, for each i of another, by a gather."""
    shape, along, batch = x.fixed_lengths(), seq_axis % x.ndim, batch_axis % x.ndim
    length = lengths.cast("int32").reshape([-1 if a == batch else 1 for a in range(x.ndim)])
    place = as_indices(np.arange(shape[along]).reshape([-1 if a == along else 1 for a in range(x.ndim)]))
    return _gather_along_axis(x, where(place < length, length - 1 - place, place).broadcast(shape), along)


@lowers("scatter_along_axis")
def _scatter_along_axis(data: Value, indices: Value, updates: Value, axis: int = 0, mode: str = "add") -> Value:
    nodes = (data.node, indices.long().node, updates.node)
    how = attribute("scatter_mode", mode)
    return Value(ops.scatter_along_axis(data.node.type, *nodes, axis % data.ndim, scatter_mode=how))


COMBINE: dict[str, Callable[[Value, Value], Value]] = {
    "update": lambda old, new: new,
    "add": Value.__add__,
    "sub": Value.__sub__,
    "mul": Value.__mul__,
    "div": Value.__truediv__,
    "max": Value.maximum,
    "min": Value.minimum,
}
"""Mode of a scatter -> the function that combines an old and a new element."""


def replace_slice(data: Value, at: Value, row: Value, axis: int = 0) -> Value:
    """Replace one slice along an axis, at a computed position from 0 on."""
    begin, end = [as_indices([0]) for _ in row.shape], [as_indices([length]) for length in row.shape]
    begin[axis] = at.reshape([1])
    end[axis] = begin[axis] + 1
    places = (concat(begin, 0), concat(end, 0), as_indices([1] * data.ndim))
    return call("slice_update", data, *places, row).refined(data.shape)


@lowers("scatter")
def scatter(data: Value, indices: Value, updates: Value, axis: int = 0, mode: str = "add") -> Value:
    """Write a scatter of slices along an axis.

    A single slice is written as a slice update: Apple's scatter in a loop was seen to end the process.
    """
    shape, axis = data.fixed_lengths(), axis % data.ndim
    count = math.prod(indices.fixed_lengths())
    if count == 1:
        at = from_front(indices.long().reshape([1]), shape[axis])
        new = updates.reshape([*shape[:axis], 1, *shape[axis + 1 :]])
        return replace_slice(data, at, COMBINE[mode](take(data, at, axis), new), axis)
    spread = [*shape[:axis], count, *shape[axis + 1 :]]
    index = indices.long().reshape([-1 if a == axis else 1 for a in range(len(shape))])
    return _scatter_along_axis(data, index.broadcast(spread), updates.reshape(spread), axis, mode)


@lowers("scatter_nd")
def scatter_nd(data: Value, indices: Value, updates: Value, mode: str = "add") -> Value:
    """Write a scatter at coordinates: the indexed axes are merged into one."""
    shape, depth = data.fixed_lengths(), indices.length(-1)
    index = indices.long()
    if mode == "update":
        return call("scatter_nd", data, index, updates)
    strides = [math.prod(shape[i + 1 : depth]) for i in range(depth)]  # shape (4, 5, 6), depth 2: [5, 1]
    row = (from_front(index, shape[:depth]) * as_indices(strides)).reduce("sum", [index.ndim - 1])
    rows = data.reshape([math.prod(shape[:depth]), *shape[depth:]])
    new_rows = updates.reshape([math.prod(index.fixed_lengths()[:-1]), *shape[depth:]])
    return scatter(rows, row.reshape([new_rows.shape[0]]), new_rows, 0, mode).reshape(shape)
