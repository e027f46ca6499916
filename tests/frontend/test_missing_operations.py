"""Operations that coremltools lacks or converts in part: each against torch, by trace and by export."""

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

Torch = Callable[[torch.Tensor], torch.Tensor]

X = torch.randn(3, 4, 6, generator=torch.Generator().manual_seed(1))
HELD_X = X.clone()
"""The same numbers, of which a trace does not say that they are the input."""
TABLE = HELD_X[:2].flatten(0, 1)
AT = torch.tensor([0, 2, -1])
LOW = float(X.min()) * 0.9
"""Not all of X is above it, but all of 0.75 X."""
EYE = 3 * torch.eye(4)
GATED = torch.nn.GRUCell(6, 5).requires_grad_(False)
PROJECTED = torch.nn.LSTM(6, 5, 2, proj_size=3, batch_first=True, bidirectional=True).requires_grad_(False)
SLOPES = torch.tensor([0.1, 0.5, -0.2, 0.9])
HELD = torch.nn.LSTMCell(6, 5).requires_grad_(False)
EYE6 = 0.1 * torch.eye(6) + 0.05
PACKED = torch.tensor([18, 52], dtype=torch.uint8)
SORTED = torch.tensor([-1.0, 0.0, 1.0])
BILINEAR = torch.randn(5, 6, 4, generator=torch.Generator().manual_seed(2))
TURNED, CAYLEY, REFLECTED = (
    torch.nn.utils.parametrizations.orthogonal(torch.nn.Linear(6, 6), orthogonal_map=how).requires_grad_(False)
    for how in ("matrix_exp", "cayley", "householder")
)
solve = torch.linalg.solve_triangular


