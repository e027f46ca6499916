"""The numbers that a stored weight can hold: what a grid of any form must do, and the grid of int4 and int8.

`fitting` builds the grid of a form for one weight and rounds the rows to it, and `Grid.form` gives the
op that decodes them. Here a grid is whole numbers times one scale for each output channel. A scale is chosen by
the error of the products, so it may clip a few large numbers. The grids of palettes are in `tables`, those with
zeros in `fitting`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np

from anesurgery.compressing.weight_forms import IOS18
from anesurgery.mil import Array, types
from anesurgery.regions.compressed_weights import Form

SHRUNK = tuple(1 - 0.04 * i for i in range(13))
"""The largest number that a scale represents, as shares of the largest one of the channel: 1 down to 0.52."""

EVERY = slice(None)
"""All columns, the default of `Grid.nearest`."""


class Grid(Protocol):
    """The numbers that the rows of one weight may be rounded to."""

    def nearest(self, values: Array, group: int, at: int | slice = EVERY) -> Array:
        """Return the nearest numbers of the grid.

        Args:
            values: [rows] of one column, or [rows, columns].
            group: the group of the rows.
            at: which column, or columns, these are.
        """

    def select_rows(self, row_numbers: Array) -> Grid:
        """Return the grid of some rows of each group, in the order of their numbers."""

    def form(self, rows: Array, from_rows: Callable[[Array], Array], dtype: Any, version: int) -> Form:
        """Return the op that decodes rows which this grid holds.

        Args:
            rows: [groups, rows, columns], numbers of the grid.
            from_rows: brings an array of that shape into the shape of the weight.
            dtype: of the decoded weight.
            version: the specification version, which decides the op.
        """

    def bytes(self, elements: int) -> int:
        """Return the bytes of the codes of so many numbers, with the scales or table entries."""

    def refit(
        self, rows: Array, rounded: Array, hessians: Array, kept: Array | None = None
    ) -> tuple[Grid, Array]:
        """Fit the scales or entries to rows whose codes are known.

        Args:
            rows: [groups, rows, columns], the weight.
            rounded: numbers of this grid, of that shape: they tell the codes.
            hessians: [groups, columns, columns].
            kept: False where a mask makes the number 0; all True by default.

        Returns:
            The grid with the scales or entries of the least squared error, and the same codes decoded with it.
        """


@dataclass(frozen=True)
class ScaledGrid:
    """Whole numbers of so many bits, times the scale of their output channel."""

    bits: int
    scales: Array
    """[channels], in the type that is stored."""
    channels: Array
    """[groups, rows]: the output channel of each row."""
    axis: int
    """The axis of the weight along which the channels lie."""
    rank: int

    def _row_scales(self, group: int, ndim: int = 1) -> Array:
        """Return the scale of each row of a group, [rows], or [rows, 1] for 2 axes."""
        scales = self.scales.astype(np.float64)[self.channels[group]]
        return scales if ndim == 1 else scales[:, None]

    def _codes(self, values: Array, group: int) -> Array:
        """Return the whole numbers nearest to values [rows] or [rows, columns] over their scales."""
        half = 2 ** (self.bits - 1)
        return np.clip(np.rint(values / self._row_scales(group, values.ndim)), -half, half - 1)

    def nearest(self, values: Array, group: int, at: int | slice = EVERY) -> Array:
        """Return the nearest whole numbers times the scales: see `Grid`."""
        return self._codes(values, group) * self._row_scales(group, values.ndim)

    def select_rows(self, row_numbers: Array) -> ScaledGrid:
        """Return the grid of some rows: see `Grid`."""
        return replace(self, channels=self.channels[:, row_numbers])

    def form(self, rows: Array, from_rows: Callable[[Array], Array], dtype: Any, version: int) -> Form:
        """Return the op with a scale for each channel; before iOS 18 it exists for 8 bits only."""
        codes = np.stack([self._codes(part, group) for group, part in enumerate(rows)])
        data = from_rows(codes).astype(np.int8)
        if version < IOS18:
            inputs = {"quantized_data": data, "zero_point": np.zeros(len(self.scales), np.int8)}
            return Form(
                "constexpr_affine_dequantize", {**inputs, "scale": self.scales, "axis": np.int32(self.axis)}
            )
        along = [-1 if axis == self.axis else 1 for axis in range(self.rank)]
        kind = types.nptype_from_builtin(types.string_to_builtin(f"int{self.bits}"))
        typed = data if self.bits == 8 else data.view(kind)
        return Form("constexpr_blockwise_shift_scale", {"data": typed, "scale": self.scales.reshape(along)})

    def bytes(self, elements: int) -> int:
        """Return the bytes of the codes of so many numbers, and of the scales."""
        return -(-elements * self.bits // 8) + self.scales.nbytes

    def refit(
        self, rows: Array, rounded: Array, hessians: Array, kept: Array | None = None
    ) -> tuple[ScaledGrid, Array]:
        """Fit each scale by least squares over the products. Zeros of a mask are codes of 0: `kept` is unused.

        The best factor for the scale of a channel is the sum of w H r over that of r H r, of its rows w and the
        rounded rows r.
        """
        numerators, denominators = np.zeros(len(self.scales)), np.zeros(len(self.scales))
        for group, (weight, numbers, hessian) in enumerate(zip(rows, rounded, hessians, strict=True)):
            products = numbers @ hessian
            np.add.at(numerators, self.channels[group], np.einsum("rc,rc->r", products, weight))
            np.add.at(denominators, self.channels[group], np.einsum("rc,rc->r", products, numbers))
        valid = (denominators > 0) & (numerators > 0)
        factors = np.where(valid, numerators / np.where(denominators > 0, denominators, 1), 1)
        scales = _normal_scales(self.scales.astype(np.float64) * factors, self.scales.dtype)
        grid = replace(self, scales=scales)
        numbers = [self._codes(part, group) * grid._row_scales(group, 2) for group, part in enumerate(rounded)]
        return grid, np.stack(numbers)


def _normal_scales(scales: Array, dtype: Any) -> Array:
    """Return scales in a type, none of them 0 or subnormal: the engine would read these as 0."""
    return np.maximum(scales, float(np.finfo(dtype).tiny)).astype(dtype)


def fit_scales(
    rows: Array, hessians: Array, channels: Array, axis: int, rank: int, bits: int, dtype: Any
) -> ScaledGrid:
    """Return the grid whose scales, out of `SHRUNK`, leave the least error when rounding to the nearest.

    The squared error of each number counts by the diagonal of its Hessian. `bits` are 4 or 8; the other
    arguments are those of `fitting.FormFitter`.
    """
    count = int(channels.max()) + 1
    largest = np.zeros(count)
    np.maximum.at(largest, channels.ravel(), np.abs(rows).max(axis=2).ravel())
    best_shares, least_errors = np.ones(count), np.full(count, np.inf)
    largest_code = 2 ** (bits - 1) - 1
    for share in SHRUNK:
        grid = ScaledGrid(bits, _normal_scales(largest * share / largest_code, dtype), channels, axis, rank)
        errors = np.zeros(count)
        for group, part in enumerate(rows):
            row_errors = (part - grid.nearest(part, group)) ** 2 @ np.diag(hessians[group])
            np.add.at(errors, channels[group], row_errors)
        better = errors < least_errors
        best_shares, least_errors = np.where(better, share, best_shares), np.where(better, errors, least_errors)
    return ScaledGrid(bits, _normal_scales(largest * best_shares / largest_code, dtype), channels, axis, rank)
