"""Clip a product that is quantized afterwards to the range that the quantization can hold.

Refuses when no factor of the product is dequantized, and when the quantization has a scale for each channel.

Why it helps: the engine gave 2, 4 and 8 times the right product for codes of scale 1/16 and outputs of scale
1/8, 1/4 and 1/2, as if it multiplied the code by the scale of the output. A clip of the product to the range of
the output repaired it (measured, M5 Pro, macOS 27.0: github.com/cadamcat/llms-on-apple-neural-engine,
coreai-qdq-multiply-scale). The clip changes no number, since quantization saturates at the same values; its
ends in fp16 round to the first and the last code. What it costs in time was not measured.

Grade: checked: a proof over a prime field cannot see saturation.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from anesurgery import authoring as an
from anesurgery.authoring import Var, mb
from anesurgery.numeric import products
from anesurgery.rewriting.repairs import Repair


@dataclass(frozen=True)
class ClipProduct(Repair):
    """`quantize(a * dequantize(b))` becomes `quantize(clip(a * dequantize(b)))`.

    `Repair` rewrites each quantize that `products.QUANTIZED` matches; the row there builds the clip from scale,
    zero point and output dtype.
    """

    name = "clip_product"
    hazard = products.QUANTIZED
    tolerates_nonfinite = True  # unlike other repairs: an infinite product has the last code before and after


@an.example((2, 8), (2, 8), dtype="fp16", opset="iOS17")
def example(a: Var, b: Var) -> Var:
    """A product with a factor that was quantized by another scale."""
    code = mb.quantize(input=b, scale=np.float16(1 / 16), output_dtype="int8", name="code")
    factor = mb.dequantize(input=code, scale=np.float16(1 / 16), name="factor")
    product = mb.mul(x=a, y=factor, name="product")
    quantized = mb.quantize(input=product, scale=np.float16(0.5), output_dtype="int8", name="quantized")
    return mb.dequantize(input=quantized, scale=np.float16(0.5), name="y")
