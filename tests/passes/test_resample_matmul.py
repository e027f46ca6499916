"""Crops, maps and resamplings as products: places inside and outside of the image."""

from __future__ import annotations

from typing import Any

import numpy as np
from pass_cases import refuses, rewrites_each, table

from anesurgery.mil import Program, Var, ct, mb
from anesurgery.passes.resample_matmul import ResampleMatmul

BOXES = np.array([[0, 0, 3, 4], [1.5, -2, 2.5, 9]], np.float32)
GRID = np.random.default_rng(0).uniform(-2, 6, (1, 3, 2, 2)).astype(np.float32)
MAP = np.array([[0.8, -0.3, 0.1, 0.2, 0.9, -0.2]], np.float32)


def crops(images: int = 1, boxes: Any = BOXES, **options: Any) -> Program:
    @mb.program(input_specs=[mb.TensorSpec((images, 3, 4, 5))], opset_version=ct.target.iOS17)
    def program(x: Var) -> Any:
        indices = np.zeros(len(boxes), np.int32)
        return mb.crop_resize(x=x, boxes=boxes, box_indices=indices, target_height=3, target_width=2, **options)

    return program


def resampled(mode: str = "constant", dynamic: bool = False) -> Program:
    @mb.program(input_specs=[mb.TensorSpec((1, 3, 4, 5)), mb.TensorSpec(GRID.shape)])
    def program(x: Var, g: Var) -> Any:
        made = mb.resample(
            x=x,
            coordinates=g if dynamic else GRID,
            sampling_mode="bilinear",
            padding_mode=mode,
            padding_value=np.float32(0.5),
            coordinates_mode="unnormalized",
            align_corners=True,
        )
        return made, mb.relu(x=g)

    return program


def mapped() -> Program:
    return mb.program(input_specs=[mb.TensorSpec((1, 3, 4, 5))])(
        lambda x: mb.affine(
            x=x,
            transform_matrix=MAP,
            output_height=3,
            output_width=6,
            sampling_mode="bilinear",
            padding_mode="constant",
            padding_value=np.float32(0),
            coordinates_mode="normalized_minus_one_to_one",
            align_corners=True,
        )
    )


CASES = {
    "crops": crops(),
    "crops, outside": crops(pad_value=np.float32(2), sampling_mode="ALIGN_CORNERS"),
    "constant": resampled(),
    "border": resampled("border"),
    "affine": mapped(),
}


test_cases, test_surroundings = table(
    ResampleMatmul(),
    refuses("%g is dynamic", resampled, dynamic=True),
    refuses("%x holds 2 images", crops, 2),
    refuses("2 x 20 x 6 = 240 numbers, above 9", crops, step=ResampleMatmul(most_numbers=9)),
    *rewrites_each(CASES, rtol=1e-5),
)
