"""Fit a form to the rows of a weight: its grid, all groups rounded to it, and what their products lose.

Rows are rounded in slabs: what rounding takes in memory beside them does not grow with the weight.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import numpy as np

from anesurgery.compressing.grids import Grid, scaled
from anesurgery.compressing.second_order import SLAB, Shares, corrected, objective
from anesurgery.compressing.tables import numbers, of_numbers, table, weighed
from anesurgery.compressing.weight_forms import WeightForm, read_form
from anesurgery.compressing.zeros import Masked, Plain, pruned
from anesurgery.mil import Array
from anesurgery.regions.clusters import Totals


@dataclass(frozen=True)
class Fitting:
    """Rows, to which forms are fitted.

    Args:
        rows: [groups, rows, columns].
        hessians: [groups, columns, columns].
        channels: [groups, rows]: the output channel of each row.
        axis: of the weight along which the channels lie.
        rank: of the weight.
        dtype: of its numbers.
        shares: of the Hessians, where they are factored already; only zeros ask for them.
    """

    rows: Array
    hessians: Array
    channels: Array
    axis: int
    rank: int
    dtype: Any
    shares: Sequence[Shares] | None = None

    @cached_property
    def _numbers(self) -> Totals:
        """All numbers, which every table of the whole weight is of."""
        return numbers(self.rows, weighed(self.rows, self.hessians))

    def grid(self, name: str) -> Grid:
        """The grid of a form.

        Raises:
            SurgeryError: there is no such form.
        """
        form = read_form(name)
        if not form.zeros:
            return self._dense(form, self.rows, None)
        shares = [Shares.of(h) for h in self.hessians] if self.shares is None else self.shares
        kept, left = pruned(self.rows, shares, form.zeros)
        inner = self._dense(form, left, kept) if form.kind else Plain(self.dtype)
        return Masked(inner, kept, form.stored)

    def _dense(self, form: WeightForm, rows: Array, kept: Array | None) -> Grid:
        if form.kind == "int":
            return scaled(rows, self.hessians, self.channels, self.axis, self.rank, form.bits, self.dtype)
        if kept is None and not form.group and form.vector == 1:
            whole = np.zeros_like(self.channels)
            return of_numbers([self._numbers], whole, form, self.axis, self.rank, self.dtype)
        weights = weighed(rows, self.hessians) * (1 if kept is None else kept)
        return table(rows, weights, self.channels, form, self.axis, self.rank, self.dtype)


def grid_of(name: str, rows: Array, hessians: Array, channels: Array, axis: int, rank: int, dtype: Any) -> Grid:
    """The grid of one form: see `Fitting`."""
    return Fitting(rows, hessians, channels, axis, rank, dtype).grid(name)


__all__ = ["Fitting", "grid_of"]


ROUNDS = 2
"""The second begins with the scales or entries that fit the numbers of the first best."""
MOST_ROWS = 4096
"""Rows whose products are made together, which take memory beside those that are there."""


@dataclass(frozen=True)
class Rounding:
    """Rows of a grid, and how far their products are from those of the weight."""

    error: float
    rows: Array
    """In fp32, which holds the numbers of every grid."""
    grid: Grid

    def or_better(self, other: Rounding) -> Rounding:
        """Another one, where its error is less."""
        return other if other.error < self.error else self


def best(first: Rounding, rows: Array, shares: Sequence[Shares], hessians: Array) -> Rounding:
    """The rows with the least error: rounded by a grid, then by the one that fits what came out, ..."""
    least, grid = first, first.grid
    for _ in range(ROUNDS):
        after = handed_on(rows, shares, grid)
        least = least.or_better(after)
        grid, numbers = grid.refitted(rows, after.rows, hessians)
        least = least.or_better(Rounding(lost(rows, numbers, hessians), numbers, grid))
    return least


def handed_on(rows: Array, shares: Sequence[Shares], grid: Grid) -> Rounding:
    """The rows of all groups, corrected."""
    numbers, total = np.empty(rows.shape, np.float32), 0.0
    for group, some in _slabs(rows):
        of_rows = grid.of_rows(some)
        rounded = corrected(rows[group, some], shares[group], partial(_column, of_rows, group))
        numbers[group, some], total = rounded.rows, total + rounded.error
    return Rounding(total, numbers, grid)


def nearest(rows: Array, grid: Grid, hessians: Array) -> Rounding:
    """The rows of all groups, rounded to the nearest."""
    numbers = np.empty(rows.shape, np.float32)
    for group, some in _slabs(rows):
        numbers[group, some] = grid.of_rows(some).nearest(rows[group, some], group)
    return Rounding(lost(rows, numbers, hessians), numbers, grid)


def _slabs(rows: Array) -> Iterator[tuple[int, Array]]:
    """(group, numbers of its rows) of what is rounded together."""
    for group in range(len(rows)):
        yield from (
            (group, some) for some in np.split(np.arange(rows.shape[1]), range(SLAB, rows.shape[1], SLAB))
        )


def _column(grid: Grid, group: int, column: Array, at: int) -> Array:
    return grid.nearest(column, group, at)


def lost(rows: Array, other: Array | None, hessians: Array) -> float:
    """The squared error of the products of all rows where others take their place; all without."""
    total = 0.0
    for group, hessian in enumerate(hessians):
        for start in range(0, rows.shape[1], MOST_ROWS):
            part = rows[group, start : start + MOST_ROWS]
            total += objective(
                part if other is None else part - other[group, start : start + MOST_ROWS], hessian
            )
    return total
