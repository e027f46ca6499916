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

Ends that a mask leaves open, and places counted from the end, are read by the lengths of the axes, as
`x[..., 4:]` and `x[..., -1:]` of PyTorch are converted.

Refuses when the slice has a stride or takes an axis away, and when intervals show that the value stays below
4094. A slice that begins at 0, and one of a value of one axis, is left.

Why it helps: on H13 and H14 a slice of the last axis that begins after 0 makes magnitudes from 4095 on
infinite (measured, M1 and M2, through the private compiler: sbryngelson/ane-guide). It costs two transposes,
whose time was not measured.

Grade: bit for bit.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from anesurgery import authoring as an
from anesurgery.authoring import Builder, Match, Operation, Refusal, Rewrite, Var, mb

LIMIT = 4094
"""The largest magnitude that such a slice keeps."""
OTHERS = {"squeeze_mask": False, "stride": 1}
"""Parameters that the rewrite does not read, with what each says where it changes nothing."""


@dataclass(frozen=True)
class CutRows(Rewrite):
    """`x[..., b:e]` becomes the transpose of `transpose(x)[..., b:e, :]`."""

    name = "cut_rows"
    kinds = frozenset({"slice_by_index"})
    static = True

    def check(self, m: Match) -> Match | Refusal | None:
        """One that begins inside the last axis of a value that may be large."""
        places = _places(m.root)
        if an.np_dtype(m.x) != np.float16 or m.x.rank < 2 or places is None or not places[0][-1]:
            return None
        begin, end = places
        if used := [name for name, rest in OTHERS.items() if set(an.each_axis(m.root, name, rest)) != {rest}]:
            return Refusal(f"the slice has {', '.join(used)}", m.root)
        most = an.magnitude(m.x, products=2)
        if most <= LIMIT:
            return Refusal(f"%{m.x.name} is at most {most:g}, and slices keep {LIMIT}", m.root)
        return m.bind(begin=begin, end=end)

    def rewrite(self, mb: Builder, m: Match) -> Var:
        """The last two axes exchanged, and back; if the one before the last begins after 0, it is cut first."""
        x, begin, end = m.x, [*m.begin], [*m.end]
        if begin[-2]:
            x = mb.slice_by_index(x=x, begin=[*begin[:-1], 0], end=[*end[:-1], x.shape[-1]])
            begin, end = [*[0] * (x.rank - 1), begin[-1]], [*x.shape[:-1], end[-1]]
        turn = [*range(x.rank - 2), x.rank - 1, x.rank - 2]
        begin, end = ([places[axis] for axis in turn] for places in (begin, end))
        part = mb.slice_by_index(x=mb.transpose(x=x, perm=turn), begin=begin, end=end)
        return mb.transpose(x=part, perm=turn)


def _places(op: Operation) -> tuple[list[int], list[int]] | None:
    """Where a slice begins and ends on each axis, counted from the front; None where only a run tells."""
    shape, begins, ends = an.static_shape(op.x), an.ints(op, "begin"), an.ints(op, "end")
    if not shape or not begins or not ends:
        return None
    opens, closes = (an.each_axis(op, name, False) for name in ("begin_mask", "end_mask"))
    begin = [0 if o else b + d * (b < 0) for b, o, d in zip(begins, opens, shape, strict=True)]
    return begin, [d if o else e + d * (e < 0) for e, o, d in zip(ends, closes, shape, strict=True)]


@an.example((4, 8), dtype="fp16")
def example(x: Var) -> Var:
    """The second half of the last axis."""
    return mb.slice_by_index(x=x, begin=[0, 4], end=[4, 8], name="s")
