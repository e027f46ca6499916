"""The example models, and `example`, which writes one of them as a package.

GPT-2, Llama, BERT, Whisper, a vision transformer and a UNet, as people write them in PyTorch: small, with
random weights.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from anesurgery import frontend
from anesurgery.errors import LoadError, UnknownName
from anesurgery.files.package import save
from anesurgery.files.writing import check_target, write_atomically
from anesurgery.loading import load
from anesurgery.mil import ct, silent_host

LEAST = torch.finfo(torch.float32).min


@dataclass(frozen=True)
class Sizes:
    """How large a model of text is: its vocabulary, tokens of one input, width, heads and layers."""

    words: int
    tokens: int = 64
    width: int = 512
    heads: int = 8
    layers: int = 4


GPT2_SIZES, LLAMA_SIZES, BERT_SIZES = Sizes(50257), Sizes(32000), Sizes(30522)
TINY = Sizes(words=96, tokens=16, width=32, heads=2, layers=1)


class Attention(nn.Module):
    """Attention; fewer heads of keys and values than of queries are repeated."""

    def __init__(self, sizes: Sizes, key_heads: int = 0, bias: bool = True) -> None:
        super().__init__()
        width = sizes.width
        self.heads, self.size = sizes.heads, width // sizes.heads
        self.key_heads = key_heads or sizes.heads
        self.queries = nn.Linear(width, width, bias=bias)
        self.keys = nn.Linear(width, self.key_heads * self.size, bias=bias)
        self.values = nn.Linear(width, self.key_heads * self.size, bias=bias)
        self.out = nn.Linear(width, width, bias=bias)

    def split(self, x: Tensor, heads: int) -> Tensor:
        """[1, tokens, heads * size] as [1, heads, tokens, size]."""
        return x.view(1, -1, heads, self.size).transpose(1, 2)

    def forward(self, x: Tensor, mask: Tensor, turn: tuple[Tensor, Tensor] | None = None) -> Tensor:
        """Attend; `mask` is added to the scores, `turn` is cos and sin of rotary positions."""
        q, k, v = (
            self.split(self.queries(x), self.heads),
            self.keys(x),
            self.split(self.values(x), self.key_heads),
        )
        k = self.split(k, self.key_heads)
        if turn is not None:
            q, k = rotated(q, *turn), rotated(k, *turn)
        k, v = (each.repeat_interleave(self.heads // self.key_heads, 1) for each in (k, v))
        scores = q @ k.transpose(-1, -2) / math.sqrt(self.size) + mask
        mixed = scores.softmax(-1) @ v
        return self.out(mixed.transpose(1, 2).reshape(1, -1, self.heads * self.size))


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions, the halves as pairs."""
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat([-second, first], -1) * sin


def causal(tokens: int) -> Tensor:
    """A mask that lets no position see a later one, made as models make it: in fp32, with -inf."""
    allowed = torch.ones(tokens, tokens).tril().bool()
    return torch.zeros(tokens, tokens).masked_fill(~allowed, float("-inf"))


class RootNorm(nn.Module):
    """RMSNorm, computed in fp32."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        """Divide by the root of the mean square."""
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5))


class Gated(nn.Module):
    """The feed-forward part of a Llama: SwiGLU."""

    def __init__(self, width: int) -> None:
        super().__init__()
        inner = 11 * width // 4
        self.gate, self.up = (nn.Linear(width, inner, bias=False) for _ in range(2))
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Gate, and back to the width."""
        return self.down(functional.silu(self.gate(x)) * self.up(x))


def feed_forward(width: int, gelu: str) -> nn.Sequential:
    """Two linear layers around a gelu."""
    return nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(gelu), nn.Linear(4 * width, width))


