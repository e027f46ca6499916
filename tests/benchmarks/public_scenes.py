"""Segmentation, depth, restoration, style: public forms with random weights, for residency.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import hand_written
import numpy as np
import torch
from hand_written import PICTURE, Does, conv, fn, plus, resize, seq
from public_parts import layers, wide_stem
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - as everybody calls it

from anesurgery import frontend


def dilated_pyramid() -> nn.Module:
    """DeepLab's pyramid: dilated branches, and the mean of the picture spread over it."""

    def forward(p: Any, x: Tensor) -> Tensor:
        y = p["stem"](x)
        mean = F.interpolate(p["mean"](y.mean((2, 3), keepdim=True)), y.shape[2:], mode="bilinear")
        branches = [p["one"](y), *(p[f"d{d}"](y) for d in (6, 12, 18)), mean]
        return F.interpolate(p["out"](torch.cat(branches, 1)), x.shape[2:], mode="bilinear").argmax(1)

    dilated = {f"d{d}": conv(128, 64, dilation=d) for d in (6, 12, 18)}
    return Does(
        forward,
        stem=seq(conv(3, 64, s=2), conv(64, 128, s=2), conv(128, 128, s=2)),
        one=conv(128, 64, 1),
        mean=seq(nn.Conv2d(128, 64, 1), nn.ReLU()),
        out=seq(conv(320, 64, 1), nn.Conv2d(64, 21, 1)),
        **dilated,
    )


def two_resolutions(p: Any, x: Tensor) -> Tensor:
    """HRNet: branches at two resolutions that exchange what they found."""
    a = p["stem"](x)
    b = p["down"](a)
    a, b = p["a"](a), p["b"](b)
    up = F.interpolate(p["up"](b), scale_factor=2, mode="nearest")
    return p["out"](torch.cat([F.relu(a + up), F.interpolate(F.relu(b + p["fuse"](a)), scale_factor=2)], 1))


def styled() -> nn.Module:
    """Style transfer: reflected edges, instance norms, transposed convolutions, tanh to pixels."""
    down = [
        seq(nn.ReflectionPad2d(1), nn.Conv2d(a, b, 3, 2), nn.InstanceNorm2d(b, affine=True), nn.ReLU())
        for a, b in ((32, 64), (64, 128))
    ]
    up = [
        seq(nn.ConvTranspose2d(a, b, 3, 2, 1, 1), nn.InstanceNorm2d(b, affine=True), nn.ReLU())
        for a, b in ((128, 64), (64, 32))
    ]
    block = seq(nn.ReflectionPad2d(1), nn.Conv2d(128, 128, 3), nn.InstanceNorm2d(128, affine=True), nn.ReLU())
    return seq(
        nn.ReflectionPad2d(4),
        nn.Conv2d(3, 32, 9),
        *down,
        plus(block),
        *up,
        nn.ReflectionPad2d(4),
        nn.Conv2d(32, 3, 9),
        fn(lambda x: (x.tanh() + 1) * 127.5),
    )


def enlarged(p: Any, x: Tensor) -> Tensor:
    """Super resolution: pixel shuffle of what was learnt, added to a bicubic enlargement."""
    y = F.pixel_shuffle(p["out"](p["body"](p["in"](x)) + p["in"](x)), 2)
    return y + F.interpolate(x, scale_factor=2, mode="bicubic", align_corners=False)


def depth(p: Any, x: Tensor) -> Tensor:
    """MiDaS: levels are enlarged with aligned corners and added."""
    a = p["a"](x)
    b = p["b"](a)
    c = p["c"](b)
    for skip in (b, a):
        c = p["fuse"](F.interpolate(c, scale_factor=2, mode="bilinear", align_corners=True) + skip)
    return F.relu(p["out"](F.interpolate(c, scale_factor=2, mode="bilinear", align_corners=True))).squeeze(1)


def warped(p: Any, x: Tensor, y: Tensor) -> Tensor:
    """Optical flow: the second picture is sampled where the flow points."""
    flow = p["flow"](torch.cat([x, y], 1))
    ys, xs = torch.meshgrid(torch.linspace(-1, 1, 128), torch.linspace(-1, 1, 128), indexing="ij")
    grid = torch.stack([xs, ys], -1)[None] + flow.permute(0, 2, 3, 1)
    return p["refine"](torch.cat([x, F.grid_sample(y, grid, align_corners=True), flow], 1))


