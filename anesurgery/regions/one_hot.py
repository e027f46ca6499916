"""Build one-hot rows for integer ids that are exact although the comparison runs in fp16.

fp16 holds every integer only up to 2048. A larger id is split into two digits while it is still an integer; the
one-hot row of the id is the outer product of the one-hot rows of its digits. Passes such as `embedding_matmul`
multiply the rows with a table. `equal` builds them: coremltools folds `one_hot` + `matmul` back into a gather.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from anesurgery import fp16
from anesurgery.interpret.arithmetic.constant_memory import release_pages
from anesurgery.mil import Array, Maker, Var
from anesurgery.semantics.bounds import FINITE, facts_of_array

LEAST_BASE = 64
"""The smallest number of low digits: tables that are padded for the ANE have a multiple of it as rows."""

CHUNK = 1024
"""The rows of a table that are read at a time: some megabytes at the widths of embeddings."""

DTypeLike = np.dtype[Any]


def digit_base(rows: int) -> int:
    """Return the smallest power of two, at least 64, that leaves at most 2048 high digits."""
    base = LEAST_BASE
    while base * fp16.LAST_INTEGER < rows:
        base *= 2
    return base


def one_hot_width(rows: int) -> int:
    """Return the length of the rows that `one_hot_pieces` builds: `rows`, or the next multiple of the base."""
    base = digit_base(rows)
    return rows if rows <= fp16.LAST_INTEGER else -(-rows // base) * base


def is_finite(table: Array) -> bool:
    """Is every element finite? The answer is remembered for the array."""
    found = facts_of_array(table)
    if FINITE not in found:
        found[FINITE] = _has_finite_exponents(table)
    return bool(found[FINITE])


def _has_finite_exponents(table: Array) -> bool:
    """Look at the exponents, chunk by chunk: a mapped table stays mapped."""
    word = np.dtype(f"u{table.dtype.itemsize}")
    infinity = np.array(np.inf, table.dtype).view(word)
    sign_off = word.type(np.iinfo(word).max >> 1)
    for start in range(0, len(table), CHUNK):
        chunk = table[start : start + CHUNK]
        if (chunk.view(word) & sign_off).max(initial=0) >= infinity:
            return False
        release_pages(chunk)
    return True


def one_hot_pieces(mb: Maker, ids: Var, rows: int, dtype: DTypeLike, most: int) -> Iterator[tuple[int, Var]]:
    """Build one-hot rows of int32 ids in pieces of at most `most` columns.

    An id outside [0, rows) gives zeros, up to the width of the rows.

    Yields:
        Pairs (first column, piece); each is built when it is asked for, so that one piece lives at a time.
    """
    name = "fp16" if dtype == np.float16 else "fp32"
    if rows <= fp16.LAST_INTEGER:
        number = mb.expand_dims(x=mb.cast(x=ids, dtype=name), axes=[-1])
        yield 0, _equals(mb, number, range(rows), -1, dtype)
        return
    base = digit_base(rows)
    high = mb.cast(x=mb.floor_div(x=ids, y=np.int32(base)), dtype=name)
    low = mb.cast(x=mb.mod(x=ids, y=np.int32(base)), dtype=name)
    high, low = (mb.expand_dims(x=digit, axes=[-2, -1]) for digit in (high, low))
    low_hot = _equals(mb, low, range(base), -1, dtype)
    for digits in _runs(one_hot_width(rows) // base, most // base):
        both = mb.mul(x=_equals(mb, high, digits, -2, dtype), y=low_hot)
        row = mb.reshape(x=both, shape=[*ids.shape, len(digits) * base])
        yield digits.start * base, row


def _runs(count: int, most: int) -> list[range]:
    """Split [0, count) into runs of nearly equal length, none longer than `most`."""
    pieces = -(-count // most)
    edges = [count * i // pieces for i in range(pieces + 1)]
    return [range(a, b) for a, b in pairwise(edges)]


def _equals(mb: Maker, number: Var, values: range, axis: int, dtype: DTypeLike) -> Var:
    """Build 1 where a number equals the value that stands there along `axis`, else 0."""
    rank = number.rank

    def axis_values() -> Array:
        return np.arange(values.start, values.stop, dtype=dtype).reshape(_shape_along_axis(rank, axis))

    key = ("ladder", values.start, values.stop, rank, axis, dtype.name)
    compared = mb.shared(key, axis_values, f"numbers_{values.start}_to_{values.stop - 1}")
    return mb.cast(x=mb.equal(x=number, y=compared), dtype="fp16" if dtype == np.float16 else "fp32")


def _shape_along_axis(rank: int, axis: int) -> Sequence[int]:
    shape = [1] * rank
    shape[axis] = -1
    return shape
