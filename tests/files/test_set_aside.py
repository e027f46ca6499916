"""Arrays on the disk are the same arrays, and take no memory of their own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import anesurgery as ane
from anesurgery.compressing import running_samples
from anesurgery.files import arrays as module
from anesurgery.files.arrays import LEAST_SET_ASIDE, set_aside
from anesurgery.interpret.arithmetic import constant_memory
from anesurgery.mil import Array, Program, Var, ct, mb, types

RNG = np.random.default_rng(41)


def owner(array: Array) -> Any:
    while isinstance(array.base, np.ndarray):
        array = array.base
    return array


@pytest.mark.parametrize("written", [False, True])
def test_an_array_stays_what_it_was(tmp_path: Path, written: bool) -> None:
    """The wrong version loses the type by which coremltools knows numbers of 4 bits, or leaves files behind."""
    codes = RNG.integers(0, 16, (1024, 1024)).astype(np.uint8).view(types.np_uint4_dtype)
    turned = np.asfortranarray(RNG.standard_normal((512, 512)))
    for array in (codes, turned):
        held = set_aside(array, tmp_path, written=written)
        np.testing.assert_array_equal(held, array)
        assert isinstance(owner(held), np.memmap)
        assert types.numpy_type_to_builtin_type(held.dtype) == types.numpy_type_to_builtin_type(array.dtype)
        assert held.flags.writeable == written
    assert not list(tmp_path.iterdir())
    small = np.zeros(LEAST_SET_ASIDE - 1, np.uint8)
    assert set_aside(small) is small


def layers() -> Program:
    @mb.program(input_specs=[mb.TensorSpec((8, 32), dtype=types.fp16)], opset_version=ct.target.iOS18)
    def program(x: Var) -> Var:
        for weight in WEIGHTS:
            x = mb.relu(x=mb.linear(x=x, weight=weight))
        return mb.identity(x=x, name="y")

    made: Program = program
    return made


WEIGHTS = [(RNG.standard_normal((32, 32)) / 5).astype(np.float16) for _ in range(3)]
SAMPLES = [{"x": RNG.standard_normal((8, 32)).astype(np.float16)} for _ in range(12)]


@pytest.mark.slow
def test_what_is_on_the_disk_changes_no_weight(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Values, codes and decoded weights, all of which a small model leaves in memory."""
    how: dict[str, Any] = {"inputs": SAMPLES, "for_": "size", "smallest": 100}
    plain = ane.compress(layers(), 3, **how)
    aside: list[Array] = []

    def counted(array: Array, *given: Any, **named: Any) -> Array:
        aside.append(set_aside(array, *given, **named))
        return aside[-1]

    monkeypatch.setattr(module, "LEAST", 0)
    monkeypatch.setattr(running_samples, "MOST_VALUES", 0)
    monkeypatch.setattr(constant_memory, "CACHE_LIMIT", 0)
    rooms = "compressing.correcting", "compressing.running_samples", "interpret.core"
    for room in rooms:
        monkeypatch.setattr(f"anesurgery.{room}.set_aside", counted)
    found = ane.compress(layers(), 3, work=tmp_path / "work", **how)
    assert {array.dtype.kind for array in aside} == {"f", "u"}
    rows = [[(row.form, row.bytes, row.error, row.rounded) for row in one.weights] for one in (found, plain)]
    assert rows[0] == rows[1]
    assert found.loss is not None
    assert plain.loss is not None
    assert found.loss.kl == plain.loss.kl
    np.testing.assert_array_equal(ane.run(found.model, SAMPLES[0])["y"], ane.run(plain.model, SAMPLES[0])["y"])
