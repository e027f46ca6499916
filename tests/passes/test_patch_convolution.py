"""Patch embeddings as space_to_depth and a 1x1 convolution, and convolutions that are none."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from pass_cases import refuses, rewrites, stays, table

from anesurgery.mil import Program, Var, mb, types, walk_ops
from anesurgery.passes.patch_convolution import PatchConvolution
from anesurgery.regions.weight_edits import Edit
from anesurgery.testing import apply_pass, assert_same_numbers


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


def kinds(program: Program) -> list[str]:
    return [op.op_type for op in walk_ops(program) if op.op_type != "const"]


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("image", [(32, 48), (33, 63), (16, 16)])
def test_every_output_is_the_same_sum(image: tuple[int, ...], channels: int) -> None:
    program = built(image=image, channels=channels)
    after, session = apply_pass(PatchConvolution(), program)
    cut = ["slice_by_index"] if image == (33, 63) else []
    assert kinds(after) == [*cut, "space_to_depth", "conv"]
    assert all(change.proof for change in session.changes)
    assert_same_numbers(program, after, rtol=1e-5)
    assert not apply_pass(PatchConvolution(), after)[1].changes


def test_the_order_of_the_channels_matters(monkeypatch: pytest.MonkeyPatch) -> None:
    """The wrong version: channels before places."""
    from anesurgery.errors import ProofError

    class Wrong(Edit):
        def transposed(self, perm: Sequence[int]) -> Edit:
            return super().transposed([0, 1, 2, 3])

    monkeypatch.setattr("anesurgery.authoring.Edit", Wrong)
    with pytest.raises(ProofError):
        apply_pass(PatchConvolution(), built())


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
)
