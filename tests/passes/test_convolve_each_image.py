"""Convolutions with dynamic weights, image by image."""

from __future__ import annotations

from typing import Any

import pytest
from pass_cases import refuses, table

import anesurgery as ane
from anesurgery.mil import Program, ct, mb, types, walk_ops
from anesurgery.passes.convolve_each_image import ConvolveEachImage
from anesurgery.testing import apply_pass, assert_same_numbers


def conv(images: int, **how: Any) -> Program:
    specs = [mb.TensorSpec((images, 4, 6, 6), types.fp16), mb.TensorSpec((4, 2, 3, 3), types.fp16)]

    return mb.program(input_specs=specs, opset_version=ct.target.iOS17)(
        lambda x, w: mb.conv(x=x, weight=w, groups=2, name="y", **how)
    )


@pytest.mark.parametrize("how", [{}, {"strides": [2, 2], "pad_type": "same"}])
def test_each_image_is_convolved_by_itself(how: dict[str, Any]) -> None:
    program = conv(3, **how)
    after, session = apply_pass(ConvolveEachImage(), program)
    assert sum(op.op_type == "conv" for op in walk_ops(after)) == 3
    assert session.changes[0].proof is not None
    assert_same_numbers(program, after, rtol=1e-5)
    found = ane.inspect(program, target="M1/macOS 14").ops, ane.inspect(after, target="M1/macOS 14").ops
    assert [[row.legal for row in rows if row.op_type == "conv"] for rows in found] == [[None], [True] * 3]


test_cases, test_surroundings = table(ConvolveEachImage(), refuses("there are 17 images, above 16", conv, 17))
