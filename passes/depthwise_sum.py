"""A depthwise convolution with a single output position becomes a product with its kernel and a sum.

Before::

    main(%x: 1x4x1x3) {
      %y: 1x4x1x1 = conv(x=%x, weight=const<4x1x1x3>, groups=4)
      return %y
    }

After::

    main(%x: 1x4x1x3) {
      %y_products: 1x4x1x3 = mul(x=%x, y=const<1x4x1x3>)
      %y: 1x4x1x1 = reduce_sum(x=%y_products, axes=[2, 3], keep_dims=True)
      return %y
    }

Such convolutions occur in decoders that keep the last few columns of their input and convolve them in each
step.

Refuses when the convolution pads, when a shape is symbolic, when a group has more than one channel, and when
the weight is compressed or dynamic. The pass does not apply to fewer than `least` groups.

Why it helps: ten such convolutions of one decoder, with 1024 groups or more, ran on the CPU (reported, one
model for A19, iOS 26: john-rocky/CoreML-LLM); what the pass gains in time was not measured.

Grade: proved.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from anesurgery import authoring as an
from anesurgery.authoring import Builder, Match, Pass, Refusal, Rewrite, Var, mb
from anesurgery.facts import windows
from anesurgery.placement.rules import legality


@dataclass(frozen=True)
class DepthwiseSum(Rewrite):
    """`conv` of single channels and one position becomes `mul` and `reduce_sum`."""

    name = "depthwise_sum"
    kinds = frozenset({"conv"})
    tolerance = an.REASSOCIATED
    least: int = 2
    """The fewest groups of a convolution that is rewritten."""

    @classmethod
    def variants(cls, target: an.Target) -> tuple[Pass, ...]:
        """Return the pass for as many groups as the engine was seen to refuse."""
        return (cls(least=legality.MANY_GROUPS),)

    def check(self, m: Match) -> Match | Refusal:
        """Match a convolution with one channel in each group, one position, and no padding."""
        op, groups = m.root, int(an.number(m.root.inputs.get("groups")) or 1)
        after, before = an.static_shape(op.outputs[0]), an.static_shape(m.x)
        if groups < max(self.least, 2):
            return an.NO_MATCH
        if after is None or before is None:
            return Refusal(f"%{m.x.name} has the symbolic shape {tuple(m.x.shape)}", op)
        if any(n != 1 for n in after[2:]):
            return an.NO_MATCH
        if not groups == after[1] == before[1]:
            return Refusal(f"{groups} groups make {after[1]} channels of {before[1]}", op)
        if an.producer(m.weight, "const") is None:
            made_by = "an input" if m.weight.op is None else m.weight.op.op_type
            return Refusal(f"its weight is made by {made_by}", op)
        if any(pads := windows.window_pads(op)):
            return Refusal(f"it pads {pads}", op)
        return m

    def rewrite(self, mb: Builder, m: Match) -> Var:
        """Build the product, its sum, and the bias."""
        op, x, name = m.root, m.x, m.root.outputs[0].name
        kernel = np.asarray(an.constant(m.weight))
        steps = an.ints(op, "dilations") or [1] * (x.rank - 2)
        ends = [step * (taps - 1) + 1 for step, taps in zip(steps, kernel.shape[2:], strict=True)]
        if ends != list(x.shape[2:]) or any(step > 1 for step in steps):
            ends, all_of = [*x.shape[:2], *ends], [True, True, *[False] * len(ends)]
            begin = [0] * x.rank
            x = mb.slice_by_index(x=x, begin=begin, end=ends, stride=[1, 1, *steps], end_mask=all_of)
        weight = mb.shared(
            (m.weight, "depthwise_sum"), lambda: np.moveaxis(kernel, 0, 1), f"{m.weight.name}_row"
        )
        products = mb.mul(x=x, y=weight, name=f"{name}_products")
        sums: Var = mb.reduce_sum(x=products, axes=list(range(2, x.rank)), keep_dims=True)
        bias = an.constant(op.inputs.get("bias"))
        return sums if bias is None else mb.add(x=sums, y=np.asarray(bias).reshape(-1, *[1] * (x.rank - 2)))


@an.example((1, 4, 1, 3))
def example(x: Var) -> Var:
    """The last three columns of four channels."""
    weight = np.random.default_rng(0).standard_normal((4, 1, 1, 3)).astype(np.float32)
    return mb.conv(x=x, weight=weight, groups=4, name="y")
