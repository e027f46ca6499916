"""Small transformers models with random weights, one for each family, converted as a user would."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from anesurgery import frontend
from anesurgery.mil import Array, ct, quiet_host

DECODER = {
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_size": 256,
    "head_dim": 64,
    "intermediate_size": 512,
    "vocab_size": 32000,
    "max_position_embeddings": 64,
}
ENCODER = {k: v for k, v in DECODER.items() if k not in ("num_key_value_heads", "head_dim")}
PICTURES = {k: v for k, v in ENCODER.items() if k not in ("vocab_size", "max_position_embeddings")}
T5 = {"num_layers": 2, "num_heads": 4, "d_model": 256, "d_kv": 64, "d_ff": 512, "vocab_size": 32128}
TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
WHISPER = {
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "d_model": 256,
    "encoder_ffn_dim": 512,
    "decoder_ffn_dim": 512,
    "vocab_size": 51865,
    "num_mel_bins": 80,
    "max_source_positions": 100,
    "max_target_positions": 64,
}
GPT2 = {"n_layer": 2, "n_head": 4, "n_embd": 256, "vocab_size": 50257, "n_positions": 64}

KINDS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "gpt2": ("GPT2LMHeadModel", "GPT2Config", GPT2),
    "llama": ("LlamaForCausalLM", "LlamaConfig", DECODER),
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Config", DECODER),
    "mistral": ("MistralForCausalLM", "MistralConfig", DECODER | {"sliding_window": 16}),
    "gemma3": ("Gemma3ForCausalLM", "Gemma3TextConfig", DECODER | {"sliding_window": 16}),
    "bert": ("BertForMaskedLM", "BertConfig", ENCODER),
    "vit": ("ViTModel", "ViTConfig", PICTURES | {"image_size": 224, "patch_size": 16}),
    "clip": ("CLIPVisionModel", "CLIPVisionConfig", PICTURES | {"image_size": 224, "patch_size": 32}),
    "whisper": ("WhisperForConditionalGeneration", "WhisperConfig", WHISPER | TOKENS),
    "t5": ("T5ForConditionalGeneration", "T5Config", T5),
    "swin": (
        "SwinModel",
        "SwinConfig",
        {"image_size": 224, "embed_dim": 96, "depths": [2, 2], "num_heads": [3, 6], "window_size": 7},
    ),
}
"""Name -> class of the model, class of its configuration, sizes."""

MASKED = ("bert", "llama")
"""Models that are converted a second time, with an attention mask as an input."""


def names() -> list[str]:
    """All variants; "-mask" stands for an attention mask."""
    return [*KINDS, *(f"{name}-mask" for name in MASKED)]


class _First(torch.nn.Module):
    """The logits of a model, or its first output, from inputs by position."""

    def __init__(self, model: Any, inputs: list[str], options: dict[str, Any]) -> None:
        super().__init__()
        self.model, self.inputs, self.options = model, inputs, options

    def forward(self, *values: torch.Tensor) -> Any:
        made = self.model(**dict(zip(self.inputs, values, strict=True)), **self.options)
        return made.logits if hasattr(made, "logits") else made[0]


def values(name: str) -> dict[str, Array]:
    """Inputs for a variant."""
    rng, kind = np.random.default_rng(0), name.removesuffix("-mask")
    ids = rng.integers(3, 1000, (1, 64)).astype(np.int32)
    if "image_size" in KINDS[kind][2]:
        side = KINDS[kind][2]["image_size"]
        return {"pixel_values": rng.standard_normal((1, 3, side, side)).astype(np.float32)}
    if kind == "whisper":
        features = rng.standard_normal((1, 80, 200)).astype(np.float32)
        return {"input_features": features, "decoder_input_ids": ids[:, :8]}
    if kind == "t5":
        return {"input_ids": ids, "decoder_input_ids": ids[:, :8]}
    seen = np.ones_like(ids)
    seen[:, 48:] = 0
    return {"input_ids": ids, "attention_mask": seen} if name.endswith("-mask") else {"input_ids": ids}


def package(name: str, folder: Path) -> Path:
    """Convert a variant to fp16; one that is in the folder already is taken from there."""
    import transformers as hf

    path = folder / f"{name}.mlpackage"
    if path.exists():
        return path
    frontend.register()
    kind, inputs = name.removesuffix("-mask"), values(name)
    model, config, sizes = KINDS[kind]
    torch.manual_seed(0)
    made = getattr(hf, model)(getattr(hf, config)(attn_implementation="eager", **sizes)).eval()
    options = {"use_cache": False} if "ForC" in model or kind == "gpt2" or kind == "t5" else {}
    example = tuple(
        torch.from_numpy(v).long() if v.dtype.kind == "i" else torch.from_numpy(v) for v in inputs.values()
    )
    with torch.no_grad(), quiet_host():
        traced: Any = torch.jit.trace(  # type: ignore[no-untyped-call]
            _First(made, list(inputs), options).eval(), example, check_trace=False
        )
        converted = ct.convert(
            traced,
            inputs=[ct.TensorType(k, shape=v.shape, dtype=v.dtype) for k, v in inputs.items()],
            minimum_deployment_target=ct.target.iOS17,
            skip_model_load=True,
        )
    converted.save(str(path))
    return path
