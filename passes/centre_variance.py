"""Compute a variance as the mean of squared differences from the mean, not as a difference of two means.

Refuses when the two means are not over the same axes of the same value, and when all values lie within 2 of
each other.

Why it helps: two large numbers cancel. At a mean of 100 and a spread of 1, fp16 leaves no correct digit, and
the root of a negative variance is NaN (computed). What the rewrite costs in time was not measured.

Grade: proved.
"""

from __future__ import annotations

from dataclasses import dataclass

from anesurgery import authoring as an
from anesurgery.authoring import Var, mb
from anesurgery.numeric import means
from anesurgery.rewriting.repairs import Repair


@dataclass(frozen=True)
class CentreVariance(Repair):
    """`mean(x * x) - mean(x) * mean(x)` becomes `mean((x - mean(x)) * (x - mean(x)))`."""

    name = "centre_variance"
    hazard = means.VARIANCE
    tolerance = an.REASSOCIATED


@an.example((2, 8))
def example(x: Var) -> Var:
    """The variance of rows."""
    first = mb.reduce_mean(x=mb.square(x=x, name="squares"), axes=[-1], keep_dims=True, name="first")
    mean = mb.reduce_mean(x=x, axes=[-1], keep_dims=True, name="mean")
    return mb.sub(x=first, y=mb.square(x=mean, name="second"), name="y")
