"""Speech in and out, keywords, codecs: public forms with random weights, for residency.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import hand_written
import torch
from hand_written import Does, conv, conv1, fn, head, plus, seq
from public_parts import WAVE, framed, layers
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - as everybody calls it

from anesurgery import frontend


def mel(p: Any, x: Tensor) -> Tensor:
    """Log mel energies: the power of an STFT through a filter bank."""
    return p["bank"](p["stft"](x).transpose(1, 2)).transpose(1, 2).clamp(min=1e-3).log()


def keywords() -> nn.Module:
    """Keyword spotting: log mel, separable convolutions, a mean."""
    body = [seq(conv(64, 64, groups=64), conv(64, 64, 1)) for _ in range(3)]
    return seq(
        Does(mel, stft=framed(512, 160), bank=nn.Linear(257, 40)),
        fn(lambda x: x.transpose(1, 2)[:, None]),
        nn.Conv2d(1, 64, (10, 4), 2, padding=(5, 1)),
        *body,
        head(64, 12),
    )


def separated(p: Any, x: Tensor) -> Tensor:
    """Conv-TasNet: a learnt filter bank, dilated blocks, masks, the bank back."""
    y = F.relu(p["enc"](x[:, None]))
    masks = p["mask"](p["body"](p["in"](y))).sigmoid().reshape(1, 2, 256, -1)
    return p["dec"]((masks * y[:, None]).reshape(2, 256, -1)).reshape(1, 2, -1)


def dilated_block(channels: int, d: int) -> nn.Module:
    """A residual block of Conv-TasNet with norms over everything."""
    body = seq(
        nn.Conv1d(channels, 256, 1),
        nn.PReLU(),
        nn.GroupNorm(1, 256),
        nn.Conv1d(256, 256, 3, padding=d, dilation=d, groups=256),
        nn.PReLU(),
        nn.GroupNorm(1, 256),
        nn.Conv1d(256, channels, 1),
    )
    return plus(body)


def raw_speech() -> nn.Module:
    """wav2vec's feature extractor: seven convolutions over samples, and positions by a wide convolution."""
    sizes = ((1, 10, 5), (256, 3, 2), (256, 3, 2), (256, 3, 2), (256, 3, 2), (256, 2, 2), (256, 2, 2))
    body = [
        seq(nn.Conv1d(a, 256, k, s, bias=False), nn.GroupNorm(256, 256) if a == 1 else nn.Identity(), nn.GELU())
        for a, k, s in sizes
    ]
    place = seq(nn.Conv1d(256, 256, 128, padding=64, groups=16), fn(lambda x: x[..., :-1]), nn.GELU())
    return seq(fn(lambda x: x[:, None]), *body, plus(place), fn(lambda x: x.transpose(1, 2)), layers(256))


def voice() -> nn.Module:
    """HiFi-GAN: transposed convolutions up, dilated residual blocks, tanh."""

    def level(a: int, b: int, k: int, s: int) -> nn.Module:
        block = [plus(seq(nn.LeakyReLU(0.1), nn.Conv1d(b, b, 7, padding=3 * d, dilation=d))) for d in (1, 3, 5)]
        return seq(nn.LeakyReLU(0.1), nn.ConvTranspose1d(a, b, k, s, (k - s) // 2), *block)

    ends = (nn.Conv1d(80, 256, 7, padding=3), nn.Conv1d(32, 1, 7, padding=3))
    return seq(
        ends[0],
        level(256, 128, 16, 8),
        level(128, 64, 16, 8),
        level(64, 32, 4, 2),
        nn.LeakyReLU(),
        ends[1],
        nn.Tanh(),
    )


def pooled_statistics(p: Any, x: Tensor) -> Tensor:
    """Speaker embedding: attention weights over time, weighted mean and deviation."""
    y = p["body"](x)
    wide = torch.cat([y, y.mean(2, keepdim=True).expand_as(y), y.std(2, keepdim=True).expand_as(y)], 1)
    share = p["attention"](wide).softmax(2)
    mean = (share * y).sum(2)
    deviation = ((share * y**2).sum(2) - mean**2).clamp(min=1e-4).sqrt()
    return F.normalize(p["out"](torch.cat([mean, deviation], 1)))


def quantized_speech(p: Any, x: Tensor) -> Tensor:
    """A codec's encoder and the nearest entry of its code book."""
    y = p["body"](x[:, None]).transpose(1, 2)
    book = p["book"].weight
    far = (y**2).sum(-1, keepdim=True) - 2 * y @ book.T + (book**2).sum(-1)
    return far.argmin(-1)


MODELS: hand_written.Models = {
    "keywords": (keywords, [WAVE]),
    "tasnet": (
        lambda: Does(
            separated,
            **{
                "enc": nn.Conv1d(1, 256, 16, 8, bias=False),
                "in": seq(nn.GroupNorm(1, 256), nn.Conv1d(256, 128, 1)),
                "body": seq(*(dilated_block(128, d) for d in (1, 2, 4, 8))),
                "mask": nn.Conv1d(128, 512, 1),
                "dec": nn.ConvTranspose1d(256, 1, 16, 8, bias=False),
            },
        ),
        [WAVE],
    ),
    "wav2vec": (raw_speech, [WAVE]),
    "hifigan": (voice, [(1, 80, 64)]),
    "speaker": (
        lambda: Does(
            pooled_statistics,
            body=seq(conv1(80, 256, 5), conv1(256, 256, 3, d=2), conv1(256, 256, 3, d=3)),
            attention=seq(nn.Conv1d(768, 64, 1), nn.Tanh(), nn.Conv1d(64, 256, 1)),
            out=seq(nn.BatchNorm1d(512), nn.Linear(512, 192)),
        ),
        [(1, 80, 300)],
    ),
    "codec": (
        lambda: Does(
            quantized_speech,
            body=seq(
                nn.Conv1d(1, 64, 7, padding=3),
                nn.ELU(),
                nn.Conv1d(64, 128, 16, 8, 4),
                nn.ELU(),
                nn.Conv1d(128, 128, 16, 8, 4),
                nn.ELU(),
            ),
            book=nn.Embedding(1024, 128),
        ),
        [WAVE],
    ),
    "voice_activity": (
        lambda: Does(
            lambda p, x, m: (
                p["out"](F.relu(p["lstm"](p["body"](p["stft"](x).sqrt()).transpose(1, 2))[0])).sigmoid()
                * m[:, :26, None].float()
            ).mean(1),
            stft=framed(256, 160),
            body=seq(conv1(129, 128), conv1(128, 64, s=2), conv1(64, 64, s=2)),
            lstm=nn.LSTM(64, 64, batch_first=True),
            out=nn.Linear(64, 1),
        ),
        [WAVE, ("mask", (1, 26))],
    ),
}


def names() -> list[str]:
    """All models."""
    return list(MODELS)


def package(name: str, folder: Path) -> Path:
    """Convert a model to fp16; one that is in the folder already is taken from there."""
    frontend.register()
    return hand_written.package(name, folder, MODELS)
