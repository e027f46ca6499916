"""PyTorch models of kinds that users report, converted: what a certificate says, and what repairs them."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import anesurgery as ane
from anesurgery.mil import ct, quiet_host

RNG = np.random.default_rng(1)


class Calls(nn.Module):
    """A function of one value, behind a convolution of its own."""

    def __init__(
        self, function: Callable[[Tensor], Tensor], channels: int = 0, kernel: Any = 1, **more: Any
    ) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.function = function
        self.enter = nn.Conv2d(8, channels, kernel, **more) if channels else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        """Both."""
        return self.function(self.enter(x))


def best(x: Tensor) -> Tensor:
    """Places of the best of scores that lie close."""
    return torch.topk(torch.sigmoid(x * 0.02).flatten(1), 10, 1)[1]


def angle(x: Tensor) -> Tensor:
    return torch.atan2(x[:, :1], x[:, 1:2])


def stream(x: Tensor) -> Tensor:
    for _ in range(3):
        x = x + functional.rms_norm(x, (32,), eps=1e-2)
    return x


IMAGE = RNG.standard_normal((1, 8, 16, 16)).astype(np.float32)
ROWS = np.concatenate([np.full((1, 8, 1), 90), RNG.standard_normal((1, 8, 31)) * 0.05], -1).astype(np.float32)
PARTS = np.array([[[0.0, 1.0], [-1.0, 2.0]]], np.float32)

MODELS: dict[str, tuple[Callable[[], nn.Module], Any, str, str, str, str]] = {
    # name: module, input, target, verdict, words of it, words of its notes
    "energy": (
        lambda: Calls(lambda x: torch.logsumexp(x * 6, 1), 64, 3),
        IMAGE * 3,
        "M3/macOS 26",
        "fails",
        "(replace_faulty_ops may help)",
        "fault-log-sum-cliff: wrong on M3",
    ),
    "mish": (
        lambda: Calls(lambda x: functional.mish(x * 6), 8, (2, 3), stride=2, padding=1),
        IMAGE * 3,
        "M1/macOS 26",
        "fails",
        "softplus",
        "fault-conv-uneven-kernel-elsewhere",
    ),
    "volume": (
        lambda: nn.Sequential(nn.BatchNorm3d(8), nn.ReLU()),
        IMAGE.reshape(1, 8, 4, 8, 8),
        "M2/macOS 15",
        "holds",
        "",
        "fault-batch-norm-volume-elsewhere",
    ),
    "angle": (lambda: Calls(angle), PARTS, "M2/macOS 15", "at risk", "lost-branch", ""),
    "mean": (
        lambda: Calls(lambda x: functional.avg_pool2d(x, 3, 2, ceil_mode=True), 4),
        IMAGE,
        "M2/macOS 15",
        "at risk",
        "apply restore_meaning",
        "",
    ),
    "stream": (lambda: Calls(stream), ROWS, "M2/macOS 15", "at risk", "lost-epsilon", ""),
    "best": (lambda: Calls(best, 1), IMAGE, "M4/macOS 15", "fails", "of choices change", ""),
    "fine": (
        lambda: Calls(
            lambda x: functional.layer_norm(functional.silu(x), x.shape[1:]).mean((2, 3)), 8, 3, padding=1
        ),
        IMAGE,
        "M4/macOS 26",
        "holds",
        "",
        "",
    ),
}


pytestmark = pytest.mark.usefixtures("hosts_own_converters")


@cache
def converted(name: str) -> tuple[nn.Module, Any, dict[str, Any]]:
    """The module, the package of it, and its inputs."""
    make, x, *_ = MODELS[name]
    module = make().eval()
    with warnings.catch_warnings(), quiet_host():
        warnings.simplefilter("ignore")
        traced = torch.jit.trace(module, torch.from_numpy(x), check_trace=False)  # type: ignore[no-untyped-call]
        inputs, target = [ct.TensorType("x", x.shape)], ct.target.iOS17
        model = ct.convert(traced, inputs=inputs, minimum_deployment_target=target, skip_model_load=True)
    return module, model, {"x": x}


@pytest.mark.parametrize("name", MODELS)
def test_a_certificate_says_what_was_reported(name: str) -> None:
    _, model, inputs = converted(name)
    _, _, target, verdict, why, note = MODELS[name]
    found = ane.certify(model, inputs, target=target)
    assert found.verdict == verdict
    assert why in found.why
    assert note in " ".join(found.notes)
    assert note or not found.notes


@pytest.mark.parametrize(("name", "step"), [("energy", "auto"), ("mish", "auto"), ("mean", "restore_meaning")])
@pytest.mark.filterwarnings("ignore::anesurgery.errors.SurgeryWarning")
def test_what_it_names_repairs_it(name: str, step: str) -> None:
    _, model, inputs = converted(name)
    target = MODELS[name][2]
    done = ane.apply(model, step, target=target, inputs=inputs, prove=None)
    assert ane.certify(done.program, inputs, target=target).ok


@pytest.mark.parametrize(
    ("name", "first"), [("angle", "atan2"), ("mean", "avg_pool2d"), ("stream", "rms_norm"), ("fine", None)]
)
def test_the_function_is_blamed(name: str, first: str | None) -> None:
    module, model, inputs = converted(name)
    found = ane.against_torch(module, model, inputs).first
    assert (None if found is None else found.name) == first
