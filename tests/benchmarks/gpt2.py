"""Make GPT-2 packages of any size with random weights."""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import Any

import numpy as np

from anesurgery.files.package import save
from anesurgery.loading import load
from anesurgery.mil import Array, Program, Var, ct, mb, types


class Weights:
    """Random fp16 weights: views of one file, each from another place on, so that 14 GB need 0.4 GB of disk."""

    STEP = 64

    def __init__(self, folder: Path, most: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        rng, file = np.random.default_rng(0), folder / "pool.npy"
        made: Any = np.lib.format.open_memmap(  # type: ignore[no-untyped-call]
            file, mode="w+", dtype=np.float16, shape=(most + 1024 * self.STEP,)
        )
        for start in range(0, made.size, 1 << 22):
            part = made[start : start + (1 << 22)]
            part[...] = 0.02 * rng.standard_normal(part.shape, dtype=np.float32)
        made.flush()
        del made
        self._pool, self._count = np.load(file, mmap_mode="r"), 0

    def __call__(self, *shape: int) -> Array:
        self._count += 1
        start = self._count * self.STEP
        found: Array = self._pool[start : start + math.prod(shape)].reshape(shape)
        return found


def program(layers: int, width: int, vocabulary: int, length: int, folder: Path) -> Program:
    """A decoder in the form that the front end gives it: fp16, iOS 16, masked by select, tied head."""
    weights, heads = Weights(folder, max(vocabulary, 4 * width, length) * width), width // 64
    keep = np.tril(np.ones((1, 1, length, length), bool))

    def norm(x: Var) -> Var:
        return mb.layer_norm(
            x=x,
            axes=[-1],
            gamma=np.ones(width, np.float16),
            beta=np.zeros(width, np.float16),
            epsilon=np.float16(1e-5),
        )

    def linear(x: Var, wide: int, narrow: int) -> Var:
        return mb.linear(x=x, weight=weights(wide, narrow), bias=np.zeros(wide, np.float16))

    def split(x: Var) -> Var:
        return mb.transpose(x=mb.reshape(x=x, shape=[1, length, heads, 64]), perm=[0, 2, 1, 3])

    @mb.program(input_specs=[mb.TensorSpec((1, length), dtype=types.int32)], opset_version=ct.target.iOS16)
    def made(ids: Var) -> Var:
        table = mb.const(val=weights(vocabulary, width), name="table")
        places = weights(length, width)[None]
        x = mb.add(x=mb.gather(x=table, indices=ids, axis=0), y=np.asarray(places))
        for _ in range(layers):
            q, k, v = mb.split(x=linear(norm(x), 3 * width, width), num_splits=3, axis=2)
            scores = mb.matmul(x=split(q), y=split(k), transpose_y=True)
            scores = mb.select(cond=keep, a=mb.mul(x=scores, y=np.float16(0.125)), b=np.float16(-np.inf))
            mixed = mb.matmul(x=mb.softmax(x=scores, axis=-1), y=split(v))
            merged = mb.reshape(x=mb.transpose(x=mixed, perm=[0, 2, 1, 3]), shape=[1, length, width])
            x = mb.add(x=x, y=linear(merged, width, width))
            hidden = mb.gelu(x=linear(norm(x), 4 * width, width), mode="EXACT")
            x = mb.add(x=x, y=linear(hidden, width, 4 * width))
        zero = np.zeros(vocabulary, np.float16)
        return mb.linear(x=norm(x), weight=table, bias=zero, name="logits")

    return made


def package(path: Path, layers: int, width: int, vocabulary: int = 50257, length: int = 512) -> Path:
    """Write such a package."""
    return save(load(program(layers, width, vocabulary, length, path.with_suffix(".weights"))), path)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("path", type=Path)
    sizes = {"layers": 12, "width": 768, "vocabulary": 50257, "length": 512}
    for name, size in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=size)
    chosen = parser.parse_args()
    package(chosen.path, chosen.layers, chosen.width, chosen.vocabulary, chosen.length)
