"""The largest score is taken away before scores are made larger for a softmax.

Before::

    main(%x: 2x8xfp16) {
      %scores: 2x8xfp16 = mul(x=%x, y=100)
      %y: 2x8xfp16 = softmax(x=%scores)
      return %y
    }

After::

    main(%x: 2x8xfp16) {
      %y_shift_scores_reduce_max: 2x1xfp16 = reduce_max(x=%x, axes=[1], keep_dims=True)
      %y_shift_scores_sub: 2x8xfp16 = sub(x=%x, y=%y_shift_scores_reduce_max)
      %y_shift_scores_mul: 2x8xfp16 = mul(x=%y_shift_scores_sub, y=100)
      %y: 2x8xfp16 = softmax(x=%y_shift_scores_mul, axis=1)
      return %y
    }

A softmax does not change when one number is taken from all scores of a row. What is left of the largest is
0, and of numbers near it the difference is exact; the others become negative, down to minus infinity.

Refuses when intervals show that the scores do not overflow, and of values of which nothing is known when the
factor is at most 32: they are taken for no larger than 2048, as elsewhere.

Why it helps: `1000 x` overflows in fp16 from 66 on, and the softmax of a row with two infinities is NaN
(computed). Two ops more; what they cost in time was not measured.

Grade: checked: a softmax leaves the field no sharp bound.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from anesurgery import authoring as an
from anesurgery.authoring import Builder, Match, Refusal, Rewrite, Var, mb


@dataclass(frozen=True)
class ShiftScores(Rewrite):
    """`softmax(c x)` becomes `softmax(c (x - max(x)))`, where c is so large that `c x` may overflow."""

    name = "shift_scores"
    kinds = frozenset({"softmax"})
    tolerance = an.Tolerance(1e-3)
    tolerates_nonfinite = False

    def check(self, m: Match) -> Match | Refusal:
        """A softmax of what a constant makes too large."""
        scores = m.x.op
        scaled = None if scores is None else an.reading.scaled(scores)
        if scaled is None or abs(scaled[1]) <= 1 or not an.intervals.is_half(m.x):
            return an.NO_MATCH
        if not an.intervals.overflows_scaled(m.root):
            words = f"%{m.x.name} is {scaled[1]:g} times %{scaled[0].name}, and does not overflow"
            return Refusal(words, m.root, idle=True)
        if scaled[0].shape != m.x.shape:
            return Refusal(f"%{scaled[0].name} has another shape than the scores", m.root)
        return m.bind(ops=(m.root, scores), values=scaled[0], factor=scaled[1])

    def rewrite(self, mb: Builder, m: Match) -> Var:
        """The largest of `c x` is that of x, or the smallest where c is negative."""
        axis = an.reading.axis_of(m.root)
        end = (mb.reduce_max if m.factor > 0 else mb.reduce_min)(x=m.values, axes=[axis], keep_dims=True)
        return mb.softmax(x=mb.mul(x=mb.sub(x=m.values, y=end), y=m.factor), axis=axis)


@an.example((2, 8), dtype="fp16")
def example(x: Var) -> Var:
    """The softmax of a hundred times a number."""
    return mb.softmax(x=mb.mul(x=x, y=np.float16(100), name="scores"), axis=-1, name="y")
