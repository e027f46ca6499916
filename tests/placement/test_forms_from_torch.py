"""What people write by hand in PyTorch, converted: named, repaired, and silent where numbers are bounded."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import anesurgery as ane
from anesurgery.checking.output_comparison import psnr
from anesurgery.interpret import run
from anesurgery.mil import Array, Program, ct, quiet_host

GOOD = 60.0
"""dB from which numbers are right."""
RNG = np.random.default_rng(3)
INPUTS = {
    "wide": np.linspace(-20, 25, 128).reshape(2, 64),
    "far": RNG.standard_normal((2, 64)) + 60,
    "loud": RNG.standard_normal((2, 64)) * 300,
    "near": RNG.standard_normal((2, 64)) * 0.03,
    "spread": RNG.uniform(-14, -11, (2, 64)),
}
"""Inputs, each of which makes some form fail; numbers of fp16."""
VALUES = {name: value.astype(np.float16).astype(np.float32) for name, value in INPUTS.items()}
WEIGHT = torch.from_numpy(RNG.uniform(-0.002, 0.002, (16, 64)).astype(np.float16)).float()


def mish(wide: Tensor) -> Tensor:
    """By algebra, without a logarithm."""
    e = torch.exp(wide)
    return wide * (e * (e + 2)) / (e * (e + 2) + 2)


def focal(wide: Tensor) -> Tensor:
    share = torch.sigmoid(wide)
    return -0.25 * (1 - share) ** 2 * torch.log(share)


def standardised(far: Tensor) -> Tensor:
    mean = far.mean(-1, keepdim=True)
    return (far - mean) / torch.sqrt((far * far).mean(-1, keepdim=True) - mean * mean + 1e-3)


def likelihood(near: Tensor, spread: Tensor) -> Tensor:
    return 0.5 * torch.exp(-spread) * (near - 0.01) ** 2 + 0.5 * spread


def squared_relu(loud: Tensor) -> Tensor:
    return nn.functional.linear(torch.relu(loud) ** 2, WEIGHT.to(loud))


def tempered(wide: Tensor) -> Tensor:
    e = torch.exp(wide / 0.5)
    return e / e.sum(-1, keepdim=True)


def share(wide: Tensor) -> Tensor:
    return torch.exp(wide) / (1 + torch.exp(wide))


def root_mean_square(loud: Tensor) -> Tensor:
    return loud * torch.rsqrt(loud.pow(2).mean(-1, keepdim=True) + 1e-3)


FORMS: dict[str, tuple[Callable[..., Tensor], tuple[str, ...]]] = {
    "mish": (mish, ("wide",)),
    "focal": (focal, ("wide",)),
    "standardised": (standardised, ("far",)),
    "likelihood": (likelihood, ("near", "spread")),
    "squared_relu": (squared_relu, ("loud",)),
    "tempered": (tempered, ("wide",)),
    "share": (share, ("wide",)),
    "root_mean_square": (root_mean_square, ("loud",)),
}


class Forms(nn.Module):
    """All forms, of the inputs, or of numbers between -1 and 1."""

    def __init__(self, bounded: bool) -> None:
        super().__init__()
        self.bounded = bounded

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        values = dict(zip(INPUTS, map(torch.tanh, inputs) if self.bounded else inputs, strict=True))
        return tuple(form(*(values[name] for name in names)) for form, names in FORMS.values())


def converted(module: nn.Module) -> Program:
    with quiet_host(), torch.no_grad():
        traced = torch.jit.trace(module.eval(), [torch.from_numpy(v) for v in VALUES.values()])  # type: ignore[no-untyped-call]
        program: Program = ct.convert(
            traced,
            inputs=[ct.TensorType(name, value.shape) for name, value in VALUES.items()],
            outputs=[ct.TensorType(name) for name in FORMS],
            minimum_deployment_target=ct.target.iOS17,
            convert_to="milinternal",
        )
    return program


@pytest.fixture(scope="module")
def model() -> Program:
    return converted(Forms(bounded=False))


@pytest.fixture(scope="module")
def repaired(model: Program) -> Program:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ane.SurgeryWarning)  # it says what the repairs cost
        return ane.apply(model, "safe_numbers", target="M1/macOS 14", prove=None, quiet=True).program


def nearness(program: Program, arithmetic: str) -> dict[str, float]:
    """DB of each form; minus infinite where a number is not finite."""
    with torch.no_grad():
        meant = Forms(bounded=False).double()(*(torch.from_numpy(v).double() for v in VALUES.values()))
    outputs = run(program, VALUES, precision=arithmetic)
    return {n: _psnr(wanted.numpy(), np.asarray(outputs[n])) for n, wanted in zip(FORMS, meant, strict=True)}


def _psnr(wanted: Array, value: Array) -> float:
    rms = float(np.sqrt(np.mean((wanted - value.astype(np.float64)) ** 2)))
    return psnr(float(np.abs(wanted).max()), rms) if math.isfinite(rms) else -math.inf


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
def test_each_goes_wrong_and_is_repaired(model: Program, repaired: Program) -> None:
    before = nearness(model, "fp16")
    assert {name for name, db in before.items() if db < GOOD} == set(FORMS)
    for arithmetic in ("fp16", "ane"):
        assert {n: db for n, db in nearness(repaired, arithmetic).items() if db < GOOD} == {}


RULES = {
    "num-exp",
    "num-exp-range",
    "num-softmax",
    "num-log-softmax",
    "num-square",
    "num-variance",
    "num-between",
}


def test_they_are_named_and_bounded_ones_are_not(model: Program) -> None:
    spoken = {f.rule for f in ane.inspect(model, target="M1/macOS 14").all_findings if f.kind == "numeric"}
    assert spoken >= RULES
    twin = ane.inspect(converted(Forms(bounded=True)), target="M1/macOS 14").all_findings
    assert [f for f in twin if f.kind == "numeric"] == []
