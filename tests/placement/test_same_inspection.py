"""A program that was read from a file is inspected as the file is, or a note says why not."""

from __future__ import annotations

import gc
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import anesurgery as ane
from anesurgery.files import interface as origins
from anesurgery.loading import clone
from anesurgery.mil import Program, ct, quiet_host

SHAPE = (1, 3, 48, 48)
SIDE = ct.RangeDim(32, 64, default=48)
SHAPES: dict[str, Any] = {
    "range": (1, 3, SIDE, SIDE),
    "list": ct.EnumeratedShapes([SHAPE, (1, 3, 32, 32)], default=SHAPE),
    "fixed": SHAPE,
}


def saved(path: Path, shape: Any, **form: Any) -> Path:
    torch.manual_seed(0)
    layers = [torch.nn.Conv2d(3, 64, 3), torch.nn.ReLU(), torch.nn.Conv2d(64, 64, 3, padding=1)]
    with quiet_host():
        traced: Any = torch.jit.trace(torch.nn.Sequential(*layers).eval(), torch.zeros(SHAPE))  # type: ignore[no-untyped-call]
        inputs = [ct.TensorType("x", shape=shape)]
        ct.convert(traced, inputs=inputs, skip_model_load=True, **form).save(str(path))
    return path


def told(inspection: Any) -> dict[str, Any]:
    """All but what the model is called."""
    return replace(inspection, model="", fixing=inspection.fixing.partition("--set")[2]).to_json()


@pytest.fixture(scope="module", params=SHAPES)
def package(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp(request.param) / "m.mlpackage"
    return saved(path, SHAPES[request.param], minimum_deployment_target=ct.target.iOS17)


@pytest.mark.parametrize("target", ["M4", "iPhone/iOS 18", "any"])
def test_a_program_says_what_its_package_does(package: Path, target: str) -> None:
    path, program = package, ane.load(package).program
    gc.collect()  # nothing but the program is held
    wanted = told(ane.inspect(path, target))
    assert told(ane.inspect(program, target)) == wanted
    assert told(ane.inspect(clone(ane.load(path)).program, target)) == wanted


def test_without_its_model_a_program_says_less(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The wrong version: nothing is remembered."""
    monkeypatch.setattr("anesurgery.files.package.remember", lambda program, spec: None)
    form = {"minimum_deployment_target": ct.target.iOS17}
    path = saved(tmp_path / "m.mlpackage", SHAPES["range"], **form)
    program = ane.load(path).program
    assert told(ane.inspect(program, "M4")) != told(ane.inspect(path, "M4"))


def test_of_a_network_a_note_says_why_it_differs(tmp_path: Path) -> None:
    path = saved(tmp_path / "m.mlmodel", SHAPE, convert_to="neuralnetwork")
    loaded = ane.load(path)
    for model in (loaded, loaded.program):
        notes = ane.inspect(model, "M4").notes
        assert any("translation of a neural network" in n and "give the path of its file" in n for n in notes)
    assert not any("translation" in n for n in ane.inspect(path, "M4").notes)
    written = tmp_path / "m.mlpackage"
    ane.save(loaded, written)
    assert not any("translation" in n for n in ane.inspect(written, "M4").notes)


def test_a_program_that_is_gone_is_forgotten(tmp_path: Path) -> None:
    path = saved(tmp_path / "m.mlpackage", SHAPE, minimum_deployment_target=ct.target.iOS17)
    program: Program | None = ane.load(path).program
    assert program is not None
    assert origins.origin_of(program) is not None
    number = len(origins._ORIGINS)
    program = None
    gc.collect()
    assert len(origins._ORIGINS) < number
