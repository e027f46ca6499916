"""A variance as a difference of means becomes the mean of the squared differences from the mean.

Refuses when both means are not over the same axes of the same value.

Why it helps: two large numbers cancel. At a mean of 100 and a spread of 1 fp16 leaves no digit, and a
negative variance makes the root after it NaN (computed). What it costs in time was not measured.

Grade: proved.
"""

from __future__ import annotations

from dataclasses import dataclass

from anesurgery import authoring as an
from anesurgery.authoring import Builder, Match, OpPattern, Ops, Refusal, Rewrite, Var, mb, var
from anesurgery.semantics import bounds


@dataclass(frozen=True)
class CentreVariance(Rewrite):
    """`mean(x * x) - mean(x) * mean(x)` becomes `mean((x - mean(x)) * (x - mean(x)))`."""

    name = "centre_variance"
    tolerance = an.REASSOCIATED
    tolerates_nonfinite = False
    shares_inner = True

    def pattern(self, op: Ops) -> OpPattern:
        """A difference whose first side is a mean."""
        return op.sub(x=op.reduce_mean(x=var("squares"), as_="first"), y=var("second"))

    def check(self, m: Match) -> Match | Refusal:
        """The mean of squares, and the square of the mean of the same value."""
        square = an.producer(m.second)
        mean = an.producer(bounds.squared(square), "reduce_mean")
        x = bounds.squared(an.producer(m.squares))
        if square is None or mean is None or x is None or mean.x is not x:
            return an.NO_MATCH
        over = [(an.reading.axes_of(op), an.flag(op, "keep_dims")) for op in (m.first, mean)]
        if over[0] != over[1]:
            return Refusal(f"the means are over {over[0]} and {over[1]} (axes, kept)", m.root)
        return m.bind(ops=(m.root, m.first, m.squares.op, square, mean), x=x)

    def rewrite(self, mb: Builder, m: Match) -> Var:
        """The mean is taken away before anything is squared."""
        axes = an.ints(m.first, "axes")
        apart = mb.sub(x=m.x, y=mb.reduce_mean(x=m.x, axes=axes, keep_dims=True))
        return mb.reduce_mean(x=mb.square(x=apart), axes=axes, keep_dims=an.flag(m.first, "keep_dims"))


@an.example((2, 8))
def example(x: Var) -> Var:
    """The variance of rows."""
    first = mb.reduce_mean(x=mb.square(x=x, name="squares"), axes=[-1], keep_dims=True, name="first")
    mean = mb.reduce_mean(x=x, axes=[-1], keep_dims=True, name="mean")
    return mb.sub(x=first, y=mb.square(x=mean, name="second"), name="y")
