"""Crops, maps and resamplings as products: places inside and outside of the image."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from pass_cases import refuses, table

from anesurgery.errors import ProofError
from anesurgery.mil import Program, Var, ct, mb, walk_ops
from anesurgery.passes import resample_matmul
from anesurgery.passes.resample_matmul import ResampleMatmul
from anesurgery.testing import apply_pass, assert_same_numbers

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


@pytest.mark.one_of(3)
@pytest.mark.parametrize("name", CASES)
def test_the_product_makes_the_same_pixels(name: str) -> None:
    after, session = apply_pass(ResampleMatmul(), CASES[name])
    kinds = {op.op_type for op in walk_ops(after)}
    assert not {"crop_resize", "resample", "affine"} & kinds, session.refusals
    assert session.changes[0].proof is not None
    assert_same_numbers(CASES[name], after, rtol=1e-5)


def test_a_matrix_that_is_turned_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The wrong version: the pixels are read backwards."""
    right = resample_matmul._weights

    def wrong(*given: Any) -> Any:
        weights, outside = right(*given)
        return weights[:, ::-1], outside

    monkeypatch.setattr(resample_matmul, "_weights", wrong)
    with pytest.raises(ProofError, match="old and new differ"):
        apply_pass(ResampleMatmul(), CASES["constant"])


test_cases, test_surroundings = table(
    ResampleMatmul(),
    refuses("%g is dynamic", resampled, dynamic=True),
    refuses("%x holds 2 images", crops, 2),
    refuses("2 x 20 x 6 = 240 numbers, above 9", crops, step=ResampleMatmul(most_numbers=9)),
)
