"""The encoder and decoder of a Whisper, as people write them in PyTorch: small, with random weights."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

MELS, FRAMES, TOKENS, VOCABULARY = 80, 512, 32, 51865
WIDTH, HEADS, LAYERS = 384, 6, 2
"""The widths of Whisper tiny, half of its layers and a sixth of its frames: it converts in seconds."""


class Attention(nn.Module):
    """Attention to oneself or to what the encoder heard; keys without a bias."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH, bias=bias) for bias in (True, False, True))
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, heard: Tensor, mask: Tensor | None = None) -> Tensor:
        """Attend from `x` to `heard`."""
        size = WIDTH // HEADS
        q, k, v = (
            each.view(1, -1, HEADS, size).transpose(1, 2) for each in (self.q(x), self.k(heard), self.v(heard))
        )
        scores = q @ k.transpose(-1, -2) / math.sqrt(size)
        scores = scores if mask is None else scores + mask
        mixed = (scores.softmax(-1) @ v).transpose(1, 2).reshape(1, -1, WIDTH)
        return self.out(mixed)


class Layer(nn.Module):
    """A layer of either side; that of the decoder also attends to the encoder."""

    def __init__(self, cross: bool) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(3 if cross else 2))
        self.own, self.cross = Attention(), Attention() if cross else None
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor, heard: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
        """Attend and compute, each added to what came in."""
        normed = self.norms[0](x)
        x = x + self.own(normed, normed, mask)
        if self.cross is not None and heard is not None:
            x = x + self.cross(self.norms[1](x), heard)
        return x + self.mlp(self.norms[-1](x))


def waves() -> Tensor:
    """Positions as sines and cosines, [frames / 2, width]."""
    speeds = torch.exp(-math.log(10000) / (WIDTH // 2 - 1) * torch.arange(WIDTH // 2))
    angles = torch.arange(FRAMES // 2)[:, None] * speeds[None, :]
    return torch.cat([angles.sin(), angles.cos()], 1)


class Whisper(nn.Module):
    """A spectrogram [1, 80, frames] and ids [1, tokens] to logits [1, tokens, vocabulary]."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv1d(MELS, WIDTH, 3, padding=1)
        self.conv2 = nn.Conv1d(WIDTH, WIDTH, 3, stride=2, padding=1)
        self.encoder = nn.ModuleList(Layer(cross=False) for _ in range(LAYERS))
        self.decoder = nn.ModuleList(Layer(cross=True) for _ in range(LAYERS))
        self.heard, self.said = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Parameter(torch.randn(TOKENS, WIDTH))

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
