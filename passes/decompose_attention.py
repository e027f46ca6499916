"""Fused attention becomes a product, a mask, a softmax and a product.

Before::

    main(%x: 1x2x4x16, %mask: 1x1x4x4) {
      %y: 1x2x4x16 = scaled_dot_product_attention(query=%x, key=%x, value=%x, attn_mask=%mask)
      return %y
    }

After::

    main(%x: 1x2x4x16, %mask: 1x1x4x4) {
      %y_query: 1x2x4x16 = mul(x=%x, y=0.25)
      %y_scores: 1x2x4x4 = matmul(x=%y_query, y=%x, transpose_y=True)
      %y_masked: 1x2x4x4 = add(x=%y_scores, y=%mask)
      %y_weights: 1x2x4x4 = softmax(x=%y_masked)
      %y: 1x2x4x16 = matmul(x=%y_weights, y=%x)
      return %y
    }

The query is scaled instead of the scores, so that their products stay small in fp16. If fp16 rounds
1/sqrt(width), a second factor from 1 to 2 on the scores makes up for it. A boolean mask selects between the
scores and `fill`, which is finite. A row whose keys are all masked gives a mean, as Core ML's own op does;
torch gives zeros or NaN.

Refuses when a shape is dynamic, and when queries and keys are so large that their scores may exceed fp16, or
come near the fill.

Why it helps: fused attention did not apply a mask unless an op of the same procedure made it (reported, M1 Max,
macOS 27.0, and M4, macOS 26.6.2: docs/engine-faults.md), and under 26.1 it gave infinities and NaN
(reported: pytorch/executorch issue 15833). Core ML prefers the engine for it only from about 2 million elements
for each of query, key and value (measured, M4, macOS 27.0.1, 751K); the separate ops need no such size.

Grade: proved.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from anesurgery import authoring as an
from anesurgery.authoring import Builder, Match, Program, Refusal, Rewrite, Session, Var, mb
from anesurgery.facts import attention
from anesurgery.interpret.arithmetic.engine_faults import outside_mask
from anesurgery.placement.rules import faulty_ops
from anesurgery.regions import small_builds


@dataclass(frozen=True)
class DecomposeAttention(Rewrite):
    """`scaled_dot_product_attention` in its parts."""

    name = "decompose_attention"
    kinds = frozenset({"scaled_dot_product_attention"})
    tolerance = an.REASSOCIATED
    tolerates_nonfinite = False
    """A score of -inf meets a finite fill."""

    fill: float = an.option(-1e4, most=attention.MASKED)
    """The score of a key that a boolean mask hides."""
    only_ignored: bool = False
    """Rewrite only under masks that the engine of the target was seen to ignore, as `safe_numbers` does."""

    def run(self, program: Program, session: Session) -> None:
        """Rewrite the attentions; with `only_ignored` only if the fault was seen on the target."""
        fault = faulty_ops.CLAIMS["fault-attention-mask"]
        has_fault = faulty_ops.may_concern(fault, an.Target.parse(session.target))
        if has_fault or not self.only_ignored:
            super().run(program, session)

    def check(self, m: Match) -> Match | Refusal:
        """Accept static shapes; the scores must stay in fp16, and far above the fill of a boolean mask."""
        if self.only_ignored and not outside_mask(m.root):  # `run` has asked about the target
            return an.NO_MATCH
        for name in ("query", "key", "value"):
            if an.static_shape(operand := m.root.inputs[name]) is None:
                return Refusal(f"%{operand.name} has a dynamic shape", m.root)
        mask = m.root.inputs.get("attn_mask")
        most = an.fp16.LARGEST if an.intervals.is_half(m.query) else math.inf  # scores are stored now
        if mask is not None and an.np_dtype(mask).kind == "b":  # exp(fill - score) must be 0
            most = min(most, -self.fill - an.intervals.VANISHES)
        return m.bind(mask=mask, limits=an.intervals.score_limits(m.root, m.query, most))

    def sample(self, m: Match, var: Var, rng: np.random.Generator) -> an.Array | None:
        """Draw boolean masks that keep a key of each row."""
        shape = an.static_shape(var)
        if var is not m.mask or not shape or an.np_dtype(var).kind != "b":
            return None
        keep = rng.random(shape) < 0.5
        keep[..., rng.integers(shape[-1])] = True
        return keep

    def rewrite(self, mb: Builder, m: Match) -> Var:
        """Build the products, the mask and the softmax of the attention."""
        wish, dtype = m.root.outputs[0].name, an.np_dtype(m.query)
        scale, *correction = attention.in_factors(1 / math.sqrt(m.query.shape[-1]), dtype)
        query = mb.mul(x=m.query, y=scale, name=f"{wish}_query")
        scores = mb.matmul(x=query, y=m.key, transpose_y=True, name=f"{wish}_scores")
        for factor in correction:  # at most one: what fp16 rounded off the scale
            scores = mb.mul(x=scores, y=factor, name=f"{wish}_scaled")
        if m.mask is not None and an.np_dtype(m.mask).kind == "b":
            fill = dtype.type(self.fill)
            scores = mb.select(cond=m.mask, a=scores, b=fill, name=f"{wish}_masked")
        elif m.mask is not None:
            scores = mb.add(x=scores, y=small_builds.as_dtype(mb, m.mask, dtype), name=f"{wish}_masked")
        weights = mb.softmax(x=scores, axis=-1, name=f"{wish}_weights")
        return mb.matmul(x=weights, y=m.value, name=wish)


@an.example((1, 2, 4, 16), (1, 1, 4, 4), opset="iOS18")
def example(x: Var, mask: Var) -> Var:
    """Two heads of width 16, of which a quarter is the scale, and a mask that is an input."""
    return mb.scaled_dot_product_attention(query=x, key=x, value=x, attn_mask=mask, name="y")
