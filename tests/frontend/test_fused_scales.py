"""A scale and a shift of one channel to many, of as many channels as there are, and of an image's channels."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from closeness import assert_close
from conversion import convert

from anesurgery import frontend
from anesurgery.interpret import run
from anesurgery.mil import ct

MANY = torch.arange(1.0, 4.0).reshape(1, 3, 1, 1)


class Scaled(torch.nn.Module):
    def __init__(self, scale: torch.Tensor, shift: torch.Tensor) -> None:
        super().__init__()
        self.scale, self.shift = scale, shift

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x * self.scale + self.shift).relu()


@pytest.mark.parametrize(
    ("channels", "shift", "fused"),
    [(3, MANY, True), (1, MANY, False), (3, torch.ones(1, 1, 1, 1), False)],
    ids=["same", "one_channel", "one_shift"],
)
def test_only_the_same_channels_become_a_batch_norm(channels: int, shift: torch.Tensor, fused: bool) -> None:
    frontend.register()
    x = torch.arange(4.0 * channels).reshape(1, channels, 2, 2).sin()
    module = Scaled(MANY, shift)
    model = convert(module, {"x": x}, "trace", "iOS17", "FLOAT32")
    kinds = [op.op_type for op in model._mil_program.functions["main"].operations]
    assert ("batch_norm" in kinds) == fused
    for given in (x, 3 - x):
        (found,) = run(model, {"x": given.numpy()}).values()
        assert_close(found, module(given).numpy(), rtol=2e-5)  # a batch norm adds 1e-5 to the variance


class Inverted(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.shift, self.conv = torch.arange(1.0, 4.0).reshape(1, 3, 1, 1), torch.nn.Conv2d(3, 3, 1, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.conv((x + self.shift).sin()) - self.shift


def test_a_shift_that_is_subtracted_from_a_convolution_stays_the_same_before_it() -> None:
    frontend.register()
    module, x = Inverted().eval(), torch.arange(12.0).reshape(1, 3, 2, 2)
    model = convert(module, {"x": x}, "trace", "iOS17", "FLOAT32")
    (found,) = run(model, {"x": x.numpy()}).values()
    assert_close(found, module(x).detach().numpy(), rtol=1e-5)


@pytest.mark.parametrize("layout", ["RGB", "BGR"])
@pytest.mark.parametrize("width", [3, 8])
def test_each_channel_of_an_image_has_its_own_scale(width: int, layout: str) -> None:
    """The wrong version is that of coremltools: it scales the columns of 3, and refuses other widths."""
    frontend.register()
    scale, bias = [1 / 58, 1 / 57, 1 / 60], [-2.1, -2.0, -1.8]
    module, trace = torch.nn.Conv2d(3, 2, 3).eval(), torch.jit.trace
    x = np.random.default_rng(0).integers(0, 256, (1, 3, 5, width)).astype(np.float32)
    image = ct.ImageType("image", x.shape, scale=scale, bias=bias, color_layout=layout)
    traced: Any = trace(module, torch.zeros(x.shape))  # type: ignore[no-untyped-call]
    model = ct.convert(traced, inputs=[image], compute_precision=ct.precision.FLOAT32, skip_model_load=True)
    (found,) = run(model, {"image": x}).values()
    normal = torch.from_numpy(x) * torch.tensor(scale).view(3, 1, 1) + torch.tensor(bias).view(3, 1, 1)
    assert_close(found, module(normal).detach().numpy(), rtol=1e-5)
