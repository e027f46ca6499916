"""The registered torch conversions: each against torch, alone and in whole transformers models."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from closeness import assert_close
from conversion import Function, convert

from anesurgery import frontend
from anesurgery.interpret import run
from anesurgery.mil import ct, quiet_host

pytestmark = pytest.mark.first

X = torch.tensor([[3.0, -1.0, 4.0, 1.0], [5.0, -9.0, 2.0, 6.0]])
MASK = torch.tensor([[True, False], [True, True]])
attend: Any = torch.nn.functional.scaled_dot_product_attention


def heads(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Four query heads over two key and value heads."""
    keys = x.reshape(1, 2, 2, 2)
    return torch.cat([x, -x]).reshape(1, 4, 2, 2), keys / 4, keys + 1


PICTURE = [1, 1, 2, 4]
resize: Any = torch.nn.functional.interpolate


class Sinus(torch.autograd.Function):
    """A function with a gradient of its own, as BLOOM writes its gelu."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, factor: float) -> torch.Tensor:
        ctx.save_for_backward(x)
        return torch.sin(x * factor) + x

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients


def written(x: torch.Tensor, view: Callable[..., Any], value: Callable[..., Any]) -> torch.Tensor:
    """A copy of x, with a new value in one view of it."""
    y = x * 2
    part = view(y)
    part.copy_(value(part)) if isinstance(value(part), torch.Tensor) else part.fill_(value(part))
    return y + 1


def in_place(x: torch.Tensor, write: Callable[..., Any]) -> torch.Tensor:
    """A copy of x, changed by other in-place ops than a copy."""
    y = x * 2
    write(y)
    return y + 1


broadcast: Any = torch.broadcast_tensors
NORMAL: Any = torch.distributions.Normal(0, 1)
GRID = (torch.tensor([[0], [-1]]), torch.tensor([1, 3]))
ONE = torch.tensor([1])
DOUBLE = torch.tensor([1 + 2j, 3, 4, 5j], dtype=torch.complex128)
PAIRS = torch.tensor([[1 - 1j], [0.25 + 3j]])


def pairs(x: torch.Tensor) -> torch.Tensor:
    return torch.view_as_complex(x.reshape(2, 2, 2))


COMPLEX: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "literal": lambda x: x * (1 + 2j),
    "literal_of_integers": lambda x: x.int() * (1 + 2j),
    "literal_first": lambda x: 1j * pairs(x),
    "literal_in_place": lambda x: pairs(x.clone()).mul_(1j),
    "literal_added": lambda x: pairs(x) + (1 - 2j),
    "literal_added_to_reals": lambda x: x + 2j,
    "literal_less": lambda x: (1 - 2j) - pairs(x),
    "literal_less_reals": lambda x: (1 - 2j) - x,
    "literal_taken_away": lambda x: x - (1 - 2j),
    "literal_below": lambda x: pairs(x) / (1 - 2j),
    "literal_below_reals": lambda x: x / (3 + 1e-3j),
    "literal_above": lambda x: (1 - 2j) / pairs(x),
    "literal_above_reals": lambda x: 2j / x,
    "whole_numbers": lambda x: 3 - (pairs(x) * 2 + 1) / 4,
    "imaginary_below": lambda x: pairs(x) / 2j + x[:, :2] / 4j,
    "imaginary_twice": lambda x: (1j * x) * (2j * x) - 3j * x,
    "imaginary_and_real": lambda x: x.abs() * (x + 1j * x.flip(1)),
    "real_literal": lambda x: pairs(x) * (2 + 0j) - (x[:, :2] + 0j),
    "quotient": lambda x: pairs(x) / pairs(x.flip(1)),
    "quotient_of_large_ones": lambda x: pairs(x) / pairs(x.flip(1) * 1000) * 1000,
    "buffer": lambda x: pairs(x) * PAIRS + PAIRS,
    "buffer_of_reals": lambda x: PAIRS - x,
    "buffer_below": lambda x: x / PAIRS,
    "factor": lambda x: torch.add(pairs(x), PAIRS, alpha=2),
    "complex_einsum": lambda x: torch.einsum("ij,kj->ik", pairs(x), PAIRS.conj() * pairs(x)),
    "complex_einsum_of_a_vector": lambda x: torch.einsum("...i,i->...", pairs(x), (1j * pairs(x))[0]),
    "complex_factor": lambda x: torch.sub(pairs(x), PAIRS, alpha=2j),
    "negative": lambda x: -pairs(x) * 1j,
    "conjugate": lambda x: (pairs(x) * 1j).conj() * pairs(x),
    "square": lambda x: pairs(x).square(),
    "exponential": lambda x: torch.exp(x / 9 * (-1 + 2j)),
    "sum": lambda x: (x * 1j).sum(1),
    "mean": lambda x: (pairs(x) * 1j).mean(-1),
    "joined": lambda x: torch.cat([x * 1j, x], -1),
    "stacked": lambda x: torch.stack([pairs(x) * 1j, pairs(x)], -1).permute(2, 0, 1),
    "spectrum": lambda x: torch.fft.rfft(x) * (0.5 + 0.5j),
    "repeated": lambda x: pairs(x).repeat(2, 1) * torch.tile(PAIRS, (2, 1)),
    "looked_up": lambda x: PAIRS[(x[0, :2] > 0).int()][..., 0] * pairs(x).index_select(1, ONE),
    "gathered": lambda x: torch.gather(pairs(x), 0, torch.tensor([[1, 0]])),
    "rolled": lambda x: pairs(x).roll(1, 1) + pairs(x).flip(0),
    "repeated_in_turn": lambda x: pairs(x).repeat_interleave(2, 1),
    "split": lambda x: torch.cat(torch.split_with_sizes(pairs(x), [1, 1])[::-1]),
    "cut": lambda x: torch.multiply(*pairs(x).chunk(2, 1)),
    "unbound": lambda x: torch.stack(pairs(x).unbind(1)[::-1]),
    "unflattened": lambda x: torch.broadcast_to(torch.unflatten(pairs(x), 1, (2, 1)), (3, 2, 2, 1)),
    "turned": lambda x: pairs(x).T + pairs(x).mT.triu() + torch.zeros_like(pairs(x)),
    "summed_up": lambda x: pairs(x).cumsum(0),
}
"""What is made of complex numbers: its parts and its magnitude are compared."""


def parts(function: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:
    def all_parts(x: torch.Tensor) -> torch.Tensor:
        z = function(x)
        return torch.stack([z.real, z.imag, z.abs()])

    return all_parts


CASES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    **{f"complex_{name}": parts(function) for name, function in COMPLEX.items()},
    "multiply": lambda x: torch.multiply(x, 2.5),
    "subtract": lambda x: torch.subtract(x, x.flip(0)),
    "divide": lambda x: torch.divide(x, 4.0),
    "less_equal": lambda x: torch.less_equal(x, 2.0).float(),
    "sum of all, transposed": lambda x: x.T.sum(),
    "mean and norm of all, transposed": lambda x: (x.T - x.T.mean()) / torch.norm(x.T),
    "swapaxes": lambda x: torch.swapaxes(x, 0, 1),
    "histc": lambda x: torch.histc(x, bins=4, min=-1, max=5),
    "histc_ends": lambda x: torch.histc(x.clamp(0, 3).floor(), bins=4, min=0, max=3),
    "lerp": lambda x: torch.lerp(x, x.flip(0), 0.25),
    "reciprocal": lambda x: 1.0 / (x.abs() + 0.01),
    "reciprocal_of_integers": lambda x: torch.reciprocal((x > 0).sum(0) + 1),
    "addcmul": lambda x: torch.addcmul(x, x, x.flip(0), value=0.5),
    "addcdiv": lambda x: torch.addcdiv(x, x, x.abs() + 1),
    "scalars_broadcast": lambda x: torch.stack(broadcast(x.sum(), x.mean())),
    "numbers_broadcast": lambda x: x * NORMAL.icdf(torch.tensor(0.9)),
    "a_scalar_broadcast": lambda x: torch.stack(broadcast(x.sum(), x)),
    "asinh": torch.asinh,
    "asinh_of_large": lambda x: torch.asinh(x * 1e20),
    "asinh_of_large_fp16": lambda x: torch.asinh(x * 3e3),
    "asinh_of_small": lambda x: torch.asinh(x / 1e5) * 1e5,
    "acosh": lambda x: torch.arccosh(x.abs() + 1.5),
    "acosh_of_large": lambda x: torch.acosh(x.abs() * 1e20),
    "acosh_of_large_fp16": lambda x: torch.acosh(x.abs() * 3e3 + 2),
    "sqrt_of_an_int": lambda x: x * torch.sqrt(torch.tensor(5)),
    "sqrt_of_a_size": lambda x: x / torch.sqrt(torch.tensor(x.shape[-1])),
    "sqrt_of_ints": lambda x: torch.sqrt(x.int().abs()),
    "sqrt_of_booleans": lambda x: torch.sqrt(x > 0),
    "log_of_ints": lambda x: torch.log((x > 0).sum(0) + 1),
    "put_in_a_grid": lambda x: in_place(x, lambda y: y.index_put_(GRID, x[:, :2])),
    "put_one_in_a_grid": lambda x: in_place(x, lambda y: y.index_put_(GRID, x.sum())),
    "put_a_row_in_a_grid": lambda x: in_place(x, lambda y: y.index_put_(GRID, x[0, :2])),
    "added_in_a_grid": lambda x: in_place(x, lambda y: y.index_put_(GRID, x.sum(), accumulate=True)),
    "put_at_one_of_each": lambda x: in_place(x, lambda y: y.index_put_((ONE, GRID[1]), x[0, 1:3])),
    "double_complex": lambda x: torch.view_as_real(x.to(torch.complex128) * DOUBLE).float(),
    "double_polar": lambda x: torch.polar(x.abs().double(), x.double()).to(torch.complex64).real,
    "double_rotation": lambda x: (torch.view_as_complex(x.double().reshape(2, 2, 2)) * DOUBLE[:2]).imag.float(),
    "complex_of_reals": lambda x: (x.to(torch.complex64) * 2).real,
    "diff": torch.diff,
    "diff_dim": lambda x: torch.diff(x, dim=0),
    "diff_middle": lambda x: torch.diff(x.reshape(2, 2, 2), dim=-2),
    "diff_prepend": lambda x: torch.diff(x, prepend=x[:, :1] - 1, dim=-1),
    "diff_append": lambda x: torch.diff(x, append=x[:, :1] - 1),
    "diff_both": lambda x: torch.diff(x, prepend=x[:, 2:3], append=x[:, :2]),
    "diff_prepend_int": lambda x: torch.diff(x, prepend=torch.ones(2, 1, dtype=torch.int32)),
    "diff_bool": lambda x: torch.diff(x > 0, dim=1).float(),
    "diff_bool_prepend": lambda x: torch.diff(x > 0, prepend=x[:, :1] > 9).float(),
    "diff_int": lambda x: torch.diff(x.int(), dim=1).float(),
    "diff_constant": lambda x: x + torch.diff(torch.tensor([1, 4, 9, 16, 25])),
    "new_ones": lambda x: x + x.new_ones((2, 4)),
    "new_ones_dtype": lambda x: x * x.new_ones((4,), dtype=torch.int32),
    "new_ones_of_int": lambda x: x.int().new_ones((2, 1)) / 2 + x,
    "new_ones_bool": lambda x: torch.where(x.new_ones((2, 4), dtype=torch.bool), x, -x),
    "new_ones_scalar": lambda x: x * x.new_ones(()),
    "where_number": lambda x: torch.where(x > 0, x, 0.5),
    "where_number_first": lambda x: torch.where(x > 0, -7.0, x),
    "where_whole_number": lambda x: torch.where(x > 0, x, 7),
    "where_whole_number_first": lambda x: torch.where(x > 0, 7, x),
    "where_fraction_for_ints": lambda x: torch.where(x > 0, 0.5, x.int()),
    "where_two_numbers": lambda x: torch.where(x > 0, 1.5, -2.0) + x,
    "where_infinite": lambda x: torch.softmax(torch.where(x > 0, x, -torch.inf), -1),
    "where_wide_condition": lambda x: torch.where(x.reshape(2, 1, 4) > 0, x, 1.0),
    "where_wide_value": lambda x: torch.where(x[:, :1] > 4, x, 1.0),
    "and": lambda x: ((x > 0) & (x < 4)).float(),
    "and_broadcast": lambda x: ((x > 0) & (x[:, :1] < 4)).float(),
    "and_constant": lambda x: ((x > 0) & torch.tensor([True, False, True, False])).float(),
    "and_in_place": lambda x: (x > 0).__iand__(x < 4).float(),
    "or": lambda x: ((x < 0) | (x > 4)).float(),
    "or_in_place": lambda x: (x < 0).__ior__(x > 4).float(),
    "bitwise_or": lambda x: torch.bitwise_or(x < 0, x > 4).float(),
    "xor": lambda x: ((x > 0) ^ (x > 4)).float(),
    "xor_in_place": lambda x: (x > 0).__ixor__(x > 4).float(),
    "bitwise_xor": lambda x: torch.bitwise_xor(x > 0, x > 4).float(),
    "alias": lambda x: torch.ops.aten.alias(x) * 2,
    "gqa": lambda x: attend(*heads(x), enable_gqa=True),
    "gqa_causal": lambda x: attend(*heads(x), is_causal=True, enable_gqa=True),
    "gqa_mask": lambda x: attend(*heads(x), attn_mask=MASK, scale=0.3, enable_gqa=True),
    "gqa_three_axes": lambda x: attend(*(v[0] for v in heads(x)), enable_gqa=True),
    "bicubic": lambda x: resize(x.reshape(PICTURE), size=(5, 3), mode="bicubic"),
    "bicubic_corners": lambda x: resize(x.reshape(PICTURE), (5, 7), mode="bicubic", align_corners=True),
    "bicubic_scale": lambda x: resize(x.reshape(PICTURE), scale_factor=(2.5, 1.3), mode="bicubic"),
    "bicubic_smooth": lambda x: resize(x.reshape(PICTURE), (1, 3), mode="bicubic", antialias=True),
    "bilinear_smooth": lambda x: resize(x.reshape(PICTURE), (1, 3), mode="bilinear", antialias=True),
    "own_function": lambda x: Sinus.apply(Sinus.apply(x, 0.5), 2.0),  # type: ignore[no-untyped-call]
    "arange_of_floats": lambda x: torch.arange(2, dtype=torch.float32)[None] @ x,
    "outer": lambda x: torch.outer(torch.cumsum(x[0].int(), 0), x[0]),
    "mT": lambda x: x.mT @ x,
    "broadcast_to": lambda x: torch.broadcast_to(x[:, :1], (3, 2, 4)) * 2,
    "linspace_of_sizes": lambda x: torch.linspace(0.5, x.shape[1] - 0.5, x.shape[1]) + x,
    "wide_mask": lambda x: x[:, :1].masked_fill(x > 2, -3.0),
    "negative_pads": lambda x: torch.nn.functional.pad(x, (1, -2, -1, 2), value=7.0),
    "only_negative_pads": lambda x: torch.nn.functional.pad(x, (0, -1)),
    "zeros_of_bool": lambda x: torch.where(torch.zeros((2, 4), dtype=torch.bool), -x, x),
    "bucketize": lambda x: torch.bucketize(x, torch.tensor([-1.0, 2.0, 4.0])).float(),
    "bucketize_right": lambda x: torch.bucketize(x, torch.tensor([-1.0, 2.0, 4.0]), right=True).float(),
    "scatter_number": lambda x: x.scatter(1, x.argmax(1, keepdim=True), 1),
    "zeros_like_float": lambda x: torch.zeros_like(x > 0, dtype=x.dtype) + x,
    "full_like_float": lambda x: torch.full_like(x > 0, 2.5, dtype=x.dtype) + x,
    "ones_like_bool": lambda x: torch.where(torch.ones_like(x, dtype=torch.bool), x, -x),
    "new_zeros_scalar": lambda x: x + x.new_zeros(()),
    "new_zeros_bool": lambda x: torch.where(x.new_zeros((4,), dtype=torch.bool), -x, x),
    "rotation_of_parts": lambda x: torch.view_as_real(
        torch.view_as_complex(x.reshape(2, 2, 2))[:, :, None].transpose(0, 1)[:, 1:]
        * torch.polar(torch.ones(2), x[0, ::2] / 4).reshape(2, 1)[None, :, None, 0]
    ),
    "rotation": lambda x: torch.view_as_real(
        torch.view_as_complex(x.reshape(2, 2, 2)).to(torch.complex64)
        * (1.5 * torch.polar(torch.ones(2), x[0, ::2] / 4))[None]
    ),
    "bfloat16": lambda x: (x.bfloat16() * torch.ones(1, dtype=torch.bfloat16)).float() * 2,
    "assign_last": lambda x: written(x, lambda y: y[..., 1], lambda v: 5 * v),
    "assign_second": lambda x: written(x, lambda y: y.select(1, 1), lambda v: v + 7),
    "assign_number": lambda x: written(x, lambda y: y[..., 2], lambda v: 4.0),
    "assign_part": lambda x: written(x, lambda y: y[..., 1:3], lambda v: v.flip(0)),
    "assign_nested": lambda x: written(x.reshape(2, 2, 2), lambda y: y[1][..., 0], lambda v: v - 1),
    "assign_in_order": lambda x: written(x, lambda y: y[1, 1:3], lambda v: v + 1),
    "add_in_place": lambda x: in_place(x, lambda y: y[1].add_(3)),
    "add_in_place_twice": lambda x: in_place(x, lambda y: (y[..., 0].mul_(3), y[:, 1:3].add_(x[:, :2]))),
    "clamp_in_place": lambda x: in_place(x, lambda y: y[..., 1:].clamp_(min=0)),
    "hardtanh_of_whole_limits": lambda x: torch.nn.functional.hardtanh(x, 0, 6),
    "leaky_relu_of_a_whole_slope": lambda x: torch.nn.functional.leaky_relu(x, 2),
    "elu_of_a_whole_scale": lambda x: torch.nn.functional.elu(x, 3),
    "threshold_of_whole_numbers": lambda x: torch.nn.functional.threshold(x, 1, 2),
    "nothing_to_replace": lambda x: torch.nan_to_num(x),
    "replaced": lambda x: (
        torch.nan_to_num((x - 1) / (1 - x), 0.5)
        + torch.nan_to_num(x / (1 - x), posinf=7)
        + torch.nan_to_num(x / (x - 1).abs() * -1, neginf=-8)
    ),
    "slopes_of_rank_2": lambda x: torch.nn.functional.prelu(x, torch.tensor([0.5, 0.25, 2.0, -1.0])),
    "slopes_of_rank_3": lambda x: torch.nn.functional.prelu(x.reshape(2, 2, 2), torch.tensor([0.5, 2.0])),
    "one_slope": lambda x: torch.nn.functional.prelu(x, torch.tensor([0.5])),
    "bilinear_uneven": lambda x: resize(x.reshape(PICTURE), scale_factor=(1.3, 0.6), mode="bilinear"),
    "nearest_uneven": lambda x: resize(x.repeat(6, 6)[None, None], scale_factor=(1.7, 0.3)),
    "linear_uneven": lambda x: resize(x[None], scale_factor=1.6, mode="linear"),
    "nearest_uneven_row": lambda x: resize(x.repeat(1, 6)[None], scale_factor=1.7),
    "nearest_even": lambda x: resize(x.repeat(6, 6)[None, None], scale_factor=(1.5, 0.5)),
    "full_like_whole": lambda x: torch.full_like(x, 2).masked_fill(x > 2, 0.5),
    "fill_whole": lambda x: torch.zeros(2, 4).fill_(3).masked_fill(x > 2, 0.5),
    "fill_computed": lambda x: torch.zeros(2, 4).fill_(x.sum()).masked_fill(x > 2, 0.5),
    "new_full_whole": lambda x: x.new_full((2, 4), 3).masked_fill(x > 2, 0.5),
    "full_like_integers": lambda x: x * torch.full_like(x, 2.7, dtype=torch.int32),
    "known_part_of_a_concat": lambda x: torch.cat([x[:, :1], torch.full((2, 1), 0.5)], 1)[:, 1] * x[:, 1],
    "known_part_of_a_stack": lambda x: torch.stack([x[0, 0], torch.tensor(0.5)])[1:] * x[:, 1],
    "gqa_equal_heads": lambda x: attend(heads(x)[1], *heads(x)[1:], enable_gqa=True),
}


def converted_module(
    module: torch.nn.Module, how: str, target: str = "iOS17", precision: str = "FLOAT32"
) -> Any:
    frontend.register()
    return convert(module, {"x": X}, how, target, precision)


@pytest.mark.one_of(114)
@pytest.mark.parametrize("how", ["trace", "export"])
@pytest.mark.parametrize("name", CASES)
def test_each_conversion_agrees_with_torch(name: str, how: str) -> None:
    module = Function(CASES[name])
    (found,) = run(converted_module(module, how), {"x": X.numpy()}).values()
    # in fp32 torch's bicubic kernels place the pixels to about 1e-6, each width of vectors in its own way
    expected = module(X.double() if name.startswith("bicubic") else X).numpy()
    assert found.shape == expected.shape
    assert_close(found, expected, rtol=1e-6)


def test_a_mixture_of_experts_in_groups() -> None:
    """By trace only: torch exports it for bf16 alone."""

    def grouped(x: torch.Tensor) -> torch.Tensor:
        experts = torch.cat([x, -x, 2 * x, x + 1, x - 1, x * x]).reshape(3, 4, 4)
        ends = (x[0, :3] > 0).int().cumsum(0).int()
        made: torch.Tensor = torch.nn.functional.grouped_mm(x, experts, offs=ends)
        return made

    (found,) = run(converted_module(Function(grouped), "trace"), {"x": X.numpy()}).values()
    assert_close(found, grouped(X).numpy(), rtol=1e-6)


MIXTURES: dict[str, dict[str, Any]] = {
    "Qwen3Moe": {"num_experts": 5, "moe_intermediate_size": 12},
    "GptOss": {"num_local_experts": 3, "intermediate_size": 12},
    "Mixtral": {"num_local_experts": 3, "intermediate_size": 12},
}
"""With a gate; with biases, transposed and interleaved; and the first of them."""


@pytest.mark.one_of(3)
@pytest.mark.parametrize("how", ["trace", "export"])
def test_a_part_that_is_zero_takes_no_part_in_products(how: str) -> None:
    """Vocoders write `size * (x + 1j * y)`; a product with 0 would look like a constant that fp16 lost."""
    module = Function(lambda x: torch.view_as_real(x.abs() * (x + 1j * x.flip(1)) / 2j))
    model = convert(module, {"x": X}, how, "iOS17", "FLOAT16")
    kinds = [op.op_type for op in model._mil_program.functions["main"].operations]
    assert kinds.count("add") == kinds.count("sub") == 0
    assert kinds.count("mul") == 5  # both parts by the size and by 1/2, and a sign


@pytest.mark.parametrize("name", MIXTURES)
def test_dense_experts_are_those_that_transformers_chooses(name: str) -> None:
    import transformers

    frontend.register()
    frontend.register_experts()
    sizes = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8}
    words = {"hidden_size": 16, "vocab_size": 31, "num_experts_per_tok": 2, "pad_token_id": 0}
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**sizes, **words, **MIXTURES[name])
    model = getattr(transformers, f"{name}Model")(config).eval().requires_grad_(False)
    for weight in model.parameters():
        torch.nn.init.normal_(weight, std=0.3)
    experts = next(m for m in model.modules() if hasattr(m, "down_proj") and hasattr(m, "num_experts"))
    tokens, router = torch.randn(7, 16), torch.randn(7, experts.num_experts).softmax(-1)
    shares, chosen = router.topk(2, dim=-1)
    made = {}
    with torch.no_grad():
        for how in ("eager", "dense"):
            model.set_experts_implementation(how)
            made[how] = experts(tokens, chosen, shares).numpy()
    assert_close(made["dense"], made["eager"], rtol=1e-5)
    with pytest.raises(AssertionError):
        assert_close(made["dense"], experts(tokens, chosen.flip(-1), shares).detach().numpy(), rtol=1e-2)
    module = Function(lambda x: experts(x, chosen, shares))
    model = convert(module, {"x": tokens}, "trace", "iOS17", "FLOAT32")
    (found,) = run(model, {"x": tokens.numpy()}).values()
    assert_close(found, made["eager"], rtol=1e-5)


BEYOND_FP16 = {"asinh_of_large", "acosh_of_large"}
"""Cases whose own numbers fp16 does not hold."""


@pytest.mark.slow
@pytest.mark.parametrize("target", ["iOS15", "iOS16", "iOS18"])
@pytest.mark.parametrize("how", ["trace", "export"])
@pytest.mark.parametrize("name", [name for name in CASES if name not in BEYOND_FP16])
def test_each_conversion_in_fp16(name: str, how: str, target: str) -> None:
    module = Function(CASES[name])
    model = converted_module(module, how, target, "FLOAT16")
    (found,) = run(model, {"x": X.numpy()}, precision="fp16").values()
    expected = module(X).numpy()
    assert_close(found, expected, rtol=2e-3)


@pytest.mark.slow
def test_registering_twice_is_harmless_and_leaves_the_hosts_own_alone() -> None:
    """A process of its own, so that "before" is before."""
    code = """
