"""What coremltools' own conversion loses: each operation against torch, by trace and by export."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from conversion import Function, assert_each_agrees
from torch.nn import functional as F  # noqa: N812 - as everybody calls it

from anesurgery import frontend
from anesurgery.interpret import run
from anesurgery.mil import ct

X = torch.tensor([[[3.25, -1.5, 4.0, 1.5, 0.0], [0.25, -9.75, 2.0, 6.0, 0.0], [1.0, 2.0, -3.0, 0.0, 12.0]]])
Y = torch.tensor([[[0.0, 0.0, 1.0, -1.0, 0.0], [-2.0, 0.0, 0.5, -7.0, 0.0], [0.0, -0.0, 2.0, 0.0, -4.0]]])
QUARTERS = torch.tensor(
    [[[1.0, -1.0, 0.0, 0.0, 1e-4], [-1e-4, -3.0, 3.0, -2.0, 0.0], [-5.0, 4.0, 0.0, -0.5, 2.0]]]
)


def filled(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    y = x * 2
    y[mask] = 0.5
    return y


def chosen(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    y = x * 2
    y[mask] = x[mask]
    return y


CASES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "a remainder of one": lambda x: x % 1,
    "a remainder of one, by name": lambda x: torch.remainder(x, 1.0) * 2,
    "a remainder of one, of whole numbers": lambda x: x.int() % 1,
    "a remainder of two": lambda x: x % 2,
    "an angle": lambda x: torch.atan2(Y, x),
    "an angle the other way": lambda x: torch.atan2(x, QUARTERS),
    "an angle of one number": lambda x: torch.atan2(x[..., :1], QUARTERS),
    "padded around": lambda x: F.pad(x, (2, 1), mode="circular"),
    "padded around both axes": lambda x: F.pad(x, (1, 2, 2, 1), mode="circular"),
    "cut and padded around": lambda x: F.pad(x, (-1, 2), mode="circular"),
    "convolved around": lambda x: F.conv1d(F.pad(x, (1, 1), mode="circular"), torch.ones(2, 3, 3) / 9),
    "a mean beyond the end": lambda x: F.avg_pool1d(x, 2, 2, ceil_mode=True),
    "a mean of squares beyond the end": lambda x: F.avg_pool2d(x[None], 2, 2, ceil_mode=True),
    "a padded mean beyond the end": lambda x: F.avg_pool2d(x[None], 3, 2, 1, ceil_mode=True),
    "a padded mean, no padding counted": lambda x: F.avg_pool2d(
        x[None], 3, 2, 1, ceil_mode=True, count_include_pad=False
    ),
    "a mean whose window begins in the padding": lambda x: F.avg_pool1d(x, 2, 3, 1, ceil_mode=True),
    "windows by a divisor": lambda x: F.avg_pool2d(x[None], 3, divisor_override=10),
    "padded windows by a divisor": lambda x: F.avg_pool2d(
        x[None], (2, 3), 2, 1, ceil_mode=True, count_include_pad=False, divisor_override=4
    ),
    "windows in space by a divisor": lambda x: F.avg_pool3d(x[None, None], (1, 2, 2), 1, divisor_override=3),
    "a floor by a division": lambda x: torch.floor_divide(x, 1) * 2,
    "a floor by a quotient": lambda x: torch.div(x, 1.0, rounding_mode="floor") * 2,
    "the last of an axis": lambda x: torch.narrow(x, -1, -1, 1) * 2,
    "the second last of an axis": lambda x: torch.narrow(x, 1, -2, 1) * 2,
    "a vector times a batch": lambda x: torch.matmul(Y[0, 0], x.transpose(1, 2)),
    "a batch times a vector": lambda x: torch.matmul(x, Y[0, 2]),
    "chosen where a mask is true": lambda x: chosen(x, x > 1),
    "chosen where a mask is nowhere true": lambda x: chosen(x, x > 50),
    "integers chosen where a mask is true": lambda x: chosen(x.int(), x > 1),
    "a number where it is negative": lambda x: filled(x, x < 0),
    "a number in rows that begin positive": lambda x: filled(x, x[..., 0] > 0),
    "a number where all is false": lambda x: filled(x, x > 99),
    "places of maxima": lambda x: F.max_pool2d(x, 2, 1, return_indices=True)[1],
    "places of maxima beside padding": lambda x: F.max_pool2d(x[None], (3, 2), 2, 1, return_indices=True)[1],
    "places of maxima beyond the end": lambda x: F.max_pool1d(x, 2, ceil_mode=True, return_indices=True)[1],
    "one padding for both axes": lambda x: F.avg_pool2d(x[None], 3, 1, padding=[1]),
    "one number of each kind": lambda x: F.max_pool2d(x[None], [3], [2], [1]),
    "a mask of a diagonal": lambda x: x.masked_fill(~torch.eye(3, 5, dtype=torch.bool), 0.5),
    "a diagonal of whole numbers": lambda x: x * (torch.eye(5, dtype=torch.int32)[:3] // 2 + 1),
    "a running logarithm": lambda x: torch.logcumsumexp(5 * x, 1),
    "a running logarithm of rows": lambda x: torch.logcumsumexp(x, -1),
}


@pytest.mark.parametrize("how", ["trace", "export"])
def test_each_agrees_with_torch(how: str) -> None:
    assert_each_agrees(CASES, (X, X / 9), how)


def test_maxima_return_to_their_places() -> None:
    """By export alone: torch cannot trace it."""
    assert_each_agrees(
        {"unpooled": lambda x: F.max_unpool2d(*F.max_pool2d(x, 2, 1, return_indices=True), [2, 2], [1, 1])},
        (X, X / 9),
        "export",
    )


@pytest.mark.parametrize(("shifts", "axes"), [(-2, 1), ((-7, 3), (1, 0)), (-4, None)])
def test_rolls_to_the_left_of_any_length(shifts: Any, axes: Any) -> None:
    """Where the length is dynamic, the remainder is taken on the device, which keeps the sign."""
    frontend.register()
    rolled = Function(lambda x: torch.roll(x, shifts, axes) + 0)
    traced = torch.jit.trace(rolled, X[0])  # type: ignore[no-untyped-call]
    shape = (ct.RangeDim(2, 9, default=3), ct.RangeDim(2, 9, default=5))
    model = ct.convert(
        traced, inputs=[ct.TensorType("x", shape)], compute_precision=ct.precision.FLOAT32, skip_model_load=True
    )
    for x in (X[0], Y[0, :, :2]):
        (found,) = run(model, {"x": x.numpy()}).values()
        np.testing.assert_array_equal(found, rolled(x).numpy())


def test_a_module_with_circular_padding_converts() -> None:
    torch.manual_seed(0)
    module = torch.nn.Sequential(
        torch.nn.Conv1d(3, 8, 3, padding=1, padding_mode="circular"), torch.nn.ReLU(), torch.nn.Conv1d(8, 2, 1)
    ).eval()
    frontend.register()
    model = ct.convert(
        torch.jit.trace(module, X),  # type: ignore[no-untyped-call]
        inputs=[ct.TensorType("x", X.shape)],
        convert_to="milinternal",
        compute_precision=ct.precision.FLOAT32,
        minimum_deployment_target=ct.target.iOS17,
    )
    (found,) = run(model, {"x": X.numpy()}).values()
    np.testing.assert_allclose(found, module(X).detach().numpy(), rtol=1e-5, atol=1e-5)
