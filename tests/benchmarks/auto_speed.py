"""Seconds and memory of `auto` on three models of about 900 ops: a decoder, a hostile CNN, an upgraded network.

The bar: under 30 s on 2 cores, for each target. Each run is a process of its own::

    python tests/benchmarks/auto_speed.py
    python tests/benchmarks/auto_speed.py decoder --targets "M1/macOS 14" --profile
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

import anesurgery as ane
from anesurgery.loading import load
from anesurgery.mil import Program, Var, ct, mb, quiet_host, types, walk_ops
from anesurgery.neuralnetwork.making import make_layer, make_network
from anesurgery.placement.score import Score, placed
from anesurgery.placement.target import Target

TARGETS = ("M1/macOS 14", "M4/macOS 15")
SECONDS = 30.0
WIDTH, LENGTH, HEADS = 64, 32, 4
CHANNELS, SIZE = 32, 32
DRAW = np.random.default_rng(0)


def weight(*shape: int) -> Any:
    """Random weights of moderate size."""
    return (DRAW.standard_normal(shape) / np.sqrt(np.prod(shape[1:]))).astype(np.float16)


def layer(x: Var, mask: Var) -> Var:
    """A layer of a decoder as converters write it: 29 ops."""
    normed = mb.layer_norm(x=x, axes=[-1], gamma=np.ones(WIDTH, np.float16), beta=np.zeros(WIDTH, np.float16))
    heads = []
    for _ in range(3):
        made = mb.reshape(x=mb.linear(x=normed, weight=weight(WIDTH, WIDTH)), shape=[1, LENGTH, HEADS, -1])
        heads.append(mb.transpose(x=made, perm=[0, 2, 1, 3]))
    query, key, value = heads
    scores = mb.mul(x=mb.matmul(x=query, y=key, transpose_y=True), y=np.float16(0.25))
    masked = mb.select(cond=mask, a=scores, b=np.float16(-65504))
    seen = mb.matmul(x=mb.softmax(x=masked, axis=-1), y=value)
    joined = mb.reshape(x=mb.transpose(x=seen, perm=[0, 2, 1, 3]), shape=[1, LENGTH, WIDTH])
    x = mb.add(x=x, y=mb.linear(x=joined, weight=weight(WIDTH, WIDTH)))
    mean = mb.reduce_mean(x=mb.square(x=x), axes=[-1], keep_dims=True)
    normed = mb.mul(x=mb.mul(x=x, y=mb.rsqrt(x=mean, epsilon=np.float16(1e-5))), y=np.ones(WIDTH, np.float16))
    gate = mb.silu(x=mb.linear(x=normed, weight=weight(2 * WIDTH, WIDTH)))
    inner = mb.mul(x=gate, y=mb.linear(x=normed, weight=weight(2 * WIDTH, WIDTH)))
    return mb.add(x=x, y=mb.linear(x=inner, weight=weight(WIDTH, 2 * WIDTH)))


def decoder() -> Program:
    """Ids and an integer mask to logits of the last word."""
    shapes = [mb.TensorSpec((1, LENGTH), dtype=types.int32)] * 2

    @mb.program(input_specs=shapes, opset_version=ct.target.iOS17)
    def program(ids: Var, mask: Var) -> Var:
        x = mb.gather(x=weight(3000, WIDTH), indices=ids, axis=0)
        padded = mb.expand_dims(x=mb.cast(x=mask, dtype="bool"), axes=[1, 2])
        both = mb.logical_and(x=padded, y=np.tril(np.ones((1, 1, LENGTH, LENGTH), bool)))
        for _ in range(31):
            x = layer(x, both)
        return mb.linear(x=x, weight=weight(3000, WIDTH), name="logits")

    return program


def block(x: Var, k: int) -> Var:
    """What keeps convolutional networks off the engine, in turn: 18 ops or so."""
    y = mb.conv(x=x, weight=weight(CHANNELS, CHANNELS, 3, 3), pad_type="same")
    mean, variance = np.zeros(CHANNELS, np.float16), np.ones(CHANNELS, np.float16)
    y = mb.batch_norm(x=y, mean=mean, variance=variance)
    y = mb.mul(
        x=y,
        y=mb.clip(
            x=mb.add(x=mb.mul(x=y, y=np.float16(1 / 6)), y=np.float16(0.5)),
            alpha=np.float16(0),
            beta=np.float16(1),
        ),
    )
    grouped = mb.reshape(x=y, shape=[1, 4, CHANNELS // 4, SIZE, SIZE])
    y = mb.reshape(x=mb.transpose(x=grouped, perm=[0, 2, 1, 3, 4]), shape=[1, CHANNELS, SIZE, SIZE])
    hostile: list[Callable[[], Var]] = [
        lambda: mb.conv(x=y, weight=weight(CHANNELS, CHANNELS, 3, 3), dilations=[4, 4], pad_type="same"),
        lambda: mb.conv(
            x=mb.pad(x=y, pad=[0, 0, 0, 0, 1, 1, 1, 1], mode="reflect"), weight=weight(CHANNELS, CHANNELS, 3, 3)
        ),
        lambda: mb.upsample_bilinear(
            x=mb.max_pool(x=y, kernel_sizes=[4, 4], strides=[4, 4], pad_type="valid"),
            scale_factor_height=np.float32(4),
            scale_factor_width=np.float32(4),
        ),
        lambda: mb.conv(x=y, weight=weight(CHANNELS, 1, 31, 31), groups=CHANNELS, pad_type="same"),
        lambda: mb.prelu(x=y, alpha=np.full(CHANNELS, 0.25, np.float16)),
    ]
    z = hostile[k % len(hostile)]()
    share = mb.reduce_mean(x=z, axes=[2, 3], keep_dims=True)
    share = mb.relu(x=mb.conv(x=share, weight=weight(8, CHANNELS, 1, 1)))
    share = mb.sigmoid(x=mb.conv(x=share, weight=weight(CHANNELS, 8, 1, 1)))
    return mb.add(x=x, y=mb.mul(x=z, y=share))


def cnn() -> Program:
    """A picture to a class of each pixel."""

    @mb.program(
        input_specs=[mb.TensorSpec((1, 3, SIZE, SIZE), dtype=types.fp16)], opset_version=ct.target.iOS17
    )
    def program(x: Var) -> Var:
        x = mb.conv(x=x, weight=weight(CHANNELS, 3, 3, 3), pad_type="same")
        for k in range(55):
            x = block(x, k)
        return mb.reduce_argmax(x=x, axis=1, name="classes")

    return program


def network() -> Program:
    """A neural network of the first releases, ReLU6 in five layers as converters wrote it, upgraded."""
    layers, last = list[Any](), "x"

    def add(kind: str, **fields: Any) -> str:
        nonlocal last
        name = f"b{len(layers)}"
        layers.append(make_layer(kind, [last], [name], **fields))
        last = name
        return name

    for k in range(140):
        add(
            "convolution",
            outputChannels=CHANNELS,
            kernelChannels=CHANNELS,
            kernelSize=[3, 3],
            same={},
            weights={"floatValue": weight(CHANNELS, CHANNELS, 3, 3).reshape(-1)},
        )
        ones = {"floatValue": np.ones(CHANNELS)}
        add("batchnorm", channels=CHANNELS, epsilon=1e-5, gamma=ones, beta=ones, mean=ones, variance=ones)
        add("activation", ReLU={})
        add("activation", linear={"alpha": -1.0})
        add("unary", type="THRESHOLD", alpha=-6.0, shift=0.0, scale=1.0)
        add("activation", linear={"alpha": -1.0})
        if k % 6 == 5:
            add("pooling", type="MAX", kernelSize=[4, 4], stride=[4, 4], valid={})
            add("upsample", scalingFactor=[4, 4], mode="BILINEAR")
    add("flatten", mode="CHANNEL_FIRST")
    add("softmax")
    model = make_network({"x": (CHANNELS, SIZE, SIZE)}, layers, [last], rank5=True)
    found: Program = load(ane.upgrade(ct.models.MLModel(model, skip_model_load=True))).program
    return found


MODELS: dict[str, Callable[[], Program]] = {"decoder": decoder, "cnn": cnn, "network": network}


def measure(name: str, target: str, profile: bool) -> None:
    """One run, in words; the seconds come last."""
    with quiet_host():
        program, aim = MODELS[name](), Target.parse(target)
    count = sum(op.op_type != "const" for op in walk_ops(program))
    before = Score.of(placed(program, aim)).share["ops"]
    profiler, started, used = cProfile.Profile(), time.perf_counter(), time.process_time()
    if profile:
        profiler.enable()
    surgery = ane.apply(program, "auto", target=target, prove=None, quiet=True)
    profiler.disable()
    seconds, used = time.perf_counter() - started, time.process_time() - used
    after = Score.of(placed(surgery.program, aim)).share["ops"]
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    passes = ", ".join(dict.fromkeys(change.pass_name for change in surgery.changes))
    if profile:
        pstats.Stats(profiler).sort_stats("cumulative").print_stats(60)
    print(f"{name}, {target}: {count} ops, {before:.3f} -> {after:.3f} of them on the ANE ({passes})")
    print(f"  {memory:.2f} GB at most, {used:.1f} s of the processor, {seconds:.1f} s")


def main() -> None:
    """Run each model for each target; the exit code says whether all stay below the bar."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*", default=list(MODELS))
    parser.add_argument("--targets", nargs="+", default=TARGETS)
    parser.add_argument("--profile", action="store_true", help="where the time goes")
    parser.add_argument("--here", action="store_true", help="in this process")
    chosen = parser.parse_args()
    jobs = [(model, target) for model in chosen.models for target in chosen.targets]
    if chosen.here:
        for model, target in jobs:
            measure(model, target, chosen.profile)
        return
    met = True
    for model, target in jobs:
        command = [
            sys.executable,
            __file__,
            model,
            "--targets",
            target,
            "--here",
            *["--profile"] * chosen.profile,
        ]
        said = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        print(said, end="", flush=True)
        met &= float(said.split()[-2]) < SECONDS
    sys.exit(0 if met else 1)


if __name__ == "__main__":
    main()
