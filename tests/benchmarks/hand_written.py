"""Models written by hand, with random weights: vision, audio, sequences, tables. For residency.py."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - as everybody calls it

from anesurgery.mil import ct, quiet_host

PICTURE = (1, 3, 256, 256)


class Does(nn.Module):
    """Modules, and a function that says how they work together."""

    def __init__(self, forward: Callable[..., Any], **parts: nn.Module) -> None:
        super().__init__()
        self.parts, self.does = nn.ModuleDict(parts), forward

    def forward(self, *values: Tensor) -> Any:
        """Call the function with the parts by name."""
        return self.does(self.parts, *values)


def conv(a: int, b: int, k: int = 3, s: int = 1, act: type[nn.Module] = nn.ReLU, **more: Any) -> nn.Module:
    """A convolution, a batch norm and an activation."""
    more.setdefault("padding", k // 2 * more.get("dilation", 1))
    return nn.Sequential(nn.Conv2d(a, b, k, s, **more), nn.BatchNorm2d(b), act())


def conv1(a: int, b: int, k: int = 3, s: int = 1, d: int = 1, act: type[nn.Module] = nn.ReLU) -> nn.Module:
    """The same in one dimension."""
    return nn.Sequential(nn.Conv1d(a, b, k, s, padding=k // 2 * d, dilation=d), nn.BatchNorm1d(b), act())


def head(channels: int, classes: int = 10) -> nn.Module:
    """Mean over the picture, and logits."""
    return nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, classes))


def plus(body: nn.Module) -> nn.Module:
    """A residual connection."""
    return Does(lambda p, x: x + p["body"](x), body=body)


def gated(x: Tensor) -> Tensor:
    """Half of the channels, gated by the other half."""
    a, b = x.chunk(2, 1)
    return torch.tanh(a) * torch.sigmoid(b)


def squeeze(channels: int) -> nn.Module:
    """Squeeze and excite."""
    body = nn.Sequential(
        nn.AdaptiveAvgPool2d(1), nn.Conv2d(channels, 8, 1), nn.SiLU(), nn.Conv2d(8, channels, 1), nn.Sigmoid()
    )
    return Does(lambda p, x: x * p["gate"](x), gate=body)


def shuffle(x: Tensor) -> Tensor:
    """Shuffle channels of two groups."""
    n, c, h, w = x.shape
    return x.reshape(n, 2, c // 2, h, w).transpose(1, 2).reshape(n, c, h, w)


def decode(x: Tensor) -> Tensor:
    """Boxes of a detector: sigmoids on a grid of anchors."""
    n, _, h, w = x.shape
    ys, xs = torch.meshgrid(torch.arange(h), torch.arange(w), indexing="ij")
    y = x.reshape(n, 3, 7, h, w).permute(0, 1, 3, 4, 2)
    place = (y[..., :2].sigmoid() * 2 - 0.5 + torch.stack([xs, ys], -1)) * 16
    return torch.cat([place, (y[..., 2:4].sigmoid() * 2) ** 2 * 32, y[..., 4:].sigmoid()], -1).flatten(1, 3)


def peaks(x: Tensor) -> Tensor:
    """Local maxima of a heat map."""
    y = x.sigmoid()
    return y * (F.max_pool2d(y, 3, 1, 1) == y)


def expectation(x: Tensor) -> Tensor:
    """Key points as the mean place under a softmax."""
    n, c, h, w = x.shape
    share = x.flatten(2).softmax(-1).reshape(n, c, h, w)
    places = torch.arange(h, dtype=torch.float32) / h
    return torch.stack([(share.sum(2) * places).sum(-1), (share.sum(3) * places).sum(-1)], -1)


def masked_mean(x: Tensor, mask: Tensor) -> Tensor:
    """The mean over the positions that count."""
    m = mask.unsqueeze(-1).float()
    return (x * m).sum(1) / m.sum(1).clamp(min=1)


def spectrum() -> nn.Module:
    """A log spectrogram by a convolution with windowed cosines and sines."""
    angle = torch.arange(256)[None] * torch.arange(129)[:, None] * (2 * np.pi / 256)
    kernel = torch.cat([angle.cos(), angle.sin()]) * torch.hann_window(256)
    layer = nn.Conv1d(1, 258, 256, 128, bias=False)
    layer.weight.data = kernel[:, None].float()

    def power(p: Any, x: Tensor) -> Tensor:
        y = p["stft"](F.pad(x, (128, 128), mode="reflect"))
        return (y[:, :129] ** 2 + y[:, 129:] ** 2 + 1e-5).log()

    return Does(power, stft=layer)


def unet(up: Callable[[int, int], nn.Module]) -> nn.Module:
    """Two levels down and up, with skips."""

    def forward(p: Any, x: Tensor) -> Tensor:
        a = p["a"](x)
        b = p["b"](F.max_pool2d(a, 2))
        return p["out"](torch.cat([a, p["up"](p["c"](F.max_pool2d(b, 2)) + 0 * p["skip"](b)), a], 1))

    return Does(
        forward,
        a=conv(3, 32),
        b=conv(32, 64),
        c=conv(64, 64),
        skip=nn.Sequential(nn.MaxPool2d(2), conv(64, 64)),
        up=nn.Sequential(up(64, 32), up(32, 32)),
        out=nn.Conv2d(96, 4, 1),
    )


def stem(channels: int = 32) -> nn.Module:
    """Down to an eighth."""
    return nn.Sequential(conv(3, 16, s=2), conv(16, channels, s=2), conv(channels, channels, s=2))


def sampled(p: Any, x: Tensor) -> Tensor:
    """A spatial transformer."""
    theta = p["loc"](x).reshape(-1, 2, 3)
    return F.grid_sample(x, F.affine_grid(theta, list(x.shape), align_corners=False), align_corners=False)


def encoder(width: int = 128) -> nn.Module:
    """Two layers of torch's own transformer, op by op."""
    torch.backends.mha.set_fastpath_enabled(False)
    layer = nn.TransformerEncoderLayer(width, 4, 256, batch_first=True, dropout=0.0)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


