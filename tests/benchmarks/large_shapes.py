"""Models of today's sizes with random weights: GPT-2 XL, a Llama with a cache, a UNet, Whisper.

Weights are views of one file, so that a model of 3 GB is made in little memory.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from gpt2 import Weights, program

from anesurgery.files.package import save
from anesurgery.loading import load
from anesurgery.mil import Program, Var, ct, mb, types

POOL = 34_000_000
"""Elements of the largest weight but for tables of words."""
HEAD = 64


@dataclass
class Parts:
    """What these models are made of."""

    weights: Weights

    def linear(self, x: Var, wide: int) -> Var:
        """A product with a stored weight."""
        made: Var = mb.linear(x=x, weight=self.weights(wide, int(x.shape[-1])))
        return made

    def conv(self, x: Var, outputs: int, size: int = 3, stride: int = 1) -> Var:
        """A convolution that keeps the size, or halves it."""
        weight = self.weights(outputs, int(x.shape[1]), size, size)
        made: Var = mb.conv(x=x, weight=weight, strides=[stride] * 2, pad_type="same")
        return made

    def norm(self, x: Var) -> Var:
        """Over channels in the last axis."""
        made: Var = mb.layer_norm(
            x=x, axes=[-1], gamma=np.ones(int(x.shape[-1]), np.float16), epsilon=np.float16(1e-5)
        )
        return made

    def group_norm(self, x: Var) -> Var:
        """Of 32 groups of channels."""
        shape = [int(n) for n in x.shape]
        rows = mb.reshape(x=x, shape=[1, 32, math.prod(shape) // 32])
        made: Var = mb.reshape(x=mb.layer_norm(x=rows, axes=[-1], epsilon=np.float16(1e-5)), shape=shape)
        return made

    def heads(self, x: Var) -> Var:
        """[1, tokens, channels] as [1, heads, tokens, channels of a head]."""
        tokens, width = (int(n) for n in x.shape[-2:])
        made: Var = mb.transpose(x=mb.reshape(x=x, shape=[1, tokens, -1, min(HEAD, width)]), perm=[0, 2, 1, 3])
        return made

    def attention(self, x: Var, other: Var | None = None) -> Var:
        """Of some tokens to themselves, or to others."""
        tokens, width = (int(n) for n in x.shape[-2:])
        source = x if other is None else other
        q, k, v = (self.heads(self.linear(s, width)) for s in (x, source, source))
        scores = mb.mul(x=mb.matmul(x=q, y=k, transpose_y=True), y=np.float16(0.125))
        mixed = mb.matmul(x=mb.softmax(x=scores, axis=-1), y=v)
        return self.linear(
            mb.reshape(x=mb.transpose(x=mixed, perm=[0, 2, 1, 3]), shape=[1, tokens, width]), width
        )


def gpt2(folder: Path, layers: int, width: int, tokens: int, **_: Any) -> Program:
    """Of 50257 words."""
    return program(layers, width, 50257, tokens, folder)


def llama(folder: Path, layers: int, width: int, context: int, **_: Any) -> Program:
    """One token a call; keys and values of each layer in a state of its own, turned by their positions."""
    parts, keys = Parts(Weights(folder, 32000 * width)), width // 8
    shape = (1, keys // HEAD, context, HEAD)
    states = [mb.StateTensorSpec(shape, types.fp16) for _ in range(2 * layers)]
    specs = [mb.TensorSpec((1, 1), dtype=types.int32), mb.TensorSpec((1,), dtype=types.int32), *states]
    angles = np.outer(np.arange(context), 1e4 ** (-np.arange(0, HEAD, 2) / HEAD))
    turns = [np.concatenate([f(angles)] * 2, 1).astype(np.float16) for f in (np.cos, np.sin)]

    def kept(state: Var, new: Var, place: Var) -> Var:
        end = mb.add(x=place, y=np.int32(1))
        old = mb.read_state(input=state)
        start = mb.concat(values=[np.zeros(2, np.int32), place, np.zeros(1, np.int32)], axis=0)
        stop = mb.concat(values=[np.array(shape[:2], np.int32), end, np.array([HEAD], np.int32)], axis=0)
        made: Var = mb.coreml_update_state(
            state=state, value=mb.slice_update(x=old, update=new, begin=start, end=stop)
        )
        return made

    def body(ids: Var, place: Var, *held: Var) -> Var:
        x = mb.gather(x=parts.weights(32000, width), indices=ids, axis=0)
        cos, sin = (mb.gather(x=t, indices=place, axis=0) for t in turns)
        later = mb.greater(x=np.arange(context, dtype=np.int32), y=place)
        mask = mb.select(cond=later, a=np.float16(-1e4), b=np.float16(0))

        def turned(x: Var) -> Var:
            a, b = mb.split(x=x, num_splits=2, axis=-1)
            other = mb.concat(values=[mb.mul(x=b, y=np.float16(-1)), a], axis=-1)
            return mb.add(x=mb.mul(x=x, y=cos), y=mb.mul(x=other, y=sin))

        for number in range(layers):
            y = parts.norm(x)
            q, k, v = (parts.heads(parts.linear(y, n)) for n in (width, keys, keys))
            k = kept(held[2 * number], turned(k), place)
            v = kept(held[2 * number + 1], v, place)
            k, v = (mb.tile(x=t, reps=[1, width // keys, 1, 1]) for t in (k, v))
            scores = mb.matmul(x=mb.mul(x=turned(q), y=np.float16(0.125)), y=k, transpose_y=True)
            scores = mb.add(x=scores, y=mask)
            mixed = mb.matmul(x=mb.softmax(x=scores, axis=-1), y=v)
            x = mb.add(x=x, y=parts.linear(mb.reshape(x=mixed, shape=[1, 1, width]), width))
            y, inner = parts.norm(x), width * 11 // 4
            gate = mb.mul(x=mb.silu(x=parts.linear(y, inner)), y=parts.linear(y, inner))
            x = mb.add(x=x, y=parts.linear(gate, width), name=f"layer_{number}")
        return mb.linear(x=parts.norm(x), weight=parts.weights(32000, width), name="logits")

    names = ", ".join(["ids", "place", *(f"state_{n}" for n in range(2 * layers))])
    scope: dict[str, Any] = {"body": body}
    exec(f"def named({names}): return body({names})", scope)  # the builder looks at the parameters
    made: Program = mb.program(input_specs=specs, opset_version=ct.target.iOS18)(scope["named"])
    return made


def unet(folder: Path, width: int, side: int, **_: Any) -> Program:
    """As in Stable Diffusion 1: four levels, attention to 77 words in three, values read again going up."""
    parts = Parts(Weights(folder, POOL))
    specs = [(1, 4, side, side), (1, 4 * width), (1, 77, 768)]

    def block(x: Var, time: Var, outputs: int) -> Var:
        y = parts.conv(mb.silu(x=parts.group_norm(x)), outputs)
        shift = mb.expand_dims(x=parts.linear(mb.silu(x=time), outputs), axes=[2, 3])
        y = parts.conv(mb.silu(x=parts.group_norm(mb.add(x=y, y=shift))), outputs)
        return mb.add(x=y, y=x if x.shape[1] == outputs else parts.conv(x, outputs, 1))

    def attended(x: Var, words: Var) -> Var:
        shape = [int(n) for n in x.shape]
        rows = mb.reshape(x=parts.conv(parts.group_norm(x), shape[1], 1), shape=[1, shape[1], -1])
        y = mb.transpose(x=rows, perm=[0, 2, 1])
        y = mb.add(x=y, y=parts.attention(parts.norm(y)))
        y = mb.add(x=y, y=parts.attention(parts.norm(y), words))
        a, b = mb.split(x=parts.linear(parts.norm(y), 8 * shape[1]), num_splits=2, axis=-1)
        y = mb.add(x=y, y=parts.linear(mb.mul(x=a, y=mb.gelu(x=b)), shape[1]))
        back = mb.reshape(x=mb.transpose(x=y, perm=[0, 2, 1]), shape=shape)
        return mb.add(x=x, y=parts.conv(back, shape[1], 1))

    @mb.program(input_specs=[mb.TensorSpec(s, dtype=types.fp16) for s in specs], opset_version=ct.target.iOS17)
    def made(x: Var, time: Var, words: Var) -> Var:
        widths = [width, 2 * width, 4 * width, 4 * width]
        x = parts.conv(x, width)
        skips = [x]
        for level, outputs in enumerate(widths):
            for _ in range(2):
                x = block(x, time, outputs)
                x = attended(x, words) if level < 3 else x
                skips.append(x)
            if level < 3:
                x = parts.conv(x, outputs, 3, 2)
                skips.append(x)
        x = block(attended(block(x, time, widths[-1]), words), time, widths[-1])
        for level in (3, 2, 1, 0):
            for _ in range(3):
                x = block(mb.concat(values=[x, skips.pop()], axis=1), time, widths[level])
                x = attended(x, words) if level < 3 else x
            if level:
                x = mb.upsample_nearest_neighbor(x=x, scale_factor_height=2, scale_factor_width=2)
                x = parts.conv(x, widths[level])
        return mb.identity(x=parts.conv(mb.silu(x=parts.group_norm(x)), 4), name="noise")

    return made


def whisper(folder: Path, layers: int, width: int, frames: int, **_: Any) -> Program:
    """An encoder of sound, and a decoder of which each layer reads what the encoder gives."""
    parts = Parts(Weights(folder, 51866 * width))

    def mlp(x: Var, name: str) -> Var:
        y = parts.linear(mb.gelu(x=parts.linear(parts.norm(x), 4 * width)), width)
        return mb.add(x=x, y=y, name=name)

    @mb.program(
        input_specs=[
            mb.TensorSpec((1, 128, frames), dtype=types.fp16),
            mb.TensorSpec((1, 4), dtype=types.int32),
        ],
        opset_version=ct.target.iOS17,
    )
    def made(sound: Var, ids: Var) -> Var:
        x = mb.gelu(x=mb.conv(x=sound, weight=parts.weights(width, 128, 3), pad_type="same"))
        x = mb.gelu(x=mb.conv(x=x, weight=parts.weights(width, width, 3), strides=[2], pad_type="same"))
        x = mb.transpose(x=x, perm=[0, 2, 1])
        for number in range(layers):
            x = mlp(mb.add(x=x, y=parts.attention(parts.norm(x))), f"encoder_{number}")
        heard = mb.identity(x=parts.norm(x), name="heard")
        table = mb.const(val=parts.weights(51866, width), name="table")
        x = mb.gather(x=table, indices=ids, axis=0)
        for number in range(layers):
            x = mb.add(x=x, y=parts.attention(parts.norm(x)))
            x = mlp(mb.add(x=x, y=parts.attention(parts.norm(x), heard)), f"decoder_{number}")
        return mb.linear(x=parts.norm(x), weight=table, name="logits")

    return made


Sizes = Mapping[str, int]
SHAPES: dict[str, tuple[Callable[..., Program], Sizes, Sizes, Sizes]] = {
    "GPT-2 XL": (gpt2, {"layers": 48, "width": 1600, "tokens": 64}, {"tokens": 4}, {"layers": 2, "width": 64}),
    "Llama, 1.1 billion": (
        llama, {"layers": 22, "width": 2048, "context": 512}, {"context": 16}, {"layers": 2, "width": 512}
    ),
    "UNet of Stable Diffusion": (unet, {"width": 320, "side": 64}, {"side": 8}, {"width": 32}),
    "Whisper large": (
        whisper, {"layers": 32, "width": 1280, "frames": 3000}, {"frames": 16}, {"layers": 2, "width": 64}
    ),
}  # fmt: skip
"""Name -> what builds it, its sizes, those in which the same weights run quickly, and those of a toy."""


def package(name: str, path: Path, *, quick: bool = False, toy: bool = False) -> Path:
    """Write one of these models."""
    build, sizes, small, tiny = SHAPES[name]
    chosen = {**sizes, **(small if quick or toy else {}), **(tiny if toy else {})}
    with tempfile.TemporaryDirectory(dir=path.parent) as pool:
        return save(load(build(Path(pool) / "weights", **chosen)), path)
