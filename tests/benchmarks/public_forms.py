"""More models with random weights, in the forms of public Core ML repositories. For residency.py.

Detectors with their decoders, segmentation, depth, restoration, speech in and out, text, scans, routing: each
with the parts that keep such models off the engine.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import hand_written
import numpy as np
import torch
from hand_written import HIDDEN, PICTURE, Does, conv, conv1, fn, head, plus, resize, seq, squeeze
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - as everybody calls it

from anesurgery import frontend

WAVE = (1, 16000)
LONG_IDS, LONG_MASK = ("ids", (1, 128)), ("mask", (1, 128))


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


def patches_attended(p: Any, x: Tensor) -> Tensor:
    """MobileViT: unfolded patches through attention, folded again."""
    y = p["in"](x)
    n, c, h, w = y.shape
    z = y.reshape(n * c * (h // 2), 2, w // 2, 2).transpose(1, 2).reshape(n, c, h * w // 4, 4)
    z = p["encoder"](z.transpose(1, 3).reshape(4 * n, h * w // 4, c))
    z = z.reshape(n, 4, h * w // 4, c).transpose(1, 3).reshape(n * c * (h // 2), w // 2, 2, 2)
    return p["out"](torch.cat([y, z.transpose(1, 2).reshape(n, c, h, w)], 1))


def layers(width: int, count: int = 1, many: int = 4) -> nn.Module:
    """Torch's own transformer, op by op."""
    torch.backends.mha.set_fastpath_enabled(False)
    layer = nn.TransformerEncoderLayer(width, many, 2 * width, batch_first=True, dropout=0.0)
    return nn.TransformerEncoder(layer, count, enable_nested_tensor=False)


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


def read_line(p: Any, x: Tensor) -> Tensor:
    """OCR: columns of features through a bidirectional LSTM, the best letter of each column."""
    y = p["body"](x)
    n, c, h, w = y.shape
    z = p["lstm"](y.reshape(n, c * h, w).permute(2, 0, 1))[0]
    return p["out"](z).log_softmax(-1).argmax(-1)


def mel(p: Any, x: Tensor) -> Tensor:
    """Log mel energies: the power of an STFT through a filter bank."""
    return p["bank"](p["stft"](x).transpose(1, 2)).transpose(1, 2).clamp(min=1e-3).log()


