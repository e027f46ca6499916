"""ONNX files: what onnx2coreml converts is right by onnxruntime, or refused in words."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812 - the usual name

import anesurgery as ane
from anesurgery.errors import LoadError
from anesurgery.interpret import Predictor

onnx = pytest.importorskip("onnx", reason="the extra [onnx] is not installed")
pytest.importorskip("onnx2coreml", reason="the extra [onnx] is not installed")
ort = pytest.importorskip("onnxruntime", reason="the extra [onnx] is not installed")

IMAGE, ROWS, IDS = (1, 3, 16, 16), (1, 8, 32), (1, 8)


class Does(nn.Module):
    """A function as a module."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor) -> Any:
        """What the function makes."""
        return self.function(x)


class First(nn.Module):
    """The first result of a recurrent layer or of attention."""

    def __init__(self, layer: nn.Module, times: int = 1) -> None:
        super().__init__()
        self.layer, self.times = layer, times

    def forward(self, x: torch.Tensor) -> Any:
        """Of the same rows as query, key and value."""
        return self.layer(*[x] * self.times)[0]


def seq(*modules: nn.Module) -> nn.Module:
    return nn.Sequential(*modules)


RIGHT: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "classifier": (
        lambda: seq(
            nn.Conv2d(3, 8, 3, stride=2), nn.BatchNorm2d(8), nn.SiLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()
        ),
        IMAGE,
    ),
    "remainders": (lambda: Does(lambda x: torch.fmod(x, 0.7)), ROWS),
    "groups": (lambda: seq(nn.Conv2d(3, 6, 3, groups=3), nn.GroupNorm(2, 6), nn.Hardswish()), IMAGE),
    "ceil mode": (lambda: seq(nn.MaxPool2d(2, ceil_mode=True), nn.AvgPool2d(3, padding=1)), (1, 3, 15, 15)),
    "transposed": (lambda: seq(nn.ConvTranspose2d(3, 4, 3, stride=2, output_padding=1), nn.PReLU()), IMAGE),
    "bilinear": (lambda: seq(nn.Upsample(scale_factor=2, mode="bilinear"), nn.Conv2d(3, 4, 1)), IMAGE),
    "corners": (lambda: nn.Upsample(scale_factor=1.5, mode="bilinear", align_corners=True), IMAGE),
    "pixel shuffle": (lambda: seq(nn.Conv2d(3, 16, 3), nn.PixelShuffle(2), nn.InstanceNorm2d(4)), IMAGE),
    "attention": (lambda: First(nn.MultiheadAttention(32, 4, batch_first=True), 3), ROWS),
    "embedding": (lambda: seq(nn.Embedding(50, 16), nn.Linear(16, 50), nn.LogSoftmax(-1)), IDS),
    "LSTM": (lambda: First(nn.LSTM(32, 16, batch_first=True, bidirectional=True)), ROWS),
    "GELU": (lambda: seq(nn.Linear(32, 64), nn.GELU(), nn.GELU("tanh"), nn.Softmax(-1)), ROWS),
    "activations": (lambda: seq(nn.ELU(), nn.Mish(), nn.LeakyReLU(0.1), nn.Softplus(), nn.Tanh()), ROWS),
    "several outputs": (lambda: Does(lambda x: (x.flip(-1)[:, ::2], x.mean(-1), x.abs().sum(1))), ROWS),
    "top k": (lambda: Does(lambda x: torch.topk(x, 3)), ROWS),
    "reflected": (lambda: Does(lambda x: F.pad(x, (1, 2, 3, 1), mode="reflect")), IMAGE),
    "gather": (lambda: Does(lambda x: x.gather(1, torch.zeros(1, 4, 32, dtype=torch.long))), ROWS),
    "spreads": (lambda: Does(lambda x: (x.norm(dim=-1), x.std(-1), x.var(1, keepdim=True))), ROWS),
    "volume": (lambda: seq(nn.Conv3d(2, 3, 3), nn.ReLU6(), nn.MaxPool3d(2)), (1, 2, 8, 8, 8)),
    "dilated": (lambda: seq(nn.Conv1d(8, 4, 3, dilation=2), nn.LayerNorm(28)), ROWS),
}
REFUSED: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], str]] = {
    "nearest to a size": (
        lambda: nn.Upsample(size=(20, 20), mode="nearest"),
        IMAGE,
        "converts it wrongly: the output y comes to",
    ),
    "remainders of negative whole numbers": (
        lambda: Does(lambda x: (x - 25) % 7),
        IDS,
        "converts it wrongly: the output y has 100% other numbers",
    ),
    "GRU": (lambda: First(nn.GRU(32, 16, batch_first=True)), ROWS, "was not converted by onnx2coreml: "),
    "running sum": (lambda: Does(lambda x: x.cumsum(1)), ROWS, "CumSum"),
}


