"""Text, tables, graphs, state spaces, routing: public forms with random weights, for residency.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import hand_written
import numpy as np
import torch
from hand_written import HIDDEN, Does, plus, seq
from public_parts import LONG_IDS, LONG_MASK, layers, linear3, mlp
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - as everybody calls it

from anesurgery import frontend


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


MODELS: hand_written.Models = {
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
}


def names() -> list[str]:
    """All models."""
    return list(MODELS)


def package(name: str, folder: Path) -> Path:
    """Convert a model to fp16; one that is in the folder already is taken from there."""
    frontend.register()
    return hand_written.package(name, folder, MODELS)
