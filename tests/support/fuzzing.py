"""Damage model files at random, and see that all that reads them ends well or with an error in words.

Run as a program, in a process of its own: `python fuzzing.py FOLDER FIRST COUNT MODEL...`. Before each file it
prints its seed, so that whoever started it knows at which one it crashed or hung; after it, what was said.
"""

from __future__ import annotations

import json
import random
import resource
import shutil
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from bad_networks import build as network

import anesurgery as ane
from anesurgery.errors import SurgeryError
from anesurgery.files.package import save
from anesurgery.loading import load
from anesurgery.mil import Program, Var, ct, mb, quiet_host, types

with quiet_host():
    from coremltools.converters.mil.mil import get_new_symbol

SECONDS = 60
"""Of CPU, for one file."""
MEMORY = 12 << 30

Damage = Callable[[random.Random, bytearray], object]


def flip(rng: random.Random, data: bytearray) -> None:
    """Other bits, a few."""
    for _ in range(rng.randint(1, 8)):
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)


def truncate(rng: random.Random, data: bytearray) -> None:
    """The end is missing."""
    del data[rng.randrange(len(data)) :]


def _span(rng: random.Random, data: bytearray) -> tuple[int, int]:
    start = rng.randrange(len(data))
    return start, min(len(data), start + rng.randint(1, 64))


def remove(rng: random.Random, data: bytearray) -> None:
    """A piece is missing."""
    start, end = _span(rng, data)
    del data[start:end]


def zero(rng: random.Random, data: bytearray) -> None:
    """A piece is zero."""
    start, end = _span(rng, data)
    data[start:end] = bytes(end - start)


def scramble(rng: random.Random, data: bytearray) -> None:
    """A piece is noise."""
    start, end = _span(rng, data)
    data[start:end] = rng.randbytes(end - start)


def repeat(rng: random.Random, data: bytearray) -> None:
    """A piece is there twice."""
    start, end = _span(rng, data)
    data[start:start] = data[start:end]


def exchange(rng: random.Random, data: bytearray) -> None:
    """A piece is in another place."""
    start, end = _span(rng, data)
    piece = data[start:end]
    to = rng.randrange(len(data) - len(piece) + 1)
    data[to : to + len(piece)] = piece


def rename(rng: random.Random, data: bytearray) -> None:
    """A letter of a word is another one."""
    letters = [i for i, b in enumerate(data) if chr(b).isalnum() and b < 128]
    if letters:
        data[rng.choice(letters)] = rng.choice(b"abcdefghijklmnopqrstuvwxyz0123456789")


def number(rng: random.Random, data: bytearray) -> None:
    """A small byte, maybe a number of the format, is another one: 0, huge, or one more."""
    small = [i for i, b in enumerate(data) if b < 32]
    if small:
        i = rng.choice(small)
        data[i] = rng.choice([0, 1, 127, 128, 255, (data[i] + 1) % 256, (data[i] - 1) % 256])


def models(folder: Path) -> list[Path]:
    """Small models of many kinds: weights, states, control flow, flexible shapes, labels, an older network."""
    made = [save(load(build()), folder / f"{build.__name__}.mlpackage") for build in (weights, state, loop)]
    for mode in (None, "classifier"):
        made.append(folder / f"network_{mode}.mlmodel")
        made[-1].write_bytes(network(mode).SerializeToString())
    return made


def weights() -> Program:
    """Weights of several types, an axis that is flexible, and a type of less than a byte."""
    table = np.arange(16 * 8, dtype=np.float16).reshape(16, 8)
    indices = np.arange(64, dtype=np.uint8).reshape(16, 4) % 16
    fourths = indices.astype(types.nptype_from_builtin(types.string_to_builtin("uint4")))

    @mb.program(input_specs=[mb.TensorSpec((get_new_symbol(), 8), types.fp16)], opset_version=ct.target.iOS18)
    def program(x: Var) -> Any:
        h = mb.linear(x=mb.sub(x=x, y=np.float16(1)), weight=table, name="h")
        lut = np.arange(16, dtype=np.float16).reshape(1, 1, 16, 1)
        picked = mb.constexpr_lut_to_dense(indices=fourths, lut=lut, name="picked")
        return mb.softmax(x=mb.matmul(x=h, y=picked), axis=-1, name="y")

    return program


