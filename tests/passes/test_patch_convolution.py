"""Patch embeddings as space_to_depth and a 1x1 convolution, and convolutions that are none."""

from __future__ import annotations

from typing import Any

import numpy as np
from pass_cases import refuses, rewrites, stays, table

from anesurgery.mil import Program, Var, mb, types
from anesurgery.passes.patch_convolution import PatchConvolution


def built(
    kernel: tuple[int, ...] = (16, 16), image: tuple[int, ...] = (32, 48), channels: int = 3, **options: Any
) -> Program:
    weight = np.random.default_rng(0).standard_normal((4, channels, *kernel)).astype(np.float16)

    @mb.program(input_specs=[mb.TensorSpec((2, 4 if channels == 2 else channels, *image), dtype=types.fp16)])
    def program(x: Var) -> Var:
        return mb.conv(
            x=x, weight=weight, **{"strides": list(kernel), "pad_type": "valid", **options}, name="y"
        )

    return program


test_cases, test_surroundings = table(
    PatchConvolution(),
    rewrites(built, pad_type="same", rtol=1e-05),
    refuses("the kernel [16, 14] is not square", built, (16, 14)),
    refuses("the strides [8, 8] are not the kernel [16, 16]", built, strides=[8, 8]),
    refuses("the dilation is [2, 2]", built, dilations=[2, 2], image=(64, 64)),
    refuses("there are 2 groups", built, channels=2, groups=2),
    refuses("the edges are padded (custom)", built, pad_type="custom", pad=[1, 1, 0, 0]),
    refuses("the edges are padded (same)", built, pad_type="same", image=(33, 48)),
    stays(built, (8, 8)),
    *(
        rewrites(built, image=image, channels=channels, rtol=1e-5)
        for image in ((32, 48), (33, 63), (16, 16))
        for channels in (1, 3)
    ),
)
