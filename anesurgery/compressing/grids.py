"""The numbers that a compressed form holds, fitted to the rows of a weight: whole numbers by scale, or a table.

A scale is chosen by the error of what it rounds, so that a few large numbers may be clipped; a table is found
by k-means. Both weigh each column by how much its input varies.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np

from anesurgery.errors import SurgeryError
from anesurgery.files import sub_byte
from anesurgery.mil import Array, types
from anesurgery.regions.clusters import weighted
from anesurgery.regions.compressed_weights import Form

IOS18 = 9
"""The specification version of forms with scales of any shape, 4-bit numbers and tables for groups."""
SHRUNK = tuple(1 - 0.04 * i for i in range(13))
"""Shares of the largest number that a scale reaches to: from all of it down to half."""

MOST_PRODUCTS = 4 * 10**9
"""Multiplications that fitting a table to a weight may take."""


class Grid(Protocol):
    """What the rows of a weight are rounded to."""

    def nearest(self, column: Array, group: int) -> Array:
        """The nearest numbers of the grid, for a column of the rows of a group."""

    def form(self, rows: Array, back: Callable[[Array], Array], dtype: Any, version: int) -> Form:
        """The op that decodes rows of the grid, for a specification version."""

    def bytes(self, elements: int) -> int:
        """Of so many codes with their scales or entries."""

    def refitted(self, rows: Array, made: Array, hessians: Array) -> tuple[Grid, Array]:
        """The scales or entries that fit the rows best, and the same codes with these."""


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

    def nearest(self, column: Array, group: int) -> Array:
        """The nearest whole numbers, times the scales."""
        scale = self._of(group)
        return self._codes(column, group) * (scale if column.ndim == 1 else scale[:, None])

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

    def refitted(self, rows: Array, made: Array, hessians: Array) -> tuple[Scaled, Array]:
        """Each scale by least squares."""
        over, under = np.zeros(len(self.scales)), np.zeros(len(self.scales))
        for group, (wanted, found, hessian) in enumerate(zip(rows, made, hessians, strict=True)):
            met = found @ hessian
            np.add.at(over, self.channels[group], np.einsum("rc,rc->r", met, wanted))
            np.add.at(under, self.channels[group], np.einsum("rc,rc->r", met, found))
        grown = np.where((under > 0) & (over > 0), over / np.where(under > 0, under, 1), 1)
        grid = replace(self, scales=_stored(self.scales.astype(np.float64) * grown, self.scales.dtype))
        codes = [self._codes(part, group) * grid._of(group)[:, None] for group, part in enumerate(made)]
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


@dataclass(frozen=True)
class Table:
    """The entries of one table."""

    entries: Array
    """Sorted, as they are stored."""
    rank: int

    def _codes(self, column: Array) -> Array:
        values = self.entries.astype(np.float64)
        return np.searchsorted((values[1:] + values[:-1]) / 2, column)

    def nearest(self, column: Array, group: int) -> Array:
        """The nearest entries."""
        return self.entries.astype(np.float64)[self._codes(column)]

    def form(self, rows: Array, back: Callable[[Array], Array], dtype: Any, version: int) -> Form:
        """One table for the tensor."""
        bits, codes = len(self.entries).bit_length() - 1, back(self._codes(rows)).astype(np.uint8)
        if version < IOS18:
            packed, shape = sub_byte.pack(codes, bits), np.array(codes.shape, np.uint32)
            inputs = {"indices": packed, "lut": self.entries, "shape": shape}
            return Form("constexpr_lut_to_dense", inputs)
        kind = types.nptype_from_builtin(types.string_to_builtin(f"uint{bits}"))
        table = self.entries.reshape(*[1] * self.rank, -1, 1)
        held = codes if bits == 8 else codes.view(kind)
        return Form("constexpr_lut_to_dense", {"indices": held, "lut": table})

    def bytes(self, elements: int) -> int:
        """Of so many codes, and the table."""
        return -(-elements * (len(self.entries).bit_length() - 1) // 8) + self.entries.nbytes

    def refitted(self, rows: Array, made: Array, hessians: Array) -> tuple[Table, Array]:
        """The entries by least squares over all products."""
        count, every = len(self.entries), _every(rows, len(self.entries))
        matrix, wanted = np.zeros((count, count)), np.zeros(count)
        for part, found, hessian in zip(rows, made, hessians, strict=True):
            for codes, row in zip(self._codes(found[::every]), part[::every], strict=True):
                held = (codes == np.arange(count)[:, None]).astype(np.float64)
                met = held @ hessian
                matrix += met @ held.T
                wanted += met @ row
        steady = np.diag(matrix).mean() * 1e-6 or 1.0  # of a weight that reads zeros alone nothing is known
        old = self.entries.astype(np.float64)
        solved = np.linalg.solve(matrix + steady * np.eye(count), wanted + steady * old)
        entries = solved.astype(self.entries.dtype)
        return replace(self, entries=np.sort(entries)), entries.astype(np.float64)[self._codes(made)]


def _every(rows: Array, entries: int) -> int:
    """Of so many rows one is looked at, so that fitting a table to a large weight takes seconds."""
    return 1 + int(rows.size * rows.shape[-1] * entries // MOST_PRODUCTS)


def table(rows: Array, hessians: Array, rank: int, bits: int, dtype: Any) -> Table:
    """The entries with the least error, weighed by the diagonal of the Hessians.

    Args:
        rows: [groups, rows, columns].
        hessians: [groups, columns, columns].
        rank: of the weight.
        bits: of an index.
        dtype: of the entries.
    """
    weights = np.stack(
        [np.broadcast_to(np.diag(h), part.shape) for h, part in zip(hessians, rows, strict=True)]
    )
    even = 1e-3 * float(weights.mean()) or 1.0
    found = weighted(rows.ravel(), weights.ravel() + even, 2**bits)
    return Table(np.sort(found.astype(dtype)), rank)


def grid_of(form: str, rows: Array, hessians: Array, channels: Array, axis: int, rank: int, dtype: Any) -> Grid:
    """The grid of a form such as "int4", "int8" or "palette3", fitted to rows.

    Raises:
        SurgeryError: there is no such form.
    """
    kind, bits = form.rstrip("0123456789"), form.lstrip("abcdefghijklmnopqrstuvwxyz")
    if kind == "int" and bits in ("4", "8"):
        return scaled(rows, hessians, channels, axis, rank, int(bits), dtype)
    if kind == "palette" and bits in ("1", "2", "3", "4", "6", "8"):
        return table(rows, hessians, rank, int(bits), dtype)
    raise SurgeryError(f"there is no form {form!r}; forms are int4, int8, palette1 to 4, palette6 and palette8")


__all__ = ["Grid", "Scaled", "Table", "grid_of", "scaled", "table"]
