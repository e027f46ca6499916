"""Arguments that coremltools drops or refuses: each conversion against torch, by trace and by export."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from closeness import assert_close
from conversion import Function, assert_each_agrees, convert
from torch.nn import functional as F  # noqa: N812 - as everybody calls it

from anesurgery import frontend
from anesurgery.interpret import run
from anesurgery.mil import Var, mb, walk_ops

X = torch.tensor([[3.0, -1.0, 4.0, 1.5], [0.25, -9.0, 2.0, 6.0]])
TARGETS = torch.tensor([0, 1, 1, 3, 3, 3])
SHARES = torch.tensor([0.5, 2.0, -1.0, 4.0, 0.25, 3.0])
INFINITE_ABOVE = torch.tensor([[1.0, torch.inf], [4.0, 2.0]])
HIDDEN = torch.tensor([[-torch.inf, -torch.inf], [0.0, 1.0]])
NOT_A_NUMBER = torch.tensor([1.0, torch.nan, 3.0])
HALF_ONES = torch.full((2500,), 1.0, dtype=torch.half)

CASES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "gelu_after_a_tanh": lambda x: F.gelu(torch.tanh(x), approximate="tanh"),
    "floor_after_a_floor": lambda x: torch.div(torch.floor(x), 0.75, rounding_mode="floor"),
    "trunc_after_a_trunc": lambda x: torch.div(torch.trunc(x), 0.75, rounding_mode="trunc"),
    "add": lambda x: torch.add(x, x.flip(0), alpha=0.25),
    "add_number": lambda x: torch.add(x, 2, alpha=3),
    "sub": lambda x: torch.sub(x, x.flip(0), alpha=0.25),
    "rsub": lambda x: torch.rsub(x, x.flip(0), alpha=0.25),
    "rsub_number": lambda x: torch.rsub(x, 1.0, alpha=0.25),
    "mean_as_floats": lambda x: x.int().mean(dtype=torch.float32),
    "mean_of_axes_as_floats": lambda x: (x > 1).mean((1,), True, dtype=torch.float32),
    "sum_as_floats": lambda x: x.int().sum(dtype=torch.float32) / 4,
    "sum_of_axis_as_integers": lambda x: x.sum(1, dtype=torch.int32) * 2,
    "power_of_two": lambda x: 2**x,
    "powers_of_several_twos": lambda x: torch.full((1, 4), 2.0) ** x,
    "powers_by_several_twos": lambda x: torch.full((3, 1, 4), 2.0) ** x,
    "addmm_whole_factors": lambda x: torch.addmm(x[:, :2], x, x.T, beta=2, alpha=3),
    "addmm_without_its_input": lambda x: torch.addmm(torch.full((2, 2), torch.nan), x, x.T, beta=0, alpha=2),
    "baddbmm_whole_factor": lambda x: torch.baddbmm(x[None, :, :2], x[None], x.T[None], alpha=2),
    "degrees_of_a_fixed_graph": lambda x: (
        x / torch.zeros(4).scatter_add(0, TARGETS, torch.ones(6)).clamp(min=1)
    ),
    "sums_of_constants": lambda x: (
        x * torch.ones(2, 4).scatter_add(1, TARGETS.repeat(2, 1), SHARES.repeat(2, 1))
    ),
    "largest_of_constants": lambda x: x * torch.ones(4).scatter_reduce(0, TARGETS, SHARES, "amax"),
    "constants_multiplied": lambda x: (
        x * torch.full((4,), 3.0).scatter(0, TARGETS[::2], SHARES[:3], reduce="multiply")
    ),
    "a_constant_read_again": lambda x: x + F.hardswish(far := torch.tensor([-9.0, -4.0, 1.0, 5.0])) + far,
    "softplus_of_large_constants": lambda x: (
        x + F.softplus(SHARES[:4].reshape(1, 4, 1, 1) * 99, beta=2.0).flatten()
    ),
    "softplus_of_small_constants": lambda x: x * F.softplus(SHARES[:4] - 20) * 1e9,
    "log_sums_of_hidden_rows": lambda x: x[:, :2] * torch.logsumexp(HIDDEN, 1).exp(),
    "band_below_infinities": lambda x: x[:, :2] + torch.tril(INFINITE_ABOVE),
    "band_above_infinities": lambda x: x[:, :2] + torch.triu(INFINITE_ABOVE.T),
    "trace_beside_infinities": lambda x: x + torch.trace(INFINITE_ABOVE),
    "stable_order": lambda x: x[0, 0] * TARGETS.repeat(9).argsort(stable=True, descending=True),
    "stable_ascending_order": lambda x: x[0, 0] * TARGETS.flip(0).repeat(9).argsort(stable=True),
    "order_with_nan": lambda x: x[:, :3] * torch.sort(NOT_A_NUMBER, descending=True)[1],
    "largest_with_nan": lambda x: x[:, :1] * torch.topk(NOT_A_NUMBER, 1)[1],
    "order_of_the_least_integer": lambda x: (
        x[:, :2] * torch.tensor([-(2**31), 5]).int().sort(descending=True)[1]
    ),
    "a_constant_without_axes": lambda x: x * torch.tensor([[2.5]]).squeeze(),
    "a_constant_without_named_axes": lambda x: x * torch.tensor([[[2.5]]]).squeeze((0, 1, 2)),
    "all_of_integers": lambda x: x + x.int().all(1, keepdim=True),
    "all_of_all": lambda x: x + x.int().all(),
    "any_of_integers": lambda x: x + torch.clamp(x.int(), max=0).any(0),
    "any_of_floats": lambda x: x + torch.any((x / 9).clamp(max=0), 1, keepdim=True),
    "truth_of_whole_parts": lambda x: x + x.int().bool(),
    "truth_of_small_numbers": lambda x: x + (x.int().bool() & x.bool()).int(),
    "a_boolean_constant": lambda x: torch.where(torch.tensor([[False, True]])[0, 1], x, -x),
    "a_half_constant": lambda x: x * HALF_ONES[3].float() + HALF_ONES[None][0, -1].float(),
    "a_running_count_of_halves": lambda x: x * HALF_ONES.cumsum(0)[-4:].float(),
    "norm_of_halves": lambda x: x * (HALF_ONES[:4] * 600).norm().float(),
    "sigmoid_of_halves": lambda x: x * torch.sigmoid(HALF_ONES[:4] * -12).float() * 1e5,
    "var": torch.var,
    "var_biased": lambda x: torch.var(x, False),
    "var_axis": lambda x: torch.var(x, 1),
    "var_by_two": lambda x: torch.var(x, 1, correction=2, keepdim=True),
    "std": torch.std,
    "std_axes": lambda x: torch.std(x, (0, 1), correction=3, keepdim=True),
    "std_biased": lambda x: torch.std(x, -1, unbiased=False),
    "softplus": lambda x: F.softplus(x, beta=2.0),
    "softplus_threshold": lambda x: F.softplus(x, beta=2.0, threshold=1.0),
    "hardtanh": F.hardtanh,
    "hardtanh_whole_limits": lambda x: F.hardtanh(x, -2, 1),
    "cosine_similarity": lambda x: F.cosine_similarity(x, x.flip(0)),
    "cosine_similarity_axis": lambda x: F.cosine_similarity(x, x.flip(0), dim=0),
    "round": torch.round,
    "round_decimals": lambda x: torch.round(x / 7, decimals=2),
    "rms_norm": lambda x: F.rms_norm(x, (4,), eps=0.5),
    "rms_norm_weight": lambda x: F.rms_norm(x, (4,), torch.tensor([1.0, 2.0, -3.0, 0.5])),
    "rms_norm_small": lambda x: F.rms_norm(x * 1e-3, (4,), eps=1e-5),
    "rms_norm_zeros": lambda x: F.rms_norm(x * torch.tensor([[0.0], [1.0]]), (4,), eps=1e-6),
    "rms_norm_axes": lambda x: F.rms_norm(x.reshape(1, 2, 2, 2), (2, 2), eps=1e-3),
}


def converted(function: Callable[[torch.Tensor], Any], how: str, precision: str) -> Any:
    frontend.register()
    return convert(Function(function), {"x": X}, how, "iOS17", precision)


def written(x: torch.Tensor, at: Any, value: Any) -> torch.Tensor:
    y = x.clone()
    y[at] = value
    return y


MASKS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "a_place_beside_a_mask": lambda x: x[torch.tensor([True, True]), torch.tensor([0, 2])] + 0,
    "places_beside_a_later_mask": lambda x: x.reshape(2, 2, 2)[
        torch.tensor([1, 0]), :, torch.tensor([True] * 2)
    ],
    "places_beside_a_mask_of_two_axes": lambda x: (
        x.reshape(2, 2, 2)[torch.tensor([[True, False], [True, True]]), torch.tensor([1, 0, 1])] + 0
    ),
    "a_place_beside_a_computed_mask": lambda x: x[x[:, 0] > -5, torch.tensor([3, 1])] + 0,
    "a_number_in_columns": lambda x: written(x, (slice(None), x[0] > 0), 5.0),
    "columns_of_another": lambda x: written(x, (slice(None), x[0] > 0), (x * 2)[:, x[0] > 0]),
    "flags_in_columns": lambda x: written(x > 1, (slice(None), x[0] > 0), x[:, x[0] > 0] > -2) * 1.0,
    "a_row_in_columns": lambda x: written(x.T, (slice(None), x[:, 0] > 0), x[0][:, None]),
    "a_number_at_a_later_mask": lambda x: written(
        x.reshape(2, 2, 2), (slice(None), x.reshape(2, 2, 2)[0] > 0), 7.0
    ),
}
"""torch does not export these: how many places a mask chooses, it does not know."""


def test_masks_beside_other_indices() -> None:
    assert_each_agrees(MASKS, (X, -X / 3), "trace")


@pytest.mark.one_of(2)
@pytest.mark.parametrize("how", ["trace", "export"])
def test_each_argument_counts(how: str) -> None:
    assert_each_agrees(CASES, (X, -X / 3), how)


@pytest.mark.parametrize("how", ["trace", "export"])
def test_spreads_in_fp16(how: str) -> None:
    cases = {"std": lambda x: torch.std(x.half(), -1).float(), "var": lambda x: x.half().var().float()}
    assert_each_agrees(cases, (X, -X / 4), how, rtol=1e-3)


@pytest.mark.parametrize("how", ["trace", "export"])
@pytest.mark.parametrize("limits", [{"min": -50}, {"max": 21001}, {"min": -50, "max": 21001}])
def test_integers_stay_integers_between_limits(limits: dict[str, int], how: str) -> None:
    """The host limits them as floats, in fp16: 21001 becomes 21008."""

    def limited(x: torch.Tensor) -> torch.Tensor:
        return ((1000 * x).int() * 7 + 1).clamp(**limits).int()

    (found,) = run(converted(limited, how, "FLOAT16"), {"x": X.numpy()}, precision="fp16").values()
    assert found.tolist() == limited(X).tolist()


def test_a_norm_of_large_values_in_fp16() -> None:
    """Their squares would overflow."""
    model = converted(CASES["rms_norm_weight"], "export", "FLOAT16")
    (found,) = run(model, {"x": X.numpy() * 4096}, precision="fp16").values()
    assert_close(found, CASES["rms_norm_weight"](X).numpy(), rtol=2e-3)


def test_what_coremltools_folds_wrong_is_known_right() -> None:
    """It overwrites where a scatter adds, and joins where a concat interleaves."""
    frontend.register()
    data, at = np.ones((2, 4), np.float32), np.array([[0, 3, 3], [1, 1, 2]])

    @mb.program(input_specs=[mb.TensorSpec((2, 4))])
    def program(x: Var) -> Var:
        added = mb.scatter_along_axis(data=data, indices=at, updates=at.astype(np.float32), axis=-1, mode="add")
        mixed = mb.concat(values=(data[:, :2] * 2, data[:, :2] * 3), axis=1, interleave=True)
        return mb.mul(x=mb.add(x=x, y=added), y=mixed)

    by_name = {op.op_type: op.outputs[0].val for op in walk_ops(program)}
    np.testing.assert_array_equal(by_name["scatter_along_axis"], [[1, 1, 1, 7], [1, 3, 3, 1]])
    np.testing.assert_array_equal(by_name["concat"], [[2, 3, 2, 3]] * 2)
