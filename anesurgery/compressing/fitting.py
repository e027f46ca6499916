"""Fit a named form, such as "int4", to the rows of a weight, round the rows to it, and measure the error.

`FormFitter` gives the grid of numbers that a form can store, and `round_to_nearest` and `best_rounding` (GPTQ)
round all rows to it. `correcting` calls them for each weight, `balancing` and `assignment` to compare forms.
Rows are rounded in slabs, so that the memory for it does not grow with the weight. Arrays of rows have the
shape [groups, rows, columns] of `weight_rows`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import numpy as np

from anesurgery.compressing.grids import Grid, fit_scales
from anesurgery.compressing.second_order import SLAB, HessianFactor, round_columns, squared_error
from anesurgery.compressing.tables import build_tables, count_numbers, fit_tables, number_weights
from anesurgery.compressing.weight_forms import WeightForm, read_form
from anesurgery.compressing.zeros import MaskedGrid, PlainGrid, choose_zeros
from anesurgery.mil import Array
from anesurgery.regions.clusters import WeightedVectors

ROUNDS = 2
"""How often a weight is rounded. The second time, its scales or table entries are refitted to the result of the
first."""
MOST_ROWS = 4096
"""The rows that are multiplied by the Hessian together, to bound the memory."""


@dataclass(frozen=True)
class FormFitter:
    """The rows of one weight, to which grids are fitted."""

    rows: Array
    """[groups, rows, columns]."""
    hessians: Array
    """[groups, columns, columns], of the squared error of the products."""
    channels: Array
    """[groups, rows]: the output channel of each row."""
    axis: int
    """The axis of the weight along which the channels lie."""
    rank: int
    """The rank of the weight."""
    dtype: Any
    """The dtype of its numbers."""
    factors: Sequence[HessianFactor] | None = None
    """Those of the Hessians, if they were computed before; only forms with zeros need them."""

    @cached_property
    def _all_numbers(self) -> WeightedVectors:
        """The numbers of all rows, for the forms with one table for the whole weight."""
        return count_numbers(self.rows, number_weights(self.rows, self.hessians))

    def grid(self, name: str) -> Grid:
        """Return the grid of a form.

        Raises:
            SurgeryError: there is no such form.
        """
        form = read_form(name)
        if not form.zeros:
            return self._dense_grid(form, self.rows, None)
        factors = [HessianFactor.of(h) for h in self.hessians] if self.factors is None else self.factors
        kept, rows = choose_zeros(self.rows, factors, form.zeros)
        inner = self._dense_grid(form, rows, kept) if form.kind else PlainGrid(self.dtype)
        return MaskedGrid(inner, kept, form.stored)

    def _dense_grid(self, form: WeightForm, rows: Array, kept: Array | None) -> Grid:
        """Return the grid of codes without zeros; `kept` says which numbers of the rows it is fitted to."""
        if form.kind == "int":
            return fit_scales(rows, self.hessians, self.channels, self.axis, self.rank, form.bits, self.dtype)
        if kept is None and not form.group and form.vector == 1:
            one_table = np.zeros_like(self.channels)
            return build_tables([self._all_numbers], one_table, form, self.axis, self.rank, self.dtype)
        weights = number_weights(rows, self.hessians)
        if kept is not None:
            weights = weights * kept
        return fit_tables(rows, weights, self.channels, form, self.axis, self.rank, self.dtype)


def fit_form(
    name: str, rows: Array, hessians: Array, channels: Array, axis: int, rank: int, dtype: Any
) -> Grid:
    """Return the grid of one form, fitted to rows: see `FormFitter`."""
    return FormFitter(rows, hessians, channels, axis, rank, dtype).grid(name)


@dataclass(frozen=True)
class Rounding:
    """The rounded rows of a weight, and the squared error of their products."""

    error: float
    rows: Array
    """[groups, rows, columns], in fp32, which holds the numbers of every grid."""
    grid: Grid

    def or_better(self, other: Rounding) -> Rounding:
        """Return the one with the smaller error, itself if they are equal."""
        return other if other.error < self.error else self


def best_rounding(first: Rounding, rows: Array, factors: Sequence[HessianFactor], hessians: Array) -> Rounding:
    """Return the rounding with the least error: GPTQ with a grid, with that grid refitted to the result, ...

    Args:
        first: rounds to the nearest; its grid is the first that GPTQ uses.
        rows: [groups, rows, columns], the weight.
        factors: of the Hessian of each group.
        hessians: [groups, columns, columns].
    """
    best, grid = first, first.grid
    for _ in range(ROUNDS):
        corrected = round_with_feedback(rows, factors, grid)
        best = best.or_better(corrected)
        grid, numbers = grid.refit(rows, corrected.rows, hessians)
        best = best.or_better(Rounding(product_error(rows, numbers, hessians), numbers, grid))
    return best


def round_with_feedback(rows: Array, factors: Sequence[HessianFactor], grid: Grid) -> Rounding:
    """Round rows to a grid with GPTQ: later columns take up the error of each."""
    rounded, error = np.empty(rows.shape, np.float32), 0.0
    for group, slab in _slabs(rows):
        round_column = partial(_nearest_in_column, grid.select_rows(slab), group)
        result = round_columns(rows[group, slab], factors[group], round_column)
        rounded[group, slab] = result.rows
        error += result.error
    return Rounding(error, rounded, grid)


def round_to_nearest(rows: Array, grid: Grid, hessians: Array) -> Rounding:
    """Round each number to the nearest one of the grid."""
    rounded = np.empty(rows.shape, np.float32)
    for group, slab in _slabs(rows):
        rounded[group, slab] = grid.select_rows(slab).nearest(rows[group, slab], group)
    return Rounding(product_error(rows, rounded, hessians), rounded, grid)


def _slabs(rows: Array) -> Iterator[tuple[int, Array]]:
    """Yield (group, row numbers) for each part of the rows that is rounded at once."""
    for group in range(len(rows)):
        for slab in np.split(np.arange(rows.shape[1]), range(SLAB, rows.shape[1], SLAB)):
            yield group, slab


def _nearest_in_column(grid: Grid, group: int, column: Array, at: int) -> Array:
    """Call `Grid.nearest` with the arguments of a `RoundColumn`."""
    return grid.nearest(column, group, at)


def product_error(rows: Array, rounded: Array | None, hessians: Array) -> float:
    """Return the squared error of the products with rounded rows.

    Args:
        rows: [groups, rows, columns].
        rounded: of that shape; None for zeros, which gives the sum of the squares of all products.
        hessians: [groups, columns, columns].
    """
    total = 0.0
    for group, hessian in enumerate(hessians):
        for start in range(0, rows.shape[1], MOST_ROWS):
            difference = rows[group, start : start + MOST_ROWS]
            if rounded is not None:
                difference = difference - rounded[group, start : start + MOST_ROWS]
            total += squared_error(difference, hessian)
    return total
