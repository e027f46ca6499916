"""The comparison with Core ML, with Core ML replaced: by our own interpreter, and by one that is wrong."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import coreml_difference
import numpy as np
import pytest

import anesurgery as ane
from anesurgery.mil import Array, Program, mb

program = mb.program(input_specs=[mb.TensorSpec((2, 3))])(
    lambda x: mb.add(x=mb.exp(x=mb.sub(x=x, y=np.float32(1))), y=np.float32(2), name="y")
)


def honest(package: Path, units: str, values: Mapping[str, Array]) -> dict[str, Array]:
    return ane.run(package, values, precision="fp16")


def wrong(package: Path, units: str, values: Mapping[str, Array]) -> dict[str, Array]:
    """With the Neural Engine, exp is off by a tenth."""
    found = honest(package, units, values)
    return {k: v * 1.1 if units == "CPU_AND_NE" and k.startswith("exp") else v for k, v in found.items()}


def broken(package: Path, units: str, values: Mapping[str, Array]) -> dict[str, Array]:
    raise RuntimeError("Error in building plan")


def measured(predict: Any, folder: Path) -> list[coreml_difference.Difference]:
    return list(coreml_difference.differences("a program", program, predict, folder))


def test_every_op_is_compared_with_each_unit(tmp_path: Path) -> None:
    found = measured(honest, tmp_path)
    assert {(d.op_type, d.units, d.relative) for d in found} == {
        (op, units, 0.0) for op in ("sub", "exp", "add") for units in coreml_difference.UNITS
    }


def test_an_op_that_is_off_is_named(tmp_path: Path) -> None:
    found = measured(wrong, tmp_path)
    off = {(d.op_type, d.units) for d in found if d.relative > 0.05}
    assert off == {("exp", "CPU_AND_NE")}
    line = next(line for line in coreml_difference.report(found).splitlines() if line.startswith("exp"))
    assert line.split()[2] == "0"
    assert float(line.split()[3]) > 0.05


def test_a_model_that_core_ml_refuses_is_listed(tmp_path: Path) -> None:
    words = coreml_difference.report(measured(broken, tmp_path))
    assert "not measured: a program CPU_AND_NE: RuntimeError: Error in building plan" in words


def test_the_exit_code_follows_the_gate(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    def few() -> list[tuple[str, Program]]:
        return [("a program", program)]

    def off(package: Path, units: str, values: Mapping[str, Array]) -> dict[str, Array]:
        return {k: v * 1.1 for k, v in honest(package, units, values).items()}

    monkeypatch.setattr(coreml_difference, "programs", few)
    monkeypatch.setattr(sys, "argv", ["coreml_difference"])
    coreml_difference.main(honest)
    assert "exp" in capsys.readouterr().out
    with pytest.raises(SystemExit) as ended:
        coreml_difference.main(off)
    assert ended.value.code == 1


@pytest.mark.skipif(sys.platform == "darwin", reason="there Core ML answers")
def test_without_core_ml_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["coreml_difference"])
    with pytest.raises(SystemExit, match="macOS only"):
        coreml_difference.main()


@pytest.mark.skipif(sys.platform != "darwin", reason="Core ML itself is asked")
def test_core_ml_itself(tmp_path: Path) -> None:
    assert all(
        d.relative < 1e-2 for d in measured(coreml_difference.core_ml, tmp_path) if d.units == "CPU_ONLY"
    )
