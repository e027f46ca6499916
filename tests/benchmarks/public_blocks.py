"""Blocks that kept models off the ANE when nobody had tried them yet: public forms, for residency.py."""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import hand_written
import torch
from hand_written import PICTURE, Does, conv, plus, seq
from public_parts import mlp, wide_stem
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - as everybody calls it

from anesurgery import frontend


def pitch(p: Any, x: Tensor) -> Tensor:
    """CREPE: kernels of 512 and 64 samples along the height, batch norm after the activation."""
    y = x[:, None, :, None]
    for i, pad in enumerate(((254, 254), *[(31, 32)] * 5)):
        y = F.max_pool2d(p[f"n{i}"](F.relu(p[f"c{i}"](F.pad(y, (0, 0, *pad))))), (2, 1), (2, 1))
    return p["out"](y.permute(0, 2, 1, 3).reshape(-1, 256)).sigmoid()


def pitched() -> nn.Module:
    """The layers of `pitch`."""
    widths = (1, 128, 32, 32, 32, 64, 64)
    long = {
        f"c{i}": nn.Conv2d(widths[i], widths[i + 1], (64 if i else 512, 1), (1 if i else 4, 1))
        for i in range(6)
    }
    return Does(
        pitch, out=nn.Linear(256, 360), **long, **{f"n{i}": nn.BatchNorm2d(widths[i + 1]) for i in range(6)}
    )


