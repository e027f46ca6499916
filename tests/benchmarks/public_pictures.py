"""Detectors, classifiers, poses and points: public forms with random weights, for residency.py."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import hand_written
import numpy as np
import torch
from hand_written import PICTURE, Does, conv, conv1, fn, head, plus, seq, squeeze
from public_parts import cross, layers, mlp, wide_stem
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - as everybody calls it

from anesurgery import frontend


def distributed_boxes(p: Any, x: Tensor) -> Tensor:
    """The head of YOLO v8 and v11: distances as expectations of 16 bins, decoded at anchors and strides."""
    levels = [x, p["down"](x), p["deep"](p["down"](x))]
    flat = torch.cat([p[f"head{i}"](y).flatten(2) for i, y in enumerate(levels)], 2)
    box, score = flat[:, :64], flat[:, 64:]
    n, _, a = box.shape
    share = box.view(n, 4, 16, a).transpose(2, 1).softmax(1)
    distance = F.conv2d(share, torch.arange(16.0).view(1, 16, 1, 1)).view(n, 4, a)
    places = [
        torch.stack(torch.meshgrid(*[torch.arange(y.shape[-1]) + 0.5] * 2, indexing="xy"), 0) for y in levels
    ]
    anchors = torch.cat([q.flatten(1) for q in places], 1)
    strides = torch.cat([torch.full((1, q[0].numel()), 8.0 * 2**i) for i, q in enumerate(places)], 1)
    low, high = anchors - distance[:, :2], anchors + distance[:, 2:]
    return torch.cat([torch.cat([(low + high) / 2, high - low], 1) * strides, score.sigmoid()], 1)


def heads(channels: int, out: int) -> dict[str, nn.Module]:
    """A head for each of three levels."""
    return {f"head{i}": nn.Conv2d(channels, out, 1) for i in range(3)}


def anchors_of_faces(p: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    """The ends of BlazeFace: two levels in NHWC order, joined, and decoded at constant anchors."""
    a = p["body"](x)
    b = p["down"](a)
    regress = [p[f"r{i}"](y).permute(0, 2, 3, 1).reshape(1, -1, 16) for i, y in enumerate((a, b))]
    scores = [p[f"s{i}"](y).permute(0, 2, 3, 1).reshape(1, -1, 1) for i, y in enumerate((a, b))]
    raw = torch.cat(regress, 1)
    places = torch.stack([torch.arange(raw.shape[1]) % 32 / 32.0, torch.arange(raw.shape[1]) % 7 / 7.0], -1)
    centre = raw[..., :2] / 128 + places
    size = raw[..., 2:4] / 128
    points = [raw[..., k : k + 2] / 128 + places for k in range(4, 16, 2)]
    boxes = torch.cat([centre - size / 2, centre + size / 2, *points], -1)
    return boxes, torch.cat(scores, 1).clamp(-100, 100).sigmoid()


def patches_attended(p: Any, x: Tensor) -> Tensor:
    """MobileViT: unfolded patches through attention, folded again."""
    y = p["in"](x)
    n, c, h, w = y.shape
    z = y.reshape(n * c * (h // 2), 2, w // 2, 2).transpose(1, 2).reshape(n, c, h * w // 4, 4)
    z = p["encoder"](z.transpose(1, 3).reshape(4 * n, h * w // 4, c))
    z = z.reshape(n, 4, h * w // 4, c).transpose(1, 3).reshape(n * c * (h // 2), w // 2, 2, 2)
    return p["out"](torch.cat([y, z.transpose(1, 2).reshape(n, c, h, w)], 1))


def read_line(p: Any, x: Tensor) -> Tensor:
    """OCR: columns of features through a bidirectional LSTM, the best letter of each column."""
    y = p["body"](x)
    n, c, h, w = y.shape
    z = p["lstm"](y.reshape(n, c * h, w).permute(2, 0, 1))[0]
    return p["out"](z).log_softmax(-1).argmax(-1)


def highest(p: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    """Pose: heat maps, and the place and value of each one's maximum."""
    y = p["body"](x).flatten(2)
    best = y.argmax(-1)
    places = [best % 64, torch.div(best, 64, rounding_mode="floor")]
    return torch.stack([place.float() for place in places], -1), y.amax(-1)


