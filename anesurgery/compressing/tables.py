"""Tables of numbers, or of vectors of numbers, that the rows of a weight are rounded to.

A table is for the whole weight, or for some of its output channels each. Its entries are found by k-means,
weighed by how much the inputs of the columns vary; an entry may hold the numbers of several output channels
that meet the same input.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from anesurgery.compressing.grids import EVERY
from anesurgery.compressing.weight_forms import IOS18, WeightForm
from anesurgery.files import sub_byte
from anesurgery.mil import Array, types
from anesurgery.regions.clusters import clustered, weighted
from anesurgery.regions.compressed_weights import Form

MOST_PRODUCTS = 4 * 10**9
"""Multiplications that fitting a table to a weight may take."""


@dataclass(frozen=True)
class Table:
    """The entries of the tables of a weight."""

    entries: Array
    """[tables, entries, width], as they are stored; sorted where the width is 1."""
    tables: Array
    """[groups, rows]: the table of each row."""
    axis: int
    """Of the weight, along which the output channels lie."""
    rank: int

    @property
    def width(self) -> int:
        """Output channels that an entry holds."""
        return int(self.entries.shape[2])

    @property
    def bits(self) -> int:
        """The bits of an index."""
        return int(self.entries.shape[1]).bit_length() - 1

    def codes(self, values: Array, group: int) -> Array:
        """[rows / width, columns]: the nearest entries of [rows, columns]."""
        entries = self.entries.astype(np.float64)
        if self.width > 1:
            vectors = _vectors(values, self.width)
            flat = vectors.reshape(-1, self.width)
            return clustered([flat], 0, entries[:1])[1][0].reshape(vectors.shape[:2])
        middles = (entries[:, 1:, 0] + entries[:, :-1, 0]) / 2
        if len(middles) == 1:
            return np.searchsorted(middles[0], values)
        of_rows = middles[self.tables[group]]
        return np.stack([(column[:, None] > of_rows).sum(1) for column in values.T], axis=1)

    def _numbers(self, codes: Array, group: int) -> Array:
        """The numbers that codes stand for, [rows, columns]."""
        entries = self.entries.astype(np.float64)
        if self.width > 1:
            return entries[0][codes].transpose(0, 2, 1).reshape(-1, codes.shape[1])
        return entries[self.tables[group][:, None], codes, 0]

    def nearest(self, values: Array, group: int, at: int | slice = EVERY) -> Array:
        """The nearest entries."""
        columns = values.reshape(len(values), -1)
        return self._numbers(self.codes(columns, group), group).reshape(values.shape)

    def form(self, rows: Array, back: Callable[[Array], Array], dtype: Any, version: int) -> Form:
        """Indices of the shape of the weight, and the tables; before iOS 18 one table."""
        codes = np.stack([self.codes(part, group) for group, part in enumerate(rows)])
        if version < IOS18:
            packed, shape = sub_byte.pack(back(codes).astype(np.uint8), self.bits), back(codes).shape
            inputs = {"indices": packed, "lut": self.entries.ravel(), "shape": np.array(shape, np.uint32)}
            return Form("constexpr_lut_to_dense", inputs)
        if self.width > 1:
            whole = back(np.repeat(codes, self.width, axis=1))
            held = whole.take(range(0, whole.shape[self.axis], self.width), self.axis)
            vector = {"vector_axis": np.int32(self.axis)}
        else:
            held, vector = back(codes), {}
        parts = {"indices": self.typed(held), "lut": self.stored, **vector}
        return Form("constexpr_lut_to_dense", parts)

    def typed(self, codes: Array) -> Array:
        """Indices as the type of so many bits."""
        kind = types.nptype_from_builtin(types.string_to_builtin(f"uint{self.bits}"))
        narrow = np.ascontiguousarray(codes.astype(np.uint8))
        return narrow if self.bits == 8 else narrow.view(kind)

    @property
    def stored(self) -> Array:
        """The tables in the shape of iOS 18."""
        along = [len(self.entries) if axis == self.axis else 1 for axis in range(self.rank)]
        return self.entries.reshape(*along, *self.entries.shape[1:])

    def bytes(self, elements: int) -> int:
        """Count the bytes of so many codes, and of the tables."""
        return -(-elements * self.bits // (8 * self.width)) + self.entries.nbytes

    def refitted(
        self, rows: Array, rounded: Array, hessians: Array, kept: Array | None = None
    ) -> tuple[Table, Array]:
        """The entries of each table by least squares over all products."""
        codes = [self.codes(part, group) for group, part in enumerate(rounded)]
        entries = self.entries.astype(np.float64)
        for table in range(len(entries)):
            for lane in range(self.width):
                some = list(self._of(table, lane, codes, rows, kept))
                entries[table, :, lane] = _fitted(entries[table, :, lane], some, hessians)
        fitted = replace(self, entries=entries.astype(self.entries.dtype))
        numbers = np.stack([fitted._numbers(each, group) for group, each in enumerate(codes)])
        if self.width == 1:
            fitted = replace(fitted, entries=np.sort(fitted.entries, axis=1))
        return fitted, numbers if kept is None else np.where(kept, numbers, 0.0)

    def _of(
        self, table: int, lane: int, codes: list[Array], rows: Array, kept: Array | None
    ) -> Iterator[tuple[int, Array, Array]]:
        """(group, codes, numbers) of the rows that a lane of a table makes; code -1 is none of its entries."""
        for group, each in enumerate(codes):
            mine = np.flatnonzero(self.tables[group] == table)
            mine = mine[mine % self.width == lane]
            indices = each[mine // self.width]
            yield (
                group,
                indices if kept is None else np.where(kept[group][mine], indices, -1),
                rows[group][mine],
            )


def _vectors(values: Array, width: int) -> Array:
    """[rows / width, columns, width] of [rows, columns]."""
    return values.reshape(-1, width, values.shape[1]).transpose(0, 2, 1)


def _fitted(old: Array, some: list[tuple[int, Array, Array]], hessians: Array) -> Array:
    """The entries that fit rows best."""
    count = len(old)
    elements = sum(part.size for _, _, part in some)
    every = 1 + int(elements * hessians.shape[-1] * count // MOST_PRODUCTS)
    matrix, wanted = np.zeros((count, count)), np.zeros(count)
    for group, codes, rows in some:
        for row_codes, row in zip(codes[::every], rows[::every], strict=True):
            held = (row_codes == np.arange(count)[:, None]).astype(np.float64)
            met = held @ hessians[group]
            matrix += met @ held.T
            wanted += met @ row
    steady = np.diag(matrix).mean() * 1e-6 or 1.0  # of a weight that reads zeros alone nothing is known
    return np.asarray(np.linalg.solve(matrix + steady * np.eye(count), wanted + steady * old))


def table(
    rows: Array, weights: Array, channels: Array, form: WeightForm, axis: int, rank: int, dtype: Any
) -> Table:
    """The entries with the least error.

    Args:
        rows: [groups, rows, columns].
        weights: of that shape: how much the square of each error counts.
        channels: [groups, rows]: the output channel of each row.
        form: the bits of an index, and the output channels of a table or of an entry.
        axis: of the weight along which the channels lie.
        rank: of the weight.
        dtype: of the entries.
    """
    tables = channels // form.group if form.group else np.zeros_like(channels)
    entries = []
    for number in range(int(tables.max()) + 1):
        held = tables == number
        values, counts = rows[held], weights[held]
        even = 1e-3 * float(counts.mean()) or 1.0
        vectors = _vectors(values, form.vector).reshape(-1, form.vector)
        each = _vectors(counts + even, form.vector).mean(axis=2).ravel()
        entries.append(weighted(vectors, each, 2**form.bits))
    stored = np.stack(entries).astype(dtype)
    return Table(np.sort(stored, axis=1) if form.vector == 1 else stored, tables, axis, rank)


__all__ = ["Table", "table"]
