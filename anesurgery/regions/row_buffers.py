"""A tensor whose rows are written one by one at known places: what stands in each row, until it is joined.

A loop that collects its results by `scatter` reads and writes such a buffer in every round. In straight code
each row is a value of its own; one concatenation at the end makes the tensor.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np

from anesurgery.mil import Array, Maker, Operation, Var, constant, dtype_name, np_dtype, static_shape
from anesurgery.regions.small_builds import joined

WIDER = {("fp16", "fp32"), ("int16", "int32"), ("uint16", "int32")}
"""Casts that lose nothing: the cast back gives what was there."""


@dataclass(frozen=True, eq=False)
class Rows:
    """A tensor, and what was written to some of its rows since.

    Attributes:
        like: a value of its type and shape.
        base: the tensor before; an array where it is known.
        written: number of the row -> a tensor of one row.
    """

    like: Var
    base: Var | Array
    written: Mapping[int, Var]

    @property
    def length(self) -> int:
        """How many rows there are."""
        return int(self.like.shape[0])


def place_of(indices: Any, length: int) -> int | None:
    """The row that known indices name; None where they name several, or none of the tensor."""
    if indices is None or np.size(indices) != 1 or np.ndim(indices) > 1:
        return None
    at = int(np.ravel(indices)[0])
    at += length if at < 0 else 0
    return at if 0 <= at < length else None


def writes_rows(op: Operation) -> bool:
    """Does a scatter write along the first axis of a tensor of static shape?"""
    axis, shape = constant(op.axis), static_shape(op.data)
    return bool(shape) and axis is not None and int(axis) in (0, -len(shape or ()))


def replaces(op: Operation, rows: Rows, at: int) -> bool:
    """Is a row afterwards what a scatter writes, by its mode or since it adds to zeros?"""
    mode, base = str(constant(op.mode)), rows.base
    zeros = at not in rows.written and isinstance(base, np.ndarray) and not np.any(base[at])
    return mode == "update" or (mode == "add" and zeros)


def reads_a_row(op: Operation) -> bool:
    """Does a gather read along the first axis?"""
    axis, batch = constant(op.axis), op.inputs.get("batch_dims")
    return axis is not None and int(axis) in (0, -op.x.rank) and (batch is None or not constant(batch))


class RowMaker:
    """Makes the ops that rows need; each cast once. Without a maker, it only counts with placeholders."""

    def __init__(self, maker: Maker | None) -> None:
        self.maker = maker
        self.casts: dict[tuple[Var, str], Var] = {}
        self.sources: dict[Var, Var] = {}
        """A cast that lost nothing -> what it was made of."""
        self.joined: dict[Rows, Var] = {}

    def cast(self, value: Var, dtype: str, name: str | None = None) -> Var:
        """A value in another type; a cast back is the value itself."""
        source = self.sources.get(value)
        if source is not None and dtype_name(source) == dtype:
            return source
        if self.maker is None or dtype_name(value) == dtype:
            return value
        if (value, dtype) not in self.casts:
            result: Var = self.maker.cast(x=value, dtype=dtype, **({"name": name} if name else {}))
            self.casts[value, dtype] = result
            if (dtype_name(value), dtype) in WIDER:
                self.sources[result] = value
        return self.casts[value, dtype]

    def cast_rows(self, rows: Rows, like: Var) -> Rows:
        """Every row in the type of another value."""
        dtype, base = dtype_name(like), rows.base
        new = base.astype(np_dtype(like)) if isinstance(base, np.ndarray) else self.cast(base, dtype)
        return Rows(like, new, {at: self.cast(v, dtype) for at, v in rows.written.items()})

    def row(self, rows: Rows, at: int, rank: int) -> Var | None:
        """One row, with a first axis of length 1 or without it; None where it is one of the base."""
        held = rows.written.get(at)
        if held is None or self.maker is None or held.rank == rank:
            return held
        change = self.maker.expand_dims if held.rank < rank else self.maker.squeeze
        return change(x=held, axes=[0])

    def join(self, rows: Rows) -> Var:
        """The tensor; where casts made its rows that lost nothing, it is joined before one cast."""
        if self.maker is None:
            return rows.like
        if rows not in self.joined:
            whole = self.concat(self.before_cast(rows) or rows)
            self.joined[rows] = self.cast(whole, dtype_name(rows.like))
        return self.joined[rows]

    def before_cast(self, rows: Rows) -> Rows | None:
        """The rows that casts were made of; None where one was not made so, or the base would be rounded."""
        sources = {at: self.sources.get(v) for at, v in rows.written.items()}
        cast_from = {at: v for at, v in sources.items() if v is not None}
        like = next(iter(cast_from.values()), None)
        if like is None or len(cast_from) < len(sources) or len({v.dtype for v in cast_from.values()}) > 1:
            return None
        base = rows.base
        if isinstance(base, np.ndarray):
            narrow = base.astype(np_dtype(like))
            return Rows(rows.like, narrow, cast_from) if np.array_equal(narrow, base) else None
        source = self.sources.get(base)
        same = source is not None and source.dtype == like.dtype
        return Rows(rows.like, source, cast_from) if same and source is not None else None

    def concat(self, rows: Rows) -> Var:
        """The rows of the base and those that were written, in order."""
        assert self.maker is not None
        rank, parts = rows.like.rank, list[Var]()
        for old, run in groupby(range(rows.length), lambda at: at not in rows.written):
            places = list(run)
            if old:
                parts.append(self.piece(rows.base, places[0], len(places)))
            else:
                parts += [v for at in places if (v := self.row(rows, at, rank)) is not None]
        return joined(self.maker, parts, 0)

    def piece(self, base: Var | Array, first: int, count: int) -> Var:
        """Some rows of the base; of an array, computed now."""
        assert self.maker is not None
        part: Var
        if isinstance(base, np.ndarray):
            part = self.maker.const(val=base[first : first + count])
        else:
            rest = base.rank - 1
            part = self.maker.slice_by_size(x=base, begin=[first] + [0] * rest, size=[count] + [-1] * rest)
        return part
