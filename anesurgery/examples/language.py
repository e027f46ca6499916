"""GPT-2, Llama and BERT, as people write them in PyTorch: small, with random weights."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

LEAST = torch.finfo(torch.float32).min


@dataclass(frozen=True)
class Sizes:
    """How large a model of text is: its vocabulary, tokens of one input, width, heads and layers."""

    words: int
    tokens: int = 64
    width: int = 512
    heads: int = 8
    layers: int = 4


GPT2_SIZES, LLAMA_SIZES, BERT_SIZES = Sizes(50257), Sizes(32000), Sizes(30522)
TINY = Sizes(words=96, tokens=16, width=32, heads=2, layers=1)


class Attention(nn.Module):
    """Attention; fewer heads of keys and values than of queries are repeated."""

    def __init__(self, sizes: Sizes, key_heads: int = 0, bias: bool = True) -> None:
        super().__init__()
        width = sizes.width
        self.heads, self.size = sizes.heads, width // sizes.heads
        self.key_heads = key_heads or sizes.heads
        self.queries = nn.Linear(width, width, bias=bias)
        self.keys = nn.Linear(width, self.key_heads * self.size, bias=bias)
        self.values = nn.Linear(width, self.key_heads * self.size, bias=bias)
        self.out = nn.Linear(width, width, bias=bias)

    def split(self, x: Tensor, heads: int) -> Tensor:
        """[1, tokens, heads * size] as [1, heads, tokens, size]."""
        return x.view(1, -1, heads, self.size).transpose(1, 2)

    def forward(self, x: Tensor, mask: Tensor, turn: tuple[Tensor, Tensor] | None = None) -> Tensor:
        """Attend; `mask` is added to the scores, `turn` is cos and sin of rotary positions."""
        q, k, v = (
            self.split(self.queries(x), self.heads),
            self.keys(x),
            self.split(self.values(x), self.key_heads),
        )
        k = self.split(k, self.key_heads)
        if turn is not None:
            q, k = rotated(q, *turn), rotated(k, *turn)
        k, v = (each.repeat_interleave(self.heads // self.key_heads, 1) for each in (k, v))
        scores = q @ k.transpose(-1, -2) / math.sqrt(self.size) + mask
        mixed = scores.softmax(-1) @ v
        return self.out(mixed.transpose(1, 2).reshape(1, -1, self.heads * self.size))


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions, the halves as pairs."""
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat([-second, first], -1) * sin


def causal(tokens: int) -> Tensor:
    """A mask that lets no position see a later one, made as models make it: in fp32, with -inf."""
    allowed = torch.ones(tokens, tokens).tril().bool()
    return torch.zeros(tokens, tokens).masked_fill(~allowed, float("-inf"))


class RootNorm(nn.Module):
    """RMSNorm, computed in fp32."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        """Divide by the root of the mean square."""
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5))


class Gated(nn.Module):
    """The feed-forward part of a Llama: SwiGLU."""

    def __init__(self, width: int) -> None:
        super().__init__()
        inner = 11 * width // 4
        self.gate, self.up = (nn.Linear(width, inner, bias=False) for _ in range(2))
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Gate, and back to the width."""
        return self.down(functional.silu(self.gate(x)) * self.up(x))


def feed_forward(width: int, gelu: str) -> nn.Sequential:
    """Two linear layers around a gelu."""
    return nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(gelu), nn.Linear(4 * width, width))


