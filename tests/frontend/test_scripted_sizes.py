"""Scripted functions in a trace: they read single lengths of a shape, and split what is not split."""

from __future__ import annotations

import pytest
import torch
from closeness import assert_close
from conversion import Function, convert

from anesurgery import frontend
from anesurgery.interpret import run

X = torch.arange(24.0).reshape(2, 3, 4).sin()


@torch.jit.script
def snake(x: torch.Tensor) -> torch.Tensor:
    """As neural codecs (DAC, SNAC) write their activation."""
    shape = x.shape
    flat = x.reshape(shape[0], shape[1], -1)
    return (flat + torch.sin(flat).pow(2) * shape[-1]).reshape(shape)


def one_chunk(x: torch.Tensor) -> torch.Tensor:
    return torch.cat([part * 2 for part in x.chunk(1, 0)], 0) + x.chunk(2, 2)[0].sum()


@pytest.mark.parametrize("function", [snake, one_chunk])
def test_it_agrees_with_torch(function: torch.nn.Module) -> None:
    """The wrong version: `shape[0]` is the whole shape."""
    frontend.register()
    model = convert(Function(lambda x: function(x)), {"x": X}, "trace", "iOS17", "FLOAT32")
    for x in (X, -X):
        (got,) = run(model, {"x": x.numpy()}).values()
        assert_close(got, function(x).numpy(), rtol=1e-5)
