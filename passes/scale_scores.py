"""Scores of attention, and other products of two values, are scaled before they are made, not after.

Before::

    main(%q: 1x4x16xfp16, %k: 1x32x16xfp16) {
      %scores: 1x4x32xfp16 = matmul(x=%q, y=%k, transpose_y=True)
      %scaled: 1x4x32xfp16 = mul(x=%scores, y=0.25)
      %y: 1x4x32xfp16 = softmax(x=%scaled)
      return %y
    }

After::

    main(%q: 1x4x16xfp16, %k: 1x32x16xfp16) {
      %scaled_scale_scores_mul: 1x4x16xfp16 = mul(x=%q, y=0.25)
      %scaled: 1x4x32xfp16 = matmul(x=%scaled_scale_scores_mul, y=%k, transpose_y=True)
      %y: 1x4x32xfp16 = softmax(x=%scaled)
      return %y
    }

The query is scaled, or the key where it has fewer numbers. A covariance or a Gram matrix, which is divided by
the number of values, is a product of two smaller sides.

Refuses when a side of the product is stored, when the factor is no constant number, is 0, or is 1 and more, and
when intervals show that the product stays below 32768.

Why it helps: sums of products end at 32768 on the engine (measured, M1 to M6), and query times key lost most
to fp16 in a probe of one kind of op at a time, 35 dB (measured, M1 Max: smpanaro/more-ane-transformers). What
it gains in time was not measured.

Grade: proved.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from anesurgery import authoring as an
from anesurgery.authoring import Builder, Match, Refusal, Rewrite, Var, mb
from anesurgery.facts import attention

SMALL = 0.05
"""A factor below this is shared by both sides, lest one becomes subnormal; that of a head of 400 is 0.05."""


@dataclass(frozen=True)
class ScaleScores(Rewrite):
    """`(q @ k) * s` becomes `(q * s) @ k`."""

    name = "scale_scores"
    kinds = frozenset({"mul", "real_div"})
    static = True
    tolerance = an.Tolerance(1e-3)
    tolerates_nonfinite = False

    def check(self, m: Match) -> Match | Refusal:
        """Scores of attention, or other products of two values, in fp16 that a factor makes smaller."""
        scaled = an.reading.scaled(m.root)
        product = an.producer(scaled[0], "matmul") if scaled is not None else None
        if scaled is None or product is None or an.np_dtype(product.x) != np.float16:
            return an.NO_MATCH
        if an.is_stored(product.x) or an.is_stored(product.y):
            return an.NO_MATCH
        if not 0 < abs(scaled[1]) < 1:
            return Refusal(
                f"the scores are multiplied by {scaled[1]:g}, and do not become smaller", m.root, idle=True
            )
        most = an.intervals.largest_score(product, an.fp16.CEILING)
        if most < an.fp16.CEILING:
            return Refusal(f"the scores are at most {most:g}, below {an.fp16.CEILING:g}", m.root, idle=True)
        both = attention.attention_of(product) is None and abs(scaled[1]) < SMALL
        return m.bind(ops=(m.root, product), product=product, scale=scaled[1], both=both)

    def rewrite(self, mb: Builder, m: Match) -> Var:
        """Multiply smaller numbers instead."""
        turned = {name: an.flag(m.product, name) for name in ("transpose_x", "transpose_y")}
        x, y = (
            v if factor == 1 else mb.mul(x=v, y=factor)
            for v, factor in zip((m.product.x, m.product.y), _factors(m), strict=True)
        )
        return mb.matmul(x=x, y=y, **{name: v for name, v in turned.items() if v})


def _factors(m: Match) -> tuple[float, float]:
    """What each side is multiplied with: the one that has fewer numbers, or both, one by a power of two."""
    if m.both:
        half = 2.0 ** round(math.log2(abs(m.scale)) / 2)
        return half, m.scale / half
    fewer = math.prod(m.product.x.shape) <= math.prod(m.product.y.shape)
    return (m.scale, 1.0) if fewer else (1.0, m.scale)


@an.example((1, 4, 16), (1, 32, 16), dtype="fp16")
def example(q: Var, k: Var) -> Var:
    """Eight keys, and four queries whose scores are divided by four."""
    scores = mb.matmul(x=q, y=k, transpose_y=True, name="scores")
    scaled = mb.mul(x=scores, y=np.float16(0.25), name="scaled")
    return mb.softmax(x=scaled, axis=-1, name="y")