class GPT2Block(nn.Module):
    """Norms in front, gelu by tanh."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(sizes.width), nn.LayerNorm(sizes.width)
        self.attn, self.mlp = Attention(sizes), feed_forward(sizes.width, "tanh")

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        """Attend and compute, each added to what came in."""
        x = x + self.attn(self.ln_1(x), mask)
        return x + self.mlp(self.ln_2(x))


class GPT2(nn.Module):
    """Ids [1, tokens] to logits [1, tokens, vocabulary]; the head is the table of the tokens."""

    def __init__(self, sizes: Sizes = GPT2_SIZES) -> None:
        super().__init__()
        self.wte = nn.Embedding(sizes.words, sizes.width)
        self.wpe = nn.Embedding(sizes.tokens, sizes.width)
        self.h = nn.ModuleList(GPT2Block(sizes) for _ in range(sizes.layers))
        self.ln_f = nn.LayerNorm(sizes.width)

    def forward(self, ids: Tensor) -> Tensor:
        """Logits of every position."""
        tokens = ids.shape[1]
        x = self.wte(ids) + self.wpe(torch.arange(tokens))
        for block in self.h:
            x = block(x, causal(tokens))
        return functional.linear(self.ln_f(x), self.wte.weight)


class LlamaBlock(nn.Module):
    """RMSNorm in front, rotary positions, grouped keys, SwiGLU."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.input_layernorm, self.post_attention_layernorm = RootNorm(sizes.width), RootNorm(sizes.width)
        self.self_attn, self.mlp = Attention(sizes, 2, bias=False), Gated(sizes.width)

    def forward(self, x: Tensor, mask: Tensor, turn: tuple[Tensor, Tensor]) -> Tensor:
        """Attend and compute, each added to what came in."""
        x = x + self.self_attn(self.input_layernorm(x), mask, turn)
        return x + self.mlp(self.post_attention_layernorm(x))


class Llama(nn.Module):
    """Ids [1, tokens] to logits [1, tokens, vocabulary]."""

    def __init__(self, sizes: Sizes = LLAMA_SIZES) -> None:
        super().__init__()
        self.size = sizes.width // sizes.heads
        self.embed_tokens = nn.Embedding(sizes.words, sizes.width)
        self.layers = nn.ModuleList(LlamaBlock(sizes) for _ in range(sizes.layers))
        self.norm = RootNorm(sizes.width)
        self.lm_head = nn.Linear(sizes.width, sizes.words, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        """Logits of every position."""
        tokens, size = ids.shape[1], self.size
        speeds = 10000.0 ** -(torch.arange(0, size, 2) / size)
        angles = torch.outer(torch.arange(tokens).float(), speeds)
        turn = (torch.cat([angles, angles], -1).cos(), torch.cat([angles, angles], -1).sin())
        x = self.embed_tokens(ids)
        for layer in self.layers:
            x = layer(x, causal(tokens), turn)
        return self.lm_head(self.norm(x))


class BertBlock(nn.Module):
    """Norms behind, exact gelu."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.attention, self.ffn = Attention(sizes), feed_forward(sizes.width, "none")
        self.attention_norm, self.ffn_norm = nn.LayerNorm(sizes.width), nn.LayerNorm(sizes.width)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        """Attend and compute, each added to what came in, and normed."""
        x = self.attention_norm(x + self.attention(x, mask))
        return self.ffn_norm(x + self.ffn(x))


class Bert(nn.Module):
    """Ids and an attention mask, [1, tokens] each, to a sentence embedding [1, width]."""

    def __init__(self, sizes: Sizes = BERT_SIZES) -> None:
        super().__init__()
        self.words, self.positions = (
            nn.Embedding(sizes.words, sizes.width),
            nn.Embedding(sizes.tokens, sizes.width),
        )
        self.types, self.norm = nn.Embedding(2, sizes.width), nn.LayerNorm(sizes.width)
        self.layers = nn.ModuleList(BertBlock(sizes) for _ in range(sizes.layers))
        self.pooler = nn.Linear(sizes.width, sizes.width)

    def forward(self, ids: Tensor, attention_mask: Tensor) -> Tensor:
        """The embedding of the first token."""
        tokens = ids.shape[1]
        x = self.words(ids) + self.positions(torch.arange(tokens)) + self.types(torch.zeros_like(ids))
        hidden = torch.zeros(1, 1, 1, tokens).masked_fill(attention_mask[:, None, None, :] == 0, LEAST)
        x = self.norm(x)
        for layer in self.layers:
            x = layer(x, hidden)
        return self.pooler(x[:, 0]).tanh()