def time_steps(t: Tensor) -> Tensor:
    """Sines and cosines of a time step."""
    angle = t[:, None] * torch.exp(torch.arange(64) * (-np.log(1e4) / 64)).float()
    return torch.cat([angle.sin(), angle.cos()], -1)


def attend(p: Any, x: Tensor, mask: Tensor) -> Tensor:
    """Attention whose mask is an input, written as today's encoders do."""
    q, k, v = (p[n](x).reshape(1, -1, 4, 32).transpose(1, 2) for n in "qkv")
    scores = q @ k.transpose(-1, -2) / 32**0.5
    fill = (1.0 - mask[:, None, None].float()) * torch.finfo(torch.float32).min
    return (scores + fill).softmax(-1) @ v


def where(p: Any, x: Tensor, mask: Tensor) -> Tensor:
    """The same with masked_fill, and causal."""
    q, k, v = (p[n](x).reshape(1, -1, 4, 32).transpose(1, 2) for n in "qkv")
    scores = q @ k.transpose(-1, -2) / 32**0.5
    keep = torch.ones(64, 64).tril().bool() & mask[:, None, None].bool()
    return scores.masked_fill(~keep, float("-inf")).softmax(-1) @ v


def qkv() -> dict[str, nn.Module]:
    """Three projections."""
    return {n: nn.Linear(128, 128) for n in "qkv"}


def deconv(a: int, b: int) -> nn.Module:
    """Twice as large, by a transposed convolution."""
    return nn.Sequential(nn.ConvTranspose2d(a, b, 4, 2, 1), nn.BatchNorm2d(b), nn.ReLU())


def resize(a: int, b: int) -> nn.Module:
    """Twice as large, by interpolation."""
    return nn.Sequential(nn.Upsample(scale_factor=2, mode="bilinear", align_corners=False), conv(a, b))


def seq(*parts: nn.Module) -> nn.Module:
    """One after the other."""
    return nn.Sequential(*parts)


def first(module: nn.Module) -> nn.Module:
    """The outputs of a recurrent layer, without its states."""
    return Does(lambda p, x: p["cell"](x)[0], cell=module)