def export(module: nn.Module, shape: tuple[int, ...], path: Path, **how: Any) -> torch.Tensor:
    """Write an ONNX file; gives inputs of the module."""
    draws = torch.Generator().manual_seed(0)
    x = torch.randint(0, 50, shape, generator=draws) if shape == IDS else torch.randn(shape, generator=draws)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            module.eval(),
            (x,),
            str(path),
            input_names=["x"],
            output_names=["y"],
            dynamo=False,
            opset_version=17,
            **how,
        )
    return x


@pytest.mark.parametrize("name", RIGHT)
def test_what_is_read_agrees_with_torch(name: str, tmp_path: Path) -> None:
    make, shape = RIGHT[name]
    torch.manual_seed(0)
    module = make()
    x = export(module, shape, tmp_path / "m.onnx")
    given = {"x": x.numpy().astype(np.int32 if shape == IDS else np.float32)}
    found = ane.run(tmp_path / "m.onnx", given, precision="fp32")
    with torch.no_grad():
        made = module(x)
    for value, wanted in zip(found.values(), made if isinstance(made, tuple) else (made,), strict=True):
        np.testing.assert_allclose(value, wanted.numpy(), atol=5e-3 * float(wanted.abs().max()), rtol=0)


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_wrong_or_not_converted_is_refused_in_words(name: str, tmp_path: Path) -> None:
    make, shape, words = REFUSED[name]
    export(make(), shape, tmp_path / "m.onnx")
    with pytest.raises(LoadError) as raised:
        ane.inspect(tmp_path / "m.onnx")
    assert words in str(raised.value)
    assert "m.onnx" in str(raised.value)


@pytest.mark.parametrize(
    "change", [lambda v: v * 0, lambda v: v * 1.01, lambda v: v + np.nan, lambda v: v * 0 + 7e4]
)
def test_a_conversion_that_is_off_is_refused(
    change: Callable[[Any], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    export(nn.Conv2d(3, 4, 3), IMAGE, tmp_path / "m.onnx")
    run = Predictor.__call__
    monkeypatch.setattr(Predictor, "__call__", lambda *given: {n: change(v) for n, v in run(*given).items()})
    with pytest.raises(LoadError, match="converts it wrongly: the output y comes to"):
        ane.load(tmp_path / "m.onnx")


def test_what_fp16_alone_makes_different_is_no_wrong_conversion(tmp_path: Path) -> None:
    """The remainder of a number near a multiple of 0.7, which fp16 rounds, is another one."""
    export(Does(lambda x: torch.remainder(x, -0.7)), ROWS, tmp_path / "m.onnx")
    assert any("its outputs in fp32 are those" in note for note in ane.load(tmp_path / "m.onnx").notes)


def test_nothing_finite_is_no_agreement(tmp_path: Path) -> None:
    export(Does(lambda x: (x * 0 - 1).log()), ROWS, tmp_path / "m.onnx")
    assert any("not compared with onnxruntime" in note for note in ane.load(tmp_path / "m.onnx").notes)


def test_it_is_inspected_edited_and_saved(tmp_path: Path) -> None:
    export(nn.AvgPool2d(40), (1, 3, 80, 80), tmp_path / "m.onnx")
    before = (tmp_path / "m.onnx").read_bytes()
    assert "avg_pool" in {row.op_type for row in ane.inspect(tmp_path / "m.onnx", "iPhone 13").ops}
    surgery = ane.apply(tmp_path / "m.onnx", ["chain_pools"], quiet=True)
    assert any("converted from ONNX by onnx2coreml" in note for note in surgery.notes)
    assert ane.run(surgery.save(tmp_path / "m.mlpackage"), {"x": np.ones((1, 3, 80, 80), np.float32)})
    assert (tmp_path / "m.onnx").read_bytes() == before


def test_sizes_that_vary(tmp_path: Path) -> None:
    export(nn.Conv2d(3, 4, 3), IMAGE, tmp_path / "batch.onnx", dynamic_axes={"x": {0: "batch"}})
    loaded = ane.load(tmp_path / "batch.onnx")
    assert any("the dynamic first axis of x counts as 1" in note for note in loaded.notes)
    export(nn.Conv2d(3, 4, 3), IMAGE, tmp_path / "high.onnx", dynamic_axes={"x": {2: "high"}})
    with pytest.raises(LoadError, match=r"axis 2 of the input x is dynamic \(high\).*make_dynamic_shape_fixed"):
        ane.load(tmp_path / "high.onnx")


def test_a_damaged_file_and_one_that_is_not_there(tmp_path: Path) -> None:
    (tmp_path / "m.onnx").write_bytes(b"\xff\xfe" * 40)
    with pytest.raises(LoadError, match="is damaged, or no ONNX model"):
        ane.load(tmp_path / "m.onnx")
    with pytest.raises(LoadError, match="does not exist"):
        ane.load(tmp_path / "other.onnx")


@pytest.mark.parametrize("name", ["sinet", "basic_pitch_nmp"])
def test_real_models(corpus: Path, name: str) -> None:
    found = ane.inspect(corpus / f"{name}.onnx", "iPhone 13")
    assert len(found.ops) > 100