def cropped_unet(p: Any, x: Tensor) -> Tensor:
    """The first U-Net: no padding, so that skips are cropped."""
    a = p["a"](x)
    b = p["b"](F.max_pool2d(a, 2))
    up = p["up"](b)
    e = (a.shape[-1] - up.shape[-1]) // 2
    return p["out"](p["c"](torch.cat([a[..., e:-e, e:-e], up], 1)))


def noise_level(p: Any, x: Tensor, t: Tensor) -> Tensor:
    """A step of diffusion: the time as sines, shifts and scales of group norms, attention in the middle."""
    angle = t[:, None] * torch.exp(torch.arange(64) * (-np.log(1e4) / 64)).float()
    e = p["time"](torch.cat([angle.cos(), angle.sin()], -1))
    y = p["in"](x)
    scale, shift = p["emb"](e)[:, :, None, None].chunk(2, 1)
    y = y + p["conv"](F.silu(p["norm"](y) * (1 + scale) + shift))
    z = p["attend"](y.flatten(2).transpose(1, 2)).transpose(1, 2).reshape(y.shape)
    return p["out"](F.silu(y + z))


MODELS: hand_written.Models = {
    "deeplab": (dilated_pyramid, [PICTURE]),
    "hrnet": (
        lambda: Does(
            two_resolutions,
            stem=seq(conv(3, 64, s=2), conv(64, 64, s=2)),
            down=conv(64, 128, s=2),
            a=conv(64, 64),
            b=conv(128, 128),
            up=nn.Conv2d(128, 64, 1),
            fuse=conv(64, 128, s=2),
            out=nn.Conv2d(192, 17, 1),
        ),
        [PICTURE],
    ),
    "style_transfer": (styled, [PICTURE]),
    "bicubic_superres": (
        lambda: Does(
            enlarged,
            **{
                "in": nn.Conv2d(3, 64, 3, padding=1),
                "body": seq(conv(64, 64), conv(64, 64)),
                "out": nn.Conv2d(64, 12, 3, padding=1),
            },
        ),
        [(1, 3, 128, 128)],
    ),
    "depth": (
        lambda: Does(
            depth,
            a=conv(3, 64, s=2),
            b=conv(64, 64, s=2),
            c=conv(64, 64, s=2),
            fuse=conv(64, 64),
            out=seq(conv(64, 32), nn.Conv2d(32, 1, 1)),
        ),
        [PICTURE],
    ),
    "flow_warp": (
        lambda: Does(
            warped,
            flow=seq(conv(6, 64), conv(64, 64), nn.Conv2d(64, 2, 3, padding=1)),
            refine=seq(conv(8, 64), nn.Conv2d(64, 3, 3, padding=1)),
        ),
        [(1, 3, 128, 128), (1, 3, 128, 128)],
    ),
    "valid_unet": (
        lambda: Does(
            cropped_unet,
            a=seq(conv(3, 64, padding=0), conv(64, 64, padding=0)),
            b=seq(conv(64, 128, padding=0), conv(128, 128, padding=0)),
            up=nn.ConvTranspose2d(128, 64, 2, 2),
            c=conv(128, 64, padding=0),
            out=nn.Conv2d(64, 2, 1),
        ),
        [(1, 3, 188, 188)],
    ),
    "denoiser": (
        lambda: Does(
            noise_level,
            **{
                "time": seq(nn.Linear(128, 128), nn.SiLU()),
                "emb": nn.Linear(128, 256),
                "in": nn.Conv2d(4, 128, 3, padding=1),
                "norm": nn.GroupNorm(8, 128),
                "conv": nn.Conv2d(128, 128, 3, padding=1),
                "attend": layers(128),
                "out": nn.Conv2d(128, 4, 3, padding=1),
            },
        ),
        [(1, 4, 32, 32), (1,)],
    ),
    "portrait": (
        lambda: seq(
            fn(lambda x: (x.permute(0, 3, 1, 2) / 127.5) - 1),
            wide_stem(64),
            resize(64, 64),
            resize(64, 32),
            resize(32, 32),
            nn.Conv2d(32, 2, 1),
            fn(lambda x: x.softmax(1)[:, 1].unsqueeze(-1)),
        ),
        [(1, 256, 256, 3)],
    ),
}


def names() -> list[str]:
    """All models."""
    return list(MODELS)


def package(name: str, folder: Path) -> Path:
    """Convert a model to fp16; one that is in the folder already is taken from there."""
    frontend.register()
    return hand_written.package(name, folder, MODELS)
