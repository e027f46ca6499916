"""What coremltools converts for some arguments only: each operation against torch, by trace and by export."""

from __future__ import annotations

from collections.abc import Callable

import coremltools as ct
import pytest
import torch
from conversion import Function, assert_each_agrees, convert
from torch.nn import functional as F  # noqa: N812 - as everybody calls it

from anesurgery import frontend
from anesurgery.interpret import run

torch.manual_seed(0)
X = torch.tensor([[3.0, -1.0, 4.0, 1.5], [0.25, -9.0, 2.0, 6.0], [1.0, 2.0, -3.0, 5.0]])
W = torch.tensor([[0.5, -2.0, 1.0], [3.0, 0.25, -1.0], [1.0, 4.0, 2.0]])
IMAGES = torch.randn(1, 4, 6, 5)
EVEN = torch.randn(1, 4, 6, 12)
SIGNAL = torch.randn(2, 200)
HANN, SHORT = torch.hann_window(32), torch.hann_window(20)
TWO, ONE = torch.randn(4, 6, 3, 4), torch.randn(4, 3, 5)


def bent(x: torch.Tensor) -> torch.Tensor:
    """An affine map that depends on the images."""
    return torch.tensor([[[0.7, 0.2, 0.1], [-0.3, 0.9, -0.2]]]) * (1 + x.mean() / 9)


CHOICES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "the place of the largest": lambda x: torch.argmax(x),
    "the place of the smallest, axes kept": lambda x: torch.argmin(x, keepdim=True),
    "the place in each row": lambda x: torch.argmax(x, 1),
    "a diagonal": lambda x: torch.diagonal(x) * 1.0,
    "a diagonal above": lambda x: torch.diagonal(x, 2) * 1.0,
    "a diagonal below, axes exchanged": lambda x: torch.diagonal(x, -1, 1, 0) * 1.0,
    "diagonals of matrices": lambda x: torch.diagonal(x.reshape(2, 3, 2), 0, 1, 2) * 1.0,
    "an empty diagonal": lambda x: torch.cat([torch.diagonal(x, 4), x[0, :1]]),
    "a stack of dtypes": lambda x: torch.stack([x.int(), x, x > 0]),
    "a stack of numbers": lambda x: (
        torch.stack([torch.full([], 0.3), torch.full([], 2.0), torch.ones([])]) * x[:, :3]
    ),
    "a stack of whole numbers": lambda x: torch.stack([torch.full([], 2), torch.full([], 3)], -1) * x[:, :2],
    "a choice of scalars": lambda x: torch.where(x.sum() > 0, x.max(), torch.ones([])) * x,
    "scalars": lambda x: x * torch.ones([]) + torch.zeros([]),
    "an equation with other axes": lambda x: torch.einsum("oi, ...ihw -> ...ohw", W, x.reshape(2, 3, 2, 1)),
    "an equation with other axes of two": lambda x: torch.einsum(
        "...ij,...jk->...ik", x.reshape(2, 3, 2), W[:2]
    ),
    "an equation without a result": lambda x: torch.einsum("ji,jk", x, W),
    "an equation with neither": lambda x: torch.einsum("...i,i", x.reshape(2, 3, 2), W[0, :2]),
    "a product of vectors": lambda x: torch.matmul(x[0], x[1]),
    "dropped": lambda x: F.alpha_dropout(x, 0.5, training=False) + 1,
    "the angle of real numbers": torch.angle,
}
CONVOLVED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "longer than its padding": lambda x: F.conv_transpose2d(x, TWO, None, (2, 3), (1, 0), (1, 2)),
    "grouped, dilated": lambda x: F.conv_transpose2d(x, TWO, torch.ones(12), (3, 2), (0, 1), (2, 1), 2, (2, 1)),
    "no padding": lambda x: F.conv_transpose1d(x[:, :, 0], ONE, torch.ones(3), 4, 0, 3),
    "as long as its padding": lambda x: F.conv_transpose2d(x, TWO, None, 2, 1, 1),
    "in three axes": lambda x: F.conv_transpose3d(
        x[:, :, None], TWO[:, :2, None], None, (1, 2, 2), 0, (0, 1, 1)
    ),
    "its own statistics": lambda x: F.instance_norm(x, weight=torch.arange(4.0)),
    "given statistics": lambda x: F.instance_norm(
        x, torch.arange(4.0), torch.arange(4.0) + 1, use_input_stats=False, eps=1e-3
    ),
    "sampled at a map": lambda x: F.grid_sample(
        x, F.affine_grid(bent(x), [1, 4, 3, 7], False), align_corners=False
    ),
    "sampled at a map, to the border": lambda x: F.grid_sample(
        x, F.affine_grid(bent(x), [1, 4, 3, 7], True), padding_mode="border", align_corners=True
    ),
    "sampled at a map, nearest": lambda x: F.grid_sample(
        x, F.affine_grid(bent(x), [1, 4, 3, 7], False), mode="nearest", align_corners=False
    ),
}