def spatial_gate(p: Any, x: Tensor) -> Tensor:
    """gMLP: half of the channels, mixed over positions, gate the other half."""
    u, v = F.gelu(p["in"](p["norm"](x))).chunk(2, -1)
    return x + p["out"](u * p["mix"](p["gate"](v).transpose(1, 2)).transpose(1, 2))


def shifted(p: Any, x: Tensor) -> Tensor:
    """Swin: windows of a picture that was rolled, attended, rolled back."""
    y = torch.roll(p["norm"](x), (-4, -4), (1, 2))
    windows = y.view(1, 4, 8, 4, 8, 96).permute(0, 1, 3, 2, 4, 5).reshape(16, 64, 96)
    q, k, v = p["qkv"](windows).reshape(16, 64, 3, 3, 32).permute(2, 0, 3, 1, 4)
    bias = torch.zeros(16, 1, 64, 64)
    bias[8:, :, :32, 32:] = -100.0
    attended = ((q @ k.transpose(-2, -1) / 32**0.5 + bias).softmax(-1) @ v).transpose(1, 2).reshape(16, 64, 96)
    z = p["out"](attended).view(1, 4, 4, 8, 8, 96).permute(0, 1, 3, 2, 4, 5).reshape(1, 32, 32, 96)
    z = x + torch.roll(z, (4, 4), (1, 2))
    return z + p["mlp"](z)


