"""The registered torch conversions: each against torch, alone and in whole transformers models."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from anesurgery import frontend
from anesurgery.interpret import run
from anesurgery.mil import ct, quiet_host

X = torch.tensor([[3.0, -1.0, 4.0, 1.0], [5.0, -9.0, 2.0, 6.0]])
CASES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "diff": torch.diff,
    "diff_dim": lambda x: torch.diff(x, dim=0),
    "diff_prepend": lambda x: torch.diff(x, prepend=x[:, :1] - 1, dim=-1),
    "diff_append": lambda x: torch.diff(x, append=x[:, :1] - 1),
    "diff_bool": lambda x: torch.diff(x > 0, dim=1).float(),
    "diff_int": lambda x: torch.diff(x.int(), dim=1).float(),
    "new_ones": lambda x: x + x.new_ones((2, 4)),
    "new_ones_dtype": lambda x: x * x.new_ones((4,), dtype=torch.int32),
    "new_ones_scalar": lambda x: x * x.new_ones(()),
    "new_zeros": lambda x: x + x.new_zeros(2, 1),
    "new_full": lambda x: x + x.new_full((4,), 2.5),
    "where_number": lambda x: torch.where(x > 0, x, 0.5),
    "where_number_first": lambda x: torch.where(x > 0, -7.0, x),
    "where_two_numbers": lambda x: torch.where(x > 0, 1.5, -2.0) + x,
    "and": lambda x: ((x > 0) & (x < 4)).float(),
    "or": lambda x: ((x < 0) | (x > 4)).float(),
    "xor": lambda x: ((x > 0) ^ (x > 4)).float(),
    "gqa": lambda x: torch.nn.functional.scaled_dot_product_attention(
        x.reshape(1, 4, 1, 2), x.reshape(1, 2, 2, 2), x.reshape(1, 2, 2, 2) + 1, enable_gqa=True
    ),
}


class Module(torch.nn.Module):
    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x)


def convert(module: torch.nn.Module, how: str) -> Any:
    frontend.register()
    with quiet_host():
        graph: Any = (
            torch.jit.trace(module, X)  # type: ignore[no-untyped-call]
            if how == "trace"
            else torch.export.export(module, (X,)).run_decompositions({})
        )
        return ct.convert(
            graph,
            inputs=[ct.TensorType("x", shape=X.shape)],
            compute_precision=ct.precision.FLOAT32,
            minimum_deployment_target=ct.target.iOS17,
            skip_model_load=True,
        )


@pytest.mark.parametrize("how", ["trace", "export"])
@pytest.mark.parametrize("name", CASES)
def test_each_conversion_agrees_with_torch(name: str, how: str) -> None:
    module = Module(CASES[name])
    (found,) = run(convert(module, how), {"x": X.numpy()}).values()
    expected = module(X).numpy()
    assert found.shape == expected.shape
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-6 * np.abs(expected).max())


def test_registering_twice_is_harmless_and_leaves_the_hosts_own_alone() -> None:
    from coremltools.converters.mil.frontend.torch.torch_op_registry import _TORCH_OPS_REGISTRY

    frontend.register()
    before = dict(_TORCH_OPS_REGISTRY.name_to_func_mapping)
    frontend.register()
    assert before == _TORCH_OPS_REGISTRY.name_to_func_mapping
    assert before["relu"].__module__.startswith("coremltools")


def test_a_higher_difference_is_refused_by_name() -> None:
    with pytest.raises(NotImplementedError, match="diff of order n=2; only n=1 is covered"):
        convert(Module(lambda x: torch.diff(x, n=2)), "trace")


FAMILIES = ["gpt2", "llama", "qwen2", "bert", "t5", "whisper", "vit"]


@pytest.mark.parametrize("how", ["trace", "export"])
@pytest.mark.parametrize("name", FAMILIES)
def test_families_convert_the_plain_way(converted: Callable[..., Any], name: str, how: str) -> None:
    made = converted(name, how, precision="fp32", attn="eager" if name == "t5" else "sdpa")
    (found,) = run(made.model, made.inputs).values()
    assert found.shape == made.expected.shape
    assert np.abs(found - made.expected).max() <= 1e-5 * np.abs(made.expected).max()


@pytest.mark.slow
@pytest.mark.parametrize("target", ["iOS15", "iOS16", "iOS18"])
@pytest.mark.parametrize("attn", ["eager", "sdpa"])
@pytest.mark.parametrize("mask", [False, True])
@pytest.mark.parametrize("how", ["trace", "export"])
@pytest.mark.parametrize("name", ["gpt2", "llama", "bert", "t5_encoder"])
def test_families_in_every_form(
    converted: Callable[..., Any], name: str, how: str, mask: bool, attn: str, target: str
) -> None:
    attn = "eager" if name.startswith("t5") else attn
    made = converted(name, how, attn=attn, mask=mask, target=target, precision="fp32")
    (found,) = run(made.model, made.inputs).values()
    assert np.abs(found - made.expected).max() <= 1e-5 * np.abs(made.expected).max()


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_with_a_cache_in_the_graph(converted: Callable[..., Any], name: str) -> None:
    made = converted(name, "trace", precision="fp32", cache=True)
    (found,) = run(made.model, made.inputs).values()
    assert np.abs(found - made.expected).max() <= 1e-5 * np.abs(made.expected).max()
