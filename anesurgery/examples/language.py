"""GPT-2, Llama and BERT, as people write them in PyTorch: small, with random weights."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

TOKENS, WIDTH, HEADS, LAYERS = 64, 512, 8, 4
GPT2_WORDS, LLAMA_WORDS, BERT_WORDS = 50257, 32000, 30522
LEAST = torch.finfo(torch.float32).min


class Attention(nn.Module):
    """Attention of a width of 512 with 8 heads; fewer heads of keys and values are repeated."""

    def __init__(self, key_heads: int = HEADS, bias: bool = True) -> None:
        super().__init__()
        self.size, self.key_heads = WIDTH // HEADS, key_heads
        self.queries = nn.Linear(WIDTH, WIDTH, bias=bias)
        self.keys = nn.Linear(WIDTH, key_heads * self.size, bias=bias)
        self.values = nn.Linear(WIDTH, key_heads * self.size, bias=bias)
        self.out = nn.Linear(WIDTH, WIDTH, bias=bias)

    def split(self, x: Tensor, heads: int) -> Tensor:
        """[1, tokens, heads * size] as [1, heads, tokens, size]."""
        return x.view(1, -1, heads, self.size).transpose(1, 2)

    def forward(self, x: Tensor, mask: Tensor, turn: tuple[Tensor, Tensor] | None = None) -> Tensor:
        """Attend; `mask` is added to the scores, `turn` is cos and sin of rotary positions."""
        q, k, v = self.split(self.queries(x), HEADS), self.keys(x), self.split(self.values(x), self.key_heads)
        k = self.split(k, self.key_heads)
        if turn is not None:
            q, k = rotated(q, *turn), rotated(k, *turn)
        k, v = (each.repeat_interleave(HEADS // self.key_heads, 1) for each in (k, v))
        scores = q @ k.transpose(-1, -2) / math.sqrt(self.size) + mask
        mixed = scores.softmax(-1) @ v
        return self.out(mixed.transpose(1, 2).reshape(1, -1, WIDTH))


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

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        """Divide by the root of the mean square."""
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5))


class Gated(nn.Module):
    """The feed-forward part of a Llama: SwiGLU."""

    def __init__(self, inner: int = 1408) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(WIDTH, inner, bias=False) for _ in range(2))
        self.down = nn.Linear(inner, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Gate, and back to the width."""
        return self.down(functional.silu(self.gate(x)) * self.up(x))


def feed_forward(gelu: str) -> nn.Sequential:
    """Two linear layers around a gelu."""
    return nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(gelu), nn.Linear(4 * WIDTH, WIDTH))


class GPT2Block(nn.Module):
    """Norms in front, gelu by tanh."""

    def __init__(self) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attn, self.mlp = Attention(), feed_forward("tanh")

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        """Attend and compute, each added to what came in."""
        x = x + self.attn(self.ln_1(x), mask)
        return x + self.mlp(self.ln_2(x))


class GPT2(nn.Module):
    """Ids [1, tokens] to logits [1, tokens, vocabulary]; the head is the table of the tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(GPT2_WORDS, WIDTH), nn.Embedding(TOKENS, WIDTH)
        self.h = nn.ModuleList(GPT2Block() for _ in range(LAYERS))
        self.ln_f = nn.LayerNorm(WIDTH)

    def forward(self, ids: Tensor) -> Tensor:
        """Logits of every position."""
        tokens = ids.shape[1]
        x = self.wte(ids) + self.wpe(torch.arange(tokens))
        for block in self.h:
            x = block(x, causal(tokens))
        return functional.linear(self.ln_f(x), self.wte.weight)


class LlamaBlock(nn.Module):
    """RMSNorm in front, rotary positions, grouped keys, SwiGLU."""

    def __init__(self) -> None:
        super().__init__()
        self.input_layernorm, self.post_attention_layernorm = RootNorm(), RootNorm()
        self.self_attn, self.mlp = Attention(2, bias=False), Gated()

    def forward(self, x: Tensor, mask: Tensor, turn: tuple[Tensor, Tensor]) -> Tensor:
        """Attend and compute, each added to what came in."""
        x = x + self.self_attn(self.input_layernorm(x), mask, turn)
        return x + self.mlp(self.post_attention_layernorm(x))


class Llama(nn.Module):
    """Ids [1, tokens] to logits [1, tokens, vocabulary]."""

    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(LLAMA_WORDS, WIDTH)
        self.layers = nn.ModuleList(LlamaBlock() for _ in range(LAYERS))
        self.norm, self.lm_head = RootNorm(), nn.Linear(WIDTH, LLAMA_WORDS, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        """Logits of every position."""
        tokens, size = ids.shape[1], WIDTH // HEADS
        speeds = 10000.0 ** -(torch.arange(0, size, 2) / size)
        angles = torch.outer(torch.arange(tokens).float(), speeds)
        turn = (torch.cat([angles, angles], -1).cos(), torch.cat([angles, angles], -1).sin())
        x = self.embed_tokens(ids)
        for layer in self.layers:
            x = layer(x, causal(tokens), turn)
        return self.lm_head(self.norm(x))


class BertBlock(nn.Module):
    """Norms behind, exact gelu."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.ffn = Attention(), feed_forward("none")
        self.attention_norm, self.ffn_norm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        """Attend and compute, each added to what came in, and normed."""
        x = self.attention_norm(x + self.attention(x, mask))
        return self.ffn_norm(x + self.ffn(x))


class Bert(nn.Module):
    """Ids and an attention mask, [1, tokens] each, to a sentence embedding [1, width]."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.positions = nn.Embedding(BERT_WORDS, WIDTH), nn.Embedding(TOKENS, WIDTH)
        self.types, self.norm = nn.Embedding(2, WIDTH), nn.LayerNorm(WIDTH)
        self.layers = nn.ModuleList(BertBlock() for _ in range(LAYERS))
        self.pooler = nn.Linear(WIDTH, WIDTH)

    def forward(self, ids: Tensor, attention_mask: Tensor) -> Tensor:
        """The embedding of the first token."""
        tokens = ids.shape[1]
        x = self.words(ids) + self.positions(torch.arange(tokens)) + self.types(torch.zeros_like(ids))
        hidden = torch.zeros(1, 1, 1, tokens).masked_fill(attention_mask[:, None, None, :] == 0, LEAST)
        x = self.norm(x)
        for layer in self.layers:
            x = layer(x, hidden)
        return self.pooler(x[:, 0]).tanh()