def framed(size: int, step: int) -> nn.Module:
    """The power of a short-time Fourier transform, by a convolution with mirrored edges."""
    angle = torch.arange(size)[None] * torch.arange(size // 2 + 1)[:, None] * (2 * np.pi / size)
    layer = nn.Conv1d(1, size + 2, size, step, bias=False)
    layer.weight.data = (torch.cat([angle.cos(), angle.sin()]) * torch.hann_window(size))[:, None].float()

    def forward(p: Any, x: Tensor) -> Tensor:
        y = p["conv"](F.pad(x[:, None], (size // 2, size // 2), mode="reflect"))
        return y[:, : size // 2 + 1] ** 2 + y[:, size // 2 + 1 :] ** 2

    return Does(forward, conv=layer)


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


def messages(p: Any, x: Tensor, source: Tensor, target: Tensor) -> Tensor:
    """A graph layer: features are gathered along edges and summed where these end."""
    sent = F.relu(p["message"](x[source.long()]))
    where = target.long()[:, None].expand_as(sent)
    got = torch.zeros(x.shape[0], sent.shape[1]).scatter_add(0, where, sent)
    return p["out"](torch.cat([x, got], -1))


def columns(p: Any, kinds: Tensor, numbers: Tensor) -> Tensor:
    """A table: an embedding for each category, joined with numbers."""
    parts = [p[f"e{i}"](kinds[:, i]) for i in range(6)]
    return p["out"](torch.cat([*parts, p["norm"](numbers)], -1)).sigmoid()


def highest(p: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    """Pose: heat maps, and the place and value of each one's maximum."""
    y = p["body"](x).flatten(2)
    best = y.argmax(-1)
    places = [best % 64, torch.div(best, 64, rounding_mode="floor")]
    return torch.stack([place.float() for place in places], -1), y.amax(-1)


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


def scanned(p: Any, x: Tensor) -> Tensor:
    """Mamba: a state that decays by what the input says, step after step."""
    u, gate = p["in"](x).chunk(2, -1)
    u = F.silu(p["conv"](u.transpose(1, 2))[..., : x.shape[1]].transpose(1, 2))
    made = p["params"](u)
    step, b, c = made[..., :128], made[..., 128:136], made[..., 136:]
    step = F.softplus(step)
    decay = torch.exp(step[..., None] * -torch.arange(1, 9).float())
    state, made = torch.zeros(1, 128, 8), []
    for t in range(x.shape[1]):
        state = decay[:, t] * state + (step[:, t] * u[:, t])[..., None] * b[:, t, None]
        made.append((state * c[:, t, None]).sum(-1))
    return p["out"](torch.stack(made, 1) * F.silu(gate))


def receptance(p: Any, x: Tensor) -> Tensor:
    """RWKV: the last position is mixed in, and sums decay over time."""
    before = torch.cat([torch.zeros(1, 1, 128), x[:, :-1]], 1)
    r, k, v = (p[n](0.5 * (x + before)) for n in "rkv")
    top, under, made = torch.zeros(1, 128), torch.full((1, 128), 1e-3), []
    for t in range(x.shape[1]):
        weight = torch.exp(k[:, t].clamp(max=8))
        top, under = 0.9 * top + weight * v[:, t], 0.9 * under + weight
        made.append(top / under)
    return p["out"](torch.sigmoid(r) * torch.stack(made, 1))


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


def sentence(p: Any, ids: Tensor, mask: Tensor) -> Tensor:
    """A sentence embedder: learnt positions, masked attention, masked mean, unit length."""
    y = p["norm"](p["words"](ids) + p["places"](torch.arange(ids.shape[1])[None]))
    y = p["encoder"](y, src_key_padding_mask=mask == 0)
    m = mask[..., None].to(y.dtype)
    return F.normalize((y * m).sum(1) / m.sum(1).clamp(min=1e-9))


def ranked(p: Any, ids: Tensor, mask: Tensor, kinds: Tensor) -> Tensor:
    """A reranker: BERT's three embeddings, a mask that is added, the first position's score."""
    y = p["norm"](p["words"](ids) + p["kinds"](kinds) + p["places"](torch.arange(ids.shape[1])[None]))
    q, k, v = (p[n](y).view(1, -1, 4, 32).transpose(1, 2) for n in "qkv")
    scores = q @ k.transpose(-1, -2) / 32**0.5 + (1 - mask[:, None, None].float()) * -10000.0
    y = y + (scores.softmax(-1) @ v).transpose(1, 2).reshape(1, -1, 128)
    return p["out"](torch.tanh(p["pool"](y[:, 0])))


def buckets(length: int) -> Tensor:
    """The bucket of each relative position, as T5 counts them."""
    apart = torch.arange(length)[None] - torch.arange(length)[:, None]
    far = 8 + (torch.log(apart.abs().float().clamp(min=1) / 8) / np.log(16) * 8).long().clamp(max=7)
    return (apart > 0).long() * 16 + torch.where(apart.abs() < 8, apart.abs(), far)


def relative(p: Any, ids: Tensor, mask: Tensor) -> Tensor:
    """T5's encoder: biases by relative position, norms without means."""
    y = p["words"](ids)
    z = p["norm"](y)
    q, k, v = (p[n](z).view(1, -1, 4, 32).transpose(1, 2) for n in "qkv")
    bias = p["bias"](buckets(ids.shape[1])).permute(2, 0, 1)[None]
    scores = q @ k.transpose(-1, -2) + bias + (1 - mask[:, None, None].float()) * torch.finfo(torch.float32).min
    y = y + p["o"]((scores.softmax(-1) @ v).transpose(1, 2).reshape(1, -1, 128))
    return y + p["down"](F.gelu(p["gate"](y), approximate="tanh") * p["up"](y))


def sloped(p: Any, ids: Tensor) -> Tensor:
    """A decoder with ALiBi: biases that fall with the distance, and a causal mask."""
    y, n = p["words"](ids), ids.shape[1]
    slopes = 2.0 ** -(torch.arange(1, 5) * 2.0)
    bias = slopes[:, None, None] * (torch.arange(n)[None] - torch.arange(n)[:, None])
    ahead = torch.full((n, n), float("-inf")).triu(1)
    q, k, v = p["qkv"](p["norm"](y)).view(1, n, 3, 4, 32).permute(2, 0, 3, 1, 4)
    y = y + p["o"](
        ((q @ k.transpose(-1, -2) / 32**0.5 + bias + ahead).softmax(-1) @ v).transpose(1, 2).reshape(1, n, 128)
    )
    y = y + p["mlp"](y)
    return p["head"](y)


def routed(p: Any, x: Tensor) -> Tensor:
    """Experts of which each position takes its best two."""
    share, which = p["gate"](x).softmax(-1).topk(2, -1)
    weights = torch.zeros(1, 64, 4).scatter(-1, which, share / share.sum(-1, keepdim=True))
    return x + sum(weights[..., i : i + 1] * p[str(i)](x) for i in range(4))


def mlp(width: int, act: type[nn.Module] = nn.GELU) -> nn.Module:
    """Four times as wide, and back."""
    return seq(nn.LayerNorm(width), nn.Linear(width, 4 * width), act(), nn.Linear(4 * width, width))


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


def quantized_speech(p: Any, x: Tensor) -> Tensor:
    """A codec's encoder and the nearest entry of its code book."""
    y = p["body"](x[:, None]).transpose(1, 2)
    book = p["book"].weight
    far = (y**2).sum(-1, keepdim=True) - 2 * y @ book.T + (book**2).sum(-1)
    return far.argmin(-1)


def proposals(p: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    """Boxes and the best 100 of their scores, gathered."""
    y = p["out"](p["body"](x)).flatten(2).transpose(1, 2)
    scores, which = y[..., 4].sigmoid().topk(100)
    return y[..., :4].gather(1, which[..., None].expand(-1, -1, 4)), scores


def linear3(names: str, width: int = 128) -> dict[str, nn.Module]:
    """Projections by name."""
    return {n: nn.Linear(width, width) for n in names}


def cross(width: int = 128) -> nn.Module:
    """Attention of one sequence to another."""
    return nn.MultiheadAttention(width, 4, batch_first=True)


def wide_stem(channels: int = 128) -> nn.Module:
    """Down to an eighth, with channels enough for the engine."""
    return seq(conv(3, 64, s=2), conv(64, channels, s=2), conv(channels, channels, s=2))


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
    "graph_messages": (
        lambda: Does(messages, message=nn.Linear(64, 128), out=nn.Linear(192, 32)),
        [(64, 64), ("source", (256,)), ("target", (256,))],
    ),
    "categories": (
        lambda: Does(
            columns,
            norm=nn.BatchNorm1d(20),
            out=seq(nn.Linear(116, 256), nn.ReLU(), nn.Linear(256, 128), nn.ReLU(), nn.Linear(128, 1)),
            **{f"e{i}": nn.Embedding(50 * (i + 1), 16) for i in range(6)},
        ),
        [("kinds", (32, 6)), (32, 20)],
    ),
    "pose_argmax": (
        lambda: Does(
            highest, body=seq(conv(3, 64, s=2), conv(64, 128, s=2), conv(128, 128), nn.Conv2d(128, 17, 1))
        ),
        [PICTURE],
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
    "mamba": (
        lambda: plus(
            Does(
                scanned,
                **{
                    "in": nn.Linear(128, 256),
                    "conv": nn.Conv1d(128, 128, 4, padding=3, groups=128),
                    "params": nn.Linear(128, 144),
                    "out": nn.Linear(128, 128),
                },
            )
        ),
        [(1, 32, 128)],
    ),
    "rwkv": (lambda: plus(Does(receptance, **linear3("rkv"), out=nn.Linear(128, 128))), [(1, 32, 128)]),
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
    "sentence": (
        lambda: Does(
            sentence,
            words=nn.Embedding(5000, 128),
            places=nn.Embedding(128, 128),
            norm=nn.LayerNorm(128),
            encoder=layers(128, 2),
        ),
        [LONG_IDS, LONG_MASK],
    ),
    "reranker": (
        lambda: Does(
            ranked,
            words=nn.Embedding(5000, 128),
            kinds=nn.Embedding(2, 128),
            places=nn.Embedding(128, 128),
            norm=nn.LayerNorm(128),
            pool=nn.Linear(128, 128),
            out=nn.Linear(128, 1),
            **linear3("qkv"),
        ),
        [LONG_IDS, LONG_MASK, ("kinds", (1, 128))],
    ),
    "t5_relative": (
        lambda: Does(
            relative,
            words=nn.Embedding(5000, 128),
            norm=nn.RMSNorm(128),
            bias=nn.Embedding(32, 4),
            gate=nn.Linear(128, 512),
            up=nn.Linear(128, 512),
            down=nn.Linear(512, 128),
            **linear3("qkvo"),
        ),
        [LONG_IDS, LONG_MASK],
    ),
    "alibi": (
        lambda: Does(
            sloped,
            words=nn.Embedding(5000, 128),
            norm=nn.LayerNorm(128),
            qkv=nn.Linear(128, 384),
            o=nn.Linear(128, 128),
            mlp=mlp(128),
            head=nn.Linear(128, 5000),
        ),
        [LONG_IDS],
    ),
    "routed": (
        lambda: Does(routed, gate=nn.Linear(128, 4), **{str(i): mlp(128, nn.SiLU) for i in range(4)}),
        [HIDDEN],
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
    "proposals": (lambda: Does(proposals, body=wide_stem(), out=nn.Conv2d(128, 5, 1)), [PICTURE]),
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


def distributed_boxes_of() -> Callable[..., Tensor]:
    """`distributed_boxes` of what the body makes of a picture."""
    return lambda p, x: distributed_boxes(p, p["body"](x))


def names() -> list[str]:
    """All models."""
    return list(MODELS)


def package(name: str, folder: Path) -> Path:
    """Convert a model to fp16; one that is in the folder already is taken from there."""
    frontend.register()
    return hand_written.package(name, folder, MODELS)
