"""A mean of very many values over several axes is taken axis by axis.

Before::

    main(%x: 1x512x512xfp16) {
      %y: 1x1x1xfp16 = reduce_mean(x=%x, axes=[-2, -1], keep_dims=True)
      return %y
    }

After::

    main(%x: 1x512x512xfp16) {
      %y_mean_of_means_reduce_mean: 1x512x1xfp16 = reduce_mean(x=%x, axes=[2], keep_dims=True)
      %y: 1x1x1xfp16 = reduce_mean(x=%y_mean_of_means_reduce_mean, axes=[1, 2], keep_dims=True)
      return %y
    }

Refuses when the values are not of fp16, are fewer than 262144, or lie along one axis.

Why it helps: a reduction has a narrow running sum (measured, M1 and M5, through the private compiler:
sbryngelson/ane-guide), which loses what is small beside it; each of these sums is short. What it costs in
time was not measured.

Grade: proved.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from anesurgery import authoring as an
from anesurgery.authoring import Builder, Match, Refusal, Rewrite, Var, mb
from anesurgery.mil import any_symbolic

MANY = 1 << 18
"""Values, as the rule of `inspect` has it: the means of norms are of fewer."""


@dataclass(frozen=True)
class MeanOfMeans(Rewrite):
    """`mean(x, [a, b])` becomes `mean(mean(x, [b]), [a])`."""

    name = "mean_of_means"
    kinds = frozenset({"reduce_mean"})
    static = True
    tolerance = an.REASSOCIATED
    tolerates_nonfinite = False

    def check(self, m: Match) -> Match | Refusal:
        """Of many values along several axes that are longer than 1."""
        axes = sorted(an.reading.axes_of(m.root))
        sizes = {axis: m.x.shape[axis] for axis in axes}
        if not an.intervals.is_half(m.x) or any_symbolic(sizes.values()):
            return an.NO_MATCH
        if (count := math.prod(sizes.values())) < MANY:
            return an.NO_MATCH
        long = [axis for axis, size in sizes.items() if size > 1]
        if len(long) < 2:
            return Refusal(f"the {count} values lie along one axis", m.root)
        return m.bind(axes=axes, first=long[-1])

    def rewrite(self, mb: Builder, m: Match) -> Var:
        """The last axis first, then the others."""
        rows = mb.reduce_mean(x=m.x, axes=[m.first], keep_dims=True)
        return mb.reduce_mean(x=rows, axes=m.axes, keep_dims=an.flag(m.root, "keep_dims"))


@an.example((1, 512, 512), dtype="fp16")
def example(x: Var) -> Var:
    """The mean of a picture."""
    return mb.reduce_mean(x=x, axes=[-2, -1], keep_dims=True, name="y")