class GPT2Block(nn.Module):
    """Norms in front, gelu by tanh."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(sizes.width), nn.LayerNorm(sizes.width)
        self.attn, self.mlp = Attention(sizes), feed_forward(sizes.width, "tanh")

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        """Attend and compute, each added to what came in."""
        x = x + self.attn(self.ln_1(x), mask)
        return x + self.mlp(self.ln_2(x))


class GPT2(nn.Module):
    """Ids [1, tokens] to logits [1, tokens, vocabulary]; the head is the table of the tokens."""

    def __init__(self, sizes: Sizes = GPT2_SIZES) -> None:
        super().__init__()
        self.wte = nn.Embedding(sizes.words, sizes.width)
        self.wpe = nn.Embedding(sizes.tokens, sizes.width)
        self.h = nn.ModuleList(GPT2Block(sizes) for _ in range(sizes.layers))
        self.ln_f = nn.LayerNorm(sizes.width)

    def forward(self, ids: Tensor) -> Tensor:
        """Logits of every position."""
        tokens = ids.shape[1]
        x = self.wte(ids) + self.wpe(torch.arange(tokens))
        for block in self.h:
            x = block(x, causal(tokens))
        return functional.linear(self.ln_f(x), self.wte.weight)


class LlamaBlock(nn.Module):
    """RMSNorm in front, rotary positions, grouped keys, SwiGLU."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.input_layernorm, self.post_attention_layernorm = RootNorm(sizes.width), RootNorm(sizes.width)
        self.self_attn, self.mlp = Attention(sizes, 2, bias=False), Gated(sizes.width)

    def forward(self, x: Tensor, mask: Tensor, turn: tuple[Tensor, Tensor]) -> Tensor:
        """Attend and compute, each added to what came in."""
        x = x + self.self_attn(self.input_layernorm(x), mask, turn)
        return x + self.mlp(self.post_attention_layernorm(x))


class Llama(nn.Module):
    """Ids [1, tokens] to logits [1, tokens, vocabulary]."""

    def __init__(self, sizes: Sizes = LLAMA_SIZES) -> None:
        super().__init__()
        self.size = sizes.width // sizes.heads
        self.embed_tokens = nn.Embedding(sizes.words, sizes.width)
        self.layers = nn.ModuleList(LlamaBlock(sizes) for _ in range(sizes.layers))
        self.norm = RootNorm(sizes.width)
        self.lm_head = nn.Linear(sizes.width, sizes.words, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        """Logits of every position."""
        tokens, size = ids.shape[1], self.size
        speeds = 10000.0 ** -(torch.arange(0, size, 2) / size)
        angles = torch.outer(torch.arange(tokens).float(), speeds)
        turn = (torch.cat([angles, angles], -1).cos(), torch.cat([angles, angles], -1).sin())
        x = self.embed_tokens(ids)
        for layer in self.layers:
            x = layer(x, causal(tokens), turn)
        return self.lm_head(self.norm(x))


class BertBlock(nn.Module):
    """Norms behind, exact gelu."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.attention, self.ffn = Attention(sizes), feed_forward(sizes.width, "none")
        self.attention_norm, self.ffn_norm = nn.LayerNorm(sizes.width), nn.LayerNorm(sizes.width)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        """Attend and compute, each added to what came in, and normed."""
        x = self.attention_norm(x + self.attention(x, mask))
        return self.ffn_norm(x + self.ffn(x))


class Bert(nn.Module):
    """Ids and an attention mask, [1, tokens] each, to a sentence embedding [1, width]."""

    def __init__(self, sizes: Sizes = BERT_SIZES) -> None:
        super().__init__()
        self.words = nn.Embedding(sizes.words, sizes.width)
        self.positions = nn.Embedding(sizes.tokens, sizes.width)
        self.types, self.norm = nn.Embedding(2, sizes.width), nn.LayerNorm(sizes.width)
        self.layers = nn.ModuleList(BertBlock(sizes) for _ in range(sizes.layers))
        self.pooler = nn.Linear(sizes.width, sizes.width)

    def forward(self, ids: Tensor, attention_mask: Tensor) -> Tensor:
        """The embedding of the first token."""
        tokens = ids.shape[1]
        x = self.words(ids) + self.positions(torch.arange(tokens)) + self.types(torch.zeros_like(ids))
        hidden = torch.zeros(1, 1, 1, tokens).masked_fill(attention_mask[:, None, None, :] == 0, LEAST)
        x = self.norm(x)
        for layer in self.layers:
            x = layer(x, hidden)
        return self.pooler(x[:, 0]).tanh()


MELS, FRAMES, TOKENS, VOCABULARY = 80, 512, 32, 51865
SPEECH_WIDTH, SPEECH_HEADS, SPEECH_LAYERS = 384, 6, 2
"""The widths of Whisper tiny, half of its layers and a sixth of its frames: it converts in seconds."""


class SpeechAttention(nn.Module):
    """Attention to oneself or to what the encoder heard; keys without a bias."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (
            nn.Linear(SPEECH_WIDTH, SPEECH_WIDTH, bias=bias) for bias in (True, False, True)
        )
        self.out = nn.Linear(SPEECH_WIDTH, SPEECH_WIDTH)

    def forward(self, x: Tensor, heard: Tensor, mask: Tensor | None = None) -> Tensor:
        """Attend from `x` to `heard`."""
        size = SPEECH_WIDTH // SPEECH_HEADS
        q, k, v = (
            each.view(1, -1, SPEECH_HEADS, size).transpose(1, 2)
            for each in (self.q(x), self.k(heard), self.v(heard))
        )
        scores = q @ k.transpose(-1, -2) / math.sqrt(size)
        scores = scores if mask is None else scores + mask
        mixed = (scores.softmax(-1) @ v).transpose(1, 2).reshape(1, -1, SPEECH_WIDTH)
        return self.out(mixed)