from anesurgery import frontend
from anesurgery.mil import quiet_host
with quiet_host():
    from coremltools.converters.mil.frontend.torch.internal_graph import InternalTorchIRNode as Node
    from coremltools.converters.mil.frontend.torch.torch_op_registry import _TORCH_OPS_REGISTRY
known = _TORCH_OPS_REGISTRY.name_to_func_mapping
before = dict(known)
assert "diff" not in before, "registered on import"
frontend.register()
once = dict(known)
assert {k for k in once if once[k] is not before.get(k)} == {
    *frontend.CONVERSIONS, *frontend.WRAPPERS, *frontend.ALIASES, *frontend._decomposable(before)
}
readers = Node.from_torchscript_node.__func__, Node.from_exir_node.__func__
frontend.register()
assert once == known
assert readers == (Node.from_torchscript_node.__func__, Node.from_exir_node.__func__)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.one_of(3)
@pytest.mark.parametrize("how", ["trace", "export"])
@pytest.mark.parametrize(
    ("function", "said"),
    [
        (lambda x: torch.diff(x, n=2), "diff of order n=2; only n=1 is covered"),
        (
            lambda x: pairs(x).atan().real,
            "atan is not converted for complex numbers: write it by their real and",
        ),
        (lambda x: (torch.full((2, 4), 2j) * x).imag, "full is not converted for complex numbers"),
        (
            lambda x: attend(*(v[None] for v in heads(x)), enable_gqa=True),
            r"enable_gqa with 4 query heads over keys or values of shape \(1, 1, 2, 2, 2\)",
        ),
    ],
)
def test_what_is_not_covered_is_refused_by_name(
    function: Callable[[torch.Tensor], torch.Tensor], said: str, how: str
) -> None:
    with pytest.raises(NotImplementedError, match=said):
        converted_module(Function(function), how)


