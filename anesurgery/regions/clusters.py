"""The few values, or vectors, that stand for many with the least squared error: k-means.

Of values the best ones are found, by the kmeans1d that coremltools brings; of vectors good ones are, by
Lloyd's steps (coremltools asks scikit-learn for these, on which nothing else here depends).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from anesurgery.mil import Array, quiet_host

with quiet_host():
    from coremltools._deps import _kmeans1d

ROUNDS = 25
"""Steps in which the values move to the means of their members: they end earlier where none moves. A choice."""
MOST_ROWS = 1 << 16
"""Vectors that are looked at to find the values: 256 for each of 256 values."""
PARTS = 16
"""Of numbers, so many means of near ones for each value stand for all: the error of the best values for these
is at most 1.1e-3 above the least, of 6 bits 6e-5 (normal, Laplace and Student's t of three degrees)."""
HALF = 15
"""The exponent of the largest number of fp16 below infinity: numbers that fall into one of fp16 are near."""
LEAST_PARTS = 1 << 12
"""But no fewer than these, which take no time."""


def clustered(groups: Sequence[Array], entries: int, tables: Array | None = None) -> tuple[Array, list[Array]]:
    """A table of values for each group of rows, and the entry next to each row.

    Args:
        groups: [rows, width] each.
        entries: of a table.
        tables: [groups, entries, width]: given, they are only looked up.

    Returns:
        The tables, and for each group the entries of its rows.
    """
    chosen = [_table(rows, entries) for rows in groups] if tables is None else list(tables)
    return np.stack(chosen), [_nearest(rows, table) for rows, table in zip(groups, chosen, strict=True)]


def _table(rows: Array, entries: int) -> Array:
    """The values of one group; entries that none needs are 0."""
    distinct, counts = np.unique(rows, return_counts=True, axis=0 if rows.shape[1] > 1 else None)
    distinct = distinct.reshape(-1, rows.shape[1])
    table = np.zeros((entries, rows.shape[1]))
    if len(distinct) <= entries:
        table[: len(distinct)] = distinct
        return table
    return _means(distinct, counts, entries)


@dataclass(frozen=True)
class Totals:
    """Different vectors, and how much each counts."""

    known: Array
    """[number, width]; numbers are sorted."""
    weights: Array
    """[number]."""


def weighted(totals: Totals, entries: int) -> Array:
    """The values with the least squared error where some count for more than others.

    Args:
        totals: the vectors.
        entries: of the table.

    Returns:
        [entries, width]; 0 where none is needed.
    """
    table = np.zeros((entries, totals.known.shape[1]))
    if len(totals.known) <= entries:
        table[: len(totals.known)] = totals.known
        return table
    return _means(totals.known, totals.weights, entries)


def totals(vectors: Array, weights: Array) -> Totals:
    """The different vectors, and how much each counts; of very many numbers the means of near ones.

    Args:
        vectors: [number, width].
        weights: [number], none below 0.
    """
    width = vectors.shape[1]
    if width > 1 or len(vectors) <= MOST_ROWS:
        distinct, places = np.unique(vectors, return_inverse=True, axis=0 if width > 1 else None)
        return Totals(distinct.reshape(-1, width), np.bincount(places.ravel(), weights))
    return near([(vectors.ravel(), weights)], float(np.abs(vectors).max()))


def near(pieces: Iterable[tuple[Array, Array]], largest: float) -> Totals:
    """The means of numbers that are near each other, and how much they count together.

    Args:
        pieces: [number] each, and how much each counts.
        largest: the size of the largest of all.
    """
    _, exponent = np.frexp(largest)
    counts, sums = np.zeros(1 << 16), np.zeros(1 << 16)
    for values, weights in pieces:
        half = (values * 2.0 ** (HALF - exponent)).astype(np.float16)
        places = (half + np.float16(0)).view(np.uint16)  # which has one zero
        counts += np.bincount(places, weights, minlength=1 << 16)
        sums += np.bincount(places, weights * values, minlength=1 << 16)
    held = counts > 0
    distinct = sums[held] / counts[held]
    order = np.argsort(distinct)
    return Totals(distinct[order, None], counts[held][order])


def _means(distinct: Array, counts: Array, entries: int) -> Array:
    """The values of more rows than entries, each of which counts several times."""
    parts = max(LEAST_PARTS, PARTS * entries)
    if distinct.shape[1] == 1 and len(distinct) > parts:
        distinct, counts = _merged(distinct[:, 0], counts, parts)
    if distinct.shape[1] == 1 and _kmeans1d is not None:  # it needs a compiled part, which some builds lack
        return np.array(_kmeans1d.cluster(distinct[:, 0], entries, weights=counts).centroids)[:, None]
    if len(distinct) > MOST_ROWS:
        some = np.random.default_rng(0).choice(len(distinct), MOST_ROWS, replace=False)
        distinct, counts = distinct[some], counts[some]
    values = _spread_out(distinct, counts, entries)
    for _ in range(ROUNDS):
        nearest = _nearest(distinct, values)
        total = np.bincount(nearest, counts, entries)
        sums = [np.bincount(nearest, counts * column, entries) for column in distinct.T]
        moved = np.where(total[:, None] > 0, np.stack(sums, 1) / np.maximum(total, 1)[:, None], values)
        if np.array_equal(moved, values):
            break
        values = moved
    return values


def _merged(distinct: Array, counts: Array, parts: int) -> tuple[Array, Array]:
    """The means of near numbers, and how often each counts.

    Parts are as wide as the best values lie apart: by the cube root of how densely the numbers lie.

    Args:
        distinct: sorted.
        counts: how often each counts.
        parts: how many.
    """
    apart = np.gradient(distinct)
    reach = np.cumsum(np.cbrt(counts * apart**2))
    places = np.minimum((reach / reach[-1] * parts).astype(np.int64), parts - 1)
    total = np.bincount(places, counts)
    held = total > 0
    means = np.bincount(places, counts * distinct)[held] / total[held]
    return means[:, None], total[held]


def _spread_out(distinct: Array, counts: Array, entries: int) -> Array:
    """Values to begin with: each one drawn far from those before it (k-means++)."""
    rng = np.random.default_rng(0)
    chosen = [int(rng.choice(len(distinct), p=counts / counts.sum()))]
    far = ((distinct - distinct[chosen[0]]) ** 2).sum(1)
    for _ in range(entries - 1):
        weight = far * counts
        chosen.append(int(np.searchsorted(np.cumsum(weight), rng.random() * weight.sum(), side="right")))
        chosen[-1] = min(chosen[-1], len(distinct) - 1)
        far = np.minimum(far, ((distinct - distinct[chosen[-1]]) ** 2).sum(1))
    return distinct[chosen].astype(np.float64)


def _nearest(rows: Array, table: Array) -> Array:
    """The entry next to each row."""
    if table.shape[1] == 1:
        order = np.argsort(table[:, 0], kind="stable")
        values = table[order, 0]
        return order[np.searchsorted((values[1:] + values[:-1]) / 2, rows[:, 0])]
    entries = np.empty(len(rows), np.intp)
    squares = (table**2).sum(1)
    for at in range(0, len(rows), MOST_ROWS):
        some = rows[at : at + MOST_ROWS]
        entries[at : at + MOST_ROWS] = (squares - 2 * some @ table.T).argmin(1)
    return entries
