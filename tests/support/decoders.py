"""Small decoders built op by op, in the spellings that conversions and people use."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from anesurgery.mil import Array, Program, Var, ct, mb, types
from anesurgery.passes.add_cache import AddCache
from anesurgery.testing import apply_pass


@dataclass
class Decoder:
    """What a small decoder looks like."""

    tokens: int = 24
    heads: int = 4
    groups: int = 2
    """Heads of keys and values."""
    width: int = 4
    """Of a head."""
    words: int = 31
    layers: int = 2
    positions: str = "rotary"
    """"learned", "rotary", "interleaved" (rotary, of neighbours) or "none"."""
    mask: str = "added"
    """"added", "selected", "window", "windows" (of every other layer), "distance" (a bias by distance), "given"
    (any bias below), "none"."""
    fused: bool = False
    """Attention in one op?"""
    keys_turned: bool = False
    """Are keys transposed before the product?"""
    flat: bool = False
    """Are the heads merged with the batch, and the MLP computed on rank 2?"""
    picked: bool = False
    """Are queries, keys and values picked from one product? Then there are as many groups as heads."""
    written: bool = False
    """Are keys written in two parts into zeros?"""
    half: bool = False
    opset: Any = ct.target.iOS18
    layer: int = 0
    """The one that is being made."""
    rng: np.random.Generator = field(default_factory=np.random.default_rng)

    @property
    def dtype(self) -> Any:
        """Of the floats."""
        return np.float16 if self.half else np.float32

    def program(self) -> Program:
        """The program; all numbers are the same each time."""
        self.rng = np.random.default_rng(0)
        spec = [mb.TensorSpec((1, self.tokens), types.int32)]

        @mb.program(input_specs=spec, opset_version=self.opset)
        def program(ids: Var) -> Var:
            x = mb.gather(x=self.numbers(self.words, self.size), indices=ids, axis=0)
            if self.positions == "learned":
                x = mb.add(x=x, y=self.numbers(1, self.tokens, self.size))
            for layer in range(self.layers):
                self.layer = layer
                x = mb.add(x=x, y=self.attention(self.norm(x)))
                x = mb.add(x=x, y=self.mlp(self.norm(x)))
            return mb.linear(x=self.norm(x), weight=self.numbers(self.words, self.size), name="logits")

        made: Program = program
        return made

    @property
    def size(self) -> int:
        """Of the residual stream."""
        return self.heads * self.width

    def numbers(self, *shape: int) -> Array:
        """Random weights."""
        found: Array = (self.rng.standard_normal(shape) * 0.8).astype(self.dtype)
        return found

    def norm(self, x: Var) -> Var:
        """By root mean square."""
        mean = mb.reduce_mean(x=mb.mul(x=x, y=x), axes=[-1], keep_dims=True)
        return mb.mul(x=x, y=mb.rsqrt(x=mean, epsilon=self.dtype(1e-3)))

    def mlp(self, x: Var) -> Var:
        """Gated."""
        if self.flat:
            x = mb.reshape(x=x, shape=[-1, self.size])
        gate, up, down = (self.numbers(*s) for s in ((9, self.size), (9, self.size), (self.size, 9)))
        y = mb.mul(x=mb.silu(x=mb.linear(x=x, weight=gate)), y=mb.linear(x=x, weight=up))
        y = mb.linear(x=y, weight=down)
        return mb.reshape(x=y, shape=[1, self.tokens, self.size]) if self.flat else y

    def attention(self, x: Var) -> Var:
        """With grouped heads."""
        heads = (self.heads, self.groups, self.groups)
        q, k, v = self.parts(x) if self.picked else (self.head(x, n) for n in heads)
        if self.positions in ("rotary", "interleaved"):
            q, k = self.rotated(q), self.rotated(k)
        k = self.in_parts(k) if self.written else k
        k, v = self.repeated(k), self.repeated(v)
        if self.flat:
            shape = [self.heads, self.tokens, self.width]
            q, k, v = (mb.reshape(x=t, shape=shape) for t in (q, k, v))
        y = self.fused_op(q, k, v) if self.fused else self.spelled_out(q, k, v)
        if self.flat:
            y = mb.reshape(x=y, shape=[1, self.heads, self.tokens, self.width])
        y = mb.reshape(x=mb.transpose(x=y, perm=[0, 2, 1, 3]), shape=[1, self.tokens, self.size])
        return mb.linear(x=y, weight=self.numbers(self.size, self.size))

    def head(self, x: Var, heads: int) -> Var:
        """The heads of queries, keys or values."""
        x = mb.linear(x=x, weight=self.numbers(heads * self.width, self.size))
        return mb.transpose(x=mb.reshape(x=x, shape=[1, self.tokens, heads, self.width]), perm=[0, 2, 1, 3])

    def parts(self, x: Var) -> list[Var]:
        """Queries, keys and values of one product."""
        shape = [1, self.tokens, self.heads, 3, self.width]
        x = mb.reshape(x=mb.linear(x=x, weight=self.numbers(3 * self.size, self.size)), shape=shape)
        squeeze = [False, False, False, True, False]
        end = [*shape[:3], 1, self.width]
        made = []
        for i in range(3):
            begin, end[3] = [0, 0, 0, i, 0], i + 1
            part = mb.slice_by_index(x=x, begin=begin, end=list(end), squeeze_mask=squeeze)
            made.append(mb.transpose(x=part, perm=[0, 2, 1, 3]))
        return made

    def in_parts(self, x: Var) -> Var:
        """The same numbers, written into zeros."""
        shape, half = [int(d) for d in x.shape], self.width // 2
        first, second = mb.split(x=x, num_splits=2, axis=-1)
        begin, end = [0, 0, 0, half], [*shape[:3], half]
        x = mb.slice_update(x=np.zeros(shape, self.dtype), update=first, begin=[0] * 4, end=end)
        return mb.slice_update(x=x, update=second, begin=begin, end=shape)

    def repeated(self, x: Var) -> Var:
        """A copy of each group for each of its heads."""
        if self.heads == self.groups:
            return x
        reps = [1, 1, self.heads // self.groups, 1, 1]
        x = mb.tile(x=mb.expand_dims(x=x, axes=[2]), reps=reps)
        return mb.reshape(x=x, shape=[1, self.heads, self.tokens, self.width])

    def rotated(self, x: Var) -> Var:
        """Rotary positions."""
        angles = np.outer(np.arange(self.tokens), 0.9 / 4.0 ** np.arange(self.width // 2))
        near = self.positions == "interleaved"
        angles = (np.repeat(angles, 2, -1) if near else np.concatenate([angles, angles], -1))[None, None]
        cos, sin = (f(angles).astype(self.dtype) for f in (np.cos, np.sin))
        if near:
            shape = [int(d) for d in x.shape]
            a, b = (
                mb.slice_by_index(x=x, begin=[0, 0, 0, i], end=shape, stride=[1, 1, 1, 2]) for i in range(2)
            )
            turned = mb.reshape(x=mb.stack(values=(mb.mul(x=b, y=self.dtype(-1)), a), axis=-1), shape=shape)
            return mb.add(x=mb.mul(x=x, y=cos), y=mb.mul(x=turned, y=sin))
        a, b = mb.split(x=x, num_splits=2, axis=-1)
        turned = mb.concat(values=(mb.mul(x=b, y=self.dtype(-1)), a), axis=-1)
        return mb.add(x=mb.mul(x=x, y=cos), y=mb.mul(x=turned, y=sin))

    def keep(self) -> Array:
        """Which keys a query sees."""
        distance = np.subtract.outer(np.arange(self.tokens), np.arange(self.tokens))
        near = self.mask == "window" or (self.mask == "windows" and self.layer % 2 == 0)
        seen: Array = (distance >= 0) & (distance < (7 if near else self.tokens))
        return seen

    def added_mask(self) -> Array:
        """What is added to the scores."""
        mask: Array = np.where(self.keep(), 0.0, -1e4)
        distance = np.subtract.outer(np.arange(self.tokens), np.arange(self.tokens))
        if self.mask == "distance":
            mask = mask - 0.25 * np.abs(distance)
        if self.mask == "given":
            mask = mask + np.random.default_rng(1).standard_normal(mask.shape)
        return mask[None, None].astype(self.dtype)

    def spelled_out(self, q: Var, k: Var, v: Var) -> Var:
        """Two products and a softmax."""
        if self.keys_turned:
            perm = [*range(k.rank - 2), k.rank - 1, k.rank - 2]
            scores = mb.matmul(x=q, y=mb.transpose(x=k, perm=perm))
        else:
            scores = mb.matmul(x=q, y=k, transpose_y=True)
        scores = mb.mul(x=scores, y=self.dtype(0.5))
        if self.mask == "selected":
            scores = mb.select(cond=self.keep()[None, None], a=scores, b=self.dtype(-np.inf))
        elif self.mask in ("distance", "given"):  # biases come first, then the mask
            bias = self.added_mask() - np.where(self.keep(), 0.0, -1e4).astype(self.dtype)
            scores = mb.add(x=mb.add(x=scores, y=bias.astype(self.dtype)), y=self.fill())
        elif self.mask != "none":
            scores = mb.add(x=scores, y=self.added_mask().reshape(self.added_mask().shape[4 - q.rank :]))
        return mb.matmul(x=mb.softmax(x=scores, axis=-1), y=v)

    def fill(self) -> Array:
        """The causal mask alone."""
        return np.where(self.keep(), 0.0, -1e4)[None, None].astype(self.dtype)

    def fused_op(self, q: Var, k: Var, v: Var) -> Var:
        """Attention in one op."""
        return mb.scaled_dot_product_attention(query=q, key=k, value=v, attn_mask=self.added_mask())


def cached(**options: Any) -> Program:
    """A small decoder of half floats with a cache of its own."""
    program, _ = apply_pass(AddCache(prefill=4), Decoder(half=True, **options).program())
    assert isinstance(program, Program)
    return program