FAMILIES = ["gpt2", "llama", "qwen2", "bert", "t5", "whisper", "vit"]


@pytest.mark.quick_cases("gpt2-trace", "llama-export", "bert-trace", "t5-trace", "whisper-trace", "vit-trace")
@pytest.mark.one_of(6)
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


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_with_a_cache_in_the_graph(converted: Callable[..., Any], name: str) -> None:
    made = converted(name, "trace", precision="fp32", cache=True)
    (found,) = run(made.model, made.inputs).values()
    assert np.abs(found - made.expected).max() <= 1e-5 * np.abs(made.expected).max()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2", "llama", "t5", "whisper", "vit"])
def test_families_in_fp16(converted: Callable[..., Any], name: str) -> None:
    made = converted(name, "trace", attn="eager")
    (found,) = run(made.model, made.inputs, precision="fp16").values()
    error = np.sqrt(np.mean((found.astype(np.float64) - made.expected) ** 2))
    assert 20 * np.log10(np.abs(made.expected).max() / error) >= 50
    scale = np.vdot(found, made.expected) / np.vdot(made.expected, made.expected)
    assert abs(scale - 1) <= 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("how", ["trace", "export"])
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_lengths_that_vary(converted: Callable[..., Any], name: str, how: str) -> None:
    """Converted for any length, run at two; grouped heads are repeated in a shape that is not known."""
    module = converted(name, precision="fp32", attn="sdpa").module
    ids = torch.arange(3, 19)[None]
    length = ct.RangeDim(2, 32, default=16)
    with quiet_host(), torch.no_grad():
        if how == "trace":
            graph: Any = torch.jit.trace(module, (ids,), check_trace=False)  # type: ignore[no-untyped-call]
            inputs = [ct.TensorType("ids", (1, length), dtype=np.int32)]
        else:
            shapes = (({1: torch.export.Dim("length", min=2, max=32)},),)
            graph = torch.export.export(module, (ids,), dynamic_shapes=shapes, strict=False)
            graph, inputs = graph.run_decompositions({}), None
        model = ct.convert(
            graph,
            inputs=inputs,
            compute_precision=ct.precision.FLOAT32,
            minimum_deployment_target=ct.target.iOS17,
            skip_model_load=True,
        )
        (given,) = model._mil_program.functions["main"].inputs
        for size in (16, 11):
            (found,) = run(model, {given: ids[:, :size].numpy().astype(np.int32)}).values()
            expected = module(ids[:, :size]).numpy()
            assert found.shape == expected.shape
            assert np.abs(found - expected).max() <= 1e-5 * np.abs(expected).max()


