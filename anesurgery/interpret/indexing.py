"""Ops that read or write at indices, gather and scatter; a negative index counts from the end."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from anesurgery.interpret.table import Unsupported, impl

Tensor = torch.Tensor

COMBINE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "mul": torch.mul,
    "min": torch.minimum,
    "max": torch.maximum,
    "sub": torch.sub,
    "div": torch.div,
}
"""How a scatter combines an element with its update, besides "update" and "add"."""


def _positive(indices: Any, length: int) -> Tensor:
    index = torch.as_tensor(indices).long()
    return torch.where(index < 0, index + length, index)


@impl("gather", moves=True)
def gather(
    x: Tensor, indices: Any, axis: int = 0, batch_dims: int = 0, validate_indices: bool = False
) -> Tensor:
    """Slices of x along an axis, in the order and shape of the indices."""
    axis, batch = int(axis) % x.ndim, int(batch_dims)
    index = _positive(indices, x.shape[axis])
    if batch == 0:
        taken = x.index_select(axis, index.reshape(-1))
        return taken.reshape((*x.shape[:axis], *index.shape, *x.shape[axis + 1 :]))
    lead = x.shape[:batch]
    flat_x = x.reshape(-1, *x.shape[batch:])
    flat_index = index.reshape(flat_x.shape[0], *index.shape[batch:])
    rows = [gather(a, b, axis - batch) for a, b in zip(flat_x, flat_index, strict=True)]
    return torch.stack(rows).reshape(*lead, *rows[0].shape)


@impl("gather_along_axis", moves=True)
def gather_along_axis(
    x: Tensor, indices: Any, axis: int = 0, validate_indices: bool = False
) -> Tensor:
    """For each place of the indices, the element of x at that index along one axis."""
    return torch.gather(x, int(axis), _positive(indices, x.shape[int(axis)]))


@impl("gather_nd", moves=True)
def gather_nd(
    x: Tensor, indices: Any, batch_dims: int = 0, validate_indices: bool = False
) -> Tensor:
    """Elements or slices of x at the coordinates that the last axis of the indices holds."""
    index, batch = torch.as_tensor(indices).long(), int(batch_dims)
    if batch:
        rows = [gather_nd(a, b, batch - 1) for a, b in zip(x, index, strict=True)]
        return torch.stack(rows)
    parts = [_positive(index[..., i], x.shape[i]) for i in range(index.shape[-1])]
    return x[tuple(parts)]


def _combine(old: Tensor, at: tuple[Any, ...], new: Tensor, mode: str) -> Tensor:
    """Write `new` at some places of a copy of `old`."""
    made = old.clone()
    if mode in ("update", "add"):
        return made.index_put_(at, new.to(old.dtype), accumulate=mode == "add")
    if mode not in COMBINE:
        raise Unsupported(f"scatter mode {mode!r} is not known")
    for place in torch.ones_like(at[0], dtype=torch.bool).nonzero():
        here = tuple(a[tuple(place)] for a in at)
        made[here] = COMBINE[mode](made[here], new[tuple(place)].to(old.dtype))
    return made


@impl("scatter")
def scatter(
    data: Tensor, indices: Tensor, updates: Tensor, axis: int = 0, mode: str = "add",
    validate_indices: bool = False,
) -> Tensor:  # fmt: skip
    """Data with slices along an axis combined with the updates."""
    axis = int(axis) % data.ndim
    index = _positive(indices, data.shape[axis])
    moved = data.movedim(axis, 0)
    flat = index.reshape(-1)
    rest = [*range(axis), *range(axis + index.ndim, updates.ndim)]
    new = updates.permute(*range(axis, axis + index.ndim), *rest).reshape(
        flat.numel(), *moved.shape[1:]
    )
    return _combine(moved, (flat,), new, mode).movedim(0, axis)


@impl("scatter_along_axis")
def scatter_along_axis(
    data: Tensor, indices: Tensor, updates: Tensor, axis: int = 0, mode: str = "add",
    validate_indices: bool = False,
) -> Tensor:  # fmt: skip
    """Data with the element at each index along one axis combined with the update there."""
    axis = int(axis) % data.ndim
    index = _positive(indices, data.shape[axis])
    grid = list(torch.meshgrid(*(torch.arange(n) for n in index.shape), indexing="ij"))
    grid[axis] = index
    return _combine(data, tuple(grid), updates, mode)


@impl("scatter_nd")
def scatter_nd(
    data: Tensor,
    indices: Tensor,
    updates: Tensor,
    mode: str = "add",
    validate_indices: bool = False,
) -> Tensor:
    """Data combined with the updates at the coordinates that the last axis of the indices holds."""
    at = tuple(_positive(indices[..., i], data.shape[i]) for i in range(indices.shape[-1]))
    return _combine(data, at, updates, mode)
