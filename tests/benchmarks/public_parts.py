"""What the models of the public forms share."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from hand_written import Does, conv, seq
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - as everybody calls it

WAVE = (1, 16000)
LONG_IDS, LONG_MASK = ("ids", (1, 128)), ("mask", (1, 128))


def layers(width: int, count: int = 1, many: int = 4) -> nn.Module:
    """Torch's own transformer, op by op."""
    torch.backends.mha.set_fastpath_enabled(False)
    layer = nn.TransformerEncoderLayer(width, many, 2 * width, batch_first=True, dropout=0.0)
    return nn.TransformerEncoder(layer, count, enable_nested_tensor=False)


def framed(size: int, step: int) -> nn.Module:
    """The power of a short-time Fourier transform, by a convolution with mirrored edges."""
    angle = torch.arange(size)[None] * torch.arange(size // 2 + 1)[:, None] * (2 * np.pi / size)
    layer = nn.Conv1d(1, size + 2, size, step, bias=False)
    layer.weight.data = (torch.cat([angle.cos(), angle.sin()]) * torch.hann_window(size))[:, None].float()

    def forward(p: Any, x: Tensor) -> Tensor:
        y = p["conv"](F.pad(x[:, None], (size // 2, size // 2), mode="reflect"))
        return y[:, : size // 2 + 1] ** 2 + y[:, size // 2 + 1 :] ** 2

    return Does(forward, conv=layer)


def mlp(width: int, act: type[nn.Module] = nn.GELU) -> nn.Module:
    """Four times as wide, and back."""
    return seq(nn.LayerNorm(width), nn.Linear(width, 4 * width), act(), nn.Linear(4 * width, width))


def linear3(names: str, width: int = 128) -> dict[str, nn.Module]:
    """Projections by name."""
    return {n: nn.Linear(width, width) for n in names}


def cross(width: int = 128) -> nn.Module:
    """Attention of one sequence to another."""
    return nn.MultiheadAttention(width, 4, batch_first=True)


def wide_stem(channels: int = 128) -> nn.Module:
    """Down to an eighth, with channels enough for the engine."""
    return seq(conv(3, 64, s=2), conv(64, channels, s=2), conv(channels, channels, s=2))