class Chosen(torch.nn.Module):
    """Frequencies that the number of positions chooses, written into a buffer, as longrope does."""

    speeds: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("speeds", torch.tensor([1.0, 0.1]))
        self.other = torch.tensor([0.5, 0.2])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        places = torch.arange(x.shape[0])
        long = torch.max(places) + 1 > 3
        self.speeds.copy_(torch.where(long, self.other, torch.tensor([1.0, 0.1])))
        return x * torch.cos(places[:, None] * self.speeds)


@pytest.mark.parametrize("rows", [3, 4])
def test_a_buffer_that_is_overwritten(rows: int) -> None:
    x = torch.randn(rows, 2, generator=torch.Generator().manual_seed(0))
    expected = Chosen()(x).numpy()
    frontend.register()
    with torch.no_grad(), quiet_host():
        traced = torch.jit.trace(Chosen(), x, check_trace=False)  # type: ignore[no-untyped-call]
        program = ct.convert(
            traced,
            inputs=[ct.TensorType("x", shape=x.shape)],
            compute_precision=ct.precision.FLOAT32,
            convert_to="milinternal",
        )
    (found,) = run(program, {"x": x.numpy()}).values()
    assert_close(found, expected)


def test_resampling_to_a_dynamic_size_says_what_to_do() -> None:
    """As positions that are interpolated, in a model that is converted with a range."""
    frontend.register()
    places = torch.randn(1, 3, 4, 4)

    def positions(x: torch.Tensor) -> torch.Tensor:
        return x + resize(places, size=x.shape[-2:], mode="bicubic")

    sides = [ct.RangeDim(2, 8, default=5) for _ in range(2)]
    with (
        pytest.raises(
            NotImplementedError, match=r"resample to is dynamic; convert at fixed sizes \(`anesurgery"
        ),
        quiet_host(),
    ):
        ct.convert(
            torch.jit.trace(Function(positions), torch.zeros(1, 3, 5, 5)),  # type: ignore[no-untyped-call]
            inputs=[ct.TensorType("x", (1, 3, *sides))],
            skip_model_load=True,
        )


