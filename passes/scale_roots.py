"""Take the root, or the logarithm, of a sum of squares of values that are divided by a unit.

The unit is 1 if the largest magnitude of a row is neither so large that its squares overflow nor so small that
they vanish; then every number keeps all its digits. The magnitude of complex numbers,
`sqrt(re * re + im * im)`, is rewritten too. An added epsilon is divided by the square of the unit. The
logarithm of a power becomes the logarithm of the smaller numbers plus twice the logarithm of the unit, and a
lower limit of its operand is divided by the square of the unit. `rms_norm` and `group_norm` do the same for
whole norms, so this pass leaves their reciprocal roots to them.

Refuses when the values are not of fp16, when intervals show that the squares and their sum do not overflow, and
when a shape is dynamic.

Why it helps: squares overflow in fp16 from 256 on, even if the root is small (computed). What added ops cost
in time was not measured.

Grade: checked: that a factor goes through a root is no identity of polynomials.
"""

from __future__ import annotations

from dataclasses import dataclass

from anesurgery import authoring as an
from anesurgery.authoring import Var, mb
from anesurgery.numeric import squares
from anesurgery.rewriting.repairs import Repair


@dataclass(frozen=True)
class ScaleRoots(Repair):
    """`sqrt(sum(x * x))` becomes `u * sqrt(sum((x / u) * (x / u)))`, where u is 1 if fp16 holds the squares."""

    name = "scale_roots"
    hazard = squares.ROOT
    static = True
    tolerance = an.REASSOCIATED
    magnitude = an.fp16.LARGEST


@an.example((2, 8), dtype="fp16")
def example(x: Var) -> Var:
    """The length of rows."""
    total = mb.reduce_sum(x=mb.square(x=x, name="squares"), axes=[-1], keep_dims=True, name="total")
    return mb.sqrt(x=total, name="y")
