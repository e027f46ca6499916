"""A slice within the last axis is taken within the axis before it, between two transposes.

Before::

    main(%x: 4x8xfp16) {
      %s: 4x4xfp16 = slice_by_index(x=%x, begin=[0, 4], end=[4, 8])
      return %s
    }

After::

    main(%x: 4x8xfp16) {
      %s_cut_rows_transpose: 8x4xfp16 = transpose(x=%x, perm=[1, 0])
      %s_cut_rows_slice_by_index: 4x4xfp16 = slice_by_index(x=%s_cut_rows_transpose, begin=[4, 0], end=[8, 4])
      %s: 4x4xfp16 = transpose(x=%s_cut_rows_slice_by_index, perm=[1, 0])
      return %s
    }

Refuses when the slice begins at 0 or has an axis alone, when it has a stride or masks, when the value has one
axis, and when intervals show that it stays below 4094.

Why it helps: on H13 and H14 a slice of the last axis that begins after 0 makes magnitudes from 4095 on
infinite (measured, M1 and M2, through the private compiler: sbryngelson/ane-guide). It costs two transposes,
whose time was not measured.

Grade: bit for bit.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from anesurgery import authoring as an
from anesurgery.authoring import Builder, Match, OpPattern, Ops, Refusal, Rewrite, Var, mb, var

LIMIT = 4094
"""The largest magnitude that such a slice keeps."""
MASKS = ("begin_mask", "end_mask", "squeeze_mask", "stride")


@dataclass(frozen=True)
class CutRows(Rewrite):
    """`x[..., b:e]` becomes the transpose of `transpose(x)[..., b:e, :]`."""

    name = "cut_rows"
    static = True

    def pattern(self, op: Ops) -> OpPattern:
        """A slice at constant places."""
        return op.slice_by_index(x=var("x"))

    def check(self, m: Match) -> Match | Refusal | None:
        """One that begins inside the last axis of a value that may be large."""
        begin, end = (an.ints(m.root, name) for name in ("begin", "end"))
        if an.np_dtype(m.x) != np.float16 or m.x.rank < 2 or not begin or not end or not begin[-1]:
            return None
        if used := [name for name in MASKS if m.root.inputs.get(name) is not None]:
            return Refusal(f"the slice has {', '.join(used)}", m.root)
        most = an.magnitude(m.x, products=2)
        if most <= LIMIT:
            return Refusal(f"%{m.x.name} is at most {most:g}, and slices keep {LIMIT}", m.root)
        return m.bind(begin=begin, end=end)

    def rewrite(self, mb: Builder, m: Match) -> Var:
        """The last two axes exchanged, and back."""
        turn = [*range(m.x.rank - 2), m.x.rank - 1, m.x.rank - 2]
        begin, end = ([places[axis] for axis in turn] for places in (m.begin, m.end))
        part = mb.slice_by_index(x=mb.transpose(x=m.x, perm=turn), begin=begin, end=end)
        return mb.transpose(x=part, perm=turn)


@an.example((4, 8), dtype="fp16")
def example(x: Var) -> Var:
    """The second half of the last axis."""
    return mb.slice_by_index(x=x, begin=[0, 4], end=[4, 8], name="s")
