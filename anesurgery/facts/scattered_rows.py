"""What a scatter at constant places writes, as runs of rows along one axis."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from anesurgery.mil import Array, Operation, constant, static_shape


@dataclass(frozen=True)
class Piece:
    """Neighbouring rows, with the first row of each run of updates that goes there, in order."""

    start: int
    length: int
    updates: tuple[int, ...]


@dataclass(frozen=True)
class Rows:
    """A scatter along one axis: the shapes in which data and updates are seen, and where the updates go."""

    axis: int
    data: tuple[int, ...]
    updates: tuple[int, ...]
    places: Array

    def pieces(self, mode: str) -> list[Piece]:
        """The rows, as few runs as possible."""
        count = self.data[self.axis]
        at: list[list[int]] = [[] for _ in range(count)]
        for update, place in enumerate(self.places.tolist()):
            place += count if place < 0 else 0
            if 0 <= place < count:
                at[place] = [update] if mode == "update" else [*at[place], update]
        found: list[Piece] = []
        for row, updates in enumerate(at):
            last = found[-1] if found else None
            if last is not None and tuple(u + last.length for u in last.updates) == tuple(updates):
                found[-1] = Piece(last.start, last.length + 1, last.updates)
            else:
                found.append(Piece(row, 1, tuple(updates)))
        return found

    def folded(self) -> Rows:
        """Seen as rows that lie alike in each of several periods, where they do: a slice of an inner axis."""
        count, places, axis = self.data[self.axis], np.where(self.places < 0, -1, self.places), self.axis
        for size in (n for n in range(1, len(places)) if len(places) % n == 0):
            period, base = int(places[size] - places[0]), places[:size]
            times = len(places) // size
            starts = period * np.arange(times)[:, None]
            if period < 1 or times * period != count or base.min() < 0 or base.max() >= period:
                continue
            if (places.reshape(times, size) == base + starts).all():
                data = (*self.data[:axis], times, period, *self.data[axis + 1 :])
                updates = (*self.updates[:axis], times, size, *self.updates[axis + 1 :])
                return Rows(axis + 1, data, updates, base)
        return self


def scattered_rows(op: Operation, places: Array) -> Rows:
    """A scatter at constant places as one along a single axis."""
    data, updates = static_shape(op.data) or (), static_shape(op.updates) or ()
    if op.op_type == "scatter_nd":
        depth = places.shape[-1]
        rest = data[depth:]
        length = data[:depth]
        wrapped = np.where(places < 0, places + np.array(length), places).reshape(-1, depth)
        flat = np.zeros(len(wrapped), np.int64)
        for axis, size in enumerate(length):
            flat = flat * size + wrapped[:, axis]
        outside = ((wrapped < 0) | (wrapped >= np.array(length))).any(axis=1)
        count = math.prod(length)
        return Rows(0, (count, *rest), (len(flat), *rest), np.where(outside, count, flat))
    axis = int(constant(op.axis) or 0) % len(data)
    if op.op_type == "scatter":
        seen = (*data[:axis], places.size, *data[axis + 1 :])
        return Rows(axis, data, seen, places.ravel())
    line = np.moveaxis(places, axis, 0).reshape(places.shape[axis], -1)
    if (line == line[:, :1]).all():
        return Rows(axis, data, updates, line[:, 0])
    wrapped = np.where(places < 0, places + data[axis], places)
    grid: list[Any] = list(np.indices(places.shape))
    outside = (wrapped < 0) | (wrapped >= data[axis])
    grid[axis] = np.where(outside, 0, wrapped)
    flat = np.where(outside, math.prod(data), np.ravel_multi_index(tuple(grid), data))
    return Rows(0, (math.prod(data),), (flat.size,), flat.ravel())
