"""Chains, pipelines and merged packages whose writer is killed: what was there before is there."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import anesurgery as ane
from anesurgery.files import sub_byte
from anesurgery.files.weights import WeightWriter
from anesurgery.files.writing import SCRATCH
from anesurgery.mil import Program, Var, ct, mb, walk_ops


def program(factor: float) -> Program:
    weights = [np.full((32, 32), factor * n, np.float32) for n in (1, 2)]

    return mb.program(input_specs=[mb.TensorSpec((2, 32))], opset_version=ct.target.iOS17)(
        lambda x: mb.relu(x=mb.linear(x=mb.linear(x=x, weight=weights[0]), weight=weights[1]), name="y")
    )


def merged(model: Path, target: Path) -> Path:
    return ane.merge({"a": model, "b": model}, target, overwrite=True)


def chained(model: Path, target: Path) -> Path:
    return ane.split(model, 2).save(target, overwrite=True)


@cache
def encoded(model: Path) -> ane.Surgery:
    """Its second weight, which is compressed, times a constant, in the form that it had."""
    program = ane.load(model).program
    table, indices = np.linspace(-1, 1, 16).astype(np.float32), np.arange(1024, dtype=np.uint8) % 16
    (first, second) = [op for op in walk_ops(program) if op.op_type == "linear"]
    scale = float(first.weight.val[0, 0])

    @mb.program(input_specs=[mb.TensorSpec((2, 32))], opset_version=ct.target.iOS16)
    def made(x: Var) -> Var:
        packed, shape = sub_byte.pack(indices.reshape(32, 32), 4), np.array([32, 32], np.uint32)
        weight = mb.constexpr_lut_to_dense(indices=packed, lut=table, shape=shape)
        return mb.linear(x=x, weight=mb.mul(x=weight, y=np.float32(scale)), bias=second.weight.val[0], name="y")

    return ane.apply(made, "fold_constants", compressed="reencode", quiet=True)


def encodes(model: Path, target: Path) -> Path:
    return encoded(model).save(target, overwrite=True)


WRITERS: dict[str, tuple[str, Callable[[Path, Path], Path]]] = {
    "a folder of chunks": ("chain", chained),
    "a pipeline": ("chain.mlpackage", chained),
    "functions": ("merged.mlpackage", merged),
    "weights encoded again": ("encoded.mlpackage", encodes),
}


def dies(write: Callable[[Path, Path], Path], model: Path, target: Path, call: int) -> bool:
    """Does a child die at a call of the writer of weights? It ends by itself where there are fewer calls."""
    child = os.fork()
    if not child:
        calls, finish = [0], WeightWriter.finish

        def killed(self: Any) -> None:
            calls[0] += 1
            finish(self)
            if calls[0] == call:
                os.kill(os.getpid(), signal.SIGKILL)

        WeightWriter.finish = killed  # type: ignore[method-assign]
        try:
            write(model, target)
        finally:
            os._exit(0)
    return os.WIFSIGNALED(os.waitpid(child, 0)[1])


@pytest.mark.one_of(4)
@pytest.mark.parametrize("kind", WRITERS)
def test_a_killed_writer_leaves_what_was_there(kind: str, tmp_path: Path) -> None:
    name, write = WRITERS[kind]
    old, new = (ane.save(ane.load(program(f)), tmp_path / f"{f}.mlpackage") for f in (1.0, 3.0))
    folder = tmp_path / "out"
    folder.mkdir()
    target = write(old, folder / name)
    x = {"x": np.ones((2, 32), np.float32)}
    before, after = (ane.run(write(model, tmp_path / name), x)["y"] for model in (old, new))
    assert not np.array_equal(before, after)
    call = 1
    while dies(write, new, target, call):
        np.testing.assert_array_equal(ane.run(target, x)["y"], before)
        call += 1
    assert call == (2 if kind in ("functions", "weights encoded again") else 3)
    np.testing.assert_array_equal(ane.run(target, x)["y"], after)  # the one that nobody killed
    write(new, target)
    assert [p.name for p in folder.iterdir() if not p.name.startswith(SCRATCH)] == [name]
    assert not [p for p in folder.iterdir() if p.name.startswith(SCRATCH)]
