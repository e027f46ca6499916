"""Values of more than five axes convert after `frontend.register()`: windows, and a volume of correlations."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from closeness import assert_close
from conversion import Function, convert

from anesurgery import frontend
from anesurgery.interpret import run
from anesurgery.mil import walk_ops

X = torch.arange(1 * 6 * 8 * 8.0).reshape(1, 6, 8, 8).sin()


def windows(x: torch.Tensor) -> torch.Tensor:
    """A norm and a softmax over the channels of 2x2 windows, as MaxViT computes them."""
    y = x.view(1, 6, 4, 2, 4, 2).permute(0, 2, 4, 3, 5, 1)
    y = torch.nn.functional.layer_norm(y, (6,)).softmax(-1) + y
    return y.permute(0, 5, 1, 3, 2, 4).reshape(1, 6, 8, 8)


def correlations(x: torch.Tensor) -> torch.Tensor:
    """Each pixel with each other, scaled before the axes are joined, as RAFT computes them."""
    flat = x.flatten(2)
    volume = (flat.transpose(1, 2) @ flat).view(1, 8, 8, 1, 8, 8) / 6**0.5
    return volume.reshape(64, 1, 8, 8)


def moved(x: torch.Tensor) -> torch.Tensor:
    """Windows alone; coremltools writes up to six exchanges of two axes."""
    return x.view(1, 6, 4, 2, 4, 2).permute(0, 2, 4, 1, 3, 5).reshape(16, 6, 2, 2)


@pytest.mark.parametrize("function", [windows, correlations, moved])
def test_more_than_five_axes(function: Callable[[torch.Tensor], torch.Tensor]) -> None:
    frontend.register()
    model = convert(Function(function), {"x": X}, "trace", "iOS17", "FLOAT32")
    (got,) = run(model, {"x": X.numpy()}).values()
    assert_close(got, function(X).numpy(), rtol=1e-5)
    ops = [op for op in walk_ops(model._mil_program) if op.op_type == "transpose"]
    assert len(ops) <= 2
