"""Tiny models from transformers, and one in the manner of nanoGPT, converted once for the whole run."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from conversion import convert

from anesurgery import frontend
from anesurgery.mil import Array


@dataclass(frozen=True)
class Converted:
    """A tiny model from transformers, and what its conversion gave."""

    module: Any
    inputs: dict[str, Array]
    model: Any
    """The MLModel."""

    @property
    def expected(self) -> Array:
        """What torch gives for the inputs."""
        with torch.no_grad():
            made: torch.Tensor = self.module(*(torch.from_numpy(v) for v in self.inputs.values()))
        return made.numpy()


class _Attention(torch.nn.Module):
    """Attention as nanoGPT writes it: a buffer for the mask, `masked_fill` with -inf, or the fused form."""

    def __init__(self, width: int, flash: bool) -> None:
        super().__init__()
        self.c_attn, self.c_proj = torch.nn.Linear(width, 3 * width), torch.nn.Linear(width, width)
        self.register_buffer("bias", torch.tril(torch.ones(32, 32)).view(1, 1, 32, 32))
        self.flash = flash

    def forward(self, x: torch.Tensor) -> Any:
        batch, length, width = x.size()
        parts = self.c_attn(x).split(width, dim=2)
        q, k, v = (p.view(batch, length, 2, width // 2).transpose(1, 2) for p in parts)
        if self.flash:
            y = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            scores = (q @ k.transpose(-2, -1)) / (width // 2) ** 0.5
            keep: Any = self.bias
            scores = scores.masked_fill(keep[:, :, :length, :length] == 0, float("-inf"))
            y = torch.softmax(scores, dim=-1) @ v
        return self.c_proj(y.transpose(1, 2).contiguous().view(batch, length, width))


class _NanoGPT(torch.nn.Module):
    """A decoder of two layers in the manner of nanoGPT, with a tied head."""

    def __init__(self, flash: bool, width: int = 32, vocabulary: int = 101) -> None:
        super().__init__()
        self.wte, self.wpe = torch.nn.Embedding(vocabulary, width), torch.nn.Embedding(32, width)
        self.blocks = torch.nn.ModuleList(
            torch.nn.ModuleDict(
                {
                    "ln_1": torch.nn.LayerNorm(width),
                    "attn": _Attention(width, flash),
                    "ln_2": torch.nn.LayerNorm(width),
                    "fc": torch.nn.Linear(width, 4 * width),
                    "proj": torch.nn.Linear(4 * width, width),
                }
            )
            for _ in range(2)
        )
        self.ln_f = torch.nn.LayerNorm(width)
        self.head = torch.nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.wte.weight

    def forward(self, input_ids: torch.Tensor) -> Any:
        x = self.wte(input_ids) + self.wpe(torch.arange(input_ids.shape[1]))
        for block in self.blocks:
            layers: Any = block
            x = x + layers["attn"](layers["ln_1"](x))
            x = x + layers["proj"](torch.nn.functional.gelu(layers["fc"](layers["ln_2"](x))))
        return self.head(self.ln_f(x))


def _trocr(attn: str) -> Any:
    """A decoder of text that attends to what an encoder makes of a picture."""
    import transformers as hf

    sides = {"image_size": 32, "patch_size": 16}
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
    words = {"decoder_layers": 1, "decoder_attention_heads": 2, "d_model": 32, "decoder_ffn_dim": 64}
    encoder = hf.ViTConfig(**sizes, **sides, attn_implementation=attn)
    decoder = hf.TrOCRConfig(
        **words, vocab_size=101, cross_attention_hidden_size=32, max_position_embeddings=32
    )
    torch.manual_seed(0)
    parts = {"encoder": hf.ViTModel(encoder, add_pooling_layer=False), "decoder": hf.TrOCRForCausalLM(decoder)}
    return hf.VisionEncoderDecoderModel(**parts).eval()


def _build(name: str, attn: str) -> Any:
    """A model of two layers; GPT-2's vocabulary is odd, as the real one is."""
    if name == "nanogpt":
        torch.manual_seed(0)
        return _NanoGPT(flash=attn == "sdpa").eval()
    if name == "trocr":
        return _trocr(attn)
    import transformers as hf

    decoder = {
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "hidden_size": 32,
        "intermediate_size": 64,
        "vocab_size": 101,
        "max_position_embeddings": 32,
    }
    encoder = {k: v for k, v in decoder.items() if k not in ("num_key_value_heads", "vocab_size")}
    tokens = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    t5 = {"num_layers": 2, "num_heads": 2, "d_model": 32, "d_kv": 16, "d_ff": 64, "vocab_size": 101}
    whisper = {
        "encoder_layers": 2,
        "decoder_layers": 2,
        "encoder_attention_heads": 2,
        "decoder_attention_heads": 2,
        "d_model": 32,
        "encoder_ffn_dim": 64,
        "decoder_ffn_dim": 64,
        "vocab_size": 101,
        "num_mel_bins": 16,
        "max_source_positions": 24,
        "max_target_positions": 16,
        "decoder_start_token_id": 1,
    }
    gpt2 = {"n_layer": 2, "n_head": 2, "n_embd": 32, "vocab_size": 101, "n_positions": 32}
    gemma = {
        "head_dim": 8,
        "sliding_window": 7,
        "query_pre_attn_scalar": 8,
        "layer_types": ["sliding_attention", "full_attention"],
    }
    kinds: dict[str, tuple[str, str, dict[str, Any]]] = {
        "gpt2": ("GPT2LMHeadModel", "GPT2Config", gpt2),
        "gpt2_untied": ("GPT2LMHeadModel", "GPT2Config", gpt2 | {"tie_word_embeddings": False}),
        "llama": ("LlamaForCausalLM", "LlamaConfig", decoder),
        "qwen2": ("Qwen2ForCausalLM", "Qwen2Config", decoder),
        "qwen3": ("Qwen3ForCausalLM", "Qwen3Config", decoder | {"head_dim": 8}),
        "mistral": ("MistralForCausalLM", "MistralConfig", decoder | {"sliding_window": 7}),
        "gemma2": ("Gemma2ForCausalLM", "Gemma2Config", decoder | gemma),
        "gemma3": ("Gemma3ForCausalLM", "Gemma3TextConfig", decoder | gemma),
        "phi3": ("Phi3ForCausalLM", "Phi3Config", decoder | {"pad_token_id": 0}),
        "opt": ("OPTForCausalLM", "OPTConfig", encoder | {"vocab_size": 101, "ffn_dim": 64}),
        "gpt_neox": ("GPTNeoXForCausalLM", "GPTNeoXConfig", encoder | {"vocab_size": 101}),
        "smollm3": ("SmolLM3ForCausalLM", "SmolLM3Config", decoder | {"pad_token_id": 0}),
        "bert": ("BertModel", "BertConfig", encoder | {"vocab_size": 101}),
        "t5": ("T5ForConditionalGeneration", "T5Config", t5),
        "t5_encoder": ("T5EncoderModel", "T5Config", t5),
        "whisper": ("WhisperForConditionalGeneration", "WhisperConfig", whisper | tokens),
        "vit": (
            "ViTModel",
            "ViTConfig",
            {
                k: encoder[k]
                for k in ("num_hidden_layers", "num_attention_heads", "hidden_size", "intermediate_size")
            }
            | {"image_size": 32, "patch_size": 8},
        ),
    }
    model, config, options = kinds[name]
    torch.manual_seed(0)
    return getattr(hf, model)(getattr(hf, config)(attn_implementation=attn, **options)).eval()