@pytest.mark.parametrize(
    "pads", [lambda n: (0, 0, 0, 40 - n), lambda n: (1, 0, n - 8, 12 - n), lambda n: (-n % 8, 0)]
)
@pytest.mark.parametrize("length", [8, 13, 40])
def test_padding_by_amounts_that_follow_from_a_size(pads: Callable[[int], Any], length: int) -> None:
    """By nothing, by a few rows at either end, and by less than nothing, which cuts."""

    def padded(x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.pad(x, pads(x.shape[2]), value=7.0)

    model = of_any_size(padded, "iOS17")
    picture = torch.randn(1, 3, length, 8)
    (found,) = run(model, {"x": picture.numpy()}).values()
    assert np.array_equal(found, padded(picture).numpy())


def of_any_size(function: Callable[[torch.Tensor], torch.Tensor], target: str) -> Any:
    """The model of a function of pictures whose two sides vary."""
    frontend.register()
    sides = [ct.RangeDim(4, 40, default=8) for _ in range(2)]
    with quiet_host():
        return ct.convert(
            torch.jit.trace(Function(function), torch.zeros(1, 3, 8, 8)),  # type: ignore[no-untyped-call]
            inputs=[ct.TensorType("x", (1, 3, *sides))],
            compute_precision=ct.precision.FLOAT32,
            minimum_deployment_target=getattr(ct.target, target),
            skip_model_load=True,
        )


def joined(x: torch.Tensor) -> torch.Tensor:
    """As in a U-Net: a small picture in the size of another one."""
    large = torch.nn.functional.max_pool2d(x, 2)
    small = resize(torch.nn.functional.avg_pool2d(large, 2), size=large.shape[-2:], mode="bilinear")
    return torch.cat([large, small], 1)


PLACES = torch.arange(48.0).reshape(1, 3, 4, 4).sin()


def line(x: torch.Tensor) -> torch.Tensor:
    """Lines of one length, and of the length of another line."""
    rows = x[:, :, 0]
    shorter = torch.nn.functional.max_pool1d(rows, 2)
    fitted = resize(shorter, size=rows.shape[-1], mode="linear")
    most = torch.nn.functional.adaptive_max_pool1d(rows, 1)
    mean = torch.nn.functional.adaptive_avg_pool1d(rows, 1)
    return torch.cat([resize(v, size=7, mode="linear") for v in (rows, fitted)] + [most, mean], -1)


RESAMPLED: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], str]] = {
    "one size": (lambda x: resize(x, size=(6, 15), mode="bilinear"), "iOS15"),
    "one size, aligned": (lambda x: resize(x, size=(6, 15), mode="bilinear", align_corners=True), "iOS15"),
    "the size of another": (joined, "iOS17"),
    "a constant": (lambda x: x + resize(PLACES, size=x.shape[-2:], mode="bilinear"), "iOS17"),
    "lines": (line, "iOS17"),
    "half the size": (lambda x: resize(x, size=[s // 2 for s in x.shape[-2:]], mode="bilinear"), "iOS17"),
    "twice the size": (lambda x: resize(x, size=[2 * s for s in x.shape[-2:]], mode="bilinear"), "iOS16"),
}


@pytest.mark.parametrize("name", RESAMPLED)
def test_pictures_of_any_size_are_resampled(name: str) -> None:
    """The wrong version: "Cannot convert expression to float", or "Unable to map torch_upsample_bilinear"."""
    function, target = RESAMPLED[name]
    model = of_any_size(function, target)
    for shape in ((20, 20), (5, 31), (6, 4)):
        x = torch.randn(1, 3, *shape)
        (found,) = run(model, {"x": x.numpy()}).values()
        assert_close(found, function(x).numpy(), rtol=1e-5)


@pytest.mark.parametrize(
    ("mode", "target", "said"),
    [
        ("bilinear", "iOS16", "convert for iOS 17 or later"),
        ("nearest", "iOS17", "other nearest pixels than torch"),
    ],
)
def test_what_cannot_be_resampled_to_a_size_that_varies(mode: str, target: str, said: str) -> None:
    def resampled(x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = resize(torch.nn.functional.max_pool2d(x, 2), size=x.shape[-2:], mode=mode)
        return made

    with pytest.raises(NotImplementedError, match=said):
        of_any_size(resampled, target)
