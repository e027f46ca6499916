"""Compute the angle of a quotient from the smaller number over the larger, and move it to the right quadrant.

`torch.atan2` is converted to `atan(y / (x + a small constant))`, with comparisons that find the quadrant. The
pass recognizes other spellings by computing them at points of all quadrants. If both numbers are 0, the angle
is 0. The signs of zeros count as in `torch.atan2`: a negative number that fp16 rounds to -0 keeps its sign.

Refuses when an inner value is read elsewhere; does not apply if the divisor cannot be 0.

Why it helps: 0 / 0 is NaN in fp16, in which the constant that converters add is 0 or the smallest number, and a
quotient of small numbers keeps few digits (computed). torch's composition gives 0 where y is 0 and x negative,
in fp32 too; the angle is pi there, as in torch. The new quotient is at most 1, and its divisor is not 0. It
costs about as many ops as torch's composition, and fifteen more than a bare arc tangent; the time was not
measured.

Grade: checked: an arc tangent is no polynomial.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from anesurgery import authoring as an
from anesurgery.authoring import Builder, Match, Rewrite, Var, mb
from anesurgery.checking import adversarial
from anesurgery.checking.lengths import drawn_shape
from anesurgery.facts import quotient_angles

FOUR = 4.0
"""Divided by any number of fp16 or fp32 it is no subnormal, which an engine may take for 0."""


@dataclass(frozen=True)
class StableAngle(Rewrite):
    """`atan(y / x)` becomes an arc tangent of at most 1, and the rest of a quarter turn."""

    name = "stable_angle"
    mends = True
    kinds = quotient_angles.ENDS
    tolerance = an.Tolerance(2e-3)
    """pi is stored in fp16."""
    tolerates_nonfinite = False

    def check(self, m: Match) -> Match | None:
        """Match an angle whose divisor may be 0."""
        angle = quotient_angles.quotient_angle(m.root)
        return None if angle is None else m.bind(ops=angle.ops, angle=angle)

    def sample(self, m: Match, var: Var, rng: np.random.Generator) -> an.Array | None:
        """Draw numbers other than 0 for four quadrants, since compositions are wrong on the axes."""
        if not m.angle.all_quadrants or var not in (m.angle.y, m.angle.x):
            return None
        sizes = 10 ** rng.uniform(-2, 4, drawn_shape(var))
        return adversarial.with_random_signs(rng, sizes).astype(an.np_dtype(var))

    def rewrite(self, mb: Builder, m: Match) -> Var:
        """Build the angle to the nearer axis, and turn it into its quadrant."""
        y, x = m.angle.y, m.angle.x
        up, aside = mb.abs(x=y), mb.abs(x=x)
        larger = mb.maximum(x=up, y=aside)
        divisor = mb.select(cond=mb.equal(x=larger, y=0.0), a=1.0, b=larger)
        near = mb.atan(x=mb.real_div(x=mb.minimum(x=up, y=aside), y=divisor), name=f"{y.name}_near")
        rest = mb.sub(x=math.pi / 2, y=near, name=f"{y.name}_rest")
        value = mb.select(cond=mb.greater(x=up, y=aside), a=rest, b=near)
        if m.angle.all_quadrants:
            value = mb.select(cond=mb.less(x=x, y=0.0), a=mb.sub(x=math.pi, y=value), b=value)
            below = self.is_negative(mb, y)
        else:  # where y is 0, so is the angle
            below = mb.logical_xor(x=mb.less(x=y, y=0.0), y=self.is_negative(mb, x))
        return mb.select(cond=below, a=mb.mul(x=value, y=-1.0), b=value)

    @staticmethod
    def is_negative(mb: Builder, value: Var) -> Var:
        """Is a value below 0, or -0? Only a division tells -0 from 0."""
        return mb.less(x=mb.real_div(x=FOUR, y=value), y=0.0)


@an.example((2, 8), (2, 8))
def example(a: Var, b: Var) -> Var:
    """The angle of complex numbers."""
    return mb.atan(x=mb.real_div(x=a, y=b, name="q"), name="y")
