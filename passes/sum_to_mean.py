"""Replace a sum of many values that is scaled down later by a mean.

Before::

    main(%x: 1x128x128xfp16) {
      %sum: 1x1x1xfp16 = reduce_sum(x=%x, axes=[-2, -1], keep_dims=True)
      %y: 1x1x1xfp16 = mul(x=%sum, y=3.05176e-05)
      return %y
    }

After::

    main(%x: 1x128x128xfp16) {
      %y_sum_to_mean_reduce_mean: 1x1x1xfp16 = reduce_mean(x=%x, axes=[-2, -1], keep_dims=True)
      %y: 1x1x1xfp16 = mul(x=%y_sum_to_mean_reduce_mean, y=0.5)
      return %y
    }

Refuses when the values are not of fp16, when the factor of the sum is not a constant number below 1, when
intervals show that the sum does not overflow, and when the number of values is not known.

Why it helps: a reduce_sum has the range of fp16 and a narrow running sum (measured, M1 and M5, through the
private compiler: sbryngelson/ane-guide). What the pass gains in time was not measured.

Grade: proved.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from anesurgery import authoring as an
from anesurgery.authoring import Builder, Match, Refusal, Rewrite, Var, mb
from anesurgery.semantics.intervals import magnitude


@dataclass(frozen=True)
class SumToMean(Rewrite):
    """`sum(x) * c` becomes `mean(x) * (c * n)`."""

    most: float | None = None
    """What may be left of the factor: the mean is so many times smaller than the result. None: anything."""
    name = "sum_to_mean"
    kinds = frozenset({"mul", "real_div"})
    static = True
    tolerance = an.Tolerance(1e-3)
    tolerates_nonfinite = False

    def check(self, m: Match) -> Match | Refusal:
        """Match a constant factor below 1 of a sum that may overflow."""
        scaled = an.reading.scaled(m.root)
        total = an.producer(scaled.value, "reduce_sum") if scaled is not None else None
        if scaled is None or total is None or an.np_dtype(total.x) != np.float16:
            return an.NO_MATCH
        if abs(scaled.factor) >= 1:
            words = f"the sum is multiplied by {scaled.factor:g}, and does not become smaller"
            return Refusal(words, m.root, idle=True)
        count = math.prod(total.x.shape[axis] for axis in an.reading.axes_of(total))
        most = magnitude(total.x) * count
        if most <= an.fp16.LARGEST:
            words = f"the sum of {count} values is at most {most:g}, and does not overflow"
            return Refusal(words, m.root, idle=True)
        scale = scaled.factor * count
        if self.most is not None and abs(scale) > self.most:
            words = f"the mean is {abs(scale):g} times smaller than the result, and may be too small"
            return Refusal(words, m.root)
        return m.bind(ops=(m.root, total), total=total, scale=scale)

    def rewrite(self, mb: Builder, m: Match) -> Var:
        """Build the mean, times the rest of the factor."""
        axes, keep_dims = an.ints(m.total, "axes"), an.flag(m.total, "keep_dims")
        mean: Var = mb.reduce_mean(x=m.total.x, axes=axes, keep_dims=keep_dims)
        return mean if abs(m.scale - 1) < an.fp16.HALF_STEP else mb.mul(x=mean, y=m.scale)


@an.example((1, 128, 128), dtype="fp16")
def example(x: Var) -> Var:
    """Half the mean of a picture, as a sum."""
    total = mb.reduce_sum(x=x, axes=[-2, -1], keep_dims=True, name="sum")
    return mb.mul(x=total, y=np.float16(1 / 32768), name="y")