class SpeechLayer(nn.Module):
    """A layer of either side; that of the decoder also attends to the encoder."""

    def __init__(self, cross: bool) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(SPEECH_WIDTH) for _ in range(3 if cross else 2))
        self.own, self.cross = SpeechAttention(), SpeechAttention() if cross else None
        self.mlp = feed_forward(SPEECH_WIDTH, "none")

    def forward(self, x: Tensor, heard: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
        """Attend and compute, each added to what came in."""
        normed = self.norms[0](x)
        x = x + self.own(normed, normed, mask)
        if self.cross is not None and heard is not None:
            x = x + self.cross(self.norms[1](x), heard)
        return x + self.mlp(self.norms[-1](x))


def waves() -> Tensor:
    """Positions as sines and cosines, [frames / 2, width]."""
    speeds = torch.exp(-math.log(10000) / (SPEECH_WIDTH // 2 - 1) * torch.arange(SPEECH_WIDTH // 2))
    angles = torch.arange(FRAMES // 2)[:, None] * speeds[None, :]
    return torch.cat([angles.sin(), angles.cos()], 1)


class Whisper(nn.Module):
    """A spectrogram [1, 80, frames] and ids [1, tokens] to logits [1, tokens, vocabulary]."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv1d(MELS, SPEECH_WIDTH, 3, padding=1)
        self.conv2 = nn.Conv1d(SPEECH_WIDTH, SPEECH_WIDTH, 3, stride=2, padding=1)
        self.encoder = nn.ModuleList(SpeechLayer(cross=False) for _ in range(SPEECH_LAYERS))
        self.decoder = nn.ModuleList(SpeechLayer(cross=True) for _ in range(SPEECH_LAYERS))
        self.heard, self.said = nn.LayerNorm(SPEECH_WIDTH), nn.LayerNorm(SPEECH_WIDTH)
        self.tokens = nn.Embedding(VOCABULARY, SPEECH_WIDTH)
        self.positions = nn.Parameter(torch.randn(TOKENS, SPEECH_WIDTH))

    def forward(self, mel: Tensor, ids: Tensor) -> Tensor:
        """Listen, then say."""
        x = functional.gelu(self.conv2(functional.gelu(self.conv1(mel)))).transpose(1, 2) + waves()
        for layer in self.encoder:
            x = layer(x)
        heard, tokens = self.heard(x), ids.shape[1]
        mask = torch.full((tokens, tokens), float("-inf")).triu(1)
        x = self.tokens(ids) + self.positions[:tokens]
        for layer in self.decoder:
            x = layer(x, heard, mask)
        return functional.linear(self.said(x), self.tokens.weight)


VISION_WIDTH, VISION_HEADS, VISION_LAYERS, PATCH, SIDE = 192, 3, 4, 16, 224
"""The widths of ViT tiny with a third of its layers, so that it converts in seconds."""


class Patches(nn.Module):
    """A picture [1, 3, 224, 224] as 197 tokens: one of the class, and one for each patch."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Conv2d(3, VISION_WIDTH, PATCH, PATCH)
        self.token = nn.Parameter(torch.randn(1, 1, VISION_WIDTH))
        self.positions = nn.Parameter(torch.randn(1, (SIDE // PATCH) ** 2 + 1, VISION_WIDTH))

    def forward(self, picture: Tensor) -> Tensor:
        """Tokens with their positions."""
        patches = self.project(picture).flatten(2).transpose(1, 2)
        return torch.cat([self.token, patches], 1) + self.positions


class VisionLayer(nn.Module):
    """Norms in front, attention in fused form, exact gelu."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(VISION_WIDTH), nn.LayerNorm(VISION_WIDTH)
        self.qkv, self.proj = nn.Linear(VISION_WIDTH, 3 * VISION_WIDTH), nn.Linear(VISION_WIDTH, VISION_WIDTH)
        self.mlp = feed_forward(VISION_WIDTH, "none")

    def forward(self, x: Tensor) -> Tensor:
        """Attend and compute, each added to what came in."""
        tokens = x.shape[1]
        q, k, v = (
            self.qkv(self.norm1(x))
            .reshape(1, tokens, 3, VISION_HEADS, VISION_WIDTH // VISION_HEADS)
            .permute(2, 0, 3, 1, 4)
        )
        scores = q @ k.transpose(-1, -2) * (VISION_WIDTH // VISION_HEADS) ** -0.5
        x = x + self.proj((scores.softmax(-1) @ v).transpose(1, 2).reshape(1, tokens, VISION_WIDTH))
        return x + self.mlp(self.norm2(x))


class ViT(nn.Module):
    """A picture [1, 3, 224, 224] to scores [1, 1000]."""

    def __init__(self) -> None:
        super().__init__()
        self.patches, self.norm = Patches(), nn.LayerNorm(VISION_WIDTH)
        self.head = nn.Linear(VISION_WIDTH, 1000)
        self.layers = nn.Sequential(*(VisionLayer() for _ in range(VISION_LAYERS)))

    def forward(self, picture: Tensor) -> Tensor:
        """The scores of the class token."""
        return self.head(self.norm(self.layers(self.patches(picture)))[:, 0])


class Residual(nn.Module):
    """Two convolutions behind group norms, added to what came in."""

    def __init__(self, channels: int, out: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.GroupNorm(16, channels), nn.GroupNorm(16, out)
        self.conv1, self.conv2 = nn.Conv2d(channels, out, 3, padding=1), nn.Conv2d(out, out, 3, padding=1)
        self.skip, self.act = nn.Conv2d(channels, out, 1), nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        """Convolve twice."""
        return self.skip(x) + self.conv2(self.act(self.norm2(self.conv1(self.act(self.norm1(x))))))


def larger(channels: int, out: int) -> nn.Sequential:
    """Twice the size; the edges are mirrored in front of the convolution."""
    return nn.Sequential(nn.Upsample(scale_factor=2), nn.ReflectionPad2d(1), nn.Conv2d(channels, out, 3))


class UNet(nn.Module):
    """A noisy picture [1, 4, 64, 64] to its noise, of the same shape."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave = nn.Conv2d(4, 64, 3, padding=1), nn.Conv2d(64, 4, 3, padding=1)
        self.down1, self.down2, self.middle = Residual(64, 64), Residual(64, 128), Residual(128, 128)
        self.up2, self.up1 = larger(128, 128), larger(128, 64)
        self.join2, self.join1 = Residual(256, 128), Residual(128, 64)

    def forward(self, noisy: Tensor) -> Tensor:
        """Down, and up again beside what was seen on the way."""
        wide = self.down1(self.enter(noisy))
        half = self.down2(functional.avg_pool2d(wide, 2))
        x = self.middle(functional.avg_pool2d(half, 2))
        x = self.join2(torch.cat([self.up2(x), half], 1))
        return self.leave(self.join1(torch.cat([self.up1(x), wide], 1)))


class OldNetwork(nn.Module):
    """Convolutions whose sums and products broadcast: what iOS 13 brought, and the engine does not take."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 32, 3, 2, 1), nn.Conv2d(32, 64, 3, padding=1)
        self.third, self.head = nn.Conv2d(64, 64, 3, padding=1), nn.Linear(64, 10)
        self.scale = nn.Parameter(torch.rand(64, 1, 1))

    def forward(self, picture: Tensor) -> Tensor:
        """Scores of a picture."""
        x = self.second(functional.relu(self.first((picture - 0.5) / 0.25))).relu()
        x = x * self.scale - x.mean((2, 3), keepdim=True)
        return self.head((self.third(x) + x).mean((2, 3)))


@dataclass(frozen=True)
class Example:
    """A model that can be made."""

    module: Callable[[], torch.nn.Module]
    """Makes it, with random weights."""
    inputs: Mapping[str, tuple[tuple[int, ...], Any]]
    """Name -> shape and dtype."""
    output: str
    """Its name."""
    recipe: str
    """The one for its family."""
    words: str
    """What it is."""
    form: str = "mlprogram"
    """The form of the model, as coremltools names it: a program, or a network of layers in an .mlmodel."""
    target: str = "iPhone 13"
    """A device on which its recipe gains something."""

    @property
    def suffix(self) -> str:
        """The suffix of its file."""
        return ".mlpackage" if self.form == "mlprogram" else ".mlmodel"


IDS = ((1, GPT2_SIZES.tokens), np.int32)
EXAMPLES = {
    "gpt2": Example(GPT2, {"input_ids": IDS}, "logits", "gpt2_ane", "a GPT-2 with 4 layers, 64 tokens"),
    "llama": Example(Llama, {"input_ids": IDS}, "logits", "decoder_ane", "a Llama with 4 layers, 64 tokens"),
    "bert": Example(
        Bert,
        {"input_ids": IDS, "attention_mask": IDS},
        "embedding",
        "encoder_ane",
        "a BERT with 4 layers and an attention mask, 64 tokens",
    ),
    "vit": Example(
        ViT,
        {"picture": ((1, 3, SIDE, SIDE), np.float32)},
        "scores",
        "vit_ane",
        "a vision transformer with 4 layers, 224 x 224 pixels",
        target="iPhone 12",
    ),
    "whisper": Example(
        Whisper,
        {"mel": ((1, MELS, FRAMES), np.float32), "input_ids": ((1, TOKENS), np.int32)},
        "logits",
        "whisper_ane",
        "a Whisper with 2 + 2 layers, 512 frames, 32 tokens",
    ),
    "unet": Example(
        UNet,
        {"noisy": ((1, 4, 64, 64), np.float32)},
        "noise",
        "unet_ane",
        "a UNet, 64 x 64 latents",
        target="iPhone 12",
    ),
    "network": Example(
        OldNetwork,
        {"picture": ((1, 3, 64, 64), np.float32)},
        "scores",
        "neuralnetwork_ane",
        "an image network in the old .mlmodel format, 64 x 64 pixels",
        form="neuralnetwork",
    ),
    "tiny": Example(
        lambda: GPT2(TINY),
        {"input_ids": ((1, TINY.tokens), np.int32)},
        "logits",
        "gpt2_ane",
        "a GPT-2 with 1 layer, 16 tokens and 96 words, to try commands on (too small to get faster)",
    ),
}

VERSIONS = (16, 17, 18)
"""The iOS releases for which an example may be made: from the first with fp16 inputs on."""


def example(
    name: str, out: str | os.PathLike[str] | None = None, *, ios: int = 16, overwrite: bool = False
) -> Path:
    """Write a small model to try the library on: a real architecture with random weights.

    The same name always gives the same weights.

    Args:
        name: "gpt2", "llama", "bert", "vit", "whisper" or "unet"; "network", an .mlmodel of layers; or "tiny",
            a GPT-2 that takes a second to make, and is too small to gain anything.
        out: the package to write. Default: NAME.mlpackage (or .mlmodel) in the current folder.
        ios: the first version of iOS that runs it, 16 to 18. Caches need the states of 18.
        overwrite: may what is there be replaced?

    Returns:
        The path of the package.

    Raises:
        UnknownName: there is no such example.
        LoadError: no such version of iOS, or the path exists or cannot be written.
    """
    if name not in EXAMPLES:
        raise UnknownName("example", name, EXAMPLES)
    if ios not in VERSIONS:
        raise LoadError(f"no example is made for iOS {ios}; say one of {', '.join(map(str, VERSIONS))}")
    chosen = EXAMPLES[name]
    path = Path(f"{name}{chosen.suffix}" if out is None else out).expanduser().absolute()
    check_target(None, path, overwrite, chosen.suffix)
    model = _converted(chosen, ios)
    if chosen.form == "mlprogram":
        return save(load(model), path, overwrite=overwrite)
    content = model.get_spec().SerializeToString()
    return write_atomically(path, lambda file: file.write_bytes(content), overwrite)


def _converted(chosen: Example, ios: int) -> Any:
    """The model of an example; a program is in fp16 as coremltools computes by default."""
    frontend.register()
    with torch.random.fork_rng(devices=[]), torch.no_grad(), silent_host():
        torch.manual_seed(0)
        module = chosen.module().eval()
        inputs = tuple(
            torch.zeros(shape, dtype=torch.int64 if kind is np.int32 else torch.float32)
            for shape, kind in chosen.inputs.values()
        )
        trace: Any = torch.jit.trace
        return ct.convert(
            trace(module, inputs, check_trace=False),
            inputs=[ct.TensorType(n, shape=s, dtype=kind) for n, (s, kind) in chosen.inputs.items()],
            outputs=[ct.TensorType(chosen.output)],
            convert_to=chosen.form,
            minimum_deployment_target=ct.target[f"iOS{ios}"] if chosen.form == "mlprogram" else None,
            skip_model_load=True,
        )
