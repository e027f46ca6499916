"""Fit a named form, such as "int4", to the rows of a weight, round the rows to it, and measure the error.

`FormFitter` gives the grid of numbers that a form can store, and `round_to_nearest` and `best_rounding` (GPTQ)
round all rows to it. `correcting` calls them for each weight, `balancing` and `assignment` to compare forms.
Rows are rounded in slabs, so that the memory for it does not grow with the weight. Arrays of rows have the
shape [groups, rows, columns] of `weight_rows`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, NamedTuple

import numpy as np
import torch

from anesurgery.compressing.grids import EVERY, Grid, ScaledGrid, fit_scales
from anesurgery.compressing.second_order import SLAB, HessianFactor, round_columns, squared_error
from anesurgery.compressing.tables import TableGrid, build_tables, count_numbers, fit_tables, number_weights
from anesurgery.compressing.weight_forms import IOS18, WeightForm, read_form
from anesurgery.mil import Array, types
from anesurgery.regions.clusters import WeightedVectors
from anesurgery.regions.compressed_weights import Form, Result
from anesurgery.regions.reencoding import as_stored, sparse_form

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


# -- zeros: "sparse-50-int8" stores the other numbers plainly, as integers, or in a palette ---------------
#
# The choice is made in blocks of columns: it takes the numbers that cost least if later columns take up their
# error, which is w^2 over the squared diagonal of the Hessian's factor (SparseGPT). Their errors are passed on
# to the later columns at once.


def choose_zeros(rows: Array, factors: Sequence[HessianFactor], zeros: int) -> tuple[Array, Array]:
    """Choose which numbers of a weight become 0.

    Args:
        rows: [groups, rows, columns].
        factors: of the Hessian of each group.
        zeros: per cent of the numbers, in each block of columns.

    Returns:
        A mask, True where a number is kept, and the rows with the errors of the zeros passed on, both of that
        shape.
    """
    kept, sparse = np.ones(rows.shape, np.bool_), np.empty_like(rows)
    for group, (part, factor) in enumerate(zip(rows, factors, strict=True)):
        mask = kept[group]
        # the mask is set block by block, each before its columns are read
        apply_mask, update_mask = partial(_mask_column, mask), partial(_mask_block, mask, zeros)
        sparse[group] = round_columns(part, factor, apply_mask, update_mask).rows
    return kept, sparse


def _mask_column(mask: Array, column: Array, at: int) -> Array:
    """Return column number `at` with the zeros of the mask."""
    return np.asarray(column * mask[:, at])


def _mask_block(mask: Array, zeros: int, numbers: torch.Tensor, columns: Array, diagonal: torch.Tensor) -> None:
    """Set the mask of a block of columns to False where a zero costs least; for `BeforeBlock`.

    Args:
        mask: [rows, all columns].
        zeros: per cent of the numbers.
        numbers: those of the block, [columns, rows].
        columns: [columns]: the number of each.
        diagonal: [columns]: of the Hessian's factor.
    """
    cost = np.asarray((numbers / diagonal[:, None]) ** 2)
    kept = np.ones(cost.size, np.bool_)
    kept[np.argsort(cost, axis=None, kind="stable")[: round(cost.size * zeros / 100)]] = False
    mask[:, columns] = kept.reshape(cost.shape).T


@dataclass(frozen=True)
class PlainGrid:
    """The numbers themselves: the grid of all numbers of a type."""

    dtype: Any

    def nearest(self, values: Array, group: int, at: int | slice = EVERY) -> Array:
        """Return the numbers rounded to the type."""
        return values.astype(self.dtype).astype(np.float64)

    def select_rows(self, row_numbers: Array) -> PlainGrid:
        """Return itself: all rows have the same grid."""
        return self

    def form(self, rows: Array, from_rows: Callable[[Array], Array], dtype: Any, version: int) -> Form:
        """Return a constant."""
        return Form("const", {"val": from_rows(rows).astype(dtype)})

    def bytes(self, elements: int) -> int:
        """Return the bytes of so many numbers."""
        return elements * np.dtype(self.dtype).itemsize

    def refit(
        self, rows: Array, rounded: Array, hessians: Array, kept: Array | None = None
    ) -> tuple[PlainGrid, Array]:
        """Return itself and the same numbers: it has nothing to fit."""
        return self, rounded


@dataclass(frozen=True)
class MaskedGrid:
    """Zeros where a mask has them, and elsewhere the numbers of another grid."""

    inner: Grid
    """The grid of the other numbers."""
    kept: Array
    """[groups, rows, columns]: True where a number is kept, False where it is 0."""
    stored: bool = False
    """Are the zeros stored like the other numbers ("zeros-50"), so that the mask is for fitting only?"""

    def nearest(self, values: Array, group: int, at: int | slice = EVERY) -> Array:
        """Return 0 where the mask has it, else the nearest numbers of the inner grid: see `Grid`."""
        return np.where(self.kept[group][:, at], self.inner.nearest(values, group, at), 0.0)

    def select_rows(self, row_numbers: Array) -> MaskedGrid:
        """Return the mask and the inner grid of some rows: see `Grid`."""
        return replace(self, inner=self.inner.select_rows(row_numbers), kept=self.kept[:, row_numbers])

    def form(self, rows: Array, from_rows: Callable[[Array], Array], dtype: Any, version: int) -> Form:
        """Return the op that reads a mask of bits, and the kept numbers in the form of the inner grid."""
        dense = self.inner.form(rows, from_rows, dtype, version)
        if self.stored:
            return dense
        mask = from_rows(self.kept)
        if isinstance(self.inner, PlainGrid):
            return sparse_form(dense.inputs["val"][mask], mask, packed=version < IOS18)
        codes = _sparse_codes_form(self.inner, dense, mask)
        return Form("constexpr_sparse_to_dense", {"nonzero_data": Result(codes, 1), "mask": Result(codes, 0)})

    def bytes(self, elements: int) -> int:
        """Return the bytes of so many numbers, zeros included: a bit for each, and the kept ones."""
        if self.stored:
            return self.inner.bytes(elements)
        return -(-elements // 8) + self.inner.bytes(round(elements * float(self.kept.mean())))

    def refit(
        self, rows: Array, rounded: Array, hessians: Array, kept: Array | None = None
    ) -> tuple[MaskedGrid, Array]:
        """Fit the inner grid to the numbers that its own mask keeps: see `Grid`."""
        inner, numbers = self.inner.refit(rows, rounded, hessians, self.kept)
        return replace(self, inner=inner), numbers


def _sparse_codes_form(grid: Grid, dense: Form, mask: Array) -> Form:
    """Return the op whose results are a mask and the decoded numbers there, from the op of all numbers."""
    names = SPARSE_OPS[type(grid)]
    codes = np.asarray(dense.inputs[names.codes])
    kept, bits = as_stored(codes[mask], codes.dtype), as_stored(mask, types.np_uint1_dtype)
    return Form(names.op, {names.mask: bits, names.kept: kept, names.values: dense.inputs[names.values]})


class _SparseOp(NamedTuple):
    """An op that decodes the codes where a mask is set, and the names of its inputs."""

    op: str
    mask: str
    kept: str
    """The codes where the mask is set."""
    codes: str
    """The input of the dense op that has all codes."""
    values: str
    """The scales or table, of the same name in both ops."""


SPARSE_OPS: dict[type, _SparseOp] = {
    ScaledGrid: _SparseOp(
        "constexpr_sparse_blockwise_shift_scale", "data_mask", "nonzero_data", "data", "scale"
    ),
    TableGrid: _SparseOp("constexpr_lut_to_sparse", "indices_mask", "indices_nonzero_data", "indices", "lut"),
}
"""The type of the inner grid -> its sparse op."""
