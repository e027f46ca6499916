"""The cosine of two rows is taken of rows whose squares fp16 holds.

Before::

    main(%a: 2x8xfp16, %b: 2x8xfp16) {
      %products: 2x8xfp16 = mul(x=%a, y=%b)
      %product: 2xfp16 = reduce_sum(x=%products, axes=[-1])
      %squares: 2x8xfp16 = mul(x=%a, y=%a)
      %first: 2xfp16 = reduce_sum(x=%squares, axes=[-1])
      %more_squares: 2x8xfp16 = mul(x=%b, y=%b)
      %second: 2xfp16 = reduce_sum(x=%more_squares, axes=[-1])
      %both: 2xfp16 = mul(x=%first, y=%second)
      %least: 2xfp16 = maximum(x=%both, y=5.96046e-08)
      %lengths: 2xfp16 = sqrt(x=%least)
      %y: 2xfp16 = real_div(x=%product, y=%lengths)
      return %y
    }

After::

    main(%a: 2x8xfp16, %b: 2x8xfp16) {
      %y_scale_cosines_abs: 2x8xfp16 = abs(x=%a)
      %y_scale_cosines_reduce_max: 2x1xfp16 = reduce_max(x=%y_scale_cosines_abs, axes=[-1], keep_dims=True)
      %y_scale_cosines_maximum: 2x1xfp16 = maximum(x=%y_scale_cosines_reduce_max, y=0.015625)
      %y_scale_cosines_clip: 2x1xfp16 = clip(x=%y_scale_cosines_maximum, alpha=0.0078125, beta=32)
      %y_scale_cosines_real_div: 2x1xfp16 = real_div(x=%y_scale_cosines_maximum, y=%y_scale_cosines_clip)
      %y_scale_cosines_real_div_1: 2x8xfp16 = real_div(x=%a, y=%y_scale_cosines_real_div)
      %y_scale_cosines_squeeze: 2xfp16 = squeeze(x=%y_scale_cosines_real_div, axes=[-1])
      %y_scale_cosines_abs_1: 2x8xfp16 = abs(x=%b)
      %y_scale_cosines_reduce_max_1: 2x1xfp16 = reduce_max(x=%y_scale_cosines_abs_1, axes=[-1], keep_dims=True)
      %y_scale_cosines_maximum_1: 2x1xfp16 = maximum(x=%y_scale_cosines_reduce_max_1, y=0.015625)
      %y_scale_cosines_clip_1: 2x1xfp16 = clip(x=%y_scale_cosines_maximum_1, alpha=0.0078125, beta=32)
      %y_scale_cosines_real_div_2: 2x1xfp16 = real_div(x=%y_scale_cosines_maximum_1, y=%y_scale_cosines_clip_1)
      %y_scale_cosines_real_div_3: 2x8xfp16 = real_div(x=%b, y=%y_scale_cosines_real_div_2)
      %y_scale_cosines_squeeze_1: 2xfp16 = squeeze(x=%y_scale_cosines_real_div_2, axes=[-1])
      %y_scale_cosines_mul: 2x8xfp16 = mul(x=%y_scale_cosines_real_div_1, y=%y_scale_cosines_real_div_3)
      %y_scale_cosines_reduce_sum: 2xfp16 = reduce_sum(x=%y_scale_cosines_mul, axes=[-1])
      %y_scale_cosines_square: 2x8xfp16 = square(x=%y_scale_cosines_real_div_1)
      %y_scale_cosines_reduce_sum_1: 2xfp16 = reduce_sum(x=%y_scale_cosines_square, axes=[-1])
      %y_scale_cosines_square_1: 2x8xfp16 = square(x=%y_scale_cosines_real_div_3)
      %y_scale_cosines_reduce_sum_2: 2xfp16 = reduce_sum(x=%y_scale_cosines_square_1, axes=[-1])
      %y_scale_cosines_sqrt: 2xfp16 = sqrt(x=%y_scale_cosines_reduce_sum_1)
      %y_scale_cosines_sqrt_1: 2xfp16 = sqrt(x=%y_scale_cosines_reduce_sum_2)
      %y_scale_cosines_mul_1: 2xfp16 = mul(x=%y_scale_cosines_sqrt, y=%y_scale_cosines_sqrt_1)
      %y_scale_cosines_real_div_4: 2xfp16 = real_div(x=1, y=%y_scale_cosines_squeeze)
      %y_scale_cosines_real_div_5: 2xfp16 = real_div(x=1, y=%y_scale_cosines_squeeze_1)
      %y_scale_cosines_mul_2: 2xfp16 = mul(x=%y_scale_cosines_real_div_4, y=%y_scale_cosines_real_div_5)
      %y_scale_cosines_mul_3: 2xfp16 = mul(x=%y_scale_cosines_mul_2, y=0.000244141)
      %y_scale_cosines_maximum_2: 2xfp16 = maximum(x=%y_scale_cosines_mul_1, y=%y_scale_cosines_mul_3)
      %y: 2xfp16 = real_div(x=%y_scale_cosines_reduce_sum, y=%y_scale_cosines_maximum_2)
      return %y
    }

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


@dataclass(frozen=True)
class ScaleCosines(an.ScaledSquares):
    """`sum(a * b) / (|a| * |b|)` becomes the same of `a / u` and `b / v`."""

    name = "scale_cosines"
    kinds = frozenset({"real_div"})

    def check(self, m: Match) -> Match | Refusal:
        """By the lengths of both rows, and of numbers whose squares may overflow."""
        cosine = an.cosines.cosine(m.root)
        if cosine is None or not self.applies(m.x, cosine.rows):
            return an.NO_MATCH
        most = self.most(cosine.rows, cosine.count)
        if most**2 <= an.bounds.LARGEST:  # the squares of both lengths are multiplied
            return Refusal(
                f"the products add up to at most {most:g}, and their square does not overflow", m.root
            )
        return m.bind(ops=cosine.ops, cosine=cosine)

    def rewrite(self, mb: Builder, m: Match) -> Var:
        """The rows have magnitudes of which fp16 holds the sums of the squares."""
        axes, keep, floor = list(m.cosine.axes), m.cosine.keep_dims, self.floor(m.cosine.least)
        quiet, rows, units = an.Quiet.of(m.cosine.count), [], []
        for row in m.cosine.rows:
            unit = quiet.unit(mb, mb.maximum(x=self.largest(mb, [row], axes), y=floor))
            rows.append(mb.real_div(x=row, y=unit))
            units.append(unit if keep else mb.squeeze(x=unit, axes=axes))
        product = mb.reduce_sum(x=mb.mul(x=rows[0], y=rows[1]), axes=axes, keep_dims=keep)
        squares = [mb.reduce_sum(x=mb.square(x=row), axes=axes, keep_dims=keep) for row in rows]
        lengths = mb.mul(x=mb.sqrt(x=squares[0]), y=mb.sqrt(x=squares[1]))
        if m.cosine.least:
            least = an.guard_of(mb, m.cosine.least, floor / quiet.least, *units)
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
