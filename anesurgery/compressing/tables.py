"""Tables of numbers, or of vectors of numbers, that the rows of a weight are rounded to.

A table is for the whole weight, or for some of its output channels each. Its entries are found by k-means,
weighed by how much the inputs of the columns vary; an entry may hold the numbers of several output channels
that meet the same input.
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
from anesurgery.files import weights
from anesurgery.mil import Array, types
from anesurgery.regions.clusters import MOST_ROWS, Totals, clustered, near, totals, weighted
from anesurgery.regions.compressed_weights import Form

MOST_PRODUCTS = 10**9
"""Multiplications that the curvature may take by which tables are fitted to a weight: of more rows it is no
other, and how far the products are off is found on all of them."""
TOGETHER = 16
"""Rows whose curvature is found together. A choice on which only times and memory depend."""
FEW = 32
"""Entries below which all are compared with each value; only times depend on it."""


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

    @cached_property
    def _one(self) -> tuple[Array, Array] | None:
        """The entries of a single table of numbers, and the middles between them, in fp32."""
        if self.entries.shape[0] > 1 or self.width > 1:
            return None
        entries = self.entries[0, :, 0].astype(np.float32)
        return entries, (entries[1:] + entries[:-1]) / 2

    @property
    def width(self) -> int:
        """Output channels that an entry holds."""
        return int(self.entries.shape[2])

    @property
    def bits(self) -> int:
        """The bits of an index."""
        return int(self.entries.shape[1]).bit_length() - 1

    def codes(self, values: Array, group: int) -> Array:
        """[rows / width, columns]: the nearest entries of [rows, columns], in int16."""
        codes = np.empty((len(values) // self.width, values.shape[1]), np.int16)
        for start in range(0, len(values), SLAB):
            some = np.arange(start, min(start + SLAB, len(values)))
            codes[start // self.width : (start + SLAB) // self.width] = self.of_rows(some)._codes(
                values[some], group
            )
        return codes

    def _codes(self, values: Array, group: int) -> Array:
        entries = self.entries.astype(np.float64)
        if self.width > 1:
            vectors = _vectors(values, self.width)
            flat = vectors.reshape(-1, self.width)
            return clustered([flat], 0, entries[:1])[1][0].reshape(vectors.shape[:2])
        if self._one is not None:
            return _above(self._one[1], values)
        middles = (entries[:, 1:, 0] + entries[:, :-1, 0]) / 2
        of_rows = middles[self.tables[group]]
        return np.stack([(column[:, None] > of_rows).sum(1) for column in values.T], axis=1)

    def _numbers(self, codes: Array, group: int) -> Array:
        """The numbers that codes stand for, [rows, columns]."""
        entries = self.entries.astype(np.float32)
        if self.width > 1:
            return entries[0][codes].transpose(0, 2, 1).reshape(-1, codes.shape[1])
        return entries[self.tables[group][:, None], codes, 0]

    def nearest(self, values: Array, group: int, at: int | slice = EVERY) -> Array:
        """The nearest entries."""
        if self._one is not None:
            entries, middles = self._one
            return entries[_above(middles, values)]
        columns = values.reshape(len(values), -1)
        return self._numbers(self._codes(columns, group), group).reshape(values.shape)

    def of_rows(self, some: Array) -> Table:
        """The tables of some rows; of vectors these are whole ones."""
        return replace(self, tables=self.tables[:, some])

    def form(self, rows: Array, back: Callable[[Array], Array], dtype: Any, version: int) -> Form:
        """Indices of the shape of the weight, and the tables; before iOS 18 one table."""
        codes = np.stack([self.codes(part, group) for group, part in enumerate(rows)])
        if version < IOS18:
            packed, shape = weights.pack(back(codes).astype(np.uint8), self.bits), back(codes).shape
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
        """The entries of each table by least squares over all products: a step of Newton's."""
        codes = [self.codes(part, group) for group, part in enumerate(rounded)]
        off = [np.asarray((a - b) @ h, np.float32) for a, b, h in zip(rows, rounded, hessians, strict=True)]
        entries = self.entries.astype(np.float64)
        products = rows.size * rows.shape[-1] * entries.shape[1]
        every = 1 + products // MOST_PRODUCTS
        for table in range(len(entries)):
            for lane in range(self.width):
                some = list(self._of(table, lane, codes, off, kept))
                entries[table, :, lane] += _step(entries.shape[1], some, hessians, every)
        fitted = replace(self, entries=entries.astype(self.entries.dtype))
        numbers = np.stack([fitted._numbers(each, group) for group, each in enumerate(codes)])
        if self.width == 1:
            fitted = replace(fitted, entries=np.sort(fitted.entries, axis=1))
        return fitted, numbers if kept is None else np.where(kept, numbers, 0.0)

    def _of(
        self, table: int, lane: int, codes: list[Array], off: list[Array], kept: Array | None
    ) -> Iterator[tuple[int, Array, Array]]:
        """(group, codes, how far off) of the rows of a lane of a table; code -1 is none of its entries."""
        for group, each in enumerate(codes):
            mine = np.flatnonzero(self.tables[group] == table)
            mine = mine[mine % self.width == lane]
            indices = each[mine // self.width]
            yield (
                group,
                indices if kept is None else np.where(kept[group][mine], indices, -1),
                off[group][mine],
            )


def _above(middles: Array, values: Array) -> Array:
    """The entry next to each value: how many of the middles between them lie below it."""
    if len(middles) >= FEW:
        return np.searchsorted(middles, values)
    count = np.zeros(values.shape, np.uint8)
    for middle in middles:
        count += (values > middle).view(np.uint8)
    return count


def _vectors(values: Array, width: int) -> Array:
    """[rows / width, columns, width] of [rows, columns]."""
    return values.reshape(-1, width, values.shape[1]).transpose(0, 2, 1)


def _step(count: int, some: list[tuple[int, Array, Array]], hessians: Array, every: int) -> Array:
    """What entries gain that the products of rows come nearest.

    Args:
        count: of the entries.
        some: (group, codes, how far off the products are, times what the columns read) of rows.
        hessians: of each group.
        every: each so manieth row is asked how the error curves.
    """
    curved, slope = torch.zeros(count, count, dtype=torch.float64), np.zeros(count)
    for group, codes, off in some:
        held = codes >= 0
        slope += np.bincount(codes[held], off[held], count)
        hessian = torch.from_numpy(hessians[group]).float()
        asked = torch.from_numpy(codes[::every].astype(np.int64))
        share = len(codes) / max(1, len(asked))
        for part in torch.split(asked, TOGETHER):
            ones = (part[:, None] == torch.arange(count)[:, None]).float()
            met = (ones.flatten(0, 1) @ hessian).reshape(ones.shape)
            curved += share * (met @ ones.transpose(1, 2)).sum(0).double()
    matrix = curved.numpy()
    steady = np.diag(matrix).mean() * 1e-6 or 1.0  # of a weight that reads zeros alone nothing is known
    return np.asarray(np.linalg.solve(matrix + steady * np.eye(count), slope))


def weighed(rows: Array, hessians: Array) -> Array:
    """How much the square of the error of each number counts: [groups, rows, columns].

    Args:
        rows: of that shape.
        hessians: [groups, columns, columns].
    """
    return np.broadcast_to(np.diagonal(hessians, axis1=1, axis2=2)[:, None], rows.shape)


def numbers(rows: Array, weights: Array, vector: int = 1) -> Totals:
    """The numbers, or vectors, of rows, and how much each counts: a little where no input meets it.

    Args:
        rows: [groups, rows, columns], or without groups.
        weights: of that shape.
        vector: rows that meet the same input, whose numbers are a vector.
    """
    even = 1e-3 * float(weights.mean()) or 1.0
    values, counts = (each.reshape(-1, rows.shape[-1]) for each in (rows, weights))
    if vector == 1 and values.size > MOST_ROWS:
        slabs = (slice(start, start + SLAB) for start in range(0, len(values), SLAB))
        pieces = ((values[some].ravel(), counts[some].ravel() + even) for some in slabs)
        return near(pieces, max(float(values.max()), -float(values.min())))
    vectors = _vectors(values, vector).reshape(-1, vector)
    return totals(vectors, _vectors(counts + even, vector).mean(axis=2).ravel())


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
    held = [tables == number for number in range(int(tables.max()) + 1)]
    return of_numbers(
        [numbers(rows[each], weights[each], form.vector) for each in held], tables, form, axis, rank, dtype
    )


def of_numbers(
    known: Sequence[Totals], tables: Array, form: WeightForm, axis: int, rank: int, dtype: Any
) -> Table:
    """The entries with the least error for the numbers of each table; the rest is as `table` takes it."""
    stored = np.stack([weighted(each, 2**form.bits) for each in known]).astype(dtype)
    return Table(np.sort(stored, axis=1) if form.vector == 1 else stored, tables, axis, rank)


__all__ = ["Table", "numbers", "of_numbers", "table", "weighed"]
