"""Palettes: tables of numbers, or of vectors, and the indices that round the rows of a weight to them.

One table serves the whole weight, or each group of output channels has its own ("palette4-group-16"). Entries
are found by k-means, in which a number counts by the mean square of the input that it meets. An entry may be a
vector: the numbers of several output channels that meet the same input ("palette6-vector-2").
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch

from anesurgery.compressing.grids import EVERY
from anesurgery.compressing.second_order import SLAB
from anesurgery.compressing.weight_forms import IOS18, WeightForm
from anesurgery.files.sub_byte import pack
from anesurgery.mil import Array, types
from anesurgery.regions.clusters import (
    MOST_ROWS,
    WeightedVectors,
    distinct_with_weights,
    merged_by_fp16,
    nearest,
    weighted,
)
from anesurgery.regions.compressed_weights import Form

MOST_PRODUCTS = 10**9
"""The most multiplications for the curvature when a table is refitted; for larger weights it comes from every
n-th row, which is enough for a mean. The gradient comes from all rows."""
TOGETHER = 16
"""Rows whose curvature is computed together. It changes time and memory, not the result."""
FEW = 32
"""In tables with fewer entries all are compared with each value. It changes the time, not the result."""


@dataclass(frozen=True)
class TableGrid:
    """A grid of table entries."""

    entries: Array
    """[tables, entries, width], in the type that is stored; sorted where the width is 1."""
    tables: Array
    """[groups, rows]: the number of each row's table."""
    axis: int
    """The axis of the weight along which the output channels lie."""
    rank: int
    """The rank of the weight."""

    @cached_property
    def _single_table(self) -> tuple[Array, Array] | None:
        """The entries [entries] and their midpoints, in fp32; None for several tables, or for vectors."""
        if self.entries.shape[0] > 1 or self.width > 1:
            return None
        entries = self.entries[0, :, 0].astype(np.float32)
        return entries, (entries[1:] + entries[:-1]) / 2

    @property
    def width(self) -> int:
        """The output channels that an entry holds."""
        return int(self.entries.shape[2])

    @property
    def bits(self) -> int:
        """The bits of an index: 4 for 16 entries."""
        return int(self.entries.shape[1]).bit_length() - 1

    def codes(self, values: Array, group: int) -> Array:
        """Return the index of the entry nearest to each value: [rows / width, columns] in int16."""
        codes = np.empty((len(values) // self.width, values.shape[1]), np.int16)
        for start in range(0, len(values), SLAB):
            row_numbers = np.arange(start, min(start + SLAB, len(values)))
            slab = self.select_rows(row_numbers)._nearest_codes(values[row_numbers], group)
            codes[start // self.width : (start + SLAB) // self.width] = slab
        return codes

    def _nearest_codes(self, values: Array, group: int) -> Array:
        """Return what `codes` does, for all rows at once."""
        entries = self.entries.astype(np.float64)
        if self.width > 1:
            vectors = _split_vectors(values, self.width)
            flat = vectors.reshape(-1, self.width)
            return nearest(flat, entries[0]).reshape(vectors.shape[:2])
        if self._single_table is not None:
            return _nearest_entries(self._single_table[1], values)
        midpoints = ((entries[:, 1:, 0] + entries[:, :-1, 0]) / 2)[self.tables[group]]
        return np.stack([(column[:, None] > midpoints).sum(1) for column in values.T], axis=1)

    def _decode(self, codes: Array, group: int) -> Array:
        """Return the numbers [rows, columns] of indices [rows / width, columns]."""
        entries = self.entries.astype(np.float32)
        if self.width > 1:
            return entries[0][codes].transpose(0, 2, 1).reshape(-1, codes.shape[1])
        return entries[self.tables[group][:, None], codes, 0]

    def nearest(self, values: Array, group: int, at: int | slice = EVERY) -> Array:
        """Return the nearest entries: see `Grid`."""
        if self._single_table is not None:
            entries, midpoints = self._single_table
            return entries[_nearest_entries(midpoints, values)]
        columns = values.reshape(len(values), -1)
        return self._decode(self._nearest_codes(columns, group), group).reshape(values.shape)

    def select_rows(self, row_numbers: Array) -> TableGrid:
        """Return the tables of some rows: see `Grid`. Rows that share vectors must stay together."""
        return replace(self, tables=self.tables[:, row_numbers])

    def form(self, rows: Array, from_rows: Callable[[Array], Array], dtype: Any, version: int) -> Form:
        """Return the op with indices of the weight's shape, and the tables; before iOS 18 only one table."""
        codes = np.stack([self.codes(part, group) for group, part in enumerate(rows)])
        if version < IOS18:
            indices = from_rows(codes)
            packed, shape = (pack(indices.astype(np.uint8), self.bits), np.array(indices.shape, np.uint32))
            return Form(
                "constexpr_lut_to_dense", {"indices": packed, "lut": self.entries.ravel(), "shape": shape}
            )
        vector_axis = {}
        if self.width > 1:  # an index for each row, of which only the first of each vector is stored
            repeated = from_rows(np.repeat(codes, self.width, axis=1))
            indices = repeated.take(range(0, repeated.shape[self.axis], self.width), self.axis)
            vector_axis = {"vector_axis": np.int32(self.axis)}
        else:
            indices = from_rows(codes)
        inputs = {"indices": self._narrow_type(indices), "lut": self._ios18_tables, **vector_axis}
        return Form("constexpr_lut_to_dense", inputs)

    def _narrow_type(self, codes: Array) -> Array:
        """Return indices in the type of their bits, such as uint4."""
        kind = types.nptype_from_builtin(types.string_to_builtin(f"uint{self.bits}"))
        in_bytes = np.ascontiguousarray(codes.astype(np.uint8))
        return in_bytes if self.bits == 8 else in_bytes.view(kind)

    @property
    def _ios18_tables(self) -> Array:
        """The tables in the shape of iOS 18: [1, ..., tables, ..., 1, entries, width]."""
        along = [len(self.entries) if axis == self.axis else 1 for axis in range(self.rank)]
        return self.entries.reshape(*along, *self.entries.shape[1:])

    def bytes(self, elements: int) -> int:
        """Return the bytes of the indices of so many numbers, and of the tables."""
        return -(-elements * self.bits // (8 * self.width)) + self.entries.nbytes

    def refit(
        self, rows: Array, rounded: Array, hessians: Array, kept: Array | None = None
    ) -> tuple[TableGrid, Array]:
        """Move the entries of each table to the least squared error of all products, by one Newton step."""
        codes = [self.codes(part, group) for group, part in enumerate(rounded)]
        gradients = [
            np.asarray((a - b) @ h, np.float32) for a, b, h in zip(rows, rounded, hessians, strict=True)
        ]
        entries = self.entries.astype(np.float64)
        products = rows.size * rows.shape[-1] * entries.shape[1]
        stride = 1 + products // MOST_PRODUCTS
        for table in range(len(entries)):
            for lane in range(self.width):
                parts = list(self._rows_of(table, lane, codes, gradients, kept))
                entries[table, :, lane] += _newton_step(entries.shape[1], parts, hessians, stride)
        fitted = replace(self, entries=entries.astype(self.entries.dtype))
        rounded_rows = np.stack([fitted._decode(each, group) for group, each in enumerate(codes)])
        if self.width == 1:
            fitted = replace(fitted, entries=np.sort(fitted.entries, axis=1))
        return fitted, rounded_rows if kept is None else np.where(kept, rounded_rows, 0.0)

    def _rows_of(
        self, table: int, lane: int, codes: list[Array], gradients: list[Array], kept: Array | None
    ) -> Iterator[tuple[int, Array, Array]]:
        """Yield (group, codes, gradients) of the rows that read a table; of vectors, those of number `lane`.

        A code of -1 stands for a number that a mask makes 0.
        """
        for group, group_codes in enumerate(codes):
            members = np.flatnonzero(self.tables[group] == table)
            members = members[members % self.width == lane]
            indices = group_codes[members // self.width]
            if kept is not None:
                indices = np.where(kept[group][members], indices, -1)
            yield group, indices, gradients[group][members]


def _nearest_entries(midpoints: Array, values: Array) -> Array:
    """Return the index of the entry nearest to each value: the number of midpoints below it."""
    if len(midpoints) >= FEW:
        return np.searchsorted(midpoints, values)
    count = np.zeros(values.shape, np.uint8)
    for midpoint in midpoints:
        count += (values > midpoint).view(np.uint8)
    return count


def _split_vectors(values: Array, width: int) -> Array:
    """Return rows [rows, columns] as vectors [rows / width, columns, width]."""
    return values.reshape(-1, width, values.shape[1]).transpose(0, 2, 1)


def _newton_step(count: int, parts: list[tuple[int, Array, Array]], hessians: Array, stride: int) -> Array:
    """Return the changes [count] of a table's entries that reduce the squared error of the products most.

    Args:
        count: of the entries.
        parts: (group, codes [rows, columns], gradients of the error by each number [rows, columns]).
        hessians: of each group.
        stride: the curvature comes from every n-th row.
    """
    curvature, gradient = torch.zeros(count, count, dtype=torch.float64), np.zeros(count)
    for group, codes, number_gradients in parts:
        from_table = codes >= 0
        gradient += np.bincount(codes[from_table], number_gradients[from_table], count)
        hessian = torch.from_numpy(hessians[group]).float()
        sampled = torch.from_numpy(codes[::stride].astype(np.int64))
        factor = len(codes) / max(1, len(sampled))
        for some_codes in torch.split(sampled, TOGETHER):
            one_hot = (some_codes[:, None] == torch.arange(count)[:, None]).float()  # [rows, entries, columns]
            products = (one_hot.flatten(0, 1) @ hessian).reshape(one_hot.shape)
            curvature += factor * (products @ one_hot.transpose(1, 2)).sum(0).double()
    matrix = curvature.numpy()
    damping = np.diag(matrix).mean() * 1e-6 or 1.0  # 1 if all inputs were 0, and so is the matrix
    return np.asarray(np.linalg.solve(matrix + damping * np.eye(count), gradient))


def number_weights(rows: Array, hessians: Array) -> Array:
    """Return how much the squared error of each number counts: the sum of squares of its input.

    Args:
        rows: [groups, rows, columns], the shape of the result.
        hessians: [groups, columns, columns].
    """
    return np.broadcast_to(np.diagonal(hessians, axis1=1, axis2=2)[:, None], rows.shape)


def count_numbers(rows: Array, weights: Array, vector: int = 1) -> WeightedVectors:
    """Return the different numbers, or vectors, of rows with the sum of their weights, for k-means.

    Each gets a thousandth of the mean weight more, so that numbers whose input was always 0 count too.

    Args:
        rows: [groups, rows, columns], or without groups.
        weights: how much the squared error of each number counts, of that shape.
        vector: the number of rows whose numbers form a vector; they meet the same inputs.
    """
    least = 1e-3 * float(weights.mean()) or 1.0
    values, counts = (each.reshape(-1, rows.shape[-1]) for each in (rows, weights))
    if vector == 1 and values.size > MOST_ROWS:
        slabs = (slice(start, start + SLAB) for start in range(0, len(values), SLAB))
        pieces = ((values[slab].ravel(), counts[slab].ravel() + least) for slab in slabs)
        return merged_by_fp16(pieces, max(float(values.max()), -float(values.min())))
    vectors = _split_vectors(values, vector).reshape(-1, vector)
    return distinct_with_weights(vectors, _split_vectors(counts + least, vector).mean(axis=2).ravel())


def fit_tables(
    rows: Array, weights: Array, channels: Array, form: WeightForm, axis: int, rank: int, dtype: Any
) -> TableGrid:
    """Return the tables with the least weighted squared error of the rows.

    `weights` say how much the squared error of each number counts, and `form` gives the bits of an index, and
    the output channels of a table or of an entry. The other arguments are those of `fitting.FormFitter`.
    """
    tables = channels // form.group if form.group else np.zeros_like(channels)
    members = [tables == number for number in range(int(tables.max()) + 1)]
    numbers = [count_numbers(rows[each], weights[each], form.vector) for each in members]
    return build_tables(numbers, tables, form, axis, rank, dtype)


def build_tables(
    numbers: Sequence[WeightedVectors], tables: Array, form: WeightForm, axis: int, rank: int, dtype: Any
) -> TableGrid:
    """Return the best tables for the counted numbers of each; `tables` [groups, rows] is that of each row."""
    entries = np.stack([weighted(each, 2**form.bits) for each in numbers]).astype(dtype)
    return TableGrid(np.sort(entries, axis=1) if form.vector == 1 else entries, tables, axis, rank)