def written(x: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    y = x * 2
    y[:, AT] = value
    return y


def added(x: torch.Tensor) -> torch.Tensor:
    return (x * 2).index_put((torch.tensor([0, 0, 1]),), x, accumulate=True)


def reduced(how: str, whole: bool) -> Torch:
    return lambda x: x.scatter_reduce(1, (x[:, :3] > 0).long(), 2 * x[:, 1:], how, include_self=whole)


def bags(mode: str, shape: tuple[int, ...] = (4, 6), **more: Any) -> Torch:
    return lambda x: F.embedding_bag((x[0] > 0).long().cumsum(1).view(shape), TABLE, mode=mode, **more)


def waves(x: torch.Tensor) -> torch.Tensor:
    return torch.complex(x, 2 * x.flip(1))


def filled_waves(x: torch.Tensor) -> torch.Tensor:
    """Low frequencies of one signal in zeros, as in Fourier neural operators, without the mean."""
    y = torch.zeros(3, 4, 8, dtype=torch.cfloat)
    y[..., :6] = waves(x)
    y[..., 0] = 0
    return y


def volume(batch: int, **options: Any) -> Torch:
    """Sample a volume at points, some of which lie outside."""
    return lambda x: F.grid_sample(
        x.reshape(batch, -1, 3, 2, 2), 0.7 * x.reshape(batch, -1, 2, 2, 3), **{"align_corners": False} | options
    )


def turned(x: torch.Tensor) -> torch.Tensor:
    return F.affine_grid(0.3 * x[0, :2].reshape(1, 3, 4), [1, 1, 2, 3, 4], align_corners=False)


BAGS: dict[str, dict[str, Any]] = {
    "even": {},
    "padded": {"padding_idx": 0},
    "uneven": {"shape": (24,), "offsets": torch.tensor([0, 4, 4, 9])},
    "to_the_end": {
        "shape": (24,),
        "offsets": torch.tensor([0, 8, 24]),
        "include_last_offset": True,
        "padding_idx": 1,
    },
}

CASES: dict[str, dict[str, Torch]] = {
    "repeating": {
        "repeats": lambda x: x.repeat_interleave(3, 1),
        "repeats_of_five_axes": lambda x: x.reshape(3, 2, 2, 3, 2).repeat_interleave(2, 2),
        "repeats_of_all": lambda x: x.repeat_interleave(2),
        "repeats_by_a_ratio_of_sizes": lambda x: x.repeat_interleave(x.shape[2] // x.shape[0], dim=2),
        "repeats_of_booleans": lambda x: (x > 0).repeat_interleave(2, -1).float(),
        "computed_repeats": lambda x: x.repeat_interleave(x[0, :, 0].argsort(), 1, output_size=6),
        "computed_repeats_of_all": lambda x: x[0, 0].repeat_interleave(x[0, 0].argsort(), output_size=15),
        "repeats_by_a_list": lambda x: x.repeat_interleave(torch.tensor([1, 0, 2, 3]), dim=-2),
        "known_values_flipped": lambda x: x * torch.tril(x.new_ones(4, 6)).flip(dims=[0]).to(torch.float32),
    },
    "counted": {
        "rows": lambda x: HELD_X[0].gather(1, (x[0, :, None] > HELD_X[1]).sum(-1).clamp(0, 5)),
        "selected": lambda x: x.index_select(1, (x[0, 0, :3, None] > HELD_X[1, 0]).sum(-1).clamp(0, 3)),
        "embedded": lambda x: F.embedding((x[..., None] > HELD_X[1, 0]).sum(-1).clamp(0, 3), HELD_X[2]),
    },
    "limits": {
        "whole_least": lambda x: x.clamp_min(0),
        "whole_most": lambda x: torch.clamp_max(x, 1),
        "fraction_of_integers": lambda x: (9 * x).int().clamp_min(0.5).float(),
    },
    "windows of spectra": {
        "hamming": lambda x: x * torch.hamming_window(6),
        "symmetric": lambda x: x * torch.hamming_window(6, periodic=False, alpha=0.5),
        "others": lambda x: x * torch.blackman_window(6) + torch.bartlett_window(6) * torch.kaiser_window(6),
    },
    "triangular": {
        "lower": lambda x: solve(x[..., :4] + EYE, x[..., 4:], upper=False),
        "lower_of_unit_diagonal": lambda x: solve(x[..., :4], x[..., 4:], upper=False, unitriangular=True),
        "upper": lambda x: solve(x[..., :4] + EYE, x[..., 4:], upper=True),
        "from_the_right": lambda x: solve(x[..., :4] + EYE, x[..., 4:].mT, upper=True, left=False),
        "of_three": lambda x: solve(x[:, :3, :3] + EYE[:3, :3], x[:, :3, 3:], upper=False),
        "of_one": lambda x: solve(x[:, :1, :1], x[:, :1, 3:], upper=False),
        # The host takes one triangle away from the whole: an infinite mask less itself.
        "above_the_diagonal": lambda x: x.where(x > 0, -torch.inf).triu(1).exp(),
        "below_the_diagonal": lambda x: x.where(x > 0, -torch.inf).tril(-2).exp(),
        "on_and_below": lambda x: x.where(x > 0, -torch.inf).tril(1).exp(),
        "of_a_known_mask": lambda x: (x + torch.full((4, 6), -torch.inf).triu(1)).exp(),
        "of_booleans": lambda x: (x > 0).triu(1).float(),
        "of_integers": lambda x: (9 * x).int().tril(-1).float(),
    },
    "scattering": {
        "index_add": lambda x: x.index_add(0, AT % 3, 2 * x, alpha=0.5),
        "index_copy": lambda x: x.index_copy(1, torch.tensor([3, 0]), x[:, 1:3]),
        "index_fill": lambda x: x.index_fill(1, torch.tensor([1, 2]), -1.0),
        "index_at_dynamic_places": lambda x: x.index_add(1, x[0, :, 0].argsort(), x),
        "assigned_places": lambda x: written(x, x[:, :3]),
        "assigned_one_row": lambda x: written(x, x[0, 0]),
        "accumulated": added,
        "scattered_booleans": lambda x: (x > 0).scatter(1, (x[:, :2] > 0).long(), 1).float(),
        "scatter_reduce": lambda x: x.scatter_reduce(1, (x[:, :2] > 0).long(), x[:, :2], "amax"),
        **{
            f"scatter_{how}_{whole}": reduced(how, whole)
            for how in ("sum", "mean", "amax", "amin", "prod")
            for whole in (True, False)
        },
        "rows_of_float_places": lambda x: x.index_add(0, torch.arange(3) // 1, x),
        "masked_select": lambda x: x.masked_select(x > 0).sum() + x,
        "masked_select_of_rows": lambda x: x.masked_select(x[..., :1] > LOW).mean() + x,
        "masked_select_of_bools": lambda x: (x[:1] > 0).masked_select(x > LOW).float().sum() + x,
        "masked_scatter_of_bools": lambda x: (x[:1] > 0).masked_scatter(x > LOW, x.flip(0) > 0).float(),
        "masked_scatter": lambda x: x.masked_scatter(x > 0, torch.arange(72.0)),
        "masked_scatter_of_rows": lambda x: x.masked_scatter(x[..., :1] > 0, torch.arange(72.0).reshape(12, 6)),
    },
    "elementary": {
        "cumsum_of_a_middle_axis": lambda x: x.cumsum(-2),
        "whole_quotients": lambda x: ((x * 10).int() // torch.tensor([2, 3, -4, 5, 6, 7])).float(),
        "bfloat16_weight": lambda x: x * torch.tensor(1.5, dtype=torch.bfloat16).float(),
        "all_true": lambda x: torch.where((x > LOW).all(), x, -x),
        "prod": lambda x: x.prod(-1),
        "prod_kept": lambda x: x.prod(1, keepdim=True),
        "trunc": lambda x: torch.trunc(x * 5),
        "fmod": lambda x: torch.fmod(x * 5, 2),
        "rounded_integers": lambda x: torch.stack(
            [how((9 * x).int()) for how in (torch.round, torch.trunc, torch.floor, torch.ceil)]
        ),
        "fmod_in_fp16": lambda x: torch.fmod((4 * x).round().half(), -3).float(),
        "erfc": torch.erfc,
        "cdist": lambda x: torch.cdist(x, x.flip(1)),
        "medians": lambda x: torch.stack([*x.median(1), *x.kthvalue(3, 1)]),
        "median_kept": lambda x: x.median(-1, keepdim=True).values,
        "median_of_all": lambda x: x.median() + x,
        "shifts": lambda x: torch.stack([(9 * x).int() << 3, (90 * x).int() >> 2]),
        "shifts_by_several": lambda x: (90 * x[..., None]).int() >> torch.arange(3),
        "each_bit": lambda x: (5e8 * x[..., None]).int() >> torch.arange(32) & 1,
        "sign_bit": lambda x: (90 * x).int() << 31,
        "shifts_of_a_number": lambda x: torch.stack([1 << (x > 0).int(), 9 >> (x > 1).int()]),
        "shifts_by_computed": lambda x: torch.stack(
            [
                (9 * x).int() << (99 * x.flip(0)).int().clamp(0, 31),
                (5e8 * x).int() >> (7 * x.flip(0).abs()).int(),
            ]
        ),
        "counts": lambda x: torch.bincount(x.argsort().flatten() // 2, minlength=5),
        "weighted_counts": lambda x: torch.bincount(x.argsort().flatten(), x.flatten(), minlength=6),
        "error_functions_undone": lambda x: torch.erfinv(torch.cat([x.tanh(), x.abs().clamp(0, 1) - 1], -1)),
        "quantized": lambda x: torch.fake_quantize_per_tensor_affine(x, 0.1, 3, -8, 7),
        "quantized_by_tensors": lambda x: torch.fake_quantize_per_tensor_affine(
            x, torch.tensor([0.1]), torch.tensor([3], dtype=torch.int32), -8, 7
        ),
        "quantized_by_channel": lambda x: torch.fake_quantize_per_channel_affine(
            x, torch.tensor([0.05, 0.1, 0.07, 0.2]), torch.zeros(4, dtype=torch.int32), 1, -20, 20
        ),
        "low_bits": lambda x: torch.stack([(90 * x).int() & 7, 1 & (9 * x).int()]).float(),
        "inverses": lambda x: torch.linalg.inv(x[..., 1:4, 1:4] + 4 * torch.eye(3)),
        "inverses_of_pairs": lambda x: (
            torch.linalg.inv(x[..., :2, :2] - 4 * torch.eye(2)) + torch.eye(2).inverse()
        ),
        "inverses_of_poses": lambda x: torch.linalg.inv(x[..., :4, :4] + 4 * torch.eye(4)),
        "solved": lambda x: torch.linalg.solve(x[..., 1:4, 1:4] + 4 * torch.eye(3), x[..., 1:4, :2]),
        "solved_for_vectors": lambda x: torch.linalg.solve(x[..., :2, :2] + 4 * torch.eye(2), x[..., 0, :2]),
        "solved_from_the_right": lambda x: torch.linalg.solve(
            x[..., 1:4, 1:4] + 4 * torch.eye(3), x[..., :2, :3], left=False
        ),
        "determinants": lambda x: torch.linalg.det(x[..., :4]) + torch.linalg.det(TABLE[:6]),
        "logarithms_of_determinants": lambda x: torch.stack(torch.linalg.slogdet(99 * x[..., :3, :3])),
        "factors": lambda x: torch.linalg.cholesky(x @ x.mT + EYE),
        "upper_factors": lambda x: torch.linalg.cholesky(x.mT @ x + torch.eye(6), upper=True),
        "failures": lambda x: torch.linalg.cholesky_ex(x @ x.mT - torch.arange(4.0).diag() * 9).info,
        "solved_by_factors": lambda x: torch.cholesky_solve(x, torch.linalg.cholesky(x @ x.mT + EYE)),
        "solved_by_upper_factors": lambda x: torch.cholesky_solve(x, (x[..., :4] + EYE).triu(), upper=True),
        "inverses_of_factors": lambda x: torch.cholesky_inverse((x[..., :4] + EYE).tril()),
        "inverses_of_upper_factors": lambda x: torch.cholesky_inverse((x[..., :4] + EYE).triu(), upper=True),
        "kept_axes": lambda x: torch.cat(torch.std_mean(x, (0, 2), keepdim=True)),
        "kept_axes_of_all": lambda x: torch.cat(torch.var_mean(x, keepdim=True, correction=0)),
        "bits_of_booleans": lambda x: torch.stack([(x > 0) & 1, (x > 0) | (9 * x).int()]).float(),
        "packed_weights": lambda x: x * torch.stack([PACKED & 15, PACKED >> 4, PACKED << 4], -1).flatten(),
        "bits": lambda x: torch.stack(
            [op((5e8 * x).int(), (7e8 * x.flip(0)).int()) for op in (torch.bitwise_and, torch.bitwise_or)]
        ),
        "bits_that_differ": lambda x: torch.stack(
            [(5e8 * x).int() ^ (90 * x.flip(0)).int(), (9 * x).int() ^ 5, (x > 0) ^ 2]
        ),
        "largest_so_far": lambda x: torch.stack([*x.cummax(1), *x.round().cummax(-1)[1:]]),
        "least_so_far": lambda x: torch.stack([*x.cummin(-1)]),
        "slopes_of_five_axes": lambda x: F.prelu(x.reshape(3, 4, 1, 2, 3), SLOPES),
        "nans_of_booleans": lambda x: torch.nansum(x > 0, -1).float() + torch.isnan((9 * x).int()).sum(),
        "close": lambda x: x.isclose(x.flip(0), atol=0.5).float(),
        "sums_of_all": lambda x: torch.einsum("...->", x) + torch.einsum("ii->", x[:, 0, :3]) + x,
        "scalars_filled": lambda x: x + x.new_full((), 3) + torch.full((), 2.0) + x.new_zeros(()),
        "places": lambda x: torch.stack(
            [
                torch.searchsorted(SORTED, x),
                torch.searchsorted(SORTED.flip(0), x, sorter=torch.tensor([2, 1, 0]), side="right"),
                torch.searchsorted(x.sort(-1).values, x.flip(0), right=True),
                torch.searchsorted(x, x.flip(0), sorter=x.argsort(-1)),
            ]
        ),
        "size_as_a_number": lambda x: torch.cat([x.new_tensor(x.shape[1]).log()[None], x[0, 0]]),
        "stable_order": lambda x: x.argsort(dim=1, stable=True, descending=True),
        "stable_sort": lambda x: torch.stack(x.sort(stable=True, dim=0)),
        "amplitudes": lambda x: torch.fft.rfft(x).abs(),
    },
    "complex": {
        "chosen": lambda x: torch.view_as_real(waves(x).where(x > 0, 2 * waves(x).conj())),
        "chosen_or_0": lambda x: torch.view_as_real(torch.where(x > 0, waves(x), 0)),
        "whole_slice": lambda x: torch.view_as_real(waves(x)[:, :, :6] * 2j),
        "masked": lambda x: torch.view_as_real(waves(x).masked_fill(x > 0, 3.0)),
        "products": lambda x: torch.view_as_real(waves(x) @ waves(x).mH),
        "products_in_batches": lambda x: torch.view_as_real(torch.bmm(waves(x), waves(x).mT)),
        "linear": lambda x: torch.view_as_real(F.linear(waves(x), waves(HELD_X[0]), waves(HELD_X[0])[:, 0])),
        "convolution": lambda x: torch.view_as_real(
            F.conv1d(waves(x), waves(HELD_X[:2, :, :3]), waves(HELD_X[0])[:2, 0])
        ),
        "cube": lambda x: torch.view_as_real(waves(x) ** 3),
        "powers": lambda x: torch.view_as_real(waves(x) ** 0.3 + waves(x) ** -1.5),
        "written": lambda x: torch.view_as_real(filled_waves(x)),
        "root": lambda x: torch.view_as_real(waves(x).sqrt()),
        "tangents": lambda x: torch.view_as_real(waves(9 * x).tanh()),
        "product_of_rows": lambda x: torch.view_as_real(waves(x).prod(1, keepdim=True)),
        "product_of_all": lambda x: torch.view_as_real(waves(x[:, :1, :5]).prod()),
        "equal": lambda x: torch.stack(
            [waves(x) == waves(x.relu()), waves(x) != waves(x.relu()), waves(x.relu()) == 0]
        ),
        "logarithm": lambda x: torch.view_as_real(waves(x).log()),
        "root_of_large": lambda x: torch.view_as_real((1e30 * waves(x)).sqrt()),
    },
    "volumes": {
        "zeros": volume(1),
        "batch": volume(3, padding_mode="border"),
        "corners": volume(1, align_corners=True),
        "nearest": volume(1, mode="nearest"),
        "resized": lambda x: F.interpolate(x.reshape(3, 2, 2, 3, 2), (5, 4, 7), mode="trilinear"),
        "resized_aligned": lambda x: F.interpolate(
            x.reshape(1, 3, 4, 3, 2), scale_factor=2, mode="trilinear", align_corners=True
        ),
        "resized_nearest": lambda x: F.interpolate(x.reshape(3, 2, 2, 3, 2), (5, 4, 7)),
        "affine": lambda x: F.grid_sample(x.reshape(1, 1, 4, 6, 3), turned(x), align_corners=False),
        "moved": lambda x: F.grid_sample(x.reshape(1, 1, 4, 6, 3), 0.1 + turned(x), align_corners=True),
    },
    "projected": {
        "rows": lambda x: PROJECTED(x)[0],
        "states": lambda x: torch.cat([PROJECTED(x)[1][0], PROJECTED(x)[1][1]], -1),
    },
    "bags": {
        **{
            f"{mode}_{room}": bags(mode, **more)
            for mode in ("sum", "mean", "max")
            for room, more in BAGS.items()
        },
        "sum_before_the_end": bags("sum", (24,), offsets=torch.tensor([0, 12, 20]), include_last_offset=True),
        "weighted": lambda x: F.embedding_bag(
            (x[0] > 0).long(), HELD_X[1], mode="sum", per_sample_weights=x[1]
        ),
        "of_computed_offsets": lambda x: F.embedding_bag(
            (x[0, 0] > 0).long(), HELD_X[1], (x[1, :2, 0] > 0).long().cumsum(0) - (x[1, 0, 0] > 0).long()
        ),
    },
    "decomposing": {
        "logcumsumexp": lambda x: (30 * x).logcumsumexp(1),
        "logcumsumexp_of_masked": lambda x: x.where(x > 0, -torch.inf).logcumsumexp(1).exp(),
        "logcumsumexp_far_below_the_largest": lambda x: (x + 150 * (x.cumsum(2) > 1)).logcumsumexp(2),
        "logsigmoid": F.logsigmoid,
        "logaddexp": lambda x: torch.logaddexp(x, 2 * x.flip(0)),
        "moved": lambda x: x.moveaxis(0, -1),
        "tensordot": lambda x: torch.tensordot(x, x, dims=([2], [2])),
        "two_results": lambda x: torch.cat(torch.var_mean(x, -1), 0),
        "take_along": lambda x: x.take_along_dim(x.argsort(-1), -1),
        "constant": lambda x: x * torch.erfinv(torch.tensor(0.25)),
        "constants_of_no_converter": lambda x: x @ EYE6.matrix_exp() * torch.kaiser_window(6),
        "orthogonal": lambda x: torch.cat([TURNED(x), CAYLEY(x), REFLECTED(x)], -1),
        "bilinear": lambda x: F.bilinear(x, x[..., :4], BILINEAR),
        "adjoint": lambda x: torch.stack([x.mH, x.adjoint(), x[0].H + x.mT, (x + 2j * x).mH.imag]),
        "gru_cell": lambda x: GATED(x[0], x[1, :, :5]),
        "lstm_cell": lambda x: torch.cat(HELD(x[0], (x[1, :, :5], x[2, :, :5]))),
        "quantiles": lambda x: torch.quantile(x, torch.tensor([0.1, 0.9]), dim=-1),
        "quantile": lambda x: torch.quantile(x, 0.3, dim=-1),
        "tensor_split": lambda x: torch.cat([part * 2 for part in x.tensor_split(4, dim=-1)], -1),
        "infinite": lambda x: torch.isinf(x / 0).float(),
    },
}


@pytest.mark.quick_cases(
    "repeating-trace",
    "triangular-trace",
    "scattering-export",
    "elementary-trace",
    "decomposing-trace",
    "bags-export",
)
@pytest.mark.one_of(3)
@pytest.mark.parametrize("how", ["trace", "export"])
@pytest.mark.parametrize("room", CASES)
def test_each_conversion(room: str, how: str) -> None:
    assert_each_agrees(CASES[room], (X, X.flip(0, 1) * 0.75), how, rtol=1e-5)


def test_covariances() -> None:
    """torch.export refuses them."""
    functions: dict[str, Torch] = {
        "covariances": lambda x: torch.cov(x[0]) + torch.cov(x[0, 0], correction=0),
        "correlations": lambda x: torch.corrcoef(x[1]),
    }
    assert_each_agrees(functions, (X, X.flip(0, 1) * 0.75), "trace", rtol=1e-5)


def test_a_filled_diagonal() -> None:
    assert_each_agrees({"filled": lambda x: (2 * x[0]).fill_diagonal_(5.0)}, (X, -X), "trace", rtol=1e-6)


@pytest.mark.one_of(3)
@pytest.mark.parametrize("how", ["trace", "export"])
@pytest.mark.parametrize(
    ("function", "said"),
    [
        (
            lambda x: x.int().scatter_reduce(1, (x > 0).long(), x.int(), "mean"),
            "scatter_reduce by mean, .* int32",
        ),
        (lambda x: torch.bincount(x.argsort().flatten()), "give `minlength`, the number of bins"),
        (lambda x: x[x > 0].unfold(0, 2, 1), "makes a shape dynamic too: leave it to the app"),
        (lambda x: x.mode(-1).values, r"no mode of computed numbers: .* gives it"),
        (lambda x: x[0, 0].repeat_interleave(x[0, 0].argsort()), "give their sum as `output_size`"),
        (
            lambda x: torch.linalg.inv(x[..., :1, None] + torch.eye(5)),
            "only those of 2 to 4 rows are inverted, .* these have 5",
        ),
        (
            lambda x: torch.linalg.matrix_norm(x, "nuc"),
            "singular values|no _linalg_svd.* compute it in the app",
        ),
        (
            lambda x: torch.linalg.norm(x[0], 2, (0, 1)),
            "singular values|no _linalg_svd.* compute it in the app",
        ),
        (torch.digamma, "no digamma of computed numbers: compute it in the app"),
        (lambda x: (9 * x[..., None]).int() >> torch.arange(33), "0 to 31 is covered"),
        (
            lambda x: torch.linalg.solve(x[..., :1, None] + torch.eye(5), x[..., :5]),
            "only those of 2 to 4 rows are inverted",
        ),
        (lambda x: torch.cdist(x, x, p=3.0), "cdist with p=3; p=1 and p=2 are covered"),
        (volume(1, padding_mode="reflection"), "a volume that is reflected at its borders"),
        (lambda x: F.grid_sample(x[None], x[None, :2, :, :2], "bicubic"), "bicubic sampling"),
        (lambda x: torch.linalg.qr(x).Q, "no linalg_qr of computed numbers: compute it in the app"),
        (lambda x: torch.linalg.cholesky(x[0, :1, :1] ** 2 + torch.eye(17)), "matrices of up to 16 rows"),
    ],
)
def test_what_is_not_covered_is_refused_by_name(function: Torch, said: str, how: str) -> None:
    frontend.register()
    with pytest.raises(NotImplementedError, match=said):
        convert(Function(function), {"x": X}, how, "iOS17", "FLOAT32")


@pytest.mark.parametrize("scale", [3e-3, 90.0])
def test_cofactors_stay_in_fp16(scale: float) -> None:
    frontend.register()
    x = scale * (X[0, :, :4] + EYE)
    model = convert(Function(torch.linalg.inv), {"x": x}, "trace", "iOS17", "FLOAT16")
    (found,) = run(model, {"x": x.numpy()}, precision="fp16").values()
    assert_close(found * scale, torch.linalg.inv(x / scale), rtol=2e-3)


def test_zeros_and_ones_are_drawn_by_chance() -> None:
    frontend.register()
    chances = torch.arange(4.0).expand(500, 4) / 3
    for function in (torch.bernoulli, lambda x: torch.bernoulli(x, 0.25)):
        model = convert(Function(function), {"x": chances}, "trace", "iOS17", "FLOAT32")
        (drawn,) = run(model, {"x": chances.numpy()}).values()
        assert set(np.unique(drawn)) == {0, 1}
        means = [0, 1 / 3, 2 / 3, 1] if function is torch.bernoulli else [0.25] * 4
        np.testing.assert_allclose(drawn.mean(0), means, atol=0.1)


class Inner(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.lgamma(x.abs() + 1) * x.exp()


@pytest.mark.parametrize("how", ["trace", "export"])
def test_an_error_says_where(how: str) -> None:
    frontend.register()
    module = torch.nn.Sequential(torch.nn.ReLU(), Inner())
    with pytest.raises(NotImplementedError, match=r"no lgamma of .* \(converting lgamma in .*1\)$"):
        convert(module, {"x": X}, how, "iOS17", "FLOAT32")


def chosen(x: torch.Tensor) -> torch.Tensor:
    """Conditions with two results, and one within a branch."""
    inner: Any = lambda x: torch.cond(x.sum() > 99, lambda x: (x @ EYE6,), lambda x: (3 * x,), (x,))  # noqa: E731
    y, z = torch.cond(x.sum() > 0, lambda x: (inner(x)[0], x + 1), lambda x: (x - 1, x.exp()), (x,))
    return y * z


def test_conditions() -> None:
    def by_a_condition_of_four_axes(x: torch.Tensor) -> Any:
        return torch.cond(x.sum()[None, None, None, None] > 0, lambda x: x + 1, lambda x: x.exp(), (x,))

    cases = {"chosen": chosen, "four_axes": by_a_condition_of_four_axes}
    assert_each_agrees(cases, (X, X.abs(), 2 - X.abs(), 9 - X), "export", rtol=1e-6)


def test_a_loop_with_a_computed_number_of_steps_is_refused() -> None:
    frontend.register()
    loop: Any = lambda x: torch.while_loop(lambda y: y.sum() < 9, lambda y: (y + 1,), (x,))[0]  # type: ignore[no-untyped-call] # noqa: E731
    with pytest.raises(NotImplementedError, match="while_loop is not converted: write a Python loop"):
        convert(Function(loop), {"x": X}, "export", "iOS17", "FLOAT32")
