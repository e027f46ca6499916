"""Layers of transformers written by hand in the layout of Apple's own, a bound for rewritten ones."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from transformer_blocks import Size

from anesurgery.mil import Program, ct, quiet_host


class Norm(torch.nn.Module):
    """A layer norm over axis 1, as the op that coremltools has for it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(width)

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

    def __init__(self, kind: str, size: Size) -> None:
        super().__init__()
        self.kind, self.width, self.each = kind, size.width, size.width // size.heads
        self.shared = size.shared if kind == "llama" else 1
        few, width, tokens = size.width // self.shared, size.width, size.tokens
        self.q, self.k, self.v, self.o = (torch.nn.Conv2d(width, n, 1) for n in (width, few, few, width))
        self.qkv = torch.nn.Conv2d(width, 3 * width, 1)
        self.register_buffer("mask", torch.triu(torch.full((tokens, tokens), -1e4), 1).T[None, :, None])
        self.register_buffer("cos", torch.rand(1, width, 1, tokens))
        half, turn = self.each // 2, torch.zeros(self.each, self.each)
        turn[:half, half:] = -torch.eye(half)
        turn[half:, :half] = torch.eye(half)
        self.register_buffer("turn", turn.repeat(size.heads, 1)[:, :, None, None])

    def rotated(self, x: Any) -> Any:
        width = x.shape[1]
        turned = torch.nn.functional.conv2d(x, self.turn[:width], groups=width // self.each)
        return x * self.cos[:, :width] + turned * self.cos[:, :width]

    def forward(self, x: Any, seen: Any = None, mask: Any = None) -> Any:
        seen = x if seen is None else seen
        if self.kind == "gpt2":
            q, k, v = self.qkv(x).split(self.width, 1)
        else:
            q, k, v = self.q(x), self.k(seen), self.v(seen)
        if self.kind == "llama":
            q, k = self.rotated(q), self.rotated(k)
        mask = self.mask if self.kind in ("gpt2", "llama") or (seen is x and self.kind == "cross") else mask
        queries = q.split(self.each, 1)
        keys, values = k.transpose(1, 3).split(self.each, 3), v.split(self.each, 1)
        heads = []
        for i, query in enumerate(queries):
            scores = torch.einsum("bchq,bkhc->bkhq", query, keys[i // self.shared]) * self.each**-0.5
            scores = scores if mask is None else scores + mask
            heads.append(torch.einsum("bkhq,bchk->bchq", scores.softmax(1), values[i // self.shared]))
        return self.o(torch.cat(heads, 1) if len(heads) > 1 else heads[0])


class Layer(torch.nn.Module):
    """Attention and a hidden layer, with norms before or after them."""

    def __init__(self, kind: str, size: Size) -> None:
        super().__init__()
        self.kind, self.attention = kind, Attention(kind, size)
        self.crossing = Attention(kind, size)
        made = [MeanSquare() if kind == "llama" else Norm(size.width) for _ in range(3)]
        self.norms = torch.nn.ModuleList(made)
        self.up, self.gate = (torch.nn.Conv2d(size.width, size.hidden, 1) for _ in range(2))
        self.down = torch.nn.Conv2d(size.hidden, size.width, 1)

    def hidden(self, x: Any) -> Any:
        if self.kind == "llama":
            return self.down(torch.nn.functional.silu(self.gate(x)) * self.up(x))
        approximate = "tanh" if self.kind == "gpt2" else "none"
        return self.down(torch.nn.functional.gelu(self.up(x), approximate=approximate))

    def forward(self, x: Any, more: Any = None) -> Any:
        first, second, third = self.norms
        if "bert" in self.kind:
            x = first(x + self.attention(x, mask=more))
            return second(x + self.hidden(x))
        x = x + self.attention(first(x))
        x = x + self.crossing(third(x), more) if self.kind == "cross" else x
        return x + self.hidden(second(x))


@cache
def layer(kind: str, size: Size = Size()) -> Program:  # noqa: B008 - it is frozen
    """One layer as coremltools converts it."""
    torch.manual_seed(0)
    more = {
        "masked bert": torch.zeros(size.batch, size.tokens, 1, 1),
        "cross": torch.zeros(size.batch, size.width, 1, size.tokens + 3),
    }
    given = [torch.zeros(size.batch, size.width, 1, size.tokens), *([more[kind]] if kind in more else [])]
    with torch.no_grad(), quiet_host():
        traced = torch.jit.trace(Layer(kind, size).eval(), tuple(given))  # type: ignore[no-untyped-call]
        made: Program = ct.convert(
            traced,
            inputs=[ct.TensorType(n, tuple(x.shape)) for n, x in zip(("x", "more"), given, strict=False)],
            minimum_deployment_target=ct.target.iOS17,
            compute_precision=ct.precision.FLOAT32,
            convert_to="milinternal",
        )
    return made