def sampled(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:
    """Samples images at the changed points of an affine map."""
    return lambda x: F.grid_sample(x, change(F.affine_grid(bent(x), [1, 4, 3, 7], False)), align_corners=False)


CONVOLVED |= {
    "points of a map, expanded": sampled(lambda grid: grid.expand(1, -1, -1, -1)),
    "points of a map, moved": sampled(lambda grid: grid + 0.1),
    "points of a map, scaled": sampled(lambda grid: grid * 0.9),
    "points of a map, turned": sampled(lambda grid: grid.permute(0, 2, 1, 3)),
    "points of a map, one of two": sampled(lambda grid: grid[:, 1:]),
}
SPECTRA: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "two axes": lambda x: torch.fft.fft2(x.reshape(2, 10, 20)).real,
    "two other axes": lambda x: torch.fft.fft2(x.reshape(4, 10, 10), dim=(0, 1), norm="ortho").abs(),
    "and back": lambda x: torch.fft.ifft2(torch.fft.fft2(x.reshape(2, 10, 20)) * 2).real,
    "real, and back": lambda x: torch.fft.irfft2(torch.fft.rfft2(x.reshape(8, 50)) * 0.5, s=(8, 50)),
    "a real spectrum": lambda x: torch.fft.irfft(x[:, :9], n=16),
    "a real spectrum of two axes": lambda x: torch.fft.irfft2(x.reshape(8, 50)),
    "a real spectrum, complex numbers": lambda x: torch.fft.ifft(x[:, :16]).real,
    "frequencies around the middle": lambda x: torch.fft.fftshift(torch.fft.fft2(x.reshape(16, 25))).abs(),
    "an odd length, and back": lambda x: (
        torch.fft.ifft2(
            torch.fft.ifftshift(torch.fft.fftshift(torch.fft.fft2(x.reshape(16, 25)), dim=-1), dim=-1)
        ).real
    ),
    "an imaginary part": lambda x: torch.fft.fft(x[:, :16]).imag,
    "angles": lambda x: torch.angle(torch.fft.rfft(x[:, :16] + 3))[:, 1:-1].cos(),
    "windows": lambda x: torch.istft(
        torch.stft(x, 32, 8, window=HANN, return_complex=True) * 2, 32, 8, window=HANN
    ),
    "short windows, a length": lambda x: torch.istft(
        torch.stft(x[0], 32, 8, 20, SHORT, normalized=True, return_complex=True),
        32,
        8,
        20,
        SHORT,
        normalized=True,
        length=210,
    ),
    "short windows, a quarter of a frame apart": lambda x: torch.istft(
        torch.stft(x[0], 32, 8, 20, SHORT, return_complex=True), 32, win_length=20, window=SHORT
    ),
    "a vocoder's": lambda x: torch.istft(
        torch.polar(x[:, :190].reshape(2, 10, 19)[:, :9].exp(), x[:, 1:191].reshape(2, 10, 19)[:, :9]),
        16,
        4,
        window=HANN[::2],
    ),
}


@pytest.mark.parametrize("how", ["trace", "export"])
@pytest.mark.parametrize(
    ("cases", "x"),
    [(CHOICES, X), (CONVOLVED, IMAGES), (SPECTRA, SIGNAL)],
    ids=["choices", "convolved", "spectra"],
)
def test_each_agrees_with_torch(
    cases: dict[str, Callable[[torch.Tensor], torch.Tensor]], x: torch.Tensor, how: str
) -> None:
    assert_each_agrees(cases, (x, -x / 3), how, rtol=1e-4)


def test_the_inverse_of_spectra_of_both_sides_is_refused() -> None:
    def back(x: torch.Tensor) -> torch.Tensor:
        spectra = torch.stft(x, 32, 8, window=HANN, return_complex=True, onesided=False)
        return torch.istft(spectra, 32, 8, window=HANN)

    with pytest.raises(NotImplementedError, match="istft"):
        assert_each_agrees({"back": back}, (SIGNAL,), "trace", rtol=1e-4)


def test_a_spectrum_of_a_shape_that_varies_is_refused_by_name() -> None:
    frontend.register()
    module = torch.jit.trace(Function(lambda x: torch.fft.rfft(x).abs()), SIGNAL)  # type: ignore[no-untyped-call]
    lengths = ct.RangeDim(64, 2 * SIGNAL.shape[-1], SIGNAL.shape[-1])
    varying = ct.TensorType("x", (*SIGNAL.shape[:-1], lengths))
    with pytest.raises(NotImplementedError, match="fft_rfft of a shape that varies"):
        ct.convert(module, inputs=[varying], skip_model_load=True)


BEFORE_IOS16: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "patches": lambda x: F.pixel_unshuffle(x, 2),
    "wide patches": lambda x: F.pixel_unshuffle(x[:, :2], 3).relu(),
    "a focus layer": lambda x: F.pixel_shuffle(F.pixel_unshuffle(x * 2, 2), 2),
    "largest, in any order": lambda x: x.topk(3, 2, sorted=False)[0].sum(2),
    "smallest, in any order": lambda x: torch.topk(x, 2, largest=False, sorted=False)[0].mean(-1),
    "places, in any order": lambda x: x.topk(2, 1, True, False)[1].amax(1).float(),
}
"""coremltools converts these for iOS 16 only, and without a target for iOS 15."""


@pytest.mark.parametrize("how", ["trace", "export"])
def test_without_a_target_each_agrees_with_torch(how: str) -> None:
    assert_each_agrees(BEFORE_IOS16, (EVEN, -EVEN / 3), how, target="iOS15")


@pytest.mark.parametrize("how", ["trace", "export"])
def test_random_numbers_have_their_range(how: str) -> None:
    frontend.register()
    noise = Function(lambda x: (torch.rand(4, 6), torch.rand(2, 3, 5) + x.mean(), x * torch.rand(1)))
    outputs = run(convert(noise, {"x": X}, how, "iOS17", "FLOAT32"), {"x": X.numpy()}).values()
    whole, added, one = outputs
    assert (whole.shape, added.shape, one.shape) == ((4, 6), (2, 3, 5), X.shape)
    assert 0 <= whole.min() < 0.5 < whole.max() < 1
