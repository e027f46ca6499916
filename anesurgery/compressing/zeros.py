"""Zeros in a weight, where they change its products least, and the other numbers in a form of their own.

Which numbers become 0 is decided in blocks of columns, by what a number costs if the columns after it take up
the error: its square over that of the diagonal of the factor (SparseGPT). What they lose is handed on at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch

from anesurgery.compressing.grids import EVERY, Grid, Scaled
from anesurgery.compressing.second_order import Shares, corrected
from anesurgery.compressing.tables import Table
from anesurgery.compressing.weight_forms import IOS18
from anesurgery.files import weights
from anesurgery.mil import Array, types
from anesurgery.regions.compressed_weights import Form, Result


def pruned(rows: Array, shares: Sequence[Shares], zeros: int) -> tuple[Array, Array]:
    """Let a share of the numbers be 0.

    Args:
        rows: [groups, rows, columns].
        shares: of the Hessian of each group.
        zeros: per cent, in each block of columns.

    Returns:
        Where numbers are kept, and the rows with what was handed on, both of that shape.
    """
    kept, left = np.ones(rows.shape, np.bool_), np.empty_like(rows)
    for group, (part, each) in enumerate(zip(rows, shares, strict=True)):
        mask = kept[group]
        left[group] = corrected(part, each, partial(_masked, mask), partial(_choose, mask, zeros)).rows
    return kept, left


def _masked(mask: Array, column: Array, at: int) -> Array:
    return np.asarray(column * mask[:, at])


def _choose(mask: Array, zeros: int, left: torch.Tensor, columns: Array, diagonal: torch.Tensor) -> None:
    """Zeros where they cost least in a block of columns."""
    cost = np.asarray((left / diagonal[:, None]) ** 2)
    chosen = np.ones(cost.size, np.bool_)
    chosen[np.argsort(cost, axis=None, kind="stable")[: round(cost.size * zeros / 100)]] = False
    mask[:, columns] = chosen.reshape(cost.shape).T


@dataclass(frozen=True)
class Plain:
    """The numbers themselves, in their type."""

    dtype: Any

    def nearest(self, values: Array, group: int, at: int | slice = EVERY) -> Array:
        """The numbers as the type holds them."""
        return values.astype(self.dtype).astype(np.float64)

    def of_rows(self, some: Array) -> Plain:
        """Of any rows."""
        return self

    def form(self, rows: Array, back: Callable[[Array], Array], dtype: Any, version: int) -> Form:
        """A constant."""
        return Form("const", {"val": back(rows).astype(dtype)})

    def bytes(self, elements: int) -> int:
        """Count the bytes of so many numbers."""
        return elements * np.dtype(self.dtype).itemsize

    def refitted(
        self, rows: Array, rounded: Array, hessians: Array, kept: Array | None = None
    ) -> tuple[Plain, Array]:
        """There is nothing to fit."""
        return self, rounded


@dataclass(frozen=True)
class Masked:
    """Zeros, and the others in a grid."""

    inner: Grid
    kept: Array
    """[groups, rows, columns]: is a number kept?"""
    stored: bool = False
    """Are the zeros stored like the others?"""

    def nearest(self, values: Array, group: int, at: int | slice = EVERY) -> Array:
        """The nearest numbers of the inner grid where they are kept."""
        return np.where(self.kept[group][:, at], self.inner.nearest(values, group, at), 0.0)

    def of_rows(self, some: Array) -> Masked:
        """The zeros and the inner grid of some rows."""
        return replace(self, inner=self.inner.of_rows(some), kept=self.kept[:, some])

    def form(self, rows: Array, back: Callable[[Array], Array], dtype: Any, version: int) -> Form:
        """A mask of bits, and what is kept in the form of the inner grid."""
        mask = back(self.kept)
        dense = self.inner.form(rows, back, dtype, version)
        if self.stored:
            return dense
        if isinstance(self.inner, Plain):
            return _sparse(dense.inputs["val"][mask], mask, version)
        inner = _joined(self.inner, dense, mask)
        return Form("constexpr_sparse_to_dense", {"nonzero_data": Result(inner, 1), "mask": Result(inner, 0)})

    def bytes(self, elements: int) -> int:
        """Of so many numbers, of which a share is kept, and a bit for each."""
        if self.stored:
            return self.inner.bytes(elements)
        return -(-elements // 8) + self.inner.bytes(round(elements * float(self.kept.mean())))

    def refitted(
        self, rows: Array, rounded: Array, hessians: Array, kept: Array | None = None
    ) -> tuple[Masked, Array]:
        """The inner grid by what is kept."""
        inner, numbers = self.inner.refitted(rows, rounded, hessians, self.kept)
        return replace(self, inner=inner), numbers


def _sparse(data: Array, mask: Array, version: int) -> Form:
    flags = mask.astype(np.uint8)
    if version >= IOS18:
        parts = {"nonzero_data": data, "mask": flags.view(types.np_uint1_dtype)}
    else:
        shape = np.array(mask.shape, np.uint32)
        parts = {"nonzero_data": data, "mask": weights.pack(flags, 1), "shape": shape}
    return Form("constexpr_sparse_to_dense", parts)


def _joined(grid: Grid, dense: Form, mask: Array) -> Form:
    """What makes a mask and the numbers where it is set, of the form of all numbers."""
    op, mask_name, kept_name, codes_name, values_name = JOINED[type(grid)]
    codes = dense.inputs[codes_name]
    kept = np.asarray(codes)[mask].view(codes.dtype)
    bits = mask.astype(np.uint8).view(types.np_uint1_dtype)
    return Form(op, {mask_name: bits, kept_name: kept, values_name: dense.inputs[values_name]})


JOINED: dict[type, tuple[str, str, str, str, str]] = {
    Scaled: ("constexpr_sparse_blockwise_shift_scale", "data_mask", "nonzero_data", "data", "scale"),
    Table: ("constexpr_lut_to_sparse", "indices_mask", "indices_nonzero_data", "indices", "lut"),
}
"""The grid of what is kept -> the op that makes a mask and the numbers, its inputs for the mask and for the
codes that are kept, and those of the dense form for all codes and for what they stand for."""

__all__ = ["Masked", "Plain", "pruned"]
