"""Patch embeddings as space_to_depth and a 1x1 convolution, and convolutions that are none."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from anesurgery.files.package import Loaded
from anesurgery.loading import load
from anesurgery.mil import Program, Var, ct, mb, quiet_host, types, walk_ops
from anesurgery.passes.patch_convolution import PatchConvolution
from anesurgery.regions.weight_edits import Edit
from anesurgery.testing import apply_pass, assert_refuses, assert_same_numbers


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


def test_padding_that_adds_nothing_is_none() -> None:
    program = built(pad_type="same")
    after, _ = apply_pass(PatchConvolution(), program)
    assert kinds(after) == ["space_to_depth", "conv"]
    assert_same_numbers(program, after, rtol=1e-5)


def test_the_order_of_the_channels_matters(monkeypatch: pytest.MonkeyPatch) -> None:
    """The wrong version: channels before places."""
    from anesurgery.errors import ProofError

    class Wrong(Edit):
        def transposed(self, perm: Sequence[int]) -> Edit:
            return super().transposed([0, 1, 2, 3])

    monkeypatch.setattr("anesurgery.authoring.Edit", Wrong)
    with pytest.raises(ProofError):
        apply_pass(PatchConvolution(), built())


@pytest.mark.parametrize(
    ("program", "reason"),
    [
        (built((16, 14)), "the kernel [16, 14] is not square"),
        (built(strides=[8, 8]), "the strides [8, 8] are not the kernel [16, 16]"),
        (built(dilations=[2, 2], image=(64, 64)), "the dilation is [2, 2]"),
        (built(channels=2, groups=2), "there are 2 groups"),
        (built(pad_type="custom", pad=[1, 1, 0, 0]), "the edges are padded (custom)"),
        (built(pad_type="same", image=(33, 48)), "the edges are padded (same)"),
    ],
)
def test_refusals(program: Program, reason: str) -> None:
    assert_refuses(PatchConvolution(), program, reason)


def test_small_kernels_are_left_as_they_are() -> None:
    _, session = apply_pass(PatchConvolution(), built((8, 8)))
    assert not session.changes
    assert not session.refusals


@pytest.mark.slow
def test_the_patch_embedding_of_a_converted_clip() -> None:
    import torch
    import transformers as hf

    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    torch.manual_seed(0)
    model = (
        hf.CLIPVisionModel(hf.CLIPVisionConfig(image_size=64, patch_size=32, **sizes))
        .eval()
        .requires_grad_(False)
    )

    class Hidden(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> Any:
            return model(x).last_hidden_state

    image = torch.randn(1, 3, 64, 64)
    with torch.no_grad(), quiet_host():
        traced: Any = torch.jit.trace(Hidden().eval(), image, check_trace=False)  # type: ignore[no-untyped-call]
        converted = ct.convert(
            traced,
            inputs=[ct.TensorType("image", shape=image.shape)],
            minimum_deployment_target=ct.target.iOS17,
            skip_model_load=True,
        )
    loaded: Loaded = load(converted)
    after, session = apply_pass(PatchConvolution(), loaded.program)
    assert len(session.changes) == 1
    assert_same_numbers(loaded.program, after, rtol=1e-4)
