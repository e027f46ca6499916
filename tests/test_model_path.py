"""How many files a reader meets who follows a model through a public call.

A file meets the model where one of its functions is called with it: with a `Loaded`, a `Subject`, a MIL
program, the specification of a model, or several of these. The decorator of public calls, which looks at types
alone, does not count.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from coremltools.models import datatypes
from coremltools.models.neural_network import NeuralNetworkBuilder

import anesurgery as ane
from anesurgery.files.package import Loaded
from anesurgery.files.protobuf import proto
from anesurgery.mil import Program, ct, mb
from anesurgery.rewriting.ml_program import Subject

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tuple(f"{ROOT / room}/" for room in ("anesurgery", "passes", "recipes"))
MODEL = (Loaded, Subject, Program, proto.Model_pb2.Model)


def program() -> Program:
    return mb.program(input_specs=[mb.TensorSpec((2, 3))], opset_version=ct.target.iOS16)(
        lambda x: mb.sub(x=x, y=mb.abs(x=x))
    )


def network(folder: Path) -> Path:
    ends = [("x", datatypes.Array(3, 8, 8))], [("y", datatypes.Array(3, 8, 8))]
    builder = NeuralNetworkBuilder(*ends)
    builder.add_activation("relu", "RELU", "x", "y")
    path = folder / "network.mlmodel"
    path.write_bytes(builder.spec.SerializeToString())
    return path


def is_model(value: object) -> bool:
    several = isinstance(value, (list, tuple)) and bool(value)
    return isinstance(value[0] if several else value, MODEL)  # type: ignore[index]


def met(call: Callable[[], object]) -> set[str]:
    """The files of the project with a function that takes the model, during a call."""
    files: set[str] = set()

    def watch(frame: FrameType, event: str, arg: object) -> None:
        code = frame.f_code
        if event != "call" or not code.co_filename.startswith(PROJECT):
            return
        taken = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        if any(is_model(frame.f_locals.get(name)) for name in taken):
            files.add(str(Path(code.co_filename).resolve().relative_to(ROOT)))

    before = sys.getprofile()
    sys.setprofile(watch)
    try:
        call()
    finally:
        sys.setprofile(before)
    return files - {"anesurgery/doors.py"}


def applied(folder: Path, **options: Any) -> Callable[[], object]:
    path = ane.apply(program(), [], quiet=True).save(folder / "before.mlpackage")
    return lambda: ane.apply(path, ["negate_subtract"], quiet=True, **options).save(folder / "after.mlpackage")


@pytest.mark.filterwarnings("ignore:negate_subtract")
@pytest.mark.parametrize("options", [{}, {"prove": "both", "target": "M1/macOS14"}], ids=["plain", "proved"])
def test_a_surgery_meets_few_files(options: dict[str, Any], tmp_path: Path) -> None:
    files = met(applied(tmp_path, **options))
    assert {"anesurgery/surgery.py", "anesurgery/files/package.py"} <= files
    assert len(files) <= 25, sorted(files)


def test_an_inspection_meets_few_files(tmp_path: Path) -> None:
    path = ane.apply(program(), [], quiet=True).save(tmp_path / "before.mlpackage")
    files = met(lambda: str(ane.inspect(path, target="M1/macOS14")))
    assert "anesurgery/placement/inspector.py" in files
    assert len(files) <= 20, sorted(files)


def test_an_upgrade_meets_few_files(tmp_path: Path) -> None:
    path = network(tmp_path)
    files = met(lambda: ane.upgrade(path))
    assert "anesurgery/network_editing/upgrade.py" in files
    assert len(files) <= 20, sorted(files)


def test_a_function_that_takes_the_model_is_noticed() -> None:
    """A wrong count would be one that sees no file, or the file of a function that is given none."""
    from anesurgery.mil import nesting
    from anesurgery.text import to_text

    given = program()
    assert met(lambda: nesting(given)) == {"anesurgery/mil.py"}
    assert "anesurgery/text.py" in met(lambda: to_text(given))
    assert met(lambda: ane.Target.parse("M1")) == set()
