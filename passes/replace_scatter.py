"""What a scatter writes at constant places becomes slices and a concatenation; at dynamic places, selections.

Before::

    main(%x: 4x2, %u: 2x2) {
      %y: 4x2 = scatter(data=%x, indices=[2, 3], updates=%u, mode="update")
      return %y
    }

After::

    main(%x: 4x2, %u: 2x2) {
      %y_replace_scatter_slice_by_size: 2x2 = slice_by_size(x=%x, begin=[0, 0], size=[2, -1])
      %y: 4x2 = concat(values=(%y_replace_scatter_slice_by_size, %u), axis=0)
      return %y
    }

Rows that stay are a slice of the data; rows that are written are a slice of the updates, added to the data
where the mode says so (or subtracted, multiplied, ...). At dynamic places each update is selected where its
place equals the number of the row, one update after another; the numbers of up to 2047 rows are exact in
fp16.

Places that repeat with a period, as those of a slice `x[..., :32]` in a flat tensor, are columns of a table
with one row for each period; what was joined before, and a shape that the elements had before, is found again.

Refuses when a shape is symbolic, when more than `most_pieces` pieces or `most_updates` dynamic updates were
needed, when dynamic places have several coordinates, and for integers, which stay off the engine anyway.

Why it helps: scatter and scatter_along_axis were not placed on the ANE in any form (measured through Core ML
on M4, macOS 27; scatter_nd is reported), while slices, concatenations, comparisons and selections were. A
dynamic place is still an int32, whose one cast stays on the CPU.

Grade: bit for bit.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from anesurgery import authoring as an
from anesurgery.authoring import Builder, Match, Refusal, Rewrite, Var, mb

MODES = {"add": "add", "sub": "sub", "mul": "mul", "div": "real_div", "max": "maximum", "min": "minimum"}
"""Mode -> the op that combines a row with its update; "update" takes the update."""


@dataclass(frozen=True)
class ReplaceScatter(Rewrite):
    """`scatter`, `scatter_along_axis` and `scatter_nd` in slices, or in selections."""

    name = "replace_scatter"
    kinds = frozenset({"scatter", "scatter_along_axis", "scatter_nd"})
    """Every scatter."""
    most_pieces: int = an.option(32, least=1)
    """Most slices that a scatter at constant places may become."""
    most_updates: int = an.option(8, least=1)
    """Most rows that are written at dynamic places."""

    def check(self, m: Match) -> Match | Refusal:
        """Known shapes, and few pieces."""
        op, mode = m.root, str(an.constant(m.root.inputs.get("mode")) or "add")
        for v in (op.data, op.updates, op.indices):
            if an.static_shape(v) is None:
                return Refusal(f"%{v.name} has the symbolic shape {tuple(v.shape)}", op)
        if an.np_dtype(op.data).kind != "f":
            return Refusal(f"%{op.data.name} holds integers, which stay off the engine", op)
        if (places := an.constant(op.indices)) is None:
            return self.dynamic(m.bind(mode=mode))
        rows = an.scattered_rows.scattered_rows(op, np.asarray(places))
        pieces = rows.pieces(mode)
        if len(pieces) > self.most_pieces:
            rows = rows.folded()
            pieces = rows.pieces(mode)
        if len(pieces) > self.most_pieces:
            return Refusal(f"{len(pieces)} pieces would be needed, the limit is {self.most_pieces}", op)
        views = _views(op.outputs[0])
        readers = [v.op for v in views if v.op is not None]
        return m.bind(ops=(*m.ops, *readers), mode=mode, rows=rows, pieces=pieces, views=views)

    def dynamic(self, m: Match) -> Match | Refusal:
        """A few updates along one axis that fp16 can count."""
        op, shape = m.root, an.static_shape(m.root.data) or ()
        if op.op_type == "scatter_nd" and op.indices.shape[-1] != 1:
            return Refusal(f"the dynamic places have {op.indices.shape[-1]} coordinates", op)
        axis = 0 if op.op_type == "scatter_nd" else int(an.constant(op.axis) or 0) % len(shape)
        along = op.op_type == "scatter_along_axis"
        count = int(op.indices.shape[axis]) if along else math.prod(op.indices.shape)
        if count > self.most_updates:
            return Refusal(f"{count} rows are written at dynamic places, the limit is {self.most_updates}", op)
        if shape[axis] >= an.whole_numbers.EXACT:
            return Refusal(
                f"the axis has {shape[axis]} rows; fp16 counts up to {an.whole_numbers.EXACT - 1}", op
            )
        return m.bind(rows=None, axis=axis, count=count)

    def rewrite(self, mb: Builder, m: Match) -> Var | dict[Var, Var]:
        """Pieces of data and updates, or one selection for each update."""
        if m.rows is None:
            return _selected(mb, m)
        out = m.root.outputs[0]
        whole = _joined(mb, m.root, m.rows, m.pieces, m.mode)
        return {old: _seen(mb, whole, an.static_shape(old) or ()) for old in (m.views or (out,))}


def _views(out: Var) -> tuple[Var, ...]:
    """The shapes in which alone a result is read; none where it is read as it is."""
    readers = an.consumers(out)
    alone = not an.is_output(out) and all(
        r.op_type == "reshape" and an.static_shape(r.outputs[0]) for r in readers
    )
    return tuple(r.outputs[0] for r in readers) if alone else ()


def _joined(
    mb: Builder,
    op: an.Operation,
    rows: an.scattered_rows.Rows,
    pieces: Sequence[an.scattered_rows.Piece],
    mode: str,
) -> Var:
    """The pieces side by side."""
    data, updates = _seen(mb, op.data, rows.data), _seen(mb, op.updates, rows.updates)
    parts = []
    for piece in pieces:
        new = [_cut(mb, updates, rows.axis, u, piece.length) for u in piece.updates]
        if new and mode == "update":
            parts.append(new[0])
            continue
        kept = _cut(mb, data, rows.axis, piece.start, piece.length)
        for u in new:
            kept = getattr(mb, MODES[mode])(x=kept, y=u)
        parts.append(kept)
    return an.joined(mb, parts, rows.axis)


def _selected(mb: Builder, m: Match) -> Var:
    """Each update where its place is the number of the row; a negative place counts from the end."""
    op, axis, shape = m.root, m.axis, an.static_shape(m.root.data) or ()
    rank, length = len(shape), np.float16(shape[axis])
    one = tuple(m.count if a == axis else 1 for a in range(rank))
    along = op.op_type == "scatter_along_axis"
    at = mb.cast(x=op.indices if along else _seen(mb, op.indices, one), dtype="fp16")
    behind = mb.cast(x=mb.less(x=at, y=np.float16(0)), dtype="fp16")
    at = mb.add(x=at, y=mb.mul(x=behind, y=length))
    numbers = np.arange(shape[axis], dtype=np.float16).reshape([-1 if a == axis else 1 for a in range(rank)])
    updates = _seen(mb, op.updates, (*shape[:axis], m.count, *shape[axis + 1 :])) if not along else op.updates
    data: Var = op.data
    for i in range(m.count):
        here = mb.equal(x=_cut(mb, at, axis, i, 1), y=numbers)
        new = _cut(mb, updates, axis, i, 1)
        new = new if m.mode == "update" else getattr(mb, MODES[m.mode])(x=data, y=new)
        data = mb.select(cond=here, a=new, b=data)
    return data


def _cut(mb: Builder, x: Var, axis: int, start: int, length: int) -> Var:
    """Some rows; of rows that were joined before, the part that they are."""
    if length == x.shape[axis]:
        return x
    joined = an.producer(x, "concat")
    if (
        joined is not None
        and int(an.constant(joined.axis)) % x.rank == axis
        and not an.flag(joined, "interleave")
    ):
        at = 0
        for part in joined.values:
            if (at, part.shape[axis]) == (start, length):
                return part
            at += part.shape[axis]
    begin, size = [0] * x.rank, [-1] * x.rank
    begin[axis], size[axis] = start, length
    return mb.slice_by_size(x=x, begin=begin, size=size)


def _seen(mb: Builder, x: Var, shape: Sequence[int]) -> Var:
    """The same elements in another shape, which they may have had before."""
    while tuple(x.shape) != tuple(shape) and (view := an.producer(x, "reshape")) is not None:
        x = view.x
    return an.reshaped(mb, x, shape)


@an.example((4, 2), (2, 2))
def example(x: Var, u: Var) -> Var:
    """Two rows of four are written."""
    return mb.scatter(data=x, indices=np.array([2, 3], np.int32), updates=u, axis=0, mode="update", name="y")
