"""The models that docs/sized-models.md is about: of several families, small, with random weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor, nn

from anesurgery import frontend
from anesurgery.mil import ct, quiet_host

LENGTHS = (4, 8, 12, 16, 20, 24)
SHORTER = (8, 20)
"""Lengths that are made of a model of the largest alone."""
Input = tuple[tuple[Any, ...], str]
"""The shape of an input, in which None is the length, and its type."""


@dataclass(frozen=True)
class Sized:
    """A model, how it is converted, and what is added to it.

    Attributes:
        build: makes the module.
        inputs: by name; each None of a shape is the length.
        mask: the name of a mask that is added.
        lengths: of its six sizes.
        least: the shortest length of a range.
    """

    build: Callable[[], nn.Module]
    inputs: Mapping[str, Input]
    mask: str | None = None
    lengths: tuple[int, ...] = LENGTHS
    least: int = 1

    def shapes(self, length: int) -> dict[str, tuple[int, ...]]:
        """Of each input at a length."""
        return {
            name: tuple(length if n is None else n for n in shape) for name, (shape, _) in self.inputs.items()
        }

    def forms(self, length: int | str) -> dict[str, Any]:
        """Of each input at a length, at a "range" of all, or at those of a "list"."""
        if isinstance(length, int):
            return dict(self.shapes(length))
        if length == "list":
            every = [self.shapes(n) for n in self.lengths]
            return {
                name: ct.EnumeratedShapes([one[name] for one in every], default=every[1][name])
                for name in self.inputs
            }
        most, default = self.lengths[-1], self.lengths[1]
        sides = [ct.RangeDim(self.least, most, default=default) for _ in range(2)]
        return {
            name: tuple(sides[shape[:a].count(None)] if n is None else n for a, n in enumerate(shape))
            for name, (shape, _) in self.inputs.items()
        }

    def convert(self, module: nn.Module, length: int | str = "range") -> Any:
        """At one length, at a range of all, or at those of a list."""
        frontend.register()
        traced = self.shapes(length if isinstance(length, int) else self.lengths[1])
        example = [
            torch.ones(traced[name], dtype=getattr(torch, kind)) for name, (_, kind) in self.inputs.items()
        ]
        forms = self.forms(length)
        with torch.no_grad(), quiet_host():
            graph: Any = torch.jit.trace(module.eval(), example, check_trace=False)  # type: ignore[no-untyped-call]
            return ct.convert(
                graph,
                inputs=[
                    ct.TensorType(name, forms[name], dtype=np.dtype(kind).type)
                    for name, (_, kind) in self.inputs.items()
                ],
                minimum_deployment_target=ct.target.iOS18,
                skip_model_load=True,
            )

    def values(self, length: int) -> dict[str, Any]:
        """Numbers of the inputs; a mask hides some places but the first."""
        rng, found = np.random.default_rng(length), dict[str, Any]()
        for name, (_, kind) in self.inputs.items():
            shape = self.shapes(length)[name]
            value = rng.integers(3, 100, shape) if kind == "int32" else rng.standard_normal(shape)
            if name == "mask":
                value = np.ones(shape)
                value[..., 3:5] = 0
            found[name] = value.astype(kind)
        return found

    def with_mask(self, values: dict[str, Any], length: int) -> dict[str, Any]:
        """The values, and the mask that was added."""
        return values | ({self.mask: np.ones((1, length), np.float32)} if self.mask else {})


class Of(nn.Module):
    """What a function makes of a module."""

    def __init__(self, inner: nn.Module, call: Callable[..., Any]) -> None:
        super().__init__()
        self.inner, self.call = inner, call

    def forward(self, *values: Tensor) -> Any:
        return self.call(self.inner, *values)


TEXT: dict[str, Any] = {
    "vocab_size": 120,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "max_position_embeddings": 80,
}


def family(name: str, settings: Mapping[str, Any], model: str | None = None) -> Any:
    """A small model of transformers with random weights."""
    config = getattr(transformers, f"{name}Config")(**settings)
    config._attn_implementation = "eager"
    config.use_cache = False
    torch.manual_seed(0)
    return getattr(transformers, model or f"{name}Model")(config)


def text(
    name: str, more: dict[str, Any] | None = None, model: str | None = None, masked: bool = True, what: Any = 0
) -> Sized:
    def build() -> nn.Module:
        return Of(
            family(name, TEXT | (more or {}), model),
            lambda inner, ids, *mask: inner(ids, **({"attention_mask": mask[0]} if mask else {}))[what],
        )

    names = ("ids", "mask") if masked else ("ids",)
    return Sized(build, dict.fromkeys(names, ((1, None), "int32")))


class WhisperEncoder(nn.Module):
    """The encoder of transformers at any length: positions are the first rows of its table."""

    def __init__(self) -> None:
        super().__init__()
        self.inner: Any = family(
            "Whisper",
            {
                "vocab_size": 120,
                "d_model": 32,
                "encoder_layers": 2,
                "decoder_layers": 1,
                "encoder_attention_heads": 2,
                "decoder_attention_heads": 2,
                "encoder_ffn_dim": 64,
                "decoder_ffn_dim": 64,
                "num_mel_bins": 20,
                "max_source_positions": 64,
                "pad_token_id": 0,
                "bos_token_id": 1,
                "eos_token_id": 2,
                "decoder_start_token_id": 1,
            },
        ).encoder

    def forward(self, mel: Tensor) -> Tensor:
        one = self.inner
        x = nn.functional.gelu(one.conv2(nn.functional.gelu(one.conv1(mel)))).permute(0, 2, 1)
        x = x + one.embed_positions.weight[: x.shape[1]]
        for layer in one.layers:
            x = layer(x, None)
            x = x[0] if isinstance(x, tuple) else x
        return one.layer_norm(x)


class Conformer(nn.Module):
    """Feed forward, attention and a depthwise convolution, as in speech recognition."""

    def __init__(self) -> None:
        super().__init__()
        width, kernel = 32, 7

        def feed() -> nn.Module:
            return nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 64), nn.SiLU(), nn.Linear(64, width))

        self.first, self.last = feed(), feed()
        self.norm, self.attention = (
            nn.LayerNorm(width),
            nn.ModuleList(nn.Linear(width, width) for _ in range(4)),
        )
        self.before = nn.LayerNorm(width)
        self.into, self.out = nn.Conv1d(width, 2 * width, 1), nn.Conv1d(width, width, 1)
        self.deep = nn.Conv1d(width, width, kernel, padding=kernel // 2, groups=width)
        self.middle = nn.BatchNorm1d(width)
        self.end = nn.LayerNorm(width)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        x = x + 0.5 * self.first(x)
        y = self.norm(x)
        q, k, v, o = self.attention
        heads = [one(y).view(1, -1, 2, 16).transpose(1, 2) for one in (q, k, v)]
        scores = heads[0] @ heads[1].transpose(-1, -2) / 4
        if mask is not None:
            scores = scores.masked_fill(mask[:, None, None, :] == 0, -1e4)
        y = (scores.softmax(-1) @ heads[2]).transpose(1, 2).reshape(1, -1, 32)
        x = x + o(y)
        y = nn.functional.glu(self.into(self.before(x).transpose(1, 2)), dim=1)
        if mask is not None:
            y = y * mask[:, None, :].to(y.dtype)
        y = self.out(nn.functional.silu(self.middle(self.deep(y)))).transpose(1, 2)
        x = x + y
        return self.end(x + 0.5 * self.last(x))


class Causal(nn.Module):
    """Convolutions that read what was, as in a TCN."""

    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.ModuleList(nn.Conv1d(8, 8, 3, dilation=2**i) for i in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for i, conv in enumerate(self.convs):
            x = x + torch.relu(conv(nn.functional.pad(x, (2 * 2**i, 0))))
        return x


class Tagger(nn.Module):
    """A recurrent layer and a head."""

    def __init__(self, both: bool, kind: Any = nn.LSTM) -> None:
        super().__init__()
        self.words = nn.Embedding(120, 16)
        self.steps, self.head = (
            kind(16, 16, 2, batch_first=True, bidirectional=both),
            nn.Linear(32 if both else 16, 5),
        )

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.steps(self.words(ids))[0])


def seeded(build: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    def one() -> nn.Module:
        torch.manual_seed(0)
        return build()

    return one


def conformer_hf() -> nn.Module:
    return Of(
        family(
            "Wav2Vec2Conformer",
            TEXT
            | {
                "position_embeddings_type": "rotary",
                "conv_depthwise_kernel_size": 7,
                "max_source_positions": 80,
                "conv_dim": (16, 16),
                "conv_stride": (5, 2),
                "conv_kernel": (10, 3),
                "num_feat_extract_layers": 2,
            },
        ).encoder,
        lambda inner, x: inner(x)[0],
    )


def convolutional() -> nn.Module:
    parts = [nn.Conv1d(8, 16, 3, padding=1), nn.ReLU(), nn.Conv1d(16, 8, 5, padding=2)]
    return nn.Sequential(*parts)


class Pictures(nn.Module):
    """A vision transformer whose positions are interpolated to the size of the picture."""

    def __init__(self, **more: int) -> None:
        super().__init__()
        form = {
            "image_size": 64,
            "patch_size": 8,
            "num_channels": 3,
            "hidden_size": 64,
            "intermediate_size": 128,
        }
        self.inner: Any = family("ViT", TEXT | form | more)

    def forward(self, x: Tensor) -> Any:
        return self.inner(x, interpolate_pos_encoding=True).last_hidden_state


STEPS: dict[str, Input] = {"x": ((1, None, 32), "float32")}
IDS: dict[str, Input] = {"ids": ((1, None), "int32")}
MELS: dict[str, Input] = {"mel": ((1, 20, None), "float32")}
CHANNELS: dict[str, Input] = {"x": ((1, 8, None), "float32")}
MODELS: dict[str, Sized] = {
    "BERT": text("Bert"),
    "Whisper encoder": Sized(seeded(WhisperEncoder), MELS),
    "Whisper encoder, `mask=` added": Sized(seeded(WhisperEncoder), MELS, "mask"),
    "conformer": Sized(seeded(Conformer), STEPS),
    "conformer, `mask=` added": Sized(seeded(Conformer), STEPS, "mask"),
    "fully convolutional": Sized(seeded(convolutional), CHANNELS),
    "fully convolutional, `mask=` added": Sized(seeded(convolutional), CHANNELS, "mask"),
    "causal convolutions": Sized(seeded(Causal), CHANNELS),
    "LSTM tagger": Sized(seeded(lambda: Tagger(False)), IDS),
    "LSTM tagger in both directions": Sized(seeded(lambda: Tagger(True)), IDS),
    "GPT-2": text("GPT2", {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 80}, masked=False),
    "Llama": text("Llama", masked=False),
    "conformer from transformers": Sized(conformer_hf, STEPS),
    "T5 encoder": text(
        "T5", {"d_model": 32, "d_kv": 16, "d_ff": 64, "num_layers": 2, "num_heads": 2}, "T5EncoderModel"
    ),
}
FIXED = {name: model for name, model in MODELS.items() if model.mask is None}


def small_vit() -> nn.Module:
    """As large as ViT-S/16."""
    heads = {"num_hidden_layers": 12, "num_attention_heads": 6}
    return Pictures(image_size=224, patch_size=16, hidden_size=384, intermediate_size=1536, **heads)


MODULES: dict[str, tuple[Callable[[], nn.Module], list[tuple[int, ...]]]] = {
    "ViT, positions interpolated": (Pictures, [(1, 3, n, n) for n in (32, 48, 64, 80, 96, 112)]),
    "the same, as large as ViT-S/16": (small_vit, [(1, 3, n, n) for n in (128, 160, 192, 224, 256, 288)]),
}
