"""What torch lets be left out: each conversion against torch, by trace and by export."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from closeness import assert_close
from conversion import convert
from torch.nn import functional as F  # noqa: N812 - as everybody calls it

from anesurgery import frontend
from anesurgery.interpret import run

X = torch.tensor([[[3.0, -1.0, 4.0, 1.5], [0.25, -9.0, 2.0, 6.0], [1.0, 2.0, -3.0, 0.0]]])

CASES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "max_pool": lambda x: F.max_pool2d(x, 3, stride=1, padding=1),
    "avg_pool": lambda x: F.avg_pool2d(x, 2),
    "avg_pool_of_a_row": lambda x: F.avg_pool1d(x[0], 2),
    "max_pool_of_a_volume": lambda x: F.max_pool3d(torch.stack([x, 2 * x], 1), 2),
    "max_pool_with_a_batch": lambda x: F.max_pool2d(x[None], 2),
    "linear": lambda x: F.linear(x, torch.tensor([1.0, 2.0, -1.0, 0.5])),
    "linear_of_columns": lambda x: F.linear(x, torch.tensor([[1.0, 2.0, -1.0, 0.5]]), torch.tensor([3.0])),
    "all_true": lambda x: torch.where((x > -2).all(), x, -x),
}


class Module(torch.nn.Module):
    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x)


@pytest.mark.parametrize("how", ["trace", "export"])
@pytest.mark.parametrize("name", CASES)
def test_each_agrees_with_torch(name: str, how: str) -> None:
    frontend.register()
    model = convert(Module(CASES[name]), {"x": X}, how, "iOS17", "FLOAT32")
    for x in (X, X / 9):
        (found,) = run(model, {"x": x.numpy()}).values()
        expected = CASES[name](x).numpy()
        assert found.shape == expected.shape
        assert_close(found, expected, rtol=1e-6)
