"""Clip a product that is quantized afterwards to the range that the quantization can hold.

Refuses when no factor of the product is dequantized, and when the quantization has a scale for each channel.

Why it helps: the engine multiplied the code of a dequantized operand by the scale of the output: 2, 4 and 8
where 1 is right. A clip of the product to the range of the output repaired it (measured, M5 Pro, macOS 27.0:
cadamcat, coreai-qdq-multiply-scale). The clip changes no number, since quantization saturates at the same
values. What it costs in time was not measured.

Grade: checked: that quantization stops where the clip does is no identity of polynomials.
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
    """`quantize(a * dequantize(b))` becomes `quantize(clip(a * dequantize(b)))`."""

    name = "clip_product"
    hazard = products.QUANTIZED
    tolerates_nonfinite = True


@an.example((2, 8), (2, 8), dtype="fp16", opset="iOS17")
def example(a: Var, b: Var) -> Var:
    """A product with a factor that was quantized by another scale."""
    code = mb.quantize(input=b, scale=np.float16(1 / 16), output_dtype="int8", name="code")
    factor = mb.dequantize(input=code, scale=np.float16(1 / 16), name="factor")
    product = mb.mul(x=a, y=factor, name="product")
    quantized = mb.quantize(input=product, scale=np.float16(0.5), output_dtype="int8", name="quantized")
    return mb.dequantize(input=quantized, scale=np.float16(0.5), name="y")
