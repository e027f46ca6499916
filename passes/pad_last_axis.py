"""Pad the last axis of products with constant weights to a multiple, and cut it where the region ends.

The weight of the first product is padded with zeros, and elementwise ops carry the padding. A product that sums
over the padded axis absorbs it: its weight has zeros there, or both its operands are padded. Every other reader
gets the value cut back, once for each value. A chain of 1x1 convolutions is padded along its width at its start
and cut at its end. Products of two run-time values (scores of attention) are padded only if an operand is
padded already; softmax, norms, reductions and reshapes end a region.

Compressed weights are padded in their form; a palette without a zero gets one.

Refuses when a shape is symbolic, when the axis has length 1 (padding would multiply the work), when a
compressed weight cannot hold the zeros, and when 1x1 convolutions would get more pads and cuts than there are
convolutions. An op that could make an infinity or NaN from the padding ends the region. Run-time values are
taken to be finite.

Why it helps: rows are stored in units of 64 bytes, 32 fp16 elements (documented by Apple, all chips); a unit of
64 elements is reported and covers both. What padding gains was not measured.

Grade: proved.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from anesurgery import authoring as an
from anesurgery.authoring import Builder, Match, Refusal, Rewrite, Var, mb
from anesurgery.facts.dependence import is_dead
from anesurgery.regions import padding


@dataclass(frozen=True)
class PadLastAxis(Rewrite):
    """Padding made by weights, carried by elementwise ops, cut once."""

    name = "pad_last_axis"
    kinds = an.ops.PRODUCTS
    # it looks for the form that the front end gives
    precedes = ("negate_subtract", "explicit_broadcast")
    tolerance = an.REASSOCIATED
    tolerates_nonfinite = False
    """A zero of the padding makes NaN of an infinity."""
    shares_inner = True
    multiple: int = an.option(64, least=1)
    """Length that the last axis becomes a multiple of (Apple's own rule for fp16 is 32)."""

    def check(self, m: Match) -> Match | Refusal:
        """Match a product with a constant weight whose result does not fit, with the region around it."""
        out = m.root.outputs[0]
        length = out.shape[-1] if out.rank else self.multiple
        if not an.is_symbolic(length) and length % self.multiple == 0:
            return an.NO_MATCH
        if padding.product_axis(m.root) is None and not padding.is_pointwise_conv(m.root):
            return an.NO_MATCH
        if an.static_shape(out) is None:
            return Refusal(f"the result has the symbolic shape {tuple(out.shape)}", m.root)
        if length == 1:
            grown = f"padding makes it {self.multiple} times as long"
            return Refusal(f"the last axis has length 1; {grown}", m.root)
        region = padding.find_region(m.root, -(-length // self.multiple) * self.multiple)
        if is_dead(m.root):
            return an.NO_MATCH
        convolutions = sum(op.op_type == "conv" for op in region.ops)
        if region.entry is not None and 1 + len(region.edges) > convolutions:
            cost = f"1 pad and {len(region.edges)} cuts"
            return Refusal(f"{cost} for {convolutions} convolutions", m.root)
        return m.bind(ops=tuple(region.ops), region=region)

    def rewrite(self, mb: Builder, m: Match) -> dict[Var, Var]:
        """Build the region anew."""
        return padding.build(mb, m.region)


@an.example((1, 4))
def example(x: Var) -> tuple[Var, Var]:
    """A hidden layer of odd width that a product and a softmax read."""
    rng = np.random.default_rng(0)
    shapes = ((37, 4), (37,), (64, 37), (64,))
    first, bias, second, bias_2 = (rng.standard_normal(s).astype(np.float32) for s in shapes)
    h = mb.linear(x=x, weight=first, bias=bias, name="h")
    g = mb.gelu(x=h, mode="EXACT", name="g")
    return mb.linear(x=g, weight=second, bias=bias_2, name="y"), mb.softmax(x=g, axis=-1, name="z")
