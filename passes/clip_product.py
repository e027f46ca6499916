"""A product that is quantized is clipped to what the quantization can hold.

Refuses when no factor of the product is dequantized, and when the quantization has a scale for each channel.

Why it helps: the engine multiplied with the code of an operand dequantized by the scale of the output: 2, 4
and 8 where 1 is right, and a clip of the product to the range of the output repaired it (measured, M5 Pro,
macOS 27.0: cadamcat, coreai-qdq-multiply-scale). The clip changes no number: quantization stops at the same
ends. What it costs in time was not measured.

Grade: checked: that quantization stops where the clip does is no identity of polynomials.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from anesurgery import authoring as an
from anesurgery.authoring import Builder, Match, OpPattern, Ops, Refusal, Rewrite, Var, mb, var


@dataclass(frozen=True)
class ClipProduct(Rewrite):
    """`quantize(a * dequantize(b))` becomes `quantize(clip(a * dequantize(b)))`."""

    name = "clip_product"

    def pattern(self, op: Ops) -> OpPattern:
        """A product that is quantized."""
        return op.quantize(input=op.mul(x=var("x"), y=var("y"), as_="product"))

    def check(self, m: Match) -> Match | Refusal:
        """One of whose factors was quantized, by one scale."""
        if not any(an.producer(v, "dequantize") for v in (m.x, m.y)):
            return an.NO_MATCH
        scale, point = an.number(m.root.scale), m.root.inputs.get("zero_point")
        zero = 0.0 if point is None else an.number(point)
        if scale is None or zero is None:
            return Refusal("the product is quantized by a scale for each channel", m.root)
        codes = np.iinfo(an.np_dtype(m.root.outputs[0]))
        return m.bind(ends=tuple((code - zero) * scale for code in (codes.min, codes.max)))

    def rewrite(self, mb: Builder, m: Match) -> Var:
        """Clip the product, and make its codes."""
        inputs = an.op_inputs(m.root, "input")
        product = mb.mul(x=m.x, y=m.y)
        return mb.quantize(input=mb.clip(x=product, alpha=m.ends[0], beta=m.ends[1]), **inputs)


@an.example((2, 8), (2, 8), dtype="fp16", opset="iOS17")
def example(a: Var, b: Var) -> Var:
    """A product with a factor that was quantized by another scale."""
    code = mb.quantize(input=b, scale=np.float16(1 / 16), output_dtype="int8", name="code")
    factor = mb.dequantize(input=code, scale=np.float16(1 / 16), name="factor")
    product = mb.mul(x=a, y=factor, name="product")
    quantized = mb.quantize(input=product, scale=np.float16(0.5), output_dtype="int8", name="quantized")
    return mb.dequantize(input=quantized, scale=np.float16(0.5), name="y")
