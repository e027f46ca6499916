"""What coreai-torch writes of PyTorch modules is read, and computes what PyTorch computes."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch
from core_ai_models import needs_core_ai, save_asset
from torch_modules import MODULES, made

import anesurgery as ane
from anesurgery.checking.output_comparison import compare_arrays
from anesurgery.coreai.lifts import Unliftable, as_int32
from anesurgery.mil import Array, walk_ops

pytestmark = needs_core_ai

GATE = 60.0
"""dB: a thousandth of the largest value."""


def inputs_of(values: list[torch.Tensor]) -> dict[str, Array]:
    return {f"x{i or ''}": v.numpy() for i, v in enumerate(values)}


def decibels(expected: Array, found: Array) -> float:
    row = compare_arrays("y", np.asarray(expected), np.asarray(found))
    assert not row.failure
    return row.psnr


OPS = {
    "mlp": ["linear", "gelu", "linear", "tanh"],
    "conv": ["conv", "relu", "max_pool"],
    "max_pool": ["max_pool"],
    "avg_pool": ["avg_pool"],
    "layer_norm": ["layer_norm"],
    "causal": ["scaled_dot_product_attention"],
    "bilinear": ["resize_bilinear"],
    "pixel_shuffle": ["pixel_shuffle"],
}
"""Module whose composites, paddings and biases become the op of that name -> its ops."""


OTHERS = [name for name in MODULES if name not in OPS]
AT_ONCE = 10
"""Modules in one file: an export takes 0.3 s, whatever it exports."""
FILES = [*([name] for name in OPS), *(OTHERS[at : at + AT_ONCE] for at in range(0, len(OTHERS), AT_ONCE))]


class Together(torch.nn.Module):
    """Modules beside each other, each with inputs of its own."""

    def __init__(self, modules: Sequence[torch.nn.Module], counts: Sequence[int]) -> None:
        super().__init__()
        self.parts, self.counts = torch.nn.ModuleList(modules), counts

    def forward(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        given = iter(inputs)
        return tuple(m(*islice(given, n)) for m, n in zip(self.parts, self.counts, strict=True))


@pytest.mark.parametrize("half", [False, True], ids=["fp32", "fp16"])
@pytest.mark.parametrize("names", FILES, ids=lambda names: names[0])
def test_modules_are_read_back(names: list[str], half: bool, tmp_path: Path) -> None:
    modules, inputs = zip(*(made(name, half) for name in names), strict=True)
    values = [value for some in inputs for value in some]
    together = Together(modules, [len(some) for some in inputs])
    path = save_asset(tmp_path / "m.aimodel", together, values, names)
    exact = [v.float() if v.is_floating_point() else v for v in values]
    with torch.no_grad():
        expected = dict(zip(names, together.float()(*exact), strict=True))
    loaded = ane.load(path)
    found = [ane.run(loaded, inputs_of(values))]
    if not half:  # Apple's Linux runtime sums fp16 products in fp16, one term after the other
        found.append(ane.run(path, inputs_of(values), engine="coreai"))
    for outputs in found:
        apart = {name: decibels(one.numpy(), outputs[name]) for name, one in expected.items()}
        assert {name: db for name, db in apart.items() if db < GATE} == {}
    if not half and names[0] in OPS:
        assert [op.op_type for op in walk_ops(loaded.program) if op.op_type != "const"] == OPS[names[0]]


class Hyperbolic(torch.nn.Module):
    """Inverses that MIL has no op for."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([torch.asinh(x), torch.acosh(x.abs() + 2)])


def test_inverses_of_large_fp16_numbers_are_finite(tmp_path: Path) -> None:
    """Squares of numbers from 256 on are infinite in fp16."""
    x = torch.tensor([[-3e3, -300.0, -1e-3, 0.5, 300.0, 6e4]]).half()
    path = save_asset(tmp_path / "hyperbolic.aimodel", Hyperbolic(), [x])
    found = ane.run(ane.load(path), {"x": x.numpy()}, precision="fp16")["y"]
    meant = torch.cat([torch.asinh(x.float()), torch.acosh((x.abs() + 2).float())])  # of what fp16 holds
    np.testing.assert_allclose(found, meant.numpy(), rtol=3e-3)


def test_the_modules_with_ops_are_there() -> None:
    assert OPS.keys() <= set(MODULES)


@pytest.mark.parametrize("number", [1 << 40, -(1 << 31) - 1])
def test_an_integer_beyond_int32_is_an_error_in_words(number: int) -> None:
    """The wrong version makes it the largest int32, and so computes another number."""
    with pytest.raises(Unliftable, match=rf"the constant {number} does not fit int32"):
        as_int32(np.array([3, number]))


def test_the_ends_of_int64_mean_no_limit() -> None:
    ends = as_int32(np.array([-(1 << 63), (1 << 63) - 1, 7]))
    assert ends.dtype == np.int32
    assert ends.tolist() == [-(1 << 31), (1 << 31) - 1, 7]
