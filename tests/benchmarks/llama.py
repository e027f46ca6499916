"""Make Llama packages of any size with random weights, in the form that the front end gives them."""

from __future__ import annotations

import argparse
import math
import shutil
from pathlib import Path

import numpy as np
from gpt2 import Weights

from anesurgery.files.package import save
from anesurgery.loading import load
from anesurgery.mil import Array, Program, Var, ct, mb, types

HEAD = 64
SIZES = {"layers": 32, "width": 2048, "hidden": 5504, "shared": 4, "vocabulary": 32000, "length": 256}
"""A Llama of 1.5 billion parameters; `shared` heads of queries have one of keys."""


def turns(length: int) -> tuple[Array, Array]:
    """Cosines and sines of rotary positions."""
    angles = np.outer(np.arange(length), 10000.0 ** (-np.arange(0, HEAD, 2) / HEAD))
    both = np.concatenate([angles, angles], 1)[None, None]
    return np.cos(both).astype(np.float16), np.sin(both).astype(np.float16)


class Layers:
    """Builds the parts of a decoder."""

    def __init__(self, weights: Weights, width: int, hidden: int, shared: int, length: int) -> None:
        self.weights, self.width, self.hidden, self.length = weights, width, hidden, length
        self.heads, self.shared = width // HEAD, shared
        self.cosines, self.sines = turns(length)
        self.ahead = np.triu(np.full((1, 1, length, length), -1e4, np.float16), 1)

    def linear(self, x: Var, outputs: int, inputs: int) -> Var:
        """A product without a bias."""
        return mb.linear(x=x, weight=self.weights(outputs, inputs))

    def norm(self, x: Var) -> Var:
        """Root mean squares."""
        mean = mb.reduce_mean(x=mb.mul(x=x, y=x), axes=[-1], keep_dims=True)
        scaled = mb.mul(x=x, y=mb.rsqrt(x=mean, epsilon=np.float16(1e-5)))
        return mb.mul(x=scaled, y=1 + self.weights(self.width))

    def split(self, x: Var, heads: int) -> Var:
        """By head."""
        return mb.transpose(x=mb.reshape(x=x, shape=[1, self.length, heads, HEAD]), perm=[0, 2, 1, 3])

    def turned(self, x: Var) -> Var:
        """With rotary positions."""
        low, high = (
            mb.slice_by_index(x=x, begin=[0, 0, 0, at], end=[*x.shape[:3], at + HEAD // 2])
            for at in (0, HEAD // 2)
        )
        other = mb.concat(values=[mb.mul(x=high, y=np.float16(-1)), low], axis=-1)
        return mb.add(x=mb.mul(x=x, y=self.cosines), y=mb.mul(x=other, y=self.sines))

    def repeated(self, x: Var) -> Var:
        """Each head of keys for `shared` heads of queries."""
        spread = mb.tile(x=mb.expand_dims(x=x, axes=[2]), reps=[1, 1, self.shared, 1, 1])
        return mb.reshape(x=spread, shape=[1, self.heads, self.length, HEAD])

    def attention(self, x: Var) -> Var:
        """Of grouped queries, masked ahead."""
        few = self.heads // self.shared
        q = self.turned(self.split(self.linear(x, self.width, self.width), self.heads))
        k = self.turned(self.split(self.linear(x, few * HEAD, self.width), few))
        v = self.split(self.linear(x, few * HEAD, self.width), few)
        scores = mb.matmul(x=q, y=self.repeated(k), transpose_y=True)
        scores = mb.add(x=mb.mul(x=scores, y=np.float16(1 / math.sqrt(HEAD))), y=self.ahead)
        mixed = mb.matmul(x=mb.softmax(x=scores, axis=-1), y=self.repeated(v))
        rows = mb.reshape(x=mb.transpose(x=mixed, perm=[0, 2, 1, 3]), shape=[1, self.length, self.width])
        return self.linear(rows, self.width, self.width)

    def gated(self, x: Var) -> Var:
        """The hidden layer."""
        gate = mb.silu(x=self.linear(x, self.hidden, self.width))
        return self.linear(mb.mul(x=gate, y=self.linear(x, self.hidden, self.width)), self.width, self.hidden)


def program(
    layers: int, width: int, hidden: int, shared: int, vocabulary: int, length: int, folder: Path
) -> Program:
    """A decoder of fp16 with a tied head."""
    weights = Weights(folder, max(vocabulary, hidden) * width)
    parts = Layers(weights, width, hidden, shared, length)

    @mb.program(input_specs=[mb.TensorSpec((1, length), dtype=types.int32)], opset_version=ct.target.iOS17)
    def made(ids: Var) -> Var:
        table = mb.const(val=weights(vocabulary, width), name="table")
        x = mb.gather(x=table, indices=ids, axis=0)
        for _ in range(layers):
            x = mb.add(x=x, y=parts.attention(parts.norm(x)))
            x = mb.add(x=x, y=parts.gated(parts.norm(x)))
        return mb.linear(x=parts.norm(x), weight=table, name="logits")

    return made


def package(path: Path, **sizes: int) -> Path:
    """Write such a package."""
    pool = path.with_suffix(".weights")
    made = save(load(program(**SIZES | sizes, folder=pool)), path)
    shutil.rmtree(pool)
    return made


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("path", type=Path)
    for name, size in SIZES.items():
        parser.add_argument(f"--{name}", type=int, default=size)
    chosen = vars(parser.parse_args())
    package(chosen.pop("path"), **chosen)
