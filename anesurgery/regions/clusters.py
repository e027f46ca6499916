"""Find the palette (table of values or vectors) that replaces weights with the least squared error: k-means.

Scalars use the exact kmeans1d that comes with coremltools; vectors use Lloyd's algorithm (coremltools would
need scikit-learn for these, on which nothing else here depends). `tables_of` treats all weights alike;
`weighted` gives the errors of some weights more importance.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from anesurgery.mil import Array, quiet_host

with quiet_host():
    from coremltools._deps import _kmeans1d  # None where a build lacks its compiled part

ROUNDS = 25
"""The most Lloyd steps; they end earlier when no value moves. A choice."""
MOST_ROWS = 1 << 16
"""The most vectors from which a table is found: 256 for each of 256 entries."""
MEANS_PER_ENTRY = 16
"""Scalars are first merged into this many means for each entry. That raises the error of the best table by at
most 1.1e-3 (for 6 bits 6e-5; measured for normal, Laplace and Student's t of three degrees).
"""
FP16_EXPONENT = 15
"""The exponent of the largest finite fp16 number."""
LEAST_MEANS = 1 << 12
"""The least number of these means in total, which takes no noticeable time."""


def tables_of(groups: Sequence[Array], entries: int) -> Array:
    """Return the tables [groups, entries, width] of groups of rows [rows, width]."""
    return np.stack([_table_of_group(rows, entries) for rows in groups])


def _table_of_group(rows: Array, entries: int) -> Array:
    """Return the table [entries, width] of one group; unused entries are 0."""
    distinct, counts = np.unique(rows, return_counts=True, axis=0 if rows.shape[1] > 1 else None)
    return weighted(WeightedVectors(distinct.reshape(-1, rows.shape[1]), counts), entries)


@dataclass(frozen=True)
class WeightedVectors:
    """Distinct vectors, and the weight of the error of each."""

    known: Array
    """[number, width]; scalars are sorted."""
    weights: Array
    """[number]."""


def weighted(totals: WeightedVectors, entries: int) -> Array:
    """Return the table with the least squared error where some vectors count more than others.

    Args:
        totals: the vectors with their weights.
        entries: the number of entries of the table.

    Returns:
        [entries, width]; unused entries are 0.
    """
    known, weights = totals.known, totals.weights
    if len(known) <= entries:
        return np.pad(known.astype(np.float64), ((0, entries - len(known)), (0, 0)))
    parts = max(LEAST_MEANS, MEANS_PER_ENTRY * entries)
    if known.shape[1] == 1 and len(known) > parts:
        known, weights = _merged_neighbours(known[:, 0], weights, parts)
    if known.shape[1] == 1 and _kmeans1d is not None:
        return np.array(_kmeans1d.cluster(known[:, 0], entries, weights=weights).centroids)[:, None]
    if len(known) > MOST_ROWS:
        sample = np.random.default_rng(0).choice(len(known), MOST_ROWS, replace=False)
        known, weights = known[sample], weights[sample]
    table = _initial_table(known, weights, entries)
    for _ in range(ROUNDS):
        entry_of = nearest(known, table)
        total = np.bincount(entry_of, weights, entries)
        sums = [np.bincount(entry_of, weights * column, entries) for column in known.T]
        means = np.where(total[:, None] > 0, np.stack(sums, 1) / np.where(total > 0, total, 1)[:, None], table)
        if np.array_equal(means, table):
            break
        table = means
    return table


def distinct_with_weights(vectors: Array, weights: Array) -> WeightedVectors:
    """Return the distinct vectors and their total weights; of very many scalars, means of near ones.

    Args:
        vectors: [number, width].
        weights: [number], none below 0.
    """
    width = vectors.shape[1]
    if width > 1 or len(vectors) <= MOST_ROWS:
        distinct, indices = np.unique(vectors, return_inverse=True, axis=0 if width > 1 else None)
        return WeightedVectors(distinct.reshape(-1, width), np.bincount(indices.ravel(), weights))
    return merged_by_fp16([(vectors.ravel(), weights)], float(np.abs(vectors).max()))


def merged_by_fp16(pieces: Iterable[tuple[Array, Array]], largest: float) -> WeightedVectors:
    """Return the means of scalars that round to the same fp16 number, with their total weights.

    Args:
        pieces: pairs of arrays [number]: the scalars and their weights.
        largest: the largest magnitude of all scalars, by which they are scaled to the fp16 range.
    """
    _, exponent = np.frexp(largest)
    totals, sums = np.zeros(1 << 16), np.zeros(1 << 16)
    for values, weights in pieces:
        half = (values * 2.0 ** (FP16_EXPONENT - exponent)).astype(np.float16)
        codes = (half + np.float16(0)).view(np.uint16)  # -0 becomes 0
        totals += np.bincount(codes, weights, minlength=1 << 16)
        sums += np.bincount(codes, weights * values, minlength=1 << 16)
    is_used = totals > 0
    means = sums[is_used] / totals[is_used]
    order = np.argsort(means)
    return WeightedVectors(means[order, None], totals[is_used][order])


def _merged_neighbours(known: Array, weights: Array, parts: int) -> tuple[Array, Array]:
    """Return the means [at most `parts`, 1] of neighbours among sorted scalars, and their total weights.

    The density of means is proportional to the cube root of the density of the scalars, as is that of the
    entries of an optimal table.
    """
    shares = np.cbrt(weights * np.gradient(known) ** 2)  # the density of scalars is weights / gaps
    shares = np.minimum(shares, _largest_share(shares, parts))
    ends = np.cumsum(shares)
    part_of = np.minimum(((ends - shares / 2) / ends[-1] * parts).astype(np.int64), parts - 1)
    total = np.bincount(part_of, weights)
    is_used = total > 0
    means = np.bincount(part_of, weights * known)[is_used] / total[is_used]
    return means[:, None], total[is_used]


def _largest_share(shares: Array, parts: int) -> float:
    """Return the limit of shares that is 1 / parts of their sum once they are limited.

    No scalar then takes more than one of the parts, however far it is from the others.
    """
    ascending = np.sort(shares)
    # the sum of all but the last m shares, for m from 0 to parts - 1; each of these m is the limit itself
    sums = np.cumsum(ascending)[: -parts - 1 : -1]
    limits = sums / np.arange(parts, 0, -1)
    return float(limits[np.argmax(ascending[: -parts - 1 : -1] <= limits)])


def _initial_table(known: Array, weights: Array, entries: int) -> Array:
    """Return the first table by k-means++: each entry is drawn far from those before it."""
    rng = np.random.default_rng(0)
    chosen = [int(rng.choice(len(known), p=weights / weights.sum()))]
    squared_distances = ((known - known[chosen[0]]) ** 2).sum(1)
    for _ in range(entries - 1):
        chances = squared_distances * weights
        place = int(np.searchsorted(np.cumsum(chances), rng.random() * chances.sum(), side="right"))
        chosen.append(min(place, len(known) - 1))
        squared_distances = np.minimum(squared_distances, ((known - known[chosen[-1]]) ** 2).sum(1))
    return known[chosen].astype(np.float64)


def nearest(rows: Array, table: Array) -> Array:
    """Return the index [rows] of the nearest entry of a table [entries, width] for each row [rows, width]."""
    if table.shape[1] == 1:
        order = np.argsort(table[:, 0], kind="stable")
        values = table[order, 0]
        return order[np.searchsorted((values[1:] + values[:-1]) / 2, rows[:, 0])]
    entries = np.empty(len(rows), np.intp)
    squares = (table**2).sum(1)
    for start in range(0, len(rows), MOST_ROWS):
        piece = rows[start : start + MOST_ROWS]
        entries[start : start + MOST_ROWS] = (squares - 2 * piece @ table.T).argmin(1)
    return entries