def denoised(p: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    """RNNoise: three GRUs, each of which reads what those before it found."""
    a = p["in"](x).tanh()
    v = p["voice"](a)[0]
    n = p["noise"](torch.cat([a, v, x], -1))[0]
    return p["bands"](p["all"](torch.cat([v, n, x], -1))[0]).sigmoid(), p["active"](v).sigmoid()


def shifted_scores(p: Any, x: Tensor) -> Tensor:
    """Conformer: relative positions, shifted by a padded view."""
    b, t, _ = x.shape
    q, k, v = (p[n](x).view(b, t, 4, 36) for n in "qkv")
    places = torch.arange(t - 1, -t, -1.0)[:, None] * torch.exp(
        torch.arange(0, 144, 2) * (-math.log(1e4) / 144)
    )
    table = p["p"](torch.stack([places.sin(), places.cos()], -1).flatten(1)[None]).view(1, -1, 4, 36)
    near = (q + 0.1).transpose(1, 2) @ k.permute(0, 2, 3, 1)
    far = (q - 0.1).transpose(1, 2) @ table.permute(0, 2, 3, 1)
    far = torch.cat([torch.zeros(b, 4, t, 1), far], -1).view(b, 4, 2 * t, t)[:, :, 1:]
    scores = (near + far.reshape(b, 4, t, 2 * t - 1)[..., :t]) / 6
    return p["o"]((scores.softmax(-1) @ v.transpose(1, 2)).transpose(1, 2).reshape(b, t, 144))


def vocoder() -> nn.Module:
    """MelGAN: reflected edges, dilated blocks, transposed convolutions with output padding."""
    made: list[nn.Module] = [nn.ReflectionPad1d(3), nn.Conv1d(80, 256, 7)]
    c = 256
    for r in (8, 2):
        made += [nn.LeakyReLU(0.2), nn.ConvTranspose1d(c, c // 2, 2 * r, r, r // 2)]
        c //= 2
        made += [
            plus(seq(nn.LeakyReLU(0.2), nn.ReflectionPad1d(d), nn.Conv1d(c, c, 3, dilation=d))) for d in (1, 3)
        ]
    return seq(*made, nn.ReflectionPad1d(3), nn.Conv1d(c, 1, 7), nn.Tanh())


def across_channels(p: Any, x: Tensor) -> Tensor:
    """Restormer: attention between channels, norms of vectors as long as the picture."""
    y = p["in"](x)
    b, c, h, w = y.shape
    z = p["norm"](y.flatten(2).transpose(1, 2)).transpose(1, 2).view(b, c, h, w)
    q, k, v = (t.view(b, 4, c // 4, h * w) for t in p["deep"](p["qkv"](z)).chunk(3, 1))
    shares = (F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).transpose(-2, -1)).softmax(-1)
    y = y + p["out"]((shares @ v).reshape(b, c, h, w))
    return F.pixel_shuffle(p["last"](F.pixel_unshuffle(y, 2)), 2)


def costs(p: Any, a: Tensor, b: Tensor) -> Tensor:
    """PWC-Net: a volume of 81 shifted products."""
    a, b = p["body"](a), p["body"](b)
    h, w = a.shape[2:]
    wide = F.pad(b, (4, 4, 4, 4))
    shifted = [(a * wide[:, :, i : i + h, j : j + w]).mean(1, keepdim=True) for i in range(9) for j in range(9)]
    return p["up"](p["flow"](F.leaky_relu(torch.cat(shifted, 1), 0.1)))


def stepwise(p: Any, x: Tensor) -> Tensor:
    """ConvLSTM over six pictures, unrolled."""
    h = c = torch.zeros(1, 32, 32, 32)
    for t in range(6):
        i, f, o, g = p["gates"](torch.cat([x[:, t], h], 1)).chunk(4, 1)
        c = f.sigmoid() * c + i.sigmoid() * g.tanh()
        h = o.sigmoid() * c.tanh()
    return p["out"](h)


def prior_boxes(p: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    """SSD: constant prior boxes, moved and scaled by what two levels say."""
    levels = [a := p["body"](x), p["down"](a)]

    def joined(name: str, size: int) -> Iterable[Tensor]:
        return (p[f"{name}{i}"](y).permute(0, 2, 3, 1).reshape(1, -1, size) for i, y in enumerate(levels))

    moves, scores = torch.cat([*joined("box", 4)], 1), torch.cat([*joined("class", 21)], 1)
    count = torch.arange(moves.shape[1])
    priors = torch.stack([(count % n + 1.0) / n for n in (32, 31, 8, 7)], -1)
    centre = priors[:, :2] + moves[..., :2] * 0.1 * priors[:, 2:]
    size = priors[:, 2:] * torch.exp(moves[..., 2:] * 0.2)
    return torch.cat([centre - size / 2, centre + size / 2], -1), scores.softmax(-1)


def answered(p: Any, ids: Tensor, mask: Tensor, kinds: Tensor) -> tuple[Tensor, Tensor]:
    """A question answerer of BERT's form, its epsilon of 1e-12 included."""
    x = p["norm"](p["words"](ids) + p["places"](torch.arange(64)[None]) + p["kinds"](kinds))
    far = (1.0 - mask[:, None, None, :].float()) * -10000.0
    q, k, v = (p[n](x).view(1, 64, 4, 32).permute(0, 2, 1, 3) for n in "qkv")
    seen = ((q @ k.transpose(-1, -2)) / math.sqrt(32) + far).softmax(-1) @ v
    x = x + p["o"](seen.permute(0, 2, 1, 3).reshape(1, 64, 128))
    first, last = p["ends"](x + p["mlp"](x)).split(1, -1)
    return first.squeeze(-1), last.squeeze(-1)


def described(p: Any, ids: Tensor) -> Tensor:
    """CLIP's text tower: the row of the largest id, normalised."""
    x = p["words"](ids) + p["places"](torch.arange(77)[None])
    q, k, v = p["qkv"](p["norm"](x)).view(1, 77, 3, 2, 64).permute(2, 0, 3, 1, 4).unbind(0)
    ahead = torch.full((77, 77), float("-inf")).triu_(1)
    x = x + p["o"](
        ((q @ k.transpose(-1, -2) * 0.125 + ahead).softmax(-1) @ v).transpose(1, 2).reshape(1, 77, 128)
    )
    y = p["out"]((x + p["mlp"](x))[torch.arange(1), ids.argmax(-1)])
    return y / y.norm(dim=-1, keepdim=True)


def words_of_two_directions(p: Any, ids: Tensor) -> Tensor:
    """A bidirectional GRU, and attention over its steps."""
    h = p["gru"](p["words"](ids))[0]
    shares = p["score"](p["map"](h).tanh()).softmax(1)
    return p["out"]((shares * h).sum(1)).softmax(-1)


def square(width: int, names_: str) -> dict[str, nn.Module]:
    """A linear map for each name."""
    return {name: nn.Linear(width, width) for name in names_}


MODELS: hand_written.Models = {
    "pitch": (pitched, [(1, 1024)]),
    "three_grus": (
        lambda: Does(
            denoised,
            **{
                "in": nn.Linear(42, 24),
                "voice": nn.GRU(24, 24, batch_first=True),
                "noise": nn.GRU(90, 48, batch_first=True),
                "all": nn.GRU(114, 96, batch_first=True),
                "bands": nn.Linear(96, 22),
                "active": nn.Linear(24, 1),
            },
        ),
        [(1, 20, 42)],
    ),
    "relative_shift": (lambda: Does(shifted_scores, **square(144, "qkvpo")), [(1, 50, 144)]),
    "melgan": (vocoder, [(1, 80, 50)]),
    "channel_attention": (
        lambda: Does(
            across_channels,
            **{
                "in": nn.Conv2d(3, 48, 3, padding=1),
                "norm": nn.LayerNorm(48),
                "qkv": nn.Conv2d(48, 144, 1),
                "deep": nn.Conv2d(144, 144, 3, padding=1, groups=144),
                "out": nn.Conv2d(48, 48, 1),
                "last": nn.Conv2d(192, 12, 3, padding=1),
            },
        ),
        [(1, 3, 128, 128)],
    ),
    "cost_volume": (
        lambda: Does(
            costs,
            body=seq(conv(3, 64, s=2), conv(64, 64, s=2)),
            flow=seq(conv(81, 64), nn.Conv2d(64, 2, 3, padding=1)),
            up=nn.ConvTranspose2d(2, 2, 4, 2, 1),
        ),
        [(1, 3, 128, 128), (1, 3, 128, 128)],
    ),
    "conv_lstm": (
        lambda: Does(stepwise, gates=nn.Conv2d(33, 128, 3, padding=1), out=nn.Conv2d(32, 1, 1)),
        [(1, 6, 1, 32, 32)],
    ),
    "prior_boxes": (
        lambda: Does(
            prior_boxes,
            body=wide_stem(),
            down=conv(128, 128, s=2),
            **{f"box{i}": nn.Conv2d(128, 24, 3, padding=1) for i in range(2)},
            **{f"class{i}": nn.Conv2d(128, 126, 3, padding=1) for i in range(2)},
        ),
        [PICTURE],
    ),
    "large_deconvolution": (
        lambda: seq(
            wide_stem(128),
            conv(128, 128, s=2),
            conv(128, 128, s=2),
            nn.Conv2d(128, 21, 1),
            nn.ConvTranspose2d(21, 21, 64, 32, 16, bias=False),
        ),
        [PICTURE],
    ),
    "answers": (
        lambda: Does(
            answered,
            words=nn.Embedding(3000, 128),
            places=nn.Embedding(128, 128),
            kinds=nn.Embedding(2, 128),
            norm=nn.LayerNorm(128, eps=1e-12),
            mlp=mlp(128),
            ends=nn.Linear(128, 2),
            **square(128, "qkvo"),
        ),
        [("ids", (1, 64)), ("mask", (1, 64)), ("kinds", (1, 64))],
    ),
    "clip_text": (
        lambda: Does(
            described,
            words=nn.Embedding(1000, 128),
            places=nn.Embedding(77, 128),
            qkv=nn.Linear(128, 384),
            o=nn.Linear(128, 128),
            norm=nn.LayerNorm(128),
            mlp=mlp(128),
            out=nn.Linear(128, 64),
        ),
        [("ids", (1, 77))],
    ),
    "two_way_gru": (
        lambda: Does(
            words_of_two_directions,
            words=nn.Embedding(2000, 100),
            gru=nn.GRU(100, 64, batch_first=True, bidirectional=True),
            map=nn.Linear(128, 128),
            score=nn.Linear(128, 1, bias=False),
            out=nn.Linear(128, 5),
        ),
        [("ids", (1, 24))],
    ),
}


def names() -> list[str]:
    """All models."""
    return list(MODELS)


def package(name: str, folder: Path) -> Path:
    """Convert a model to fp16; one that is in the folder already is taken from there."""
    frontend.register()
    return hand_written.package(name, folder, MODELS)
