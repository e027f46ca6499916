"""Sequences (batch, tokens, channels) become (batch, channels, 1, tokens), over whole regions.

A region begins at rows of channels that a product or a norm reads: the last axis holds channels, the one or two
before it tokens. It takes in every op that has a form there. A product with a constant weight becomes a 1x1
convolution; norms and reductions go to axis 1; elementwise ops come along, their constants transposed when the
model is rewritten; views and transpositions of heads are nothing, since heads times their width are the
channels; a product of attention sums over channels or tokens where they stand, and the scores keep their form;
fused attention is taken apart. Halves of each head that are exchanged (rotary positions) are a convolution in
groups, of ones and zeros; dynamic values are taken to be finite there. What remains of transpositions stands at
the ends. A long region is rebuilt in parts of a layer or so, each proved.

Refuses when a region has more transpositions at its ends than products and transpositions inside, when a shape
is dynamic, when there is one token only, and when a compressed weight cannot be reordered in its form.

Why it helps: Apple's port of DistilBERT in this layout, with split heads, went from 55 to 8.7 ms (measured,
M1 Max: apple/ml-ane-transformers) and was up to 10 times as fast (Apple, iPhone 13). A SigLIP that was on
the engine as a whole gained 10 to 13 % and lost on the GPU (measured, M4 Pro and M5 Max:
erwinzhang7/coreml-compute-placement). So it runs on request, but for text encoders on M1, M1 Max and A15
(`sequence_layout`).

Grade: bit for bit.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from anesurgery import authoring as an
from anesurgery.authoring import Builder, Match, Program, Refusal, Rewrite, Session, Var, mb
from anesurgery.passes.channels_first import channel_regions
from anesurgery.placement.rules import finds_sequence_layout
from anesurgery.regions import channel_ops, channel_products


@dataclass(frozen=True)
class ChannelsFirst(Rewrite):
    """Regions of sequences go channels first; what remains of transpositions stands at their ends."""

    name = "channels_first"
    kinds = frozenset(channel_ops.RULES)
    """Every op that has a form on twins."""
    tolerance = an.REASSOCIATED
    tolerates_nonfinite = False
    """Halves that are exchanged by a convolution: its zeros make NaN of an infinity."""
    shares_inner = True

    @classmethod
    def variants(cls, target: an.Target) -> tuple[an.Pass, ...]:
        """Only where it was measured to help."""
        return () if isinstance(finds_sequence_layout.deciding_measurements(target), Refusal) else (cls(),)

    def run(self, program: Program, session: Session) -> None:
        """Region by region; what was found of them is not kept."""
        try:
            super().run(program, session)
        finally:
            channel_regions.forget()

    def check(self, m: Match) -> Match | Refusal:
        """The region that begins here, if it pays."""
        region = next((r for r in channel_regions.regions(m.block) if m.root in r.steps), None)
        if region is None:
            reason = channel_products.reason_outside_region(m.root)
            return Refusal(reason, m.root) if reason else an.NO_MATCH
        if not region.products + region.transposes:
            return an.NO_MATCH
        if not region.pays:
            ends = f"{region.cut} transpositions at its ends"
            inside = f"{region.products} products and {region.transposes} transpositions inside"
            reason = f"a region of {len(region.ops)} ops has {ends} for {inside}"
            return Refusal(reason, m.root) if region.ops[0] is m.root else an.NO_MATCH
        part = region.first(channel_regions.LARGEST)
        return m.bind(ops=tuple(part.ops), region=part)

    def rewrite(self, mb: Builder, m: Match) -> dict[Var, Var]:
        """Build the region anew."""
        return channel_regions.build(mb, m.region)


@an.example((1, 8, 16))
def example(x: Var) -> Var:
    """A hidden layer with its residual and a norm."""
    rng = np.random.default_rng(0)
    shapes = ((32, 16), (32,), (16, 32), (16,), (16,))
    first, bias, second, bias_2, gamma = (rng.standard_normal(s).astype(np.float32) for s in shapes)
    a = mb.linear(x=x, weight=first, bias=bias, name="a")
    g = mb.gelu(x=a, mode="EXACT", name="g")
    b = mb.linear(x=g, weight=second, bias=bias_2, name="b")
    s = mb.add(x=b, y=x, name="s")
    return mb.layer_norm(x=s, axes=[-1], gamma=gamma, epsilon=np.float32(0.01), name="n")
