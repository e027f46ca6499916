"""The product of a single row with a stored weight becomes a 1x1 convolution of one pixel.

Before::

    main(%x: 1x1x16xfp16) {
      %y: 1x1x32xfp16 = linear(x=%x, weight=const<32x16xfp16>, bias=const<32xfp16>)
      return %y
    }

After::

    main(%x: 1x1x16xfp16) {
      %x_pixel: 1x16x1x1xfp16 = reshape(x=%x, shape=[1, 16, 1, 1])
      %y_pixel: 1x32x1x1xfp16 = conv(x=%x_pixel, weight=const<32x16x1x1xfp16>, bias=const<32xfp16>)
      %y: 1x1x32xfp16 = reshape(x=%y_pixel, shape=[1, 1, 32])
      return %y
    }

The numbers of the row become the channels of the pixel; products that read the same row share its reshape.
Compressed weights are reshaped in their form. Each output is the same sum as before; a kernel may add its terms
in another order. A table that an embedding reads as well is stored a second time.

Refuses when the weight or a shape is dynamic, and when there are more than `most` outputs or inputs: longer
heads left the engine as convolutions too (`split_head` cuts them first).

Why it helps: on an M1 a `linear` of one row stayed on the CPU at each width that was tried, while 1x1
convolutions of one pixel went to the ANE as Core ML's estimates say: from 4.7 million weights on alone, and 16
of 576 channels one after the other (reported, M1: thisisthepy/torchnative). So `auto` tries it up to the A14
and M1. What the pass gains in time was not measured.

Grade: bit for bit.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from anesurgery import authoring as an
from anesurgery.authoring import Builder, Match, Pass, Refusal, Rewrite, Var, mb
from anesurgery.placement.cost import LAST_FEW_ROWS_FAMILY
from anesurgery.regions import channel_products


@dataclass(frozen=True)
class PointwiseConvolution(Rewrite):
    """`linear` and `matmul` of one row become `conv`."""

    name = "pointwise_convolution"
    kinds = frozenset({"linear", "matmul"})
    follows = ("split_head", "select_last_token")
    shares_inner = True
    tolerance = an.REASSOCIATED
    most: int = an.option(16384, least=1)
    """Most inputs and outputs of a product."""

    @classmethod
    def variants(cls, target: an.Target) -> tuple[Pass, ...]:
        """Return the pass for chips on which single rows were seen to stay on the CPU."""
        return (cls(most=target.least("axis")[0]),) if min(target.families) <= LAST_FEW_ROWS_FAMILY else ()

    def check(self, m: Match) -> Match | Refusal:
        """Match one row, and a stored weight of few enough channels."""
        stored, shape, out = (
            channel_products.weight_of(m.root),
            an.static_shape(m.x),
            an.static_shape(m.root.outputs[0]),
        )
        if stored is None:
            return an.NO_MATCH
        if shape is None or out is None:
            return Refusal(f"%{m.x.name} has the dynamic shape {tuple(map(str, m.x.shape))}", m.root)
        if math.prod(shape[:-1]) != 1:
            return an.NO_MATCH
        weight, turned = stored
        if not an.is_stored(weight):
            return Refusal(f"the weight %{weight.name} is dynamic", m.root)
        if max(weight.shape) > self.most:
            words = f"{out[-1]} outputs of {shape[-1]} inputs"
            return Refusal(f"{words}; {self.most} is the limit, and split_head cuts heads", m.root)
        return m.bind(weight=weight, turned=turned, out=out)

    def rewrite(self, mb: Builder, m: Match) -> Var:
        """Reshape to a pixel, convolve, and reshape back to a row."""
        x, bias, wish = m.x, m.root.inputs.get("bias"), f"{m.root.outputs[0].name}_pixel"
        shape, name = [1, int(x.shape[-1]), 1, 1], f"{x.name}_pixel"
        pixel = mb.shared_value((x, "pixel"), [x], lambda maker: maker.reshape(x=x, shape=shape, name=name))
        kernel = an.Edit.of(m.weight.shape).transposed([1, 0] if m.turned else [0, 1]).expanded(2).expanded(3)
        weight = an.edit_weight(mb, m.weight, kernel, f"{m.weight.name}_pixel")
        more = {} if bias is None else {"bias": bias}
        return mb.reshape(x=mb.conv(x=pixel, weight=weight, name=wish, **more), shape=list(m.out))


@an.example((1, 1, 16), dtype="fp16")
def example(x: Var) -> Var:
    """A small head over one position."""
    rng = np.random.default_rng(0)
    weight, bias = (rng.standard_normal(shape).astype(np.float16) for shape in ((32, 16), (32,)))
    return mb.linear(x=x, weight=weight, bias=bias, name="y")
