"""Gathers and scatters.

Up to iOS 16 a negative index counts from the end. From iOS 17 on, which is where `validate_indices` exists, it
lies outside like one beyond the end. An index outside is an error if it is to be validated; otherwise the
result is undefined and the program goes on: a gather reads the nearest element, a scatter writes nothing.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from anesurgery.interpret.ops.computing import quotient
from anesurgery.interpret.table import Unsupported, impl

Tensor = torch.Tensor

REDUCE = {"mul": "prod", "min": "amin", "max": "amax"}
"""Mode of a scatter -> its name in torch."""


def _index(indices: Any, length: int, validate: bool | None) -> Tensor:
    """Return indices as int64; where `validate` is None, those that count from the end are made positive.

    Indices outside stay as they are.

    Raises:
        IndexError: validation is asked for, and an index is outside.
    """
    index = torch.as_tensor(indices).long()
    if validate is None:
        return torch.where(index < 0, index + length, index)
    if validate and bool(((index < 0) | (index >= length)).any()):
        raise IndexError(f"an index is outside [0, {length})")
    return index


def _clamped_index(indices: Any, length: int, validate: bool | None) -> Tensor:
    """Return indices, those outside replaced by the nearest inside."""
    return _index(indices, length, validate).clamp(0, max(length - 1, 0))


@impl("gather")
def gather(
    x: Tensor, indices: Any, axis: int = 0, batch_dims: int = 0, validate_indices: bool | None = None
) -> Tensor:
    """Return slices of x along an axis: x.shape[:axis] + indices.shape[batch_dims:] + x.shape[axis + 1:]."""
    axis, batch = int(axis) % x.ndim, int(batch_dims)
    length = x.shape[axis]
    index = _clamped_index(indices, length, validate_indices)
    shape = (*x.shape[:axis], *index.shape[batch:], *x.shape[axis + 1 :])
    if batch == 0:
        return x.index_select(axis, index.reshape(-1)).reshape(shape)
    # x (N, A, B, C), axis 2, batch 1, index (N, I): rows (N * B, A, C), taken (N, I, A, C) -> (N, A, I, C)
    batches, inner = math.prod(x.shape[:batch]), index.shape[batch:]
    rows = x.movedim(axis, batch).flatten(0, batch)
    first_rows = torch.arange(batches)[:, None] * length
    taken = rows.index_select(0, (index.reshape(batches, -1) + first_rows).reshape(-1))
    taken = taken.reshape(*x.shape[:batch], *inner, *rows.shape[1:])
    source = list(range(batch, batch + len(inner)))
    return taken.movedim(source, [a + axis - batch for a in source]).reshape(shape)


@impl("gather_along_axis")
def gather_along_axis(x: Tensor, indices: Any, axis: int = 0, validate_indices: bool | None = None) -> Tensor:
    """Return for each place of the indices the element of x at that index along one axis."""
    index = _clamped_index(indices, x.shape[int(axis)], validate_indices)
    return torch.gather(x, int(axis), index)


@impl("gather_nd")
def gather_nd(x: Tensor, indices: Any, batch_dims: int = 0, validate_indices: bool | None = None) -> Tensor:
    """Return elements or slices of x at the coordinates that the last axis of the indices holds."""
    index, batch = torch.as_tensor(indices), int(batch_dims)
    at = []
    for axis in range(batch):
        grid = [-1 if a == axis else 1 for a in range(index.ndim - 1)]
        at.append(torch.arange(x.shape[axis]).reshape(grid))
    for i in range(index.shape[-1]):
        at.append(_clamped_index(index[..., i], x.shape[batch + i], validate_indices))
    return x[tuple(at)] if at else x.expand(*index.shape[:-1], *x.shape)


def _combine(rows: Tensor, index: Tensor, new: Tensor, mode: str) -> Tensor:
    """Combine rows [n, width] with `new` [m, width] at `index` [m], in the order of `new`.

    Where an index is outside, nothing is combined.
    """
    valid = (index >= 0) & (index < rows.shape[0])
    index, new = index[valid], new[valid].to(rows.dtype)
    if mode in ("add", "sub"):
        return rows.index_add(0, index, new, alpha=1 if mode == "add" else -1)
    if mode == "update":
        return _update(rows, index, new)
    if mode in REDUCE:
        return rows.scatter_reduce(0, index[:, None].expand_as(new), new, REDUCE[mode])
    if mode == "div":
        return _divide(rows, index, new)
    raise Unsupported(f"scatter mode {mode!r} is not known")


def _update(rows: Tensor, index: Tensor, new: Tensor) -> Tensor:
    """Replace rows; the last update of a row wins."""
    last = torch.full((rows.shape[0],), -1).scatter_reduce(0, index, torch.arange(index.shape[0]), "amax")
    has_update = last >= 0
    updated = rows.clone()
    updated[has_update] = new[last[has_update]]
    return updated


def _divide(rows: Tensor, index: Tensor, new: Tensor) -> Tensor:
    """Divide rows once per update: by the first update of each row, then by the second of each, and so on."""
    order = torch.argsort(index, stable=True)
    counts = torch.bincount(index, minlength=rows.shape[0])
    start = torch.cumsum(counts, 0) - counts
    turn = torch.empty_like(index)
    turn[order] = torch.arange(index.shape[0]) - start[index[order]]
    divided = rows.clone()
    for n in range(int(counts.max()) if counts.numel() else 0):
        now = turn == n
        at = index[now]
        divided[at] = quotient(divided[at], new[now])
    return divided


@impl("scatter")
def scatter(
    data: Tensor,
    indices: Any,
    updates: Tensor,
    axis: int = 0,
    mode: str = "add",
    validate_indices: bool | None = None,
) -> Tensor:
    """Return data whose slices along an axis are combined with updates of shape [...axis, indices..., ...]."""
    axis = int(axis) % data.ndim
    index = _index(indices, data.shape[axis], validate_indices)
    # data (A, B), axis 1, index (I,): moved (B, A), updates (A, I) -> new (I, A)
    moved = data.movedim(axis, 0)
    new = updates.movedim(list(range(axis, axis + index.ndim)), list(range(index.ndim)))
    width = math.prod(moved.shape[1:])
    rows = moved.reshape(data.shape[axis], width)
    combined = _combine(rows, index.reshape(-1), new.reshape(index.numel(), width), mode)
    return combined.reshape(moved.shape).movedim(0, axis)


@impl("scatter_along_axis")
def scatter_along_axis(
    data: Tensor,
    indices: Any,
    updates: Tensor,
    axis: int = 0,
    mode: str = "add",
    validate_indices: bool | None = None,
) -> Tensor:
    """Return data whose element at each index along one axis is combined with the update there."""
    axis, length = int(axis) % data.ndim, data.shape[int(axis)]
    index = _index(indices, length, validate_indices).movedim(axis, -1)
    outside = (index < 0) | (index >= length)
    moved = data.movedim(axis, -1)
    lines = math.prod(moved.shape[:-1])
    # all elements lie in one row: the element i of line k has the index k * length + i
    flat = index.reshape(lines, index.shape[-1]) + torch.arange(lines)[:, None] * length
    flat = torch.where(outside.reshape(flat.shape), -1, flat)
    new = updates.movedim(axis, -1).reshape(-1, 1)
    combined = _combine(moved.reshape(-1, 1), flat.reshape(-1), new, mode)
    return combined.reshape(moved.shape).movedim(-1, axis)


@impl("scatter_nd")
def scatter_nd(
    data: Tensor, indices: Any, updates: Tensor, mode: str = "add", validate_indices: bool | None = None
) -> Tensor:
    """Return data combined with the updates at the coordinates that the last axis of the indices holds."""
    index = torch.as_tensor(indices)
    depth = index.shape[-1]
    count, width = math.prod(data.shape[:depth]), math.prod(data.shape[depth:])
    flat = torch.zeros(index.shape[:-1], dtype=torch.int64)
    outside = torch.zeros(index.shape[:-1], dtype=torch.bool)
    for i in range(depth):
        length = data.shape[i]
        place = _index(index[..., i], length, validate_indices)
        outside |= (place < 0) | (place >= length)
        flat = flat * length + place
    flat = torch.where(outside, -1, flat)
    new = updates.reshape(flat.numel(), width)
    return _combine(data.reshape(count, width), flat.reshape(-1), new, mode).reshape(data.shape)
