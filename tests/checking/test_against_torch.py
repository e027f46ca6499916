"""A planted wrong module is the first that is named, and a right conversion has none."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import anesurgery as ane
from anesurgery.errors import SurgeryError
from anesurgery.examples.language import GPT2_SIZES, GPT2Block, causal
from anesurgery.mil import ct, quiet_host


class Stack(nn.Module):
    """Blocks of a GPT-2 around which the input goes, and a table that is no parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(64, 512)
        self.blocks = nn.ModuleList(GPT2Block(GPT2_SIZES) for _ in range(2))
        self.leave = nn.Linear(512, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.enter(x) + torch.linspace(0, 1, 512).sin()
        for block in self.blocks:
            y = block(y, causal(16))
        return self.leave(y)


class Pictures(nn.Module):
    """A convolution that the converter fuses with the norm behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.last = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Conv2d(8, 4, 1)
        nn.init.uniform_(self.norm.running_mean, -1, 1)  # type: ignore[arg-type]
        nn.init.uniform_(self.norm.running_var, 0.5, 2)  # type: ignore[arg-type]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.relu(self.norm(self.conv(x)))).permute(0, 2, 3, 1)


def converted(module: nn.Module, shape: tuple[int, ...], **options: Any) -> Any:
    with quiet_host(), torch.no_grad():
        trace: Any = torch.jit.trace
        return ct.convert(
            trace(module.eval(), torch.zeros(shape), check_trace=False),
            inputs=[ct.TensorType("x", shape)],
            minimum_deployment_target=ct.target.iOS16,
            skip_model_load=True,
            **options,
        )


@pytest.fixture(scope="module")
def stack() -> tuple[Stack, Any, dict[str, Any]]:
    torch.manual_seed(0)
    module = Stack()
    values = np.random.default_rng(0).standard_normal((1, 16, 64)).astype(np.float32)
    return module, converted(module, (1, 16, 64)), {"x": values}


def test_a_right_conversion_agrees(stack: Any) -> None:
    found = ane.against_torch(*stack)
    assert found.ok
    assert found.rounded
    assert found.first is None
    assert {row.state for row in found.rows} <= {"agrees", "carries", "rounds", "not kept"}
    assert "package and PyTorch agree" in str(found)
    assert found.to_json()["ok"]
    assert all(row.psnr["fp16"] <= row.psnr["fp32"] for row in found.rows)


def heavier(module: Any) -> None:
    with torch.no_grad():
        next(module.parameters()).mul_(1.01)


def guarded(module: Any) -> None:
    module.eps = 1e-2


def turned(module: Any) -> None:
    with torch.no_grad():
        module.weight.copy_(module.weight.T.clone())


@pytest.mark.parametrize(
    ("name", "spoil"),
    [
        ("enter", heavier),
        ("blocks.0.attn.keys", heavier),
        ("blocks.1.mlp.2", heavier),
        ("blocks.0.ln_2", guarded),
        ("blocks.1.attn.out", turned),
    ],
)
def test_a_wrong_module_is_the_first(stack: Any, name: str, spoil: Callable[[Any], None]) -> None:
    module, model, inputs = stack
    wrong = copy.deepcopy(module)
    spoil(wrong.get_submodule(name))
    found = ane.against_torch(wrong, model, inputs, precisions=("fp32",))
    assert found.first is not None
    assert found.first.name == name
    assert f"part in {name}" in str(found)


@pytest.mark.parametrize("precision", ["FLOAT32", "FLOAT16"])
def test_what_the_converter_fused_is_no_difference(precision: str) -> None:
    torch.manual_seed(1)
    module = Pictures().eval()
    model = converted(module, (1, 3, 12, 12), compute_precision=getattr(ct.precision, precision))
    values = {"x": np.random.default_rng(0).standard_normal((1, 3, 12, 12)).astype(np.float32)}
    states = {row.name: row.state for row in ane.against_torch(module, model, values).rows}
    assert "parts" not in states.values()
    wrong = copy.deepcopy(module)
    heavier(wrong.last)
    found = ane.against_torch(wrong, model, values).first
    assert found is not None
    assert found.name == "last"


def test_bad_input_is_said(stack: Any) -> None:
    module, model, inputs = stack
    with pytest.raises(SurgeryError, match="it takes a Module"):
        ane.against_torch(torch.relu, model, inputs)  # type: ignore[arg-type]
    with pytest.raises(SurgeryError, match="lacks 'fp32'"):
        ane.against_torch(module, model, inputs, precisions=("fp16",))
    with pytest.raises(SurgeryError, match="does not take"):
        ane.against_torch(nn.Linear(3, 3), model, inputs)


def test_the_module_stays_as_it_is(stack: Any) -> None:
    module, model, inputs = stack
    before = copy.deepcopy(module.state_dict())
    ane.against_torch(module, model, inputs, precisions=("fp32",))
    assert all(torch.equal(before[k], v) for k, v in module.state_dict().items())
    assert not any(part._forward_hooks for part in module.modules())
