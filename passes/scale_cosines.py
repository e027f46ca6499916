"""The cosine of two rows is taken of rows whose squares fp16 holds.

Each row is divided by a unit, which is 1 where its largest magnitude is neither too large nor too small to be
squared. The lengths may be roots of their own, or `reduce_l2_norm`; the least that their product may be is
divided by both units. `scale_roots` repairs a length by itself.

Refuses when the values are not of fp16, when intervals show that neither the product nor the squares overflow,
and when a shape is dynamic.

Why it helps: the product of two rows overflows in fp16 where their numbers are above 255, though the cosine is
at most 1 (computed). What the further ops cost in time was not measured.

Grade: checked: that a factor goes through a root is no identity of polynomials.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from anesurgery import authoring as an
from anesurgery.authoring import Builder, Match, Refusal, Var, mb
from anesurgery.facts import cosines
from anesurgery.regions.root_norms import Quiet, guard_of
from anesurgery.rewriting.scaled_squares import ScaledSquares


@dataclass(frozen=True)
class ScaleCosines(ScaledSquares):
    """`sum(a * b) / (|a| * |b|)` becomes the same of `a / u` and `b / v`."""

    name = "scale_cosines"
    kinds = frozenset({"real_div"})

    def check(self, m: Match) -> Match | Refusal:
        """By the lengths of both rows, and of numbers whose squares may overflow."""
        cosine = cosines.cosine(m.root)
        if cosine is None or not self.applies(m.x, cosine.rows):
            return an.NO_MATCH
        most = self.most(cosine.rows, cosine.count)
        if most**2 <= an.fp16.LARGEST:  # the squares of both lengths are multiplied
            return Refusal(
                f"the products add up to at most {most:g}, and their square does not overflow", m.root
            )
        return m.bind(ops=cosine.ops, cosine=cosine)

    def rewrite(self, mb: Builder, m: Match) -> Var:
        """The rows have magnitudes of which fp16 holds the sums of the squares."""
        axes, keep, floor = list(m.cosine.axes), m.cosine.keep_dims, self.floor(m.cosine.least)
        quiet, rows, units = Quiet.of(m.cosine.count), [], []
        for row in m.cosine.rows:
            unit = quiet.unit(mb, mb.maximum(x=self.largest(mb, [row], axes), y=floor))
            rows.append(mb.real_div(x=row, y=unit))
            units.append(unit if keep else mb.squeeze(x=unit, axes=axes))
        product = mb.reduce_sum(x=mb.mul(x=rows[0], y=rows[1]), axes=axes, keep_dims=keep)
        squares = [mb.reduce_sum(x=mb.square(x=row), axes=axes, keep_dims=keep) for row in rows]
        lengths = mb.mul(x=mb.sqrt(x=squares[0]), y=mb.sqrt(x=squares[1]))
        if m.cosine.least:
            least = guard_of(mb, m.cosine.least, floor / quiet.least, *units)
            lengths = mb.maximum(x=lengths, y=least)
        return mb.real_div(x=product, y=lengths)


@an.example((2, 8), (2, 8), dtype="fp16")
def example(a: Var, b: Var) -> Var:
    """As `torch.nn.functional.cosine_similarity` is converted."""
    product = mb.reduce_sum(x=mb.mul(x=a, y=b, name="products"), axes=[-1], name="product")
    first = mb.reduce_sum(x=mb.mul(x=a, y=a, name="squares"), axes=[-1], name="first")
    second = mb.reduce_sum(x=mb.mul(x=b, y=b, name="more_squares"), axes=[-1], name="second")
    both = mb.maximum(x=mb.mul(x=first, y=second, name="both"), y=np.float16(6e-8), name="least")
    return mb.real_div(x=product, y=mb.sqrt(x=both, name="lengths"), name="y")
