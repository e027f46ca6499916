"""Sequences (batch, tokens, channels) become (batch, channels, 1, tokens), over whole regions.

Before::

    main(%x: 1x8x16) {
      %a: 1x8x32 = linear(x=%x, weight=const<32x16>, bias=const<32>)
      %g: 1x8x32 = gelu(x=%a)
      %b: 1x8x16 = linear(x=%g, weight=const<16x32>, bias=const<16>)
      %s: 1x8x16 = add(x=%b, y=%x)
      %n: 1x8x16 = layer_norm(x=%s, axes=[-1], gamma=const<16>)
      return %n
    }

After::

    main(%x: 1x8x16) {
    }

Refuses when

Why it helps:

Grade: proved.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from anesurgery.checking.grades import REASSOCIATED, Tolerance
from anesurgery.errors import Refusal
from anesurgery.facts.channel_ops import RULES
from anesurgery.facts.channel_regions import LARGEST, build, regions
from anesurgery.mil import Program, Var, mb
from anesurgery.rewriting.builder import Builder
from anesurgery.rewriting.pattern import Match, OpPattern, Ops
from anesurgery.rewriting.rewrite import Rewrite


@dataclass(frozen=True)
class ChannelsFirst(Rewrite):
    """Regions of sequences go channels first; what remains of transpositions stands at their ends."""

    name: ClassVar[str] = "channels_first"
    tolerance: ClassVar[Tolerance] = REASSOCIATED
    shares_inner: ClassVar[bool] = True

    def pattern(self, op: Ops) -> OpPattern:
        """Every op that has a form on twins."""
        return op.any(*sorted(RULES))()

    def check(self, m: Match) -> Match | Refusal | None:
        """The region that begins here, if it pays."""
        for region in regions(m.block):
            if region.steps and region.ops[0] is m.root:
                if not region.products + region.transposes:
                    return None
                if not region.pays:
                    ends = f"{region.cut} transposes at its ends"
                    inside = f"{region.products} products and {region.transposes} transposes inside"
                    return Refusal(f"a region of {len(region.ops)} ops has {ends} for {inside}", m.root)
                part = region.first(LARGEST)
                return m.bind(ops=tuple(part.ops), region=part)
        return None

    def rewrite(self, mb: Builder, m: Match) -> dict[Var, Var]:
        """Build the region anew."""
        return build(mb, m.region)


def example() -> Program:
    """A hidden layer with its residual and a norm."""
    rng = np.random.default_rng(0)
    shapes = ((32, 16), (32,), (16, 32), (16,), (16,))
    first, bias, second, bias_2, gamma = (rng.standard_normal(s).astype(np.float32) for s in shapes)

    @mb.program(input_specs=[mb.TensorSpec((1, 8, 16))])
    def program(x: Var) -> Var:
        a = mb.linear(x=x, weight=first, bias=bias, name="a")
        g = mb.gelu(x=a, mode="EXACT", name="g")
        b = mb.linear(x=g, weight=second, bias=bias_2, name="b")
        s = mb.add(x=b, y=x, name="s")
        return mb.layer_norm(x=s, axes=[-1], gamma=gamma, name="n")

    return program
