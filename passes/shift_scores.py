"""Subtract the largest score before scores are multiplied by a large factor for a softmax.

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

A softmax does not change when the same number is subtracted from all scores of a row. The largest score becomes
0, and differences of scores near it are exact; the others become negative, down to minus infinity.

Refuses when intervals show that the scores do not overflow. If the range of the values is unknown and the
factor is at most 32, it refuses too: such values are assumed to be at most 2048, as elsewhere.

Why it helps: `1000 x` overflows in fp16 if `x` is 66 or more, and the softmax of a row with two infinities is
NaN (computed). The pass adds two ops; what they cost in time was not measured.

Grade: checked: a softmax leaves the field no sharp bound.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from anesurgery import authoring as an
from anesurgery.authoring import Var, mb
from anesurgery.numeric import products
from anesurgery.rewriting.repairs import Repair


@dataclass(frozen=True)
class ShiftScores(Repair):
    """`softmax(c x)` becomes `softmax(c (x - max(x)))`, where c is so large that `c x` may overflow."""

    name = "shift_scores"
    hazard = products.LARGE_SCORES
    tolerance = an.Tolerance(1e-3)


@an.example((2, 8), dtype="fp16")
def example(x: Var) -> Var:
    """The softmax of a hundred times a number."""
    return mb.softmax(x=mb.mul(x=x, y=np.float16(100), name="scores"), axis=-1, name="y")
