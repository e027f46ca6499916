"""The expected time at each length, and the choice of sizes by it; what is said of each size of a folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

import anesurgery as ane
from anesurgery.commands.app import app
from anesurgery.errors import SurgeryError
from anesurgery.mil import Program, ct, mb, types

TARGET = "M4/macOS 15"
LENGTHS = [3000, 4000, 9000, 40000]
WEIGHT = np.eye(64, dtype=np.float16)


def at(shapes: Any, opset: Any = ct.target.iOS18) -> Program:
    return mb.program(input_specs=[mb.TensorSpec(shapes["x"], dtype=types.fp16)], opset_version=opset)(
        lambda x: mb.linear(x=mb.relu(x=mb.linear(x=x, weight=WEIGHT)), weight=WEIGHT, name="y")
    )


def times(lengths: Any = LENGTHS, **options: Any) -> ane.SizeTimes:
    return ane.size_times(at, {"x": (1, None, 64)}, lengths, TARGET, **options)


def test_what_was_made_has_its_own_time_and_what_lies_between_a_time_between() -> None:
    found = times()
    assert min(found.milliseconds) == 3000
    assert max(found.milliseconds) == 40000
    for length, ms in found.milliseconds.items():
        alone = ane.inspect(at({"x": (1, length, 64)}), TARGET).time
        assert alone is not None
        assert found(length) == ms == alone.ms
    (low, high) = list(found.milliseconds)[2:4]
    between = found((low + high) // 2)
    assert found(low) < between < found(high)
    assert found(1) == found(3000)


def test_time_chooses_other_sizes_than_padding_does() -> None:
    lengths = {3000: 5, 4000: 5, 9000: 1, 40000: 1}
    found = times(lengths, multiple=64)
    assert all(length % 64 == 0 for length in found.milliseconds)
    choice = ane.choose_sizes(lengths, 2, time=found, multiple=64)
    assert choice.timed
    total = sum(lengths.values())
    served = {length: next(s for s in choice.sizes if s >= length) for length in lengths}
    assert choice.best.expected == pytest.approx(sum(n * found(served[k]) for k, n in lengths.items()) / total)


def test_the_package_is_as_large_as_said(tmp_path: Path) -> None:
    """The wrong version counts the weights for each size."""
    found = times()
    choice = ane.choose_sizes(LENGTHS, 3, time=found)
    for one in choice.choices:
        shapes = {"x": [(1, n, 64) for n in one.sizes]}
        folder = ane.sizes(at, shapes).save(tmp_path / str(len(one.sizes)))
        written = sum(f.stat().st_size for f in folder.rglob("*") if f.suffix in (".bin", ".mlmodel"))
        assert one.bytes == pytest.approx(written, rel=0.1)
    assert "package" in str(choice)


def test_a_model_that_stays_on_the_cpu_has_core_mls_estimate() -> None:
    """The wrong version has a time only where published ones of the engine are behind it."""
    found = times([100, 200])
    assert all(inspection.residency["ops"] == 0 for inspection in found.inspections.values())
    assert 0 < found(100) < found(200)


def test_a_shape_has_a_length() -> None:
    with pytest.raises(SurgeryError, match="put None in its place"):
        ane.size_times(at, {"x": (1, 64, 64)}, LENGTHS, TARGET)


def test_in_the_terminal(tmp_path: Path) -> None:
    (tmp_path / "lengths.txt").write_text("\n".join(map(str, LENGTHS)))
    lengths = ["choose-sizes", str(tmp_path / "lengths.txt")]
    told = CliRunner().invoke(app, [*lengths, "--model", "m.mlpackage"])
    assert "go together" in str(told.exception)
    told = CliRunner().invoke(app, [*lengths, "--model", "m", "--size", "x=1x64", "--target", "M4"])
    assert "with N in the place" in str(told.exception)


@pytest.mark.parametrize("opset", [ct.target.iOS17, ct.target.iOS18])
def test_each_size_of_a_folder_and_each_function_is_told(tmp_path: Path, opset: Any) -> None:
    sized = ane.sizes(lambda shapes: at(shapes, opset), {"x": [(1, 2, 64), (1, 4096, 64), (1, 32768, 64)]})
    folder = sized.save(tmp_path / "sized")
    found = ane.inspect(folder, TARGET)
    assert found.model == str(folder)
    assert list(found.functions) == ["size_2", "size_4096", "size_32768"]
    assert [one.status for one in found.functions.values()] == [2, 2, 0]
    assert found.ops == found.functions["size_32768"].ops
    for name, one in found.functions.items():
        assert f"{name}: {one.summary}" in found.notes
        assert found.to_json()["functions"][name]["summary"] == one.summary
    one = ane.inspect(folder, TARGET, function="size_2")
    assert (one.status, one.functions) == (2, {})
    with pytest.raises(ane.SurgeryError, match="unknown size 'size_3'"):
        ane.inspect(folder, TARGET, function="size_3")
    with pytest.raises(ane.SurgeryError, match="holds several sizes"):
        ane.inspect(folder, TARGET, inputs={"x": np.zeros((1, 2, 64), np.float16)})
    if opset == ct.target.iOS18:
        package = ane.inspect(folder / "model.mlpackage", TARGET)
        assert package.functions.keys() == found.functions.keys()
        alone = ane.inspect(folder / "model.mlpackage", TARGET, function="size_2")
        assert not alone.functions
        assert alone.status == 2


def test_the_size_at_which_ops_leave_the_engine_is_named(tmp_path: Path) -> None:
    """An axis of 32768 is too long for an M2, and not for an M4."""
    sized = ane.sizes(at, {"x": [(1, 2, 64), (1, 4096, 64), (1, 32768, 64), (1, 40000, 64)]})
    folder = sized.save(tmp_path / "sized")
    note = ane.inspect(folder, "M2/macOS 15").notes[0]
    assert note.startswith("leaves the engine at size_32768: linear ")
    assert note.endswith("(and 2 more), which it can run at size_4096")
    assert not any("leaves the engine" in note for note in ane.inspect(folder, TARGET).notes)