def fn(function: Callable[..., Any]) -> nn.Module:
    """A function as a module."""
    return Does(lambda p, *values: function(*values))


IDS, MASK = ("ids", (1, 64)), ("mask", (1, 64))
HIDDEN = (1, 64, 128)

Models = dict[str, tuple[Callable[[], nn.Module], list[Any]]]
"""Name -> what makes it, and its inputs: a shape of floats, or the name and shape of integers."""

MODELS: Models = {
    "lenet": (
        lambda: seq(conv(3, 8, 5), nn.MaxPool2d(2), conv(8, 16, 5), nn.MaxPool2d(2), head(16)),
        [PICTURE],
    ),
    "vgg": (lambda: seq(conv(3, 64), conv(64, 64), nn.MaxPool2d(2), conv(64, 128), head(128)), [PICTURE]),
    "resnet": (lambda: seq(stem(64), plus(seq(conv(64, 64), conv(64, 64))), head(64)), [PICTURE]),
    "mobilenet2": (
        lambda: seq(stem(), conv(32, 96, 1, act=nn.ReLU6), conv(96, 96, act=nn.ReLU6, groups=96), head(96)),
        [PICTURE],
    ),
    "mobilenet3": (
        lambda: seq(stem(), conv(32, 96, 5, act=nn.Hardswish, groups=32), squeeze(96), head(96)),
        [PICTURE],
    ),
    "squeezenet": (
        lambda: seq(
            stem(),
            Does(lambda p, x: torch.cat([p["a"](x), p["b"](x)], 1), a=conv(32, 32, 1), b=conv(32, 32)),
            head(64),
        ),
        [PICTURE],
    ),
    "shufflenet": (
        lambda: seq(stem(), conv(32, 32, 1, groups=2), fn(shuffle), conv(32, 32, groups=32), head(32)),
        [PICTURE],
    ),
    "inception": (
        lambda: seq(
            stem(),
            Does(
                lambda p, x: torch.cat([p["a"](x), p["b"](x), p["c"](F.avg_pool2d(x, 3, 1, 1))], 1),
                a=conv(32, 16, 1),
                b=conv(32, 16, 5),
                c=conv(32, 16, 1),
            ),
            head(48),
        ),
        [PICTURE],
    ),
    "convnext": (
        lambda: seq(
            stem(64),
            plus(
                Does(
                    lambda p, x: p["out"](F.gelu(p["in"](p["norm"](p["wide"](x).permute(0, 2, 3, 1))))).permute(
                        0, 3, 1, 2
                    ),
                    wide=nn.Conv2d(64, 64, 7, padding=3, groups=64),
                    norm=nn.LayerNorm(64),
                    **{"in": nn.Linear(64, 256), "out": nn.Linear(256, 64)},
                )
            ),
            head(64),
        ),
        [PICTURE],
    ),
    "mixer": (
        lambda: seq(
            nn.Conv2d(3, 64, 16, 16),
            nn.Flatten(2),
            plus(seq(nn.Linear(256, 128), nn.GELU(), nn.Linear(128, 256))),
            fn(lambda x: x.transpose(1, 2)),
            plus(seq(nn.LayerNorm(64), nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64))),
        ),
        [PICTURE],
    ),
    "unet_deconv": (lambda: unet(deconv), [PICTURE]),
    "unet_resize": (lambda: unet(resize), [PICTURE]),
    "segment": (
        lambda: seq(
            stem(64),
            nn.Conv2d(64, 21, 1),
            nn.Upsample(scale_factor=8, mode="bilinear"),
            fn(lambda x: x.argmax(1)),
        ),
        [PICTURE],
    ),
    "aspp": (
        lambda: seq(
            stem(64),
            Does(
                lambda p, x: torch.cat([p[str(d)](x) for d in (1, 6, 12)], 1),
                **{str(d): conv(64, 32, dilation=d) for d in (1, 6, 12)},
            ),
        ),
        [PICTURE],
    ),
    "yolo": (
        lambda: seq(stem(64), conv(64, 64, s=2, act=nn.SiLU), nn.Conv2d(64, 21, 1), fn(decode)),
        [PICTURE],
    ),
    "ssd": (
        lambda: seq(
            stem(64),
            nn.Conv2d(64, 84, 3, padding=1),
            fn(lambda x: x.permute(0, 2, 3, 1).reshape(1, -1, 21).softmax(-1)),
        ),
        [PICTURE],
    ),
    "centernet": (lambda: seq(stem(64), deconv(64, 32), nn.Conv2d(32, 10, 1), fn(peaks)), [PICTURE]),
    "topk_boxes": (
        lambda: seq(stem(64), nn.Conv2d(64, 10, 1), fn(peaks), fn(lambda x: torch.topk(x.flatten(1), 20)[0])),
        [PICTURE],
    ),
    "keypoints": (lambda: seq(stem(64), nn.Conv2d(64, 17, 1), fn(expectation)), [PICTURE]),
    "superres": (
        lambda: seq(conv(3, 64), conv(64, 64), nn.Conv2d(64, 27, 3, padding=1), nn.PixelShuffle(3)),
        [PICTURE],
    ),
    "style": (
        lambda: seq(
            nn.ReflectionPad2d(4),
            nn.Conv2d(3, 32, 9),
            nn.InstanceNorm2d(32, affine=True),
            nn.ReLU(),
            plus(seq(nn.ReflectionPad2d(1), nn.Conv2d(32, 32, 3), nn.InstanceNorm2d(32, affine=True))),
            nn.Upsample(scale_factor=2),
            nn.ReflectionPad2d(4),
            nn.Conv2d(32, 3, 9),
            nn.Tanh(),
        ),
        [PICTURE],
    ),
    "autoencoder": (
        lambda: seq(stem(), deconv(32, 32), deconv(32, 16), nn.ConvTranspose2d(16, 3, 4, 2, 1), nn.Sigmoid()),
        [PICTURE],
    ),
    "generator": (
        lambda: seq(
            nn.Linear(64, 4096),
            nn.Unflatten(1, (64, 8, 8)),
            deconv(64, 64),
            deconv(64, 32),
            nn.Conv2d(32, 3, 3, padding=1),
            nn.Tanh(),
        ),
        [(1, 64)],
    ),
    "face": (
        lambda: seq(
            conv(3, 32, s=2, act=nn.PReLU),
            conv(32, 64, s=2, act=nn.PReLU),
            head(64, 128),
            fn(lambda x: F.normalize(x)),
        ),
        [PICTURE],
    ),
    "siamese": (
        lambda: Does(
            lambda p, a, b: F.cosine_similarity(p["net"](a), p["net"](b)), net=seq(stem(), head(32, 64))
        ),
        [PICTURE, PICTURE],
    ),
    "spatial_transformer": (lambda: Does(sampled, loc=seq(stem(), head(32, 6))), [PICTURE]),
    "group_norm": (
        lambda: seq(
            nn.Conv2d(3, 64, 3, padding=1),
            plus(seq(nn.GroupNorm(8, 64), nn.SiLU(), nn.Conv2d(64, 64, 3, padding=1))),
        ),
        [PICTURE],
    ),
    "wide_pool": (
        lambda: seq(
            stem(64),
            Does(lambda p, x: torch.cat([x, *(F.max_pool2d(x, k, 1, k // 2) for k in (5, 9, 13))], 1)),
            head(256),
        ),
        [PICTURE],
    ),
    "large_kernel": (lambda: seq(stem(64), nn.Conv2d(64, 64, 31, padding=15, groups=64), head(64)), [PICTURE]),
    "conv3d": (
        lambda: seq(
            nn.Conv3d(3, 16, 3, padding=1), nn.ReLU(), nn.MaxPool3d(2), nn.Conv3d(16, 16, 3, padding=1)
        ),
        [(1, 3, 8, 32, 32)],
    ),
    "colours": (
        lambda: seq(fn(lambda x: (x / 255 - 0.45) / 0.22), conv(3, 32), conv(32, 32), head(32)),
        [PICTURE],
    ),
    "channels_last": (
        lambda: seq(
            fn(lambda x: x.permute(0, 3, 1, 2)), conv(3, 32), conv(32, 32), fn(lambda x: x.permute(0, 2, 3, 1))
        ),
        [(1, 128, 128, 3)],
    ),
    "spectrogram": (lambda: seq(spectrum(), conv1(129, 64), conv1(64, 64)), [(1, 1, 16000)]),
    "wavenet": (
        lambda: seq(
            nn.Conv1d(1, 32, 1),
            *(plus(seq(nn.Conv1d(32, 64, 3, padding=d, dilation=d), fn(gated))) for d in (1, 2, 4, 8)),
        ),
        [(1, 1, 8000)],
    ),
    "long_audio": (lambda: seq(conv1(1, 32, 11, 5), conv1(32, 32, 7, 4), conv1(32, 64, 5, 2)), [(1, 1, 48000)]),
    "vocoder": (
        lambda: seq(
            conv1(80, 128, 7),
            nn.ConvTranspose1d(128, 64, 16, 8, 4),
            nn.LeakyReLU(0.1),
            conv1(64, 64, 7, d=3),
            nn.Conv1d(64, 1, 7, padding=3),
            nn.Tanh(),
        ),
        [(1, 80, 100)],
    ),
    "conformer": (
        lambda: plus(
            seq(
                nn.LayerNorm(128),
                fn(lambda x: x.transpose(1, 2)),
                nn.Conv1d(128, 256, 1),
                nn.GLU(1),
                nn.Conv1d(128, 128, 31, padding=15, groups=128),
                nn.BatchNorm1d(128),
                nn.SiLU(),
                fn(lambda x: x.transpose(1, 2)),
            )
        ),
        [HIDDEN],
    ),
    "tcn": (lambda: seq(*(conv1(64, 64, 3, d=d) for d in (1, 2, 4)), nn.AdaptiveAvgPool1d(1)), [(1, 64, 1000)]),
    "crnn": (
        lambda: seq(
            conv(1, 32, s=2),
            conv(32, 64, s=2),
            fn(lambda x: x.mean(2).transpose(1, 2)),
            first(nn.LSTM(64, 64, batch_first=True, bidirectional=True)),
            nn.Linear(128, 40),
        ),
        [(1, 1, 32, 128)],
    ),
    "gru_words": (
        lambda: seq(
            spectrum(),
            fn(lambda x: x.transpose(1, 2)),
            first(nn.GRU(129, 64, batch_first=True)),
            nn.Linear(64, 12),
        ),
        [(1, 1, 4000)],
    ),
    "lstm_sensor": (
        lambda: seq(first(nn.LSTM(6, 64, 2, batch_first=True)), fn(lambda x: x[:, -1]), nn.Linear(64, 5)),
        [(1, 50, 6)],
    ),
    "rnn": (lambda: seq(first(nn.RNN(16, 32, batch_first=True)), nn.Linear(32, 4)), [(1, 20, 16)]),
    "lstm_words": (
        lambda: seq(nn.Embedding(2000, 64), first(nn.LSTM(64, 128, batch_first=True)), nn.Linear(128, 2000)),
        [IDS],
    ),
    "tagger": (
        lambda: seq(
            nn.Embedding(5000, 64),
            first(nn.LSTM(64, 64, batch_first=True, bidirectional=True)),
            nn.Linear(128, 20),
            fn(lambda x: x.argmax(-1)),
        ),
        [IDS],
    ),
    "torch_encoder": (encoder, [HIDDEN]),
    "pooled_mask": (lambda: Does(lambda p, x, m: masked_mean(p["net"](x), m), net=encoder()), [HIDDEN, MASK]),
    "mask_minimum": (lambda: Does(attend, **qkv()), [HIDDEN, MASK]),
    "mask_where": (lambda: Does(where, **qkv()), [HIDDEN, MASK]),
    "text_cnn": (
        lambda: seq(
            nn.Embedding(5000, 128),
            fn(lambda x: x.transpose(1, 2)),
            conv1(128, 128, 5),
            nn.AdaptiveMaxPool1d(1),
            nn.Flatten(),
            nn.Linear(128, 4),
        ),
        [IDS],
    ),
    "bag": (lambda: seq(nn.Embedding(5000, 64), fn(lambda x: x.mean(1)), nn.Linear(64, 10)), [IDS]),
    "recommender": (
        lambda: Does(
            lambda p, u, i: (p["u"](u) * p["i"](i)).sum(-1).sigmoid(),
            u=nn.Embedding(1000, 32),
            i=nn.Embedding(3000, 32),
        ),
        [("user", (64,)), ("item", (64,))],
    ),
    "tabular": (
        lambda: seq(
            nn.BatchNorm1d(40), nn.Linear(40, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 2)
        ),
        [(64, 40)],
    ),
    "graph": (
        lambda: Does(
            lambda p, x, a: p["b"](torch.relu(a @ p["a"](x))), a=nn.Linear(64, 128), b=nn.Linear(128, 16)
        ),
        [(1, 200, 64), (1, 200, 200)],
    ),
    "diffusion": (
        lambda: Does(
            lambda p, x, t: p["out"](p["in"](x) + p["t"](time_steps(t))[:, :, None, None]),
            **{
                "in": nn.Conv2d(4, 64, 3, padding=1),
                "t": nn.Linear(128, 64),
                "out": seq(nn.GroupNorm(8, 64), nn.SiLU(), nn.Conv2d(64, 4, 3, padding=1)),
            },
        ),
        [(1, 4, 64, 64), (1,)],
    ),
    "positions": (
        lambda: Does(lambda p, x, m: p["e"](m.cumsum(1) * m) + x, e=nn.Embedding(70, 128)),
        [HIDDEN, MASK],
    ),
    "experts": (
        lambda: Does(
            lambda p, x: sum(p["gate"](x).softmax(-1)[..., i : i + 1] * p[str(i)](x) for i in range(4)),
            gate=nn.Linear(128, 4),
            **{str(i): seq(nn.Linear(128, 256), nn.GELU(), nn.Linear(256, 128)) for i in range(4)},
        ),
        [HIDDEN],
    ),
    "one_hot": (
        lambda: seq(fn(lambda ids: F.one_hot(ids.long(), 128).float()), nn.Linear(128, 64), nn.ReLU()),
        [IDS],
    ),
    "mishmash": (
        lambda: seq(
            conv(3, 32, act=nn.Mish), conv(32, 32, act=nn.Softplus), conv(32, 32, act=nn.ELU), head(32)
        ),
        [PICTURE],
    ),
    "rms_mlp": (
        lambda: seq(
            *(plus(seq(nn.RMSNorm(128), nn.Linear(128, 256), nn.SiLU(), nn.Linear(256, 128))) for _ in range(3))
        ),
        [HIDDEN],
    ),
    "window": (
        lambda: Does(
            lambda p, x: (
                p["a"](x.reshape(1, 4, 8, 4, 8, 64).permute(0, 1, 3, 2, 4, 5).reshape(16, 64, 64))
                .reshape(1, 4, 4, 8, 8, 64)
                .permute(0, 1, 3, 2, 4, 5)
                .reshape(1, 32, 32, 64)
            ),
            a=nn.Linear(64, 64),
        ),
        [(1, 32, 32, 64)],
    ),
}


def names() -> list[str]:
    """All models."""
    return list(MODELS)


def package(name: str, folder: Path, models: Models = MODELS) -> Path:
    """Convert a model to fp16; one that is in the folder already is taken from there."""
    path = folder / f"{name}.mlpackage"
    if path.exists():
        return path
    make, inputs = models[name]
    torch.manual_seed(0)
    values, types = list[Tensor](), list[Any]()
    for i, given in enumerate(inputs):
        whole = isinstance(given[0], str)
        shape, label = (given[1], given[0]) if whole else (given, f"x{i}")
        values.append(torch.randint(0, 2, shape, dtype=torch.int32) if whole else torch.randn(shape))
        types.append(ct.TensorType(label, shape=shape, dtype=np.int32 if whole else np.float32))
    with torch.no_grad(), quiet_host():
        traced: Any = torch.jit.trace(make().eval(), tuple(values), check_trace=False)  # type: ignore[no-untyped-call]
        made = ct.convert(traced, inputs=types, minimum_deployment_target=ct.target.iOS17, skip_model_load=True)
    made.save(str(path))
    return path
