"""Sparse weights: choose which numbers become 0, and store the others plainly, as integers, or in a palette.

`fitting` uses both steps for forms such as "sparse-50-int8". The choice is made in blocks of columns: it takes
the numbers that cost least if later columns take up their error, which is w^2 over the squared diagonal of the
Hessian's factor (SparseGPT). Their errors are passed on to the later columns at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch

from anesurgery.compressing.grids import EVERY, Grid, ScaledGrid
from anesurgery.compressing.second_order import HessianFactor, round_columns
from anesurgery.compressing.tables import TableGrid
from anesurgery.compressing.weight_forms import IOS18
from anesurgery.mil import Array, types
from anesurgery.regions.compressed_weights import Form, Result
from anesurgery.regions.reencoding import as_stored, sparse_form


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
