"""Find the index of the largest number in floats, so that only a final cast to integers stays off the engine.

Before::

    main(%x: 2x3x8x8xfp16) {
      %class: 2x8x8xint32 = reduce_argmax(x=%x, axis=1)
      %y: 2x8x8xfp16 = cast(x=%class, dtype="fp16")
      return %y
    }

After::

    main(%x: 2x3x8x8xfp16) {
      %class_top: 2x1x8x8xfp16 = reduce_max(x=%x, axes=[1], keep_dims=True)
      %class_hit: 2x3x8x8xbool = equal(x=%x, y=%class_top)
      %class_one: 2x3x8x8xfp16 = cast(x=%class_hit, dtype="fp16")
      %class_left: 2x3x8x8xfp16 = mul(x=%class_one, y=[[[3]], [[2]], [[1]]])
      %class_most: 2x8x8xfp16 = reduce_max(x=%class_left, axes=[1])
      %y: 2x8x8xfp16 = sub(x=3, y=%class_most)
      return %y
    }

A constant numbers the positions from the end, so that the first of several equal numbers wins, as before.
`reduce_argmin` is rewritten in the same way. Casts of the index to floats are removed; readers that need the
integer get a cast. The rewrite is right for finite numbers and infinities, but not for NaN.

Refuses when the axis is longer than `most_places`, up to which fp16 counts exactly, or has an unknown length;
and when the numbers are integers.

Why it helps: an int32 index keeps the search for the maximum on the CPU (measured, M4, macOS 27.0.1, by
751K/Apple-Neural-Engine-Microarchitecture-Study-M6), at the end of every model that labels pixels. What the
pass gains in time was not measured.

Grade: checked: that a number equals the largest one is opaque in the field.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from anesurgery import authoring as an
from anesurgery.authoring import Builder, Match, Refusal, Rewrite, Var, mb

FLOATS = ("fp16", "fp32")


@dataclass(frozen=True)
class ArgmaxAsFloats(Rewrite):
    """`reduce_argmax` and `reduce_argmin` become comparisons and a maximum of places."""

    name = "argmax_as_floats"
    kinds = frozenset({"reduce_argmax", "reduce_argmin"})
    tolerates_nonfinite = False
    """Nothing equals NaN."""
    most_places: int = an.fp16.LAST_INTEGER
    """The longest axis; fp16 holds each integer up to 2048."""

    def check(self, m: Match) -> Match | Refusal:
        """Match a float tensor with an axis that fp16 can count."""
        if an.dtype_name(m.x) not in FLOATS:
            return Refusal(f"%{m.x.name} is {an.dtype_name(m.x)}", m.root)
        axis = int(an.number(m.root.axis) or 0) % m.x.rank
        length = m.x.shape[axis]
        if an.is_symbolic(length):
            return Refusal(f"axis {axis} of %{m.x.name} has the unknown length {length}", m.root)
        if length > self.most_places:
            return Refusal(f"axis {axis} has {length} places, above {self.most_places}", m.root)
        return m.bind(axis=axis, length=int(length))

    def rewrite(self, mb: Builder, m: Match) -> dict[Var, Var]:
        """Number the places from the end; the largest such number of a largest element is the first place."""
        index: Var = m.root.outputs[0]
        kind, wish = an.np_dtype(m.x).type, index.name
        extremum = mb.reduce_max if m.root.op_type == "reduce_argmax" else mb.reduce_min
        top = extremum(x=m.x, axes=[m.axis], keep_dims=True, name=f"{wish}_top")
        hit = mb.equal(x=m.x, y=top, name=f"{wish}_hit")
        along = [m.length] + [1] * (m.x.rank - 1 - m.axis)
        left = np.arange(m.length, 0, -1).astype(kind).reshape(along)
        one = mb.cast(x=hit, dtype=an.dtype_name(m.x), name=f"{wish}_one")
        counted = mb.mul(x=one, y=left, name=f"{wish}_left")
        kept = bool(m.root.keep_dims.val)
        most = mb.reduce_max(x=counted, axes=[m.axis], keep_dims=kept, name=f"{wish}_most")
        place = mb.sub(x=kind(m.length), y=most)
        casts = [op for op in an.consumers(index) if op.op_type == "cast" and op.dtype.val in FLOATS]
        pairs: dict[Var, Var] = {}
        for op in casts:
            same = op.dtype.val == an.dtype_name(m.x)
            pairs[op.outputs[0]] = place if same else mb.cast(x=place, dtype=op.dtype.val)
        if an.is_output(index) or len(casts) < len(an.consumers(index)):
            pairs[index] = mb.cast(x=place, dtype=an.dtype_name(index))
        return pairs


@an.example((2, 3, 8, 8), dtype="fp16", opset="iOS17")
def example(x: Var) -> Var:
    """Each pixel gets the class with the highest score."""
    index = mb.reduce_argmax(x=x, axis=1, keep_dims=False, name="class")
    return mb.cast(x=index, dtype="fp16", name="y")