def state() -> Program:
    """A state that grows."""

    @mb.program(
        input_specs=[mb.TensorSpec((2,), types.fp16), mb.StateTensorSpec((2,), types.fp16)],
        opset_version=ct.target.iOS18,
    )
    def program(x: Var, total: Var) -> Any:
        grown = mb.add(x=mb.read_state(input=total), y=x)
        return mb.mul(x=mb.coreml_update_state(state=total, value=grown), y=np.float16(2), name="y")

    return program


def loop() -> Program:
    """Blocks in a loop and a branch."""

    @mb.program(input_specs=[mb.TensorSpec((2, 3))], opset_version=ct.target.iOS16)
    def program(x: Var) -> Any:
        def go_on(i: Var, v: Var) -> Any:
            return mb.less(x=i, y=np.int32(3))

        def body(i: Var, v: Var) -> Any:
            return mb.add(x=i, y=np.int32(1)), mb.mul(x=v, y=np.float32(0.5))

        _, turned = mb.while_loop(_cond=go_on, _body=body, loop_vars=(np.int32(0), x))
        positive = mb.greater(x=mb.reduce_sum(x=turned, axes=[0, 1], keep_dims=False), y=np.float32(0))
        return mb.cond(
            pred=positive, _true_fn=lambda: mb.relu(x=turned), _false_fn=lambda: mb.abs(x=turned), name="y"
        )

    return program


DAMAGES: tuple[Damage, ...] = (flip, truncate, remove, zero, scramble, repeat, exchange, rename, number)


def damaged(sources: list[Path], folder: Path, seed: int) -> Path:
    """A damaged copy of one of the models."""
    rng = random.Random(seed)
    source = sources[seed % len(sources)]
    target = folder / f"damaged{source.suffix}"
    shutil.rmtree(target, ignore_errors=True)
    target.unlink(missing_ok=True)
    if source.is_dir():
        shutil.copytree(source, target, copy_function=shutil.copyfile)
    else:
        shutil.copyfile(source, target)
    parts = sorted(p for p in target.rglob("*") if p.is_file()) if target.is_dir() else [target]
    parts += [p for p in parts if p.suffix in (".mlmodel", ".mil")] * 4
    for _ in range(rng.choice([1, 1, 1, 2, 5])):
        part = rng.choice(parts)
        data = bytearray(part.read_bytes())
        if data:
            rng.choice(DAMAGES)(rng, data)
        part.write_bytes(data)
    return target


def uses(model: Path, folder: Path) -> Iterator[tuple[str, Callable[[], object]]]:
    """What a user does with a model."""
    yield "load", lambda: load(model)
    yield "inspect", lambda: str(ane.inspect(model))
    yield "run", lambda: _run(model)
    yield "apply", lambda: str(ane.apply(model, ["negate_subtract"], quiet=True))
    yield "save", lambda: save(load(model), folder / "saved.mlpackage", overwrite=True)


def _run(model: Path) -> object:
    predictor = ane.Predictor(model)
    return predictor(predictor.sample(0))


class Hang(BaseException):
    """It takes too long."""


def _hang(*given: Any) -> None:
    raise Hang


def say(**words: Any) -> None:
    print(json.dumps(words), flush=True)


def main(sources: list[Path], folder: Path, first: int, count: int) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    signal.signal(signal.SIGVTALRM, _hang)
    for seed in range(first, first + count):
        say(seed=seed)
        model = damaged(sources, folder, seed)
        for name, use in uses(model, folder):
            signal.setitimer(signal.ITIMER_VIRTUAL, SECONDS)
            try:
                use()
                said = None
            except SurgeryError as error:
                said = str(error)
            except (Hang, Exception) as error:
                say(
                    seed=seed,
                    raw=f"{name}: {type(error).__name__}: {error}",
                    trace=traceback.format_exc(limit=-6),
                )
                break
            finally:
                signal.setitimer(signal.ITIMER_VIRTUAL, 0)
            if said is not None and name == "load":
                say(seed=seed, error=said)
                break


if __name__ == "__main__":
    places = [Path(p) for p in sys.argv[4:]]
    main(places, Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
