"""Sequences (batch, tokens, channels) become (batch, channels, 1, tokens), over whole regions.

A region begins where a product or a norm reads a sequence: the last axis holds channels, and the one or two
axes before it hold tokens. The region takes in every op that has a channels-first form. A product with a
constant weight becomes a 1x1 convolution. Norms and reductions move to axis 1. Elementwise ops move along, and
their constants are transposed when the pass runs. Reshapes and transposes that split channels into heads
disappear, since heads times their width are the channels. A product inside attention sums over channels or
tokens in their new positions, and the scores keep their shape; fused attention is taken apart. Halves of each
head that change places (rotary positions) become a grouped convolution of ones and zeros; this takes run-time
values to be finite. Only the transposes at the two ends of a region remain. A long region is rebuilt in parts
of about one layer, and each part is proved.

Refuses when a region has more transposes at its ends than products and transposes inside, when a shape is
dynamic, when there is only one token, and when a compressed weight cannot be reordered in its form.

Why it helps: Apple's port of DistilBERT in this layout, with split heads, went from 55 to 8.7 ms (measured, M1
Max: apple/ml-ane-transformers) and was up to 10 times as fast (Apple, iPhone 13). A SigLIP that was on the
engine as a whole gained 10 to 13 % and lost on the GPU (measured, M4 Pro and M5 Max:
erwinzhang7/coreml-compute-placement). So recipes use it only on request, except for text encoders on M1, M1 Max
and A15 (`sequence_layout`).

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
    """Regions of sequences become channels first, with transposes only at their ends."""

    name = "channels_first"
    kinds = frozenset(channel_ops.RULES)
    tolerance = an.REASSOCIATED
    tolerates_nonfinite = False
    """Halves that are exchanged by a convolution: its zeros make NaN of an infinity."""
    shares_inner = True

    @classmethod
    def variants(cls, target: an.Target) -> tuple[an.Pass, ...]:
        """Return the pass where it was measured to help."""
        return () if isinstance(finds_sequence_layout.deciding_measurements(target), Refusal) else (cls(),)

    def run(self, program: Program, session: Session) -> None:
        """Rebuild region by region, and drop the regions found afterwards."""
        try:
            super().run(program, session)
        finally:
            channel_regions.forget()

    def check(self, m: Match) -> Match | Refusal:
        """Accept the region that the op belongs to, if rebuilding it pays."""
        region = next((r for r in channel_regions.regions(m.block) if m.root in r.steps), None)
        if region is None:
            reason = channel_products.reason_outside_region(m.root)
            return Refusal(reason, m.root) if reason else an.NO_MATCH
        if not region.products + region.removed_transposes:
            return an.NO_MATCH
        if not region.pays:
            ends = f"{region.end_transposes} transpositions at its ends"
            inside = f"{region.products} products and {region.removed_transposes} transpositions inside"
            reason = f"a region of {len(region.ops)} ops has {ends} for {inside}"
            return Refusal(reason, m.root) if region.ops[0] is m.root else an.NO_MATCH
        part = region.first(channel_regions.LARGEST)
        return m.bind(ops=tuple(part.ops), region=part)

    def rewrite(self, mb: Builder, m: Match) -> dict[Var, Var]:
        """Rebuild the region channels first."""
        return channel_regions.RegionBuilder(mb, m.region).run()


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
