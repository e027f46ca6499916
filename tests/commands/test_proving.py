"""`prove` of two models: what is equal or checked op by op is no failure, and another model is one."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

import anesurgery as ane
from anesurgery.commands import app as cli
from anesurgery.mil import Program, mb
from anesurgery.passes.negate_subtract import NegateSubtract


def scaled(factor: float, shift: float = 0.5) -> Program:
    return mb.program(input_specs=[mb.TensorSpec((2, 64))])(
        lambda x: mb.sub(x=mb.softmax(x=mb.mul(x=x, y=np.float32(factor))), y=np.float32(shift), name="y")
    )


def prove(tmp_path: Path, old: Program, new: Program) -> int:
    places = [ane.save(ane.load(one), tmp_path / f"{name}.mlpackage") for name, one in (("a", old), ("b", new))]
    return CliRunner().invoke(cli.app, ["prove", *map(str, places), "--quiet"]).exit_code


def test_both_commands_say_the_same_of_what_is_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The wrong version: `compare --prove` fails where an op is checked on numbers, and `prove` does not."""
    monkeypatch.chdir(tmp_path)
    ane.apply(ane.example("tiny", "a.mlpackage"), ["causal_mask_tensor"], quiet=True).save("b.mlpackage")
    done = [
        CliRunner().invoke(cli.app, [*words, "a.mlpackage", "b.mlpackage"])
        for words in (["prove"], ["compare", "--prove", "--precision", "fp32"])
    ]
    assert "not proved, but checked" in done[0].stdout
    assert done[0].stdout == done[1].stdout
    assert [one.exit_code for one in done] == [0, 0]


def test_an_edit_that_is_equal_is_no_failure(tmp_path: Path) -> None:
    assert prove(tmp_path, scaled(2.0), ane.apply(scaled(2.0), [NegateSubtract()], quiet=True).program) == 0


@pytest.mark.parametrize("other", [scaled(2.2), scaled(0.0), scaled(2.0, 0.51), scaled(2.0, float("nan"))])
def test_another_model_is_one(other: Program, tmp_path: Path) -> None:
    assert prove(tmp_path, scaled(2.0), other) == 1
