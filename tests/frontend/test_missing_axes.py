"""Pools and products without an axis: each conversion against torch, by trace and by export."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from conversion import assert_each_agrees
from torch.nn import functional as F  # noqa: N812 - as everybody calls it

X = torch.tensor([[[3.0, -1.0, 4.0, 1.5], [0.25, -9.0, 2.0, 6.0], [1.0, 2.0, -3.0, 0.0]]])

CASES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "max_pool": lambda x: F.max_pool2d(x, 3, stride=1, padding=1),
    "avg_pool": lambda x: F.avg_pool2d(x, 2),
    "avg_pool_of_a_row": lambda x: F.avg_pool1d(x[0], 2),
    "max_pool_of_a_volume": lambda x: F.max_pool3d(torch.stack([x, 2 * x], 1), 2),
    "max_pool_with_a_batch": lambda x: F.max_pool2d(x[None], 2),
    "linear": lambda x: F.linear(x, torch.tensor([1.0, 2.0, -1.0, 0.5])),
    "linear_of_columns": lambda x: F.linear(x, torch.tensor([[1.0, 2.0, -1.0, 0.5]]), torch.tensor([3.0])),
}


@pytest.mark.one_of(2)
@pytest.mark.parametrize("how", ["trace", "export"])
def test_each_agrees_with_torch(how: str) -> None:
    assert_each_agrees(CASES, (X, X / 9), how)
