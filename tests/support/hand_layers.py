"""Layers of transformers written by hand in the layout of Apple's own, a bound for rewritten ones."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from transformer_blocks import HEADS, TOKENS, WIDTH

from anesurgery.mil import Program, ct, quiet_host

EACH = WIDTH // HEADS


class Norm(torch.nn.Module):
    """A layer norm over axis 1, as the op that coremltools has for it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(WIDTH)

    def forward(self, x: Any) -> Any:
        return self.norm(x.transpose(1, 3)).transpose(1, 3)


class MeanSquare(torch.nn.Module):
    """A norm by the root mean square over axis 1."""

    def forward(self, x: Any) -> Any:
        return x * torch.rsqrt(x.pow(2).mean(1, keepdim=True) + 1e-6)


class Attention(torch.nn.Module):
    """Head by head; keys are transposed once, before they are split."""

    cos: torch.Tensor
    turn: torch.Tensor

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.shared = kind, 2 if kind == "llama" else 1
        few = WIDTH // self.shared
        self.q, self.k, self.v, self.o = (torch.nn.Conv2d(WIDTH, n, 1) for n in (WIDTH, few, few, WIDTH))
        self.qkv = torch.nn.Conv2d(WIDTH, 3 * WIDTH, 1)
        self.register_buffer("mask", torch.triu(torch.full((TOKENS, TOKENS), -1e4), 1).T[None, :, None])
        self.register_buffer("cos", torch.rand(1, WIDTH, 1, TOKENS))
        turn = torch.zeros(EACH, EACH)
        turn[: EACH // 2, EACH // 2 :] = -torch.eye(EACH // 2)
        turn[EACH // 2 :, : EACH // 2] = torch.eye(EACH // 2)
        self.register_buffer("turn", turn.repeat(HEADS, 1)[:, :, None, None])

    def rotated(self, x: Any) -> Any:
        width = x.shape[1]
        turned = torch.nn.functional.conv2d(x, self.turn[:width], groups=width // EACH)
        return x * self.cos[:, :width] + turned * self.cos[:, :width]

    def forward(self, x: Any) -> Any:
        if self.kind == "gpt2":
            q, k, v = self.qkv(x).split(WIDTH, 1)
        else:
            q, k, v = self.q(x), self.k(x), self.v(x)
        if self.kind == "llama":
            q, k = self.rotated(q), self.rotated(k)
        queries = q.split(EACH, 1)
        keys, values = k.transpose(1, 3).split(EACH, 3), v.split(EACH, 1)
        heads = []
        for i, query in enumerate(queries):
            scores = torch.einsum("bchq,bkhc->bkhq", query, keys[i // self.shared]) * EACH**-0.5
            scores = scores + self.mask if self.kind in ("gpt2", "llama") else scores
            heads.append(torch.einsum("bkhq,bchk->bchq", scores.softmax(1), values[i // self.shared]))
        return self.o(torch.cat(heads, 1))


class Layer(torch.nn.Module):
    """Attention and a hidden layer, with norms before or after them."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.attention = kind, Attention(kind)
        self.norms = torch.nn.ModuleList([MeanSquare() if kind == "llama" else Norm() for _ in range(2)])
        self.up, self.gate = torch.nn.Conv2d(WIDTH, 96, 1), torch.nn.Conv2d(WIDTH, 96, 1)
        self.down = torch.nn.Conv2d(96, WIDTH, 1)

    def hidden(self, x: Any) -> Any:
        if self.kind == "llama":
            return self.down(torch.nn.functional.silu(self.gate(x)) * self.up(x))
        approximate = "tanh" if self.kind == "gpt2" else "none"
        return self.down(torch.nn.functional.gelu(self.up(x), approximate=approximate))

    def forward(self, x: Any) -> Any:
        first, second = self.norms
        if self.kind == "bert":
            x = first(x + self.attention(x))
            return second(x + self.hidden(x))
        x = x + self.attention(first(x))
        return x + self.hidden(second(x))


@cache
def layer(kind: str) -> Program:
    """One layer as coremltools converts it."""
    torch.manual_seed(0)
    x = torch.zeros(1, WIDTH, 1, TOKENS)
    with torch.no_grad(), quiet_host():
        traced = torch.jit.trace(Layer(kind).eval(), x)  # type: ignore[no-untyped-call]
        made: Program = ct.convert(
            traced,
            inputs=[ct.TensorType("x", tuple(x.shape))],
            minimum_deployment_target=ct.target.iOS17,
            compute_precision=ct.precision.FLOAT32,
            convert_to="milinternal",
        )
    return made
