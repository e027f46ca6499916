"""Models in whose forms a score of ops once chose wrongly: none gets slower, or larger for nothing.

Tables that input and output share, recurrences that unroll into hundreds of small ops, wide kernels over sound.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from conversion import convert
from slower import score_of, slower
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

import anesurgery as ane
from anesurgery import frontend

TARGETS = ("M1/macOS 14", "M4/macOS 15")


class Logits(nn.Module):
    """A language model without its options."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: torch.Tensor) -> Any:
        return self.model(input_ids=ids, use_cache=False).logits


class WideKernel(nn.Module):
    """The front of Moonshine: kernels of 127 over raw sound, norms, then a layer of attention."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.norm = nn.Conv1d(1, 288, 127, 64, bias=False), nn.GroupNorm(1, 288)
        self.next, self.last = nn.Conv1d(288, 576, 7, 3), nn.Conv1d(576, 288, 3, 2)
        self.layer = nn.TransformerEncoderLayer(288, 8, 1152, batch_first=True, norm_first=True)

    def forward(self, x: torch.Tensor) -> Any:
        x = self.norm(torch.tanh(self.wide(x)))
        x = nn.functional.gelu(self.last(nn.functional.gelu(self.next(x))))
        return self.layer(x.transpose(1, 2))


class Grus(nn.Module):
    """A denoiser as DeepFilterNet: convolutions over a spectrogram, and recurrent layers."""

    def __init__(self) -> None:
        super().__init__()
        self.fold = nn.Sequential(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 16, 3, (1, 2), 1))
        self.into, self.gru = nn.Linear(256, 256), nn.GRU(256, 256, 1, batch_first=True)
        self.out = nn.Linear(256, 32)

    def forward(self, x: torch.Tensor) -> Any:
        y = self.fold(x)
        y = self.into(y.permute(0, 2, 1, 3).flatten(2))
        return torch.sigmoid(self.out(self.gru(y)[0])) * x[:, 0]


class Lstms(nn.Module):
    """The middle of EnCodec: recurrent layers between convolutions of sound."""

    def __init__(self) -> None:
        super().__init__()
        self.front, self.lstm = nn.Conv1d(64, 256, 7, padding=3), nn.LSTM(256, 256, 2)
        self.up, self.out = nn.ConvTranspose1d(256, 128, 16, 8), nn.Conv1d(128, 1, 7)

    def forward(self, x: torch.Tensor) -> Any:
        y = self.front(x).permute(2, 0, 1)
        y = nn.functional.elu((self.lstm(y)[0] + y).permute(1, 2, 0))
        return self.out(nn.functional.elu(self.up(y)))


class BothWays(nn.Module):
    """Durations of Kokoro: recurrent layers that read forwards and backwards."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.LSTM(128, 64, 1, batch_first=True, bidirectional=True)
        self.second, self.out = nn.LSTM(128, 64, 1, batch_first=True, bidirectional=True), nn.Linear(128, 50)

    def forward(self, x: torch.Tensor) -> Any:
        return torch.sigmoid(self.out(self.second(self.first(x)[0])[0])).sum(-1)


SHAPE: dict[str, Any] = {
    "vocab_size": 8192,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "tie_word_embeddings": True,
    "attn_implementation": "eager",
}
IDS = torch.zeros(1, 64, dtype=torch.int64)
KINDS: dict[str, tuple[Callable[[], nn.Module], torch.Tensor]] = {
    "qwen2": (lambda: Logits(Qwen2ForCausalLM(Qwen2Config(**SHAPE))), IDS),
    "smollm2": (lambda: Logits(LlamaForCausalLM(LlamaConfig(**SHAPE))), IDS),
    "moonshine": (WideKernel, torch.randn(1, 1, 64000)),
    "deepfilternet": (Grus, torch.randn(1, 1, 24, 32)),
    "encodec": (Lstms, torch.randn(1, 64, 48)),
    "kokoro": (BothWays, torch.randn(1, 48, 128)),
}
WORDS = ("qwen2", "smollm2")


@cache
def kind(name: str) -> Any:
    """A model of a kind, converted."""
    frontend.register()
    torch.manual_seed(0)
    make, example = KINDS[name]
    return convert(make().eval(), {"x": example}, "trace", "iOS17", "FLOAT16")


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", KINDS)
def test_auto_makes_none_slower(name: str, target: str) -> None:
    assert not slower(kind(name), "auto", target)


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("recipe", ["decoder_ane", "llm_ane"])
@pytest.mark.parametrize("name", WORDS)
def test_a_shared_table_is_not_stored_twice(name: str, recipe: str, target: str) -> None:
    assert not slower(kind(name), recipe, target)
    before, after = (
        score_of(model, target).weights
        for model in (kind(name), ane.apply(kind(name), recipe, target=target, prove=None, quiet=True).program)
    )
    assert after < 1.1 * before


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
def test_wide_kernels_reach_the_engine_for_a_few_ops_more(target: str) -> None:
    """The wrong version: a share of ops that falls by a little, and vetoes a shorter time."""
    surgery = ane.apply(kind("moonshine"), "auto", target=target, prove=None, quiet=True)
    before, after = score_of(kind("moonshine"), target), score_of(surgery.program, target)
    assert "long_convolution" in {change.pass_name for change in surgery.changes}
    assert (after.share["flop"], before.share["flop"] < 1) == (1, True)
    assert after.expected.over(before.expected).best < 1


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", ["deepfilternet", "encodec", "kokoro"])
def test_a_recurrence_is_unrolled_for_a_clear_gain_in_time_or_not_at_all(name: str, target: str) -> None:
    """The share of ops, which unrolling raises or lowers, decides nothing."""
    surgery = ane.apply(kind(name), "auto", target=target, prove=None, quiet=True)
    before, after = score_of(kind(name), target), score_of(surgery.program, target)
    steps = {change.pass_name for change in surgery.changes} & {"unroll_loop", "unroll_recurrent"}
    said = [r.reason for step, r in surgery.refusals if step.startswith("unroll_")]
    if steps:
        assert after.over(before).clear
    else:
        assert any("is no clear gain" in reason or "would rise" in reason for reason in said), said
    assert not [reason for reason in said if "share" in reason]