def _example(name: str, mask: bool) -> dict[str, Array]:
    rng = np.random.default_rng(0)
    ids = rng.integers(3, 101, (1, 16)).astype(np.int32)
    if name == "vit":
        return {"pixel_values": rng.standard_normal((1, 3, 32, 32)).astype(np.float32)}
    if name == "trocr":
        return {
            "pixel_values": rng.standard_normal((1, 3, 32, 32)).astype(np.float32),
            "decoder_input_ids": ids[:, :8],
        }
    if name == "whisper":
        features = rng.standard_normal((1, 16, 48)).astype(np.float32)
        return {"input_features": features, "decoder_input_ids": ids[:, :8]}
    if name == "t5":
        return {"input_ids": ids, "decoder_input_ids": ids[:, :8]}
    ones = np.ones((1, 16), np.int32)
    ones[:, 12:] = 0
    return {"input_ids": ids, "attention_mask": ones} if mask else {"input_ids": ids}


class _First(torch.nn.Module):
    """The logits of a model, or its first output, from inputs by position."""

    def __init__(self, model: Any, names: list[str], options: dict[str, Any]) -> None:
        super().__init__()
        self.model, self.names, self.options = model, names, options

    def forward(self, *values: torch.Tensor) -> Any:
        made = self.model(**dict(zip(self.names, values, strict=True)), **self.options)
        if isinstance(made, torch.Tensor):
            return made
        return made.logits if hasattr(made, "logits") else made[0]


@functools.cache
def converted(
    name: str, how: str, attn: str, mask: bool, target: str, precision: str, cache: bool
) -> Converted:
    """A model by its name; `how` is "trace" or "export", `mask` asks for one of the padding as an input."""
    frontend.register()
    inputs = _example(name, mask)
    cached = name not in ("nanogpt", "bert", "t5_encoder", "vit")
    module = _First(_build(name, attn), list(inputs), {"use_cache": cache} if cached else {}).eval()
    example = {
        k: torch.from_numpy(v).long() if v.dtype.kind == "i" else torch.from_numpy(v) for k, v in inputs.items()
    }
    model = convert(module, example, how, target, "FLOAT16" if precision == "fp16" else "FLOAT32")
    return Converted(module, inputs, model)
