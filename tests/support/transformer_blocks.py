"""One block of well-known transformers, of random weights, as coremltools converts them."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import torch
import transformers

from anesurgery import frontend
from anesurgery.mil import Program, ct, quiet_host

WIDTH, HEADS, TOKENS = 64, 4, 16
COMMON = {"num_attention_heads": HEADS, "intermediate_size": 96}


def _bert(layers: int) -> tuple[Any, torch.Tensor]:
    config = transformers.BertConfig(hidden_size=WIDTH, num_hidden_layers=layers, vocab_size=50, **COMMON)
    return transformers.BertModel(config).encoder, torch.zeros(1, TOKENS, WIDTH)


def _vit(layers: int) -> tuple[Any, torch.Tensor]:
    config = transformers.ViTConfig(
        hidden_size=WIDTH, num_hidden_layers=layers, image_size=32, patch_size=8, **COMMON
    )
    return transformers.ViTModel(config, add_pooling_layer=False), torch.zeros(1, 3, 32, 32)


def _whisper(layers: int) -> tuple[Any, torch.Tensor]:
    config = transformers.WhisperConfig(
        d_model=WIDTH,
        encoder_attention_heads=HEADS,
        encoder_layers=layers,
        encoder_ffn_dim=96,
        max_source_positions=TOKENS,
        num_mel_bins=8,
        decoder_layers=1,
        decoder_attention_heads=HEADS,
        vocab_size=50,
        **dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id"), 0),
    )
    return transformers.WhisperModel(config).encoder, torch.zeros(1, 8, 2 * TOKENS)


def _gpt2(layers: int) -> tuple[Any, torch.Tensor]:
    config = transformers.GPT2Config(
        n_embd=WIDTH, n_head=HEADS, n_layer=layers, vocab_size=50, n_positions=TOKENS, use_cache=False
    )
    return transformers.GPT2Model(config), torch.zeros(1, TOKENS, dtype=torch.int32)


def _llama(layers: int) -> tuple[Any, torch.Tensor]:
    config = transformers.LlamaConfig(
        hidden_size=WIDTH,
        num_hidden_layers=layers,
        num_key_value_heads=2,
        vocab_size=50,
        use_cache=False,
        **COMMON,
    )
    return transformers.LlamaModel(config), torch.zeros(1, TOKENS, dtype=torch.int32)


BLOCKS = {"bert": _bert, "vit": _vit, "whisper": _whisper, "gpt2": _gpt2, "llama": _llama}


class _First(torch.nn.Module):
    """The first result of a model."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: torch.Tensor) -> Any:
        return self.model(x)[0]


@cache
def block(name: str, layers: int = 1) -> Program:
    """A model of `BLOCKS` as a program of fp32."""
    torch.manual_seed(0)
    frontend.register()
    model, x = BLOCKS[name](layers)
    with torch.no_grad(), quiet_host():
        traced = torch.jit.trace(_First(model).eval(), x, check_trace=False)  # type: ignore[no-untyped-call]
        kind = np.int32 if x.dtype == torch.int32 else np.float32
        made: Program = ct.convert(
            traced,
            inputs=[ct.TensorType("x", tuple(x.shape), dtype=kind)],
            minimum_deployment_target=ct.target.iOS17,
            compute_precision=ct.precision.FLOAT32,
            convert_to="milinternal",
        )
    return made
