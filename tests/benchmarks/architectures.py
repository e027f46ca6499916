"""Small models with random weights: how a row of the matrix is built, and with what it is called.

Each names the family recipe that is meant for it, if there is one; all others go through `auto`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from anesurgery.mil import Array

Sizes = dict[str, Any]

# As wide as small models in use, with two layers: narrower ones are too small for a verdict on their products.
LAYERS: Sizes = {"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 256, "intermediate_size": 512}
TEXT = LAYERS | {"vocab_size": 32000, "max_position_embeddings": 256}
DECODER = TEXT | {"num_key_value_heads": 4, "head_dim": 64, "pad_token_id": 0}
GPT = {"n_layer": 2, "n_head": 12, "n_embd": 768, "vocab_size": 50257, "n_positions": 256, "n_ctx": 256}
SEQ2SEQ = {
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 12,
    "decoder_attention_heads": 12,
    "d_model": 768,
    "encoder_ffn_dim": 2048,
    "decoder_ffn_dim": 2048,
    "vocab_size": 32000,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
}
T5 = {"num_layers": 2, "num_heads": 12, "d_model": 768, "d_kv": 64, "d_ff": 2048, "vocab_size": 32128}
WHISPER = SEQ2SEQ | {
    "vocab_size": 51865,
    "num_mel_bins": 80,
    "max_source_positions": 100,
    "max_target_positions": 64,
}
PATCHES = LAYERS | {"image_size": 224, "patch_size": 16}
WAVES = LAYERS | {"vocab_size": 32, "num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 4}
RESNET = {
    "model_type": "resnet",
    "embedding_size": 32,
    "hidden_sizes": [32, 64, 128, 256],
    "depths": [1, 1, 1, 1],
    "out_features": ["stage2", "stage3", "stage4"],
}
DINO = LAYERS | {
    "model_type": "dinov2",
    "num_hidden_layers": 4,
    "image_size": 518,
    "patch_size": 14,
    "out_features": ["stage1", "stage2", "stage3", "stage4"],
    "reshape_hidden_states": False,
}
STAGES = {"image_size": 224, "embed_dim": 96, "depths": [2, 2], "num_heads": [3, 6], "window_size": 7}
BOXES = SEQ2SEQ | {"num_queries": 20, "use_timm_backbone": False, "use_pretrained_backbone": False}


def tokens(length: int = 128) -> dict[str, Array]:
    """Token ids."""
    return {"input_ids": np.random.default_rng(0).integers(3, 1000, (1, length)).astype(np.int32)}


def masked(length: int = 128) -> dict[str, Array]:
    """Token ids, of which the last quarter is padding."""
    seen = np.ones((1, length), np.int32)
    seen[:, length * 3 // 4 :] = 0
    return tokens(length) | {"attention_mask": seen}


def both() -> dict[str, Array]:
    """Token ids for the encoder and a few for the decoder."""
    ids = tokens()["input_ids"]
    return {"input_ids": ids, "decoder_input_ids": ids[:, :8]}


def pixels(side: int = 224, channels: int = 3, name: str = "pixel_values") -> Callable[[], dict[str, Array]]:
    """A square picture."""
    shape = (1, channels, side, side)
    return lambda: {name: np.random.default_rng(0).standard_normal(shape).astype(np.float32)}


def waves() -> dict[str, Array]:
    """Half a second of sound."""
    return {"input_values": np.random.default_rng(0).standard_normal((1, 8000)).astype(np.float32)}


def mel(frames: int = 200) -> dict[str, Array]:
    """Two seconds of a spectrogram."""
    return {"input_features": np.random.default_rng(0).standard_normal((1, 80, frames)).astype(np.float32)}


def spoken() -> dict[str, Array]:
    """A spectrogram and the first words."""
    return mel() | {"decoder_input_ids": tokens()["input_ids"][:, :8]}


def written() -> dict[str, Array]:
    """A picture of words, and the first of them."""
    return pixels()() | {"decoder_input_ids": tokens()["input_ids"][:, :8]}


def trocr(sizes: Sizes) -> Callable[[], Any]:
    """An encoder of pictures, and a decoder that reads what it makes of them."""

    def build() -> Any:
        import transformers as hf

        words = {"d_model": sizes["hidden_size"], "vocab_size": 32000, "pad_token_id": 1}
        words |= {"decoder_layers": 2, "decoder_attention_heads": sizes["num_attention_heads"]}
        words |= {"decoder_ffn_dim": sizes["intermediate_size"], "max_position_embeddings": 64}
        words |= {"cross_attention_hidden_size": sizes["hidden_size"]}
        encoder = hf.ViTModel(hf.ViTConfig(**sizes, image_size=224, patch_size=16), add_pooling_layer=False)
        return hf.VisionEncoderDecoderModel(
            encoder=encoder, decoder=hf.TrOCRForCausalLM(hf.TrOCRConfig(**words))
        )

    return build


def noisy(**extra: tuple[int, ...]) -> Callable[[], dict[str, Array]]:
    """A latent picture, a time step, and what conditions it."""

    def make() -> dict[str, Array]:
        rng = np.random.default_rng(0)
        given = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in extra.items()}
        latent = {k: v for k, v in given.items() if k in ("sample", "hidden_states")}
        rest = {k: v for k, v in given.items() if k not in latent}
        return latent | {"timestep": np.array([10.0], np.float32)} | rest

    return make


@dataclass(frozen=True)
class Architecture:
    """One row of the matrix."""

    build: Callable[[], Any]
    inputs: Callable[[], dict[str, Array]]
    recipe: str | None = None
    options: tuple[tuple[str, Any], ...] = ()
    """Keyword arguments of the call."""
    method: str = "__call__"
    part: str = ""
    """The output that is converted; the logits or the first by default."""

    def module(self) -> torch.nn.Module:
        """The model with random weights, called with its inputs by position, giving one tensor."""
        torch.manual_seed(0)
        made = _OneOutput(self.build(), tuple(self.inputs()), self).eval()
        for part in made.modules():
            if isinstance(part, torch.nn.Conv2d):
                part.reset_parameters()
        _settle_norms(made, self.example())
        _show_something(made.eval(), self.example())
        return made

    def example(self) -> tuple[torch.Tensor, ...]:
        """The inputs as tensors."""
        found = [torch.from_numpy(value) for value in self.inputs().values()]
        return tuple(v.long() if v.dtype == torch.int32 else v for v in found)


def _settle_norms(module: torch.nn.Module, example: tuple[torch.Tensor, ...]) -> None:
    """Batch norms as after training on the example; else values fade to 0, and fp16 is not tried."""
    norms = [part for part in module.modules() if isinstance(part, torch.nn.modules.batchnorm._BatchNorm)]
    for norm in norms:
        norm.momentum = 1.0
        norm.train()
    with torch.no_grad():
        module(*(torch.cat([v, v.flip(-1), -v, v / 2]) for v in example)) if norms else None


def _show_something(module: torch.nn.Module, example: tuple[torch.Tensor, ...]) -> None:
    """Where the output is one number all over, as behind a head of zeros, draw what was set to one number.

    Raises:
        ValueError: it still is: nothing that is compared with it could be wrong.
    """
    with torch.no_grad():
        if not _is_constant(module(*example)):
            return
        for parameter in module.parameters():
            if parameter.numel() > 1 and _is_constant(parameter):
                parameter.add_(0.1 * torch.randn_like(parameter))
        if _is_constant(module(*example)):
            raise ValueError("the output is one number all over, whatever is computed")


def _is_constant(x: torch.Tensor) -> bool:
    return bool((x == x.flatten()[0]).all())


class _OneOutput(torch.nn.Module):
    def __init__(self, model: Any, names: tuple[str, ...], row: Architecture) -> None:
        super().__init__()
        self.model, self.names, self.row = model, names, row

    def forward(self, *values: torch.Tensor) -> Any:
        call = self.model if self.row.method == "__call__" else getattr(self.model, self.row.method)
        made = call(**dict(zip(self.names, values, strict=True)), **dict(self.row.options))
        if self.row.part:
            return getattr(made, self.row.part)
        if isinstance(made, torch.Tensor):
            return made
        return made.logits if getattr(made, "logits", None) is not None else made[0]


def hugging_face(model: str, config: str, sizes: Sizes) -> Callable[[], Any]:
    def build() -> Any:
        import transformers as hf

        return getattr(hf, model)(getattr(hf, config)(**sizes))

    return build


def decoder(
    name: str, sizes: Sizes = DECODER, config: str = "", model: str = "", recipe: str | None = "decoder_ane"
) -> Architecture:
    """A causal language model; one without attention is not for `decoder_ane`."""
    build = hugging_face(model or f"{name}ForCausalLM", config or f"{name}Config", sizes)
    return Architecture(build, tokens, recipe, (("use_cache", False),))


def encoder(name: str, sizes: Sizes = TEXT, *, model: str = "", inputs: Any = masked) -> Architecture:
    """A text encoder, with an attention mask."""
    return Architecture(hugging_face(model or f"{name}Model", f"{name}Config", sizes), inputs, "encoder_ane")


def picture(
    name: str, sizes: Sizes = PATCHES, *, model: str = "", config: str = "", side: int = 224, part: str = ""
) -> Architecture:
    """A transformer over pictures."""
    build = hugging_face(model or f"{name}Model", config or f"{name}Config", sizes)
    return Architecture(build, pixels(side), "vit_ane", part=part)


def plain(model: str, config: str, sizes: Sizes, inputs: Any, recipe: str | None = None) -> Architecture:
    return Architecture(hugging_face(model, config, sizes), inputs, recipe)


def from_timm(name: str, side: int = 224, recipe: str | None = None, **options: Any) -> Architecture:
    def build() -> Any:
        import timm

        return timm.create_model(name, pretrained=False, **options)

    return Architecture(build, pixels(side, name="x"), recipe)


def from_diffusers(name: str, inputs: Any, recipe: str | None, method: str = "", **sizes: Any) -> Architecture:
    def build() -> Any:
        import diffusers

        return getattr(diffusers, name)(**sizes)

    options = () if method == "_encode" else (("return_dict", False),)
    return Architecture(build, inputs, recipe, options, method or "__call__")
