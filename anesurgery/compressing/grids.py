"""The numbers that a compressed form holds, fitted to the rows of a weight; here whole numbers times a scale.

A scale is chosen by the error of what it rounds, so that a few large numbers may be clipped. Each column is
weighed by how much its input varies.
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
"""Shares of the largest number that a scale reaches to: from all of it down to half."""

EVERY = slice(None)


class Grid(Protocol):
    """What the rows of a weight are rounded to."""

    def nearest(self, values: Array, group: int, at: int | slice = EVERY) -> Array:
        """The nearest numbers of the grid.

        Args:
            values: [rows] of a column of a group, or [rows, columns].
            group: whose rows they are.
            at: the column, or columns.
        """

    def of_rows(self, some: Array) -> Grid:
        """The same for some rows of each group, in the order of their numbers."""

    def form(self, rows: Array, back: Callable[[Array], Array], dtype: Any, version: int) -> Form:
        """The op that decodes rows of the grid, for a specification version."""

    def bytes(self, elements: int) -> int:
        """Of so many codes with their scales or entries."""

    def refitted(
        self, rows: Array, rounded: Array, hessians: Array, kept: Array | None = None
    ) -> tuple[Grid, Array]:
        """The scales or entries that fit the rows best, and the same codes with these.

        Args:
            rows: [groups, rows, columns].
            rounded: numbers of the grid, of that shape.
            hessians: [groups, columns, columns].
            kept: where numbers are no zeros of a mask; everywhere by default.
        """


@dataclass(frozen=True)
class Scaled:
    """Whole numbers times the scale of their output channel."""

    bits: int
    scales: Array
    """[channels], as they are stored."""
    channels: Array
    """[groups, rows]: the channel of each."""
    axis: int
    """Of the weight, along which the channels lie."""
    rank: int

    def _of(self, group: int) -> Array:
        return self.scales.astype(np.float64)[self.channels[group]]

    def _codes(self, column: Array, group: int) -> Array:
        half = 2 ** (self.bits - 1)
        scale = self._of(group)
        scale = scale if column.ndim == 1 else scale[:, None]
        return np.clip(np.rint(column / scale), -half, half - 1)

    def nearest(self, values: Array, group: int, at: int | slice = EVERY) -> Array:
        """The nearest whole numbers, times the scales."""
        scale = self._of(group)
        return self._codes(values, group) * (scale if values.ndim == 1 else scale[:, None])

    def of_rows(self, some: Array) -> Scaled:
        """The scales of some rows."""
        return replace(self, channels=self.channels[:, some])

    def form(self, rows: Array, back: Callable[[Array], Array], dtype: Any, version: int) -> Form:
        """A scale for each channel; iOS 16 has it for 8 bits only."""
        codes = np.stack([self._codes(part, group) for group, part in enumerate(rows)])
        data = back(codes).astype(np.int8)
        if version < IOS18:
            inputs = {"quantized_data": data, "zero_point": np.zeros(len(self.scales), np.int8)}
            return Form(
                "constexpr_affine_dequantize", {**inputs, "scale": self.scales, "axis": np.int32(self.axis)}
            )
        along = [-1 if axis == self.axis else 1 for axis in range(self.rank)]
        kind = types.nptype_from_builtin(types.string_to_builtin(f"int{self.bits}"))
        held = data if self.bits == 8 else data.view(kind)
        return Form("constexpr_blockwise_shift_scale", {"data": held, "scale": self.scales.reshape(along)})

    def bytes(self, elements: int) -> int:
        """Of so many codes, and the scales."""
        return -(-elements * self.bits // 8) + self.scales.nbytes

    def refitted(
        self, rows: Array, rounded: Array, hessians: Array, kept: Array | None = None
    ) -> tuple[Scaled, Array]:
        """Each scale by least squares; zeros of a mask are codes of 0."""
        over, under = np.zeros(len(self.scales)), np.zeros(len(self.scales))
        for group, (wanted, numbers, hessian) in enumerate(zip(rows, rounded, hessians, strict=True)):
            met = numbers @ hessian
            np.add.at(over, self.channels[group], np.einsum("rc,rc->r", met, wanted))
            np.add.at(under, self.channels[group], np.einsum("rc,rc->r", met, numbers))
        grown = np.where((under > 0) & (over > 0), over / np.where(under > 0, under, 1), 1)
        grid = replace(self, scales=_stored(self.scales.astype(np.float64) * grown, self.scales.dtype))
        codes = [self._codes(part, group) * grid._of(group)[:, None] for group, part in enumerate(rounded)]
        return grid, np.stack(codes)


def _stored(scales: Array, dtype: Any) -> Array:
    """Scales of a type; none is 0, nor subnormal, which the engine would read as 0."""
    return np.maximum(scales, float(np.finfo(dtype).tiny)).astype(dtype)


def scaled(
    rows: Array, hessians: Array, channels: Array, axis: int, rank: int, bits: int, dtype: Any
) -> Scaled:
    """Whole numbers whose scales make the least error, weighed by the diagonal of the Hessians.

    Args:
        rows: [groups, rows, columns].
        hessians: [groups, columns, columns].
        channels: [groups, rows].
        axis: of the weight along which the channels lie.
        rank: of the weight.
        bits: 4 or 8.
        dtype: of the scales.
    """
    count = int(channels.max()) + 1
    largest = np.zeros(count)
    np.maximum.at(largest, channels.ravel(), np.abs(rows).max(axis=2).ravel())
    best, least = np.ones(count), np.full(count, np.inf)
    span = 2 ** (bits - 1) - 1
    for share in SHRUNK:
        grid = Scaled(bits, _stored(largest * share / span, dtype), channels, axis, rank)
        error = np.zeros(count)
        for group, part in enumerate(rows):
            off = (part - grid.nearest(part, group)) ** 2 @ np.diag(hessians[group])
            np.add.at(error, channels[group], off)
        better = error < least
        best, least = np.where(better, share, best), np.where(better, error, least)
    return Scaled(bits, _stored(largest * best / span, dtype), channels, axis, rank)


__all__ = ["Grid", "Scaled", "scaled"]
