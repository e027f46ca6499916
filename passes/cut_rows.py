"""Slice the last axis as the axis before it, between two transposes.

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

Slice ends that a mask leaves open, and positions counted from the end, are resolved by the axis lengths;
PyTorch's `x[..., 4:]` and `x[..., -1:]` are converted so. After `x[..., 4]`, which removes the axis, no second
transpose is needed. A `split` of the last axis becomes a split of the axis before it, and each part is
transposed back.

Refuses when the slice has a stride, and when intervals show that the value stays below 4094. A slice that
begins at 0, and one of a tensor with one axis, is left as it is.

Why it helps: on H13 and H14 a slice of the last axis that begins after 0 makes magnitudes of 4095 or more
infinite (measured, M1 and M2, through the private compiler: sbryngelson/ane-guide), and so do the parts of a
split after the first. The rewrite costs two transposes, one more for each part, whose time was not measured.

Grade: bit for bit.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from anesurgery import authoring as an
from anesurgery.authoring import Builder, Match, Operation, Refusal, Rewrite, Var, mb
from anesurgery.semantics.intervals import magnitude
from anesurgery.semantics.reading import each_axis

LIMIT = 4094
"""The largest magnitude that such a slice keeps."""


@dataclass(frozen=True)
class CutRows(Rewrite):
    """`x[..., b:e]` becomes the transpose of `transpose(x)[..., b:e, :]`."""

    name = "cut_rows"
    kinds = frozenset({"slice_by_index", "split"})
    static = True

    def check(self, m: Match) -> Match | Refusal:
        """Match a slice or split that begins inside the last axis of a value that may be large."""
        places = None if m.root.op_type == "split" else an.reading.slice_places(m.root)
        if an.np_dtype(m.x) != np.float16 or m.x.rank < 2 or not _begins_inside(m.root, places):
            return an.NO_MATCH
        if places is not None and set(each_axis(m.root, "stride", 1)) != {1}:
            return Refusal("the slice has a stride", m.root)
        most = magnitude(m.x, products=2)
        if most <= LIMIT:
            return Refusal(f"%{m.x.name} is at most {most:g}, and slices keep {LIMIT}", m.root)
        return m.bind(places=places)

    def rewrite(self, mb: Builder, m: Match) -> Var | list[Var]:
        """Exchange the last two axes, cut, and exchange them back."""
        if m.root.op_type != "split":
            return _sliced(mb, m)
        sizes = [part.shape[-1] for part in m.root.outputs]
        parts = mb.split(x=_turned(mb, m.x), split_sizes=sizes, axis=m.x.rank - 2)
        return [_turned(mb, part) for part in parts]


def _begins_inside(op: Operation, places: tuple[list[int], list[int]] | None) -> bool:
    """Is some result cut off in front, along the last axis?"""
    if op.op_type == "split":
        return len(op.outputs) > 1 and an.ints(op, "axis")[0] % op.x.rank == op.x.rank - 1
    return places is not None and places[0][-1] > 0


def _turned(mb: Builder, x: Var) -> Var:
    """Exchange the last two axes."""
    turned: Var = mb.transpose(x=x, perm=[*range(x.rank - 2), x.rank - 1, x.rank - 2])
    return turned


def _sliced(mb: Builder, m: Match) -> Var:
    """Cut what was turned, and turn it back; an axis before the last that begins after 0 is cut first."""
    x, (begin, end) = m.x, m.places
    gone = [bool(g) for g in each_axis(m.root, "squeeze_mask", False)]
    if begin[-2]:
        x = mb.slice_by_index(x=x, begin=[*begin[:-1], 0], end=[*end[:-1], x.shape[-1]])
        begin, end = [*[0] * (x.rank - 1), begin[-1]], [*x.shape[:-1], end[-1]]
    begin, end, gone = ([*places[:-2], places[-1], places[-2]] for places in (begin, end, gone))
    masks = {"squeeze_mask": gone} if any(gone) else {}
    part: Var = mb.slice_by_index(x=_turned(mb, x), begin=begin, end=end, **masks)
    return part if any(gone[-2:]) else _turned(mb, part)


@an.example((4, 8), dtype="fp16")
def example(x: Var) -> Var:
    """The second half of the last axis."""
    return mb.slice_by_index(x=x, begin=[0, 4], end=[4, 8], name="s")