def queried(p: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    """DETR: learnt queries attend to a picture; classes and boxes of each."""
    memory = p["body"](x).flatten(2).transpose(1, 2)
    places = torch.arange(memory.shape[1])[:, None] / torch.exp(torch.arange(64) / 16.0)
    memory = memory + torch.cat([places.sin(), places.cos()], -1)
    query = p["queries"].weight[None].expand(1, -1, -1)
    y = query + p["cross"](query, memory, memory, need_weights=False)[0]
    y = y + p["mlp"](y)
    return p["class"](y), p["box"](y).sigmoid()


def masks_of(p: Any, x: Tensor, points: Tensor) -> tuple[Tensor, Tensor]:
    """Segment anything: points as tokens, two-way attention, masks as products with enlarged features."""
    angle = 2 * np.pi * (2 * points - 1) @ torch.linspace(-2, 2, 128).reshape(2, 64)
    tokens = torch.cat([p["tokens"].weight[None], torch.cat([angle.sin(), angle.cos()], -1)], 1)
    keys = x.flatten(2).transpose(1, 2)
    tokens = p["norm"](tokens + p["reads"](tokens, keys, keys, need_weights=False)[0])
    keys = keys + p["answers"](keys, tokens, tokens, need_weights=False)[0]
    large = p["up"](keys.transpose(1, 2).reshape(1, 128, 32, 32))
    masks = (p["hyper"](tokens[:, :4]) @ large.flatten(2)).reshape(1, 4, 128, 128)
    return masks, p["quality"](tokens[:, 0])


def proposals(p: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    """Boxes and the best 100 of their scores, gathered."""
    y = p["out"](p["body"](x)).flatten(2).transpose(1, 2)
    scores, which = y[..., 4].sigmoid().topk(100)
    return y[..., :4].gather(1, which[..., None].expand(-1, -1, 4)), scores


def distributed_boxes_of() -> Callable[..., Tensor]:
    """`distributed_boxes` of what the body makes of a picture."""
    return lambda p, x: distributed_boxes(p, p["body"](x))


MODELS: hand_written.Models = {
    "yolo_v8": (
        lambda: Does(
            distributed_boxes_of(),
            body=wide_stem(),
            down=conv(128, 128, s=2),
            deep=conv(128, 128, s=2),
            **heads(128, 84),
        ),
        [PICTURE],
    ),
    "blaze_anchors": (
        lambda: Does(
            anchors_of_faces,
            body=wide_stem(),
            down=conv(128, 128, s=2),
            r0=nn.Conv2d(128, 32, 1),
            r1=nn.Conv2d(128, 96, 1),
            s0=nn.Conv2d(128, 2, 1),
            s1=nn.Conv2d(128, 6, 1),
        ),
        [PICTURE],
    ),
    "efficientnet_lite": (
        lambda: seq(
            wide_stem(64),
            *(
                plus(
                    seq(
                        conv(64, 384, 1, act=nn.ReLU6),
                        conv(384, 384, 5, act=nn.ReLU6, groups=384),
                        squeeze(384),
                        nn.Conv2d(384, 64, 1),
                    )
                )
                for _ in range(2)
            ),
            head(64, 1000),
        ),
        [PICTURE],
    ),
    "mobilevit": (
        lambda: Does(patches_attended, **{"in": wide_stem(64), "encoder": layers(64), "out": conv(128, 64)}),
        [PICTURE],
    ),
    "ocr": (
        lambda: Does(
            read_line,
            body=seq(
                conv(1, 64),
                nn.MaxPool2d(2),
                conv(64, 128),
                nn.MaxPool2d(2),
                conv(128, 128),
                nn.MaxPool2d((4, 1)),
            ),
            lstm=nn.LSTM(256, 128, bidirectional=True),
            out=nn.Linear(256, 96),
        ),
        [(1, 1, 32, 160)],
    ),
    "pose_argmax": (
        lambda: Does(
            highest, body=seq(conv(3, 64, s=2), conv(64, 128, s=2), conv(128, 128), nn.Conv2d(128, 17, 1))
        ),
        [PICTURE],
    ),
    "gmlp": (
        lambda: seq(
            *(
                Does(
                    spatial_gate,
                    **{
                        "norm": nn.LayerNorm(128),
                        "in": nn.Linear(128, 512),
                        "gate": nn.LayerNorm(256),
                        "mix": nn.Linear(196, 196),
                        "out": nn.Linear(256, 128),
                    },
                )
                for _ in range(2)
            )
        ),
        [(1, 196, 128)],
    ),
    "swin_shift": (
        lambda: Does(
            shifted, norm=nn.LayerNorm(96), qkv=nn.Linear(96, 288), out=nn.Linear(96, 96), mlp=mlp(96)
        ),
        [(1, 32, 32, 96)],
    ),
    "detr": (
        lambda: Does(
            queried,
            **{
                "body": wide_stem(),
                "queries": nn.Embedding(100, 128),
                "cross": cross(),
                "mlp": mlp(128),
                "class": nn.Linear(128, 92),
                "box": nn.Linear(128, 4),
            },
        ),
        [PICTURE],
    ),
    "mask_decoder": (
        lambda: Does(
            masks_of,
            **{
                "tokens": nn.Embedding(5, 128),
                "norm": nn.LayerNorm(128),
                "reads": cross(),
                "answers": cross(),
                "up": seq(
                    nn.ConvTranspose2d(128, 64, 2, 2), nn.GELU(), nn.ConvTranspose2d(64, 32, 2, 2), nn.GELU()
                ),
                "hyper": nn.Linear(128, 32),
                "quality": nn.Linear(128, 4),
            },
        ),
        [(1, 128, 32, 32), (1, 6, 2)],
    ),
    "proposals": (lambda: Does(proposals, body=wide_stem(), out=nn.Conv2d(128, 5, 1)), [PICTURE]),
    "pointnet": (
        lambda: Does(
            lambda p, x: p["out"](
                torch.cat([p["a"](x), p["b"](p["a"](x)).amax(2, keepdim=True).expand(-1, -1, x.shape[2])], 1)
            ),
            a=seq(conv1(3, 64, 1), conv1(64, 64, 1)),
            b=seq(conv1(64, 128, 1), conv1(128, 1024, 1)),
            out=seq(conv1(1088, 256, 1), nn.Conv1d(256, 13, 1)),
        ),
        [(1, 3, 2048)],
    ),
    "video3d": (
        lambda: seq(
            nn.Conv3d(3, 32, (3, 7, 7), (1, 2, 2), (1, 3, 3)),
            nn.ReLU(),
            nn.Conv3d(32, 64, 3, (1, 2, 2), 1),
            nn.ReLU(),
            fn(lambda x: x.mean((2, 3, 4))),
            nn.Linear(64, 51),
        ),
        [(1, 3, 8, 112, 112)],
    ),
}


def names() -> list[str]:
    """All models."""
    return list(MODELS)


def package(name: str, folder: Path) -> Path:
    """Convert a model to fp16; one that is in the folder already is taken from there."""
    frontend.register()
    return hand_written.package(name, folder, MODELS)
