"""The root, or the logarithm, of a sum of squares is taken of values that are divided by a unit.

The unit is 1 where the largest magnitude of a row is neither so large that its squares overflow nor so small
that they vanish: then each number stays what it was, to the last digit. The magnitude of complex numbers,
`sqrt(re * re + im * im)`, is rewritten too, and what is added as an epsilon is divided by the square of the
unit. The logarithm of a power becomes that of the smaller numbers plus twice the logarithm of the unit, and the
least that it reads is divided by the square of it too. `rms_norm` and `group_norm` do so for whole norms, whose
reciprocal roots are left to them.

Refuses when the values are not of fp16, when intervals show that the squares and their sum do not overflow,
and when a shape is dynamic.

Why it helps: squares overflow in fp16 above 255, though the root would be small (computed). What the further
ops cost in time was not measured.

Grade: checked: that a factor goes through a root is no identity of polynomials.
"""

from __future__ import annotations

from dataclasses import dataclass

from anesurgery import authoring as an
from anesurgery.authoring import Builder, Match, Operation, Refusal, Var, mb
from anesurgery.facts import sums_of_squares
from anesurgery.regions.root_norms import Quiet, guard_of
from anesurgery.rewriting.scaled_squares import ScaledSquares


@dataclass(frozen=True)
class ScaleRoots(ScaledSquares):
    """`sqrt(sum(x * x))` becomes `u * sqrt(sum((x / u) * (x / u)))`, where u is 1 if fp16 holds the squares."""

    name = "scale_roots"
    kinds = frozenset({"sqrt", "rsqrt", "pow", "log"})

    def check(self, m: Match) -> Match | Refusal:
        """A root of a sum of squares that may overflow."""
        read = sums_of_squares.read_by_root(m.root)
        if read is None or not self.applies(m.x, read[0].values):
            return an.NO_MATCH
        squares, least = read
        most = self.most(squares.values, squares.most)
        if most + squares.epsilon <= an.fp16.LARGEST:
            return Refusal(f"the squares add up to at most {most:g}, and do not overflow", m.root)
        return m.bind(ops=(m.root, *squares.ops), squares=squares, least=least)

    def rewrite(self, mb: Builder, m: Match) -> Var:
        """The root of squares that fp16 holds, times the unit."""
        squares, total = m.squares, m.squares.total
        axes, floor = [] if total is None else an.ints(total, "axes"), self.floor(max(squares.epsilon, m.least))
        quiet = Quiet.of(squares.most, self.averaged(total))
        unit = quiet.unit(mb, mb.maximum(x=self.largest(mb, squares.values, axes), y=floor))
        inner = self.summed_squares(mb, squares.values, unit)
        if total is not None:
            inner = getattr(mb, squares.reduces)(x=inner, axes=axes, keep_dims=True)
        if squares.factor != 1:
            inner = mb.mul(x=inner, y=squares.factor)
        if squares.epsilon:
            inner = mb.add(x=inner, y=guard_of(mb, squares.epsilon, floor / quiet.least, unit))
        if m.least:
            inner = mb.maximum(x=inner, y=guard_of(mb, m.least, floor / quiet.least, unit))
        result = _ending(mb, m.root, unit, inner)
        if total is None or an.flag(total, "keep_dims"):
            return result
        return mb.squeeze(x=result, axes=axes)


def _ending(mb: Builder, root: Operation, unit: Var, inner: Var) -> Var:
    """The root of the smaller squares times the unit, or their logarithm plus twice that of it."""
    value: Var
    if root.op_type == "rsqrt":
        value = mb.real_div(x=mb.rsqrt(x=inner, epsilon=0.0), y=unit)
    elif root.op_type != "log":
        value = mb.mul(x=unit, y=mb.sqrt(x=inner))
    else:
        twice = mb.mul(x=mb.log(x=unit, epsilon=0.0), y=2.0)
        value = mb.add(x=mb.log(x=inner, epsilon=0.0), y=twice)
    return value


@an.example((2, 8), dtype="fp16")
def example(x: Var) -> Var:
    """The length of rows."""
    total = mb.reduce_sum(x=mb.square(x=x, name="squares"), axes=[-1], keep_dims=True, name="total")
    return mb.sqrt(x=total, name="y")
