"""One block of well-known transformers, of random weights, as coremltools converts them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
import transformers

from anesurgery import frontend
from anesurgery.mil import Program, ct, quiet_host


@dataclass(frozen=True)
class Size:
    """Of a block: the defaults are those of most tests."""

    width: int = 64
    heads: int = 4
    shared: int = 2
    """Heads of queries for one of keys, where a model has such."""
    tokens: int = 16
    batch: int = 1
    hidden: int = 96

    @property
    def common(self) -> dict[str, int]:
        """Options that the configurations of several models have."""
        return {"num_attention_heads": self.heads, "intermediate_size": self.hidden}

    @property
    def states(self) -> torch.Tensor:
        """Rows of channels."""
        return torch.zeros(self.batch, self.tokens, self.width)

    @property
    def ids(self) -> torch.Tensor:
        """Token ids."""
        return torch.zeros(self.batch, self.tokens, dtype=torch.int32)


Made = tuple[Any, tuple[torch.Tensor, ...]]
"""A module, and what it reads."""


def _bert(layers: int, size: Size) -> Made:
    config = transformers.BertConfig(
        hidden_size=size.width, num_hidden_layers=layers, vocab_size=50, **size.common
    )
    return transformers.BertModel(config).encoder, (size.states,)


def _masked_bert(layers: int, size: Size) -> Made:
    return _bert(layers, size)[0], (size.states, torch.zeros(size.batch, 1, 1, size.tokens))


def _vit(layers: int, size: Size) -> Made:
    config = transformers.ViTConfig(
        hidden_size=size.width, num_hidden_layers=layers, image_size=32, patch_size=8, **size.common
    )
    return transformers.ViTModel(config, add_pooling_layer=False), (torch.zeros(size.batch, 3, 32, 32),)


def _whisper_model(layers: int, size: Size) -> Any:
    config = transformers.WhisperConfig(
        d_model=size.width,
        encoder_attention_heads=size.heads,
        encoder_layers=layers,
        encoder_ffn_dim=size.hidden,
        max_source_positions=size.tokens,
        num_mel_bins=8,
        decoder_layers=layers,
        decoder_attention_heads=size.heads,
        decoder_ffn_dim=size.hidden,
        vocab_size=50,
        **dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id"), 0),
    )
    return transformers.WhisperModel(config)


def _whisper(layers: int, size: Size) -> Made:
    return _whisper_model(layers, size).encoder, (torch.zeros(size.batch, 8, 2 * size.tokens),)


class _CrossLayers(torch.nn.Module):
    """Layers of a decoder that look at what an encoder made, without masks."""

    def __init__(self, layers: Any) -> None:
        super().__init__()
        self.layers = layers

    def forward(self, x: torch.Tensor, encoded: torch.Tensor) -> Any:
        for layer in self.layers:
            x = layer(x, encoder_hidden_states=encoded, use_cache=False)
            x = x[0] if isinstance(x, tuple) else x
        return (x,)


def _cross(layers: int, size: Size) -> Made:
    encoded = torch.zeros(size.batch, size.tokens + 3, size.width)
    return _CrossLayers(_whisper_model(layers, size).decoder.layers), (size.states, encoded)


def _gpt2(layers: int, size: Size) -> Made:
    config = transformers.GPT2Config(
        n_embd=size.width,
        n_head=size.heads,
        n_inner=size.hidden,
        n_layer=layers,
        vocab_size=50,
        n_positions=size.tokens,
        use_cache=False,
    )
    return transformers.GPT2Model(config), (size.ids,)


def _llama(layers: int, size: Size) -> Made:
    config = transformers.LlamaConfig(
        hidden_size=size.width,
        num_hidden_layers=layers,
        num_key_value_heads=size.heads // size.shared,
        vocab_size=50,
        use_cache=False,
        **size.common,
    )
    return transformers.LlamaModel(config), (size.ids,)


BLOCKS = {"bert": _bert, "vit": _vit, "whisper": _whisper, "gpt2": _gpt2, "llama": _llama}
MORE = {"masked bert": _masked_bert, "cross": _cross}
"""Blocks with another input."""


class _First(torch.nn.Module):
    """The first result of a model."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, *given: torch.Tensor) -> Any:
        return self.model(*given)[0]


@cache
def block(name: str, layers: int = 1, size: Size = Size()) -> Program:
    """A model of `BLOCKS` or `MORE` as a program of fp32."""
    torch.manual_seed(0)
    frontend.register()
    model, given = (BLOCKS | MORE)[name](layers, size)
    with torch.no_grad(), quiet_host():
        traced = torch.jit.trace(_First(model).eval(), given, check_trace=False)  # type: ignore[no-untyped-call]
        kinds = [np.int32 if x.dtype == torch.int32 else np.float32 for x in given]
        made: Program = ct.convert(
            traced,
            inputs=[
                ct.TensorType(name, tuple(x.shape), dtype=kind)
                for name, x, kind in zip(("x", "more"), given, kinds, strict=False)
            ],
            minimum_deployment_target=ct.target.iOS17,
            compute_precision=ct.precision.FLOAT32,
            convert_to="milinternal",
        )
    return made
