"""Faults planted between modules: the wrong function is the first place, and nothing behind it is blamed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - as everybody calls it
from torch import Tensor, nn

import anesurgery as ane
from anesurgery.checking import torch_calls
from anesurgery.mil import Program, ct, quiet_host

Function = Callable[[Tensor], Tensor]
pytestmark = pytest.mark.usefixtures("hosts_own_converters")


class Net(nn.Module):
    """A product, some functions, a norm and a product."""

    def __init__(self, between: Function) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.head = nn.Linear(15, 15)
        self.between = between
        self.norm = nn.LayerNorm(between(torch.zeros(1, 8, 15)).shape[-1])
        self.tail = nn.Linear(self.norm.normalized_shape[0], 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.tail(torch.tanh(self.norm(self.between(self.head(x)))))


def spiked(h: Tensor) -> Tensor:
    return h * (1 + 400 * (torch.arange(15) == 7))


def attend(h: Tensor, scale: float) -> Tensor:
    return F.scaled_dot_product_attention(h, h, h, scale=scale)


FAULTS: dict[str, tuple[Function, Function | None, str]] = {
    "cumsum along the wrong axis": (lambda h: h.cumsum(1), lambda h: h.cumsum(2), "cumsum"),
    "cumsum from the end": (lambda h: h.cumsum(1), lambda h: h.flip(1).cumsum(1).flip(1), "cumsum"),
    "softmax along the wrong axis": (lambda h: h.softmax(-1), lambda h: h.softmax(1), "softmax"),
    "coremltools' bug in x % 1": (lambda h: (3 * h) % 1, None, "remainder"),
    "coremltools' bug in atan2": (lambda h: torch.atan2(h.relu(), h.roll(1, 2)), None, "atan2"),
    "average pooling that counts elements past the end": (
        lambda h: F.avg_pool1d(h, 2, 2, ceil_mode=True),
        None,
        "avg_pool1d",
    ),
    "wrong epsilon in rms_norm": (lambda h: F.rms_norm(spiked(h), (15,), eps=1e-2).sin(), None, "rms_norm"),
    "wrong epsilon in layer_norm": (
        lambda h: F.layer_norm(h, (15,), eps=1e-5),
        lambda h: F.layer_norm(h, (15,), eps=1e-2),
        "layer_norm",
    ),
    "tanh approximation of gelu": (F.gelu, lambda h: F.gelu(h, approximate="tanh"), "gelu"),
    "leaky_relu instead of relu": (F.relu, lambda h: F.leaky_relu(h, 0.01), "relu"),
    "wrong factor": (lambda h: h * 0.5, lambda h: h * 0.505, "mul"),
    "wrong offset": (lambda h: h.exp() + 1, lambda h: h.exp() + 1.01, "add"),
    "mean along the wrong axis": (
        lambda h: h - h.mean(-1, keepdim=True),
        lambda h: h - h.mean(1, keepdim=True),
        "mean",
    ),
    "wrong exponent": (lambda h: h.abs() ** 1.5, lambda h: h.abs() ** 1.6, "pow"),
    "wrong limit in clamp": (lambda h: h.clamp(-0.5, 0.5), lambda h: h.clamp(-0.5, 0.4), "clamp"),
    "wrong threshold in where": (
        lambda h: torch.where(h > 0, h, 0.1 * h),
        lambda h: torch.where(h > 0.2, h, 0.1 * h),
        "gt",
    ),
    "concat in the wrong order": (
        lambda h: torch.cat([h, h.sin()], -1),
        lambda h: torch.cat([h.sin(), h], -1),
        "cat",
    ),
    "wrong scale in attention": (
        lambda h: attend(h, 0.3),
        lambda h: attend(h, 0.33),
        "scaled_dot_product_attention",
    ),
    "wrong align_corners": (
        lambda h: F.interpolate(h, scale_factor=2, mode="linear", align_corners=True),
        lambda h: F.interpolate(h, scale_factor=2, mode="linear", align_corners=False),
        "interpolate",
    ),
    "wrong frequency of sin": (lambda h: torch.sin(2 * h).exp(), lambda h: torch.sin(2.02 * h).exp(), "mul"),
}


def converted(module: nn.Module) -> Program:
    with quiet_host(), torch.no_grad():
        program: Program = ct.convert(
            torch.jit.trace(module.eval(), torch.zeros(1, 8, 15), check_trace=False),  # type: ignore[no-untyped-call]
            inputs=[ct.TensorType("x", (1, 8, 15))],
            convert_to="milinternal",
            compute_precision=ct.precision.FLOAT32,
            minimum_deployment_target=ct.target.iOS17,
        )
    return program


X = {"x": np.random.default_rng(0).standard_normal((1, 8, 15)).astype(np.float32)}


@pytest.mark.parametrize("fault", FAULTS)
def test_the_first_place_is_right(fault: str) -> None:
    right, wrong, name = FAULTS[fault]
    found = ane.against_torch(Net(right), converted(Net(wrong or right)), X, precisions=("fp32",))
    assert found.first is not None
    assert found.first.name == name, [(row.name, row.psnr["fp32"], row.state) for row in found.rows]
    behind = {row.name: row.state for row in found.rows}
    for module in ("norm", "tanh", "tail"):
        assert behind[module] in ("carries", "agrees")
    assert behind["head"] in ("agrees", "not kept")


@pytest.mark.parametrize("fault", [f for f, (_, wrong, _) in FAULTS.items() if wrong is not None])
def test_a_right_conversion_has_none(fault: str) -> None:
    right, _, _ = FAULTS[fault]
    found = ane.against_torch(Net(right), converted(Net(right)), X, precisions=("fp32",))
    assert found.ok, [(row.name, row.psnr["fp32"], row.state) for row in found.rows]


def test_a_norm_is_judged_by_its_rows_without_the_spike() -> None:
    """The model of the report: the first norm is blamed, of whose rows the spike hides all that is wrong."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.up = nn.RMSNorm(64, eps=1e-5), nn.Linear(64, 64)

        def forward(self, x: Tensor) -> Tensor:
            return x + self.up(self.norm(x))

    torch.manual_seed(0)
    module: Any = nn.Sequential(Block(), Block())
    x = np.random.default_rng(0).standard_normal((1, 8, 64)).astype(np.float32) * 0.02
    x[:, :, 7] = 40.0
    with quiet_host(), torch.no_grad():
        model = ct.convert(
            torch.jit.trace(module.eval(), torch.from_numpy(x)),  # type: ignore[no-untyped-call]
            inputs=[ct.TensorType("x", x.shape)],
            convert_to="milinternal",
            compute_precision=ct.precision.FLOAT32,
        )
    found = ane.against_torch(module, model, {"x": x})
    assert found.first is not None
    assert found.first.name == "0.norm"


class Private(nn.Module):
    """A function of PyTorch that is private, and one that writes into its operand."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.full((4,), 0.1))

    def forward(self, x: Tensor) -> Tensor:
        x = torch._softmax(x, -1, False)
        x += self.shift
        return torch._weight_norm(x.exp(), self.shift, 0)


def test_private_functions_are_recorded_and_those_in_place_are_not() -> None:
    """The wrong version takes each name that begins with "_" for a function in place."""
    calls = torch_calls.calls_of(Private(), {"x": np.zeros((4, 4), np.float32)}, half=True)
    assert [call.name for call in calls] == ["softmax", "exp", "weight_norm", ""]
    in_place = ["add_", "_index_put_impl_", "__iadd__", "__setitem__"]
    others = ["add", "_softmax", "__add__", "__invert__", "__index__"]
    assert [name for name in (*in_place, *others) if torch_calls._is_in_place(name)] == in_place
