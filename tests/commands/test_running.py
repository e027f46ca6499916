"""`anesurgery run` and `anesurgery ranges`: numbers on the command line."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from classifiers import LABELS, classifier

from anesurgery.commands import app as cli
from anesurgery.files.package import save
from anesurgery.loading import load
from anesurgery.mil import Var, ct, mb, types

Call = Any


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """Squares of fp16 numbers."""

    @mb.program(input_specs=[mb.TensorSpec((3,), dtype=types.fp16)], opset_version=ct.target.iOS16)
    def program(x: Var) -> Var:
        return mb.mul(x=x, y=x, name="y")

    return save(load(program), tmp_path / "model.mlpackage")


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Call:
    """Words -> (exit code, standard output, standard error)."""

    def run(*words: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["anesurgery", *map(str, words)])
        code: Any = 0
        try:
            cli.main()
        except SystemExit as ended:
            code = ended.code or 0
        return int(code), *capsys.readouterr()

    return run


def numbers(folder: Path, *values: float) -> Path:
    path = folder / f"in{values[0]:g}.npz"
    np.savez(path, x=np.array(values))
    return path


def test_run_shows_and_writes(call: Call, package: Path, tmp_path: Path) -> None:
    given, out = numbers(tmp_path, 1, 2, 3), tmp_path / "out.npz"
    code, said, _ = call("run", package, "--inputs", given, "--out", out)
    assert code == 0
    assert "float16" in said
    with np.load(out) as made:
        np.testing.assert_array_equal(made["y"], np.array([1, 4, 9], np.float16))
    code, said, _ = call("run", package, "--inputs", given, "--json")
    row = {"shape": [3], "dtype": "float16", "min": "1", "max": "9", "mean": "4.66797"}
    assert json.loads(said) == {"y": row}


def test_run_shows_the_label_and_the_probabilities(call: Call, tmp_path: Path) -> None:
    """The wrong version: both are a scalar object without a number."""
    code, said, _ = call("run", classifier(tmp_path), "--json")
    rows = json.loads(said)
    assert code == 0
    assert rows["classLabel"]["min"] in LABELS
    (probabilities,) = (row for name, row in rows.items() if name != "classLabel")
    assert probabilities["shape"] == [len(LABELS)]
    assert float(probabilities["mean"]) == pytest.approx(1 / len(LABELS), rel=1e-3)


def test_run_in_each_arithmetic(call: Call, package: Path, tmp_path: Path) -> None:
    given = numbers(tmp_path, 300, 0, 0)
    for precision, largest in (("fp32", "90000"), ("fp16", "inf"), ("ane", "inf"), ("ane:M1", "inf")):
        code, said, _ = call("run", package, "--inputs", given, "--precision", precision, "--json")
        assert (code, json.loads(said)["y"]["max"]) == (0, largest)


def test_ranges_end_with_1_where_something_overflows(call: Call, package: Path, tmp_path: Path) -> None:
    small, large = numbers(tmp_path, 1, 2, 3), numbers(tmp_path, 300, 2, 3)
    code, said, _ = call("ranges", package, "--inputs", small)
    assert code == 0
    assert "no op leaves the range" in said
    code, said, _ = call("ranges", package, "--inputs", small, "--inputs", large, "--json")
    assert code == 1
    data = json.loads(said)
    assert data["first"] == {"fp16": "y", "ane": "y"}
    assert (data["samples"], data["ops"][0]["maximum"]) == (2, 90000)


def test_run_samples_shapes_that_the_model_allows(call: Call, corpus: Path) -> None:
    code, said, _ = call("run", corpus / "dtln_aec_128_part1_fp16.mlpackage", "--json")
    assert code == 0
    assert all(row["shape"] and row["mean"] for row in json.loads(said).values())


def test_drawn_inputs_are_named(package: Path, call: Call) -> None:
    _, out, _ = call("run", package)
    assert "random inputs (seed 0; pass your own with --inputs): " in " ".join(out.split())
