"""Products between two quantizations: signed and unsigned codes, refusals, a wrong version."""

from __future__ import annotations

import numpy as np
from pass_cases import refuses, rewrites, stays, table

from anesurgery.mil import Program, Var, ct, mb, types
from anesurgery.passes.clip_product import ClipProduct

HALF = np.float16


def built(
    dtype: str = "int8", zero: int | None = None, by_channel: bool = False, plain: bool = False
) -> Program:
    point = {} if zero is None else {"zero_point": np.array(zero, dtype)}
    scale = np.full(4, 0.5, HALF) if by_channel else HALF(0.5)
    more = {"axis": np.int32(1)} if by_channel else {}

    @mb.program(input_specs=[mb.TensorSpec((2, 4), dtype=types.fp16)], opset_version=ct.target.iOS17)
    def program(x: Var) -> Var:
        code = mb.quantize(input=x, scale=HALF(1 / 16), output_dtype="int8")
        factor = mb.relu(x=x) if plain else mb.dequantize(input=code, scale=HALF(1 / 16))
        product = mb.mul(x=x, y=factor)
        return mb.dequantize(
            input=mb.quantize(input=product, scale=scale, output_dtype=dtype, **point, **more),
            scale=scale,
            name="y",
            **point,
            **more,
        )

    return program


test_cases, test_surroundings = table(
    ClipProduct(),
    *(rewrites(built, dtype, zero) for dtype, zero in [("int8", None), ("uint8", 100), ("int8", -3)]),
    refuses("a scale for each channel", built, by_channel=True),
    stays(built, plain=True),
)
