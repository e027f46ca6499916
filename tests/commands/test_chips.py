"""The commands `chips` and `inspect --why`."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

import anesurgery as ane
from anesurgery.commands.app import app
from anesurgery.mil import Program, Var, ct, mb, types
from anesurgery.placement.inspector import OTHER_TARGET, why
from anesurgery.placement.target import CHIPS, SOURCES, Target

RUN = CliRunner()


def test_each_chip_has_a_line_and_each_limit_a_source() -> None:
    told = json.loads(RUN.invoke(app, ["chips", "--json"]).stdout)
    assert [chip["name"] for chip in told["chips"]] == list(CHIPS)
    assert told["sources"] == SOURCES
    shown = RUN.invoke(app, ["chips", "--target", "M1-M3"]).stdout
    words = [line.split() for line in shown.splitlines()]
    rows = [line[0] for line in words if len(line) > 1 and line[1].startswith("H1")]
    assert rows == ["M1", "M2", "M3"]
    assert "more-ane-transformers" in RUN.invoke(app, ["chips", "--full"]).stdout
    assert all(
        source in SOURCES for source in ("engine", "cores", "bandwidth", "axis", "kernel", "program", "since")
    )


def test_chips_are_found_by_the_phone_that_has_them() -> None:
    shown = RUN.invoke(app, ["chips", "--target", "iphone13"]).stdout
    assert "iPhone 13, iPhone 13 Pro" in shown
    assert "M1" not in shown


def sine() -> Program:
    @mb.program(input_specs=[mb.TensorSpec((1, 64), dtype=types.fp16)], opset_version=ct.target.iOS16)
    def program(x: Var) -> Var:
        wide = mb.linear(x=x, weight=np.ones((64, 64), np.float16), name="wide")
        return mb.sin(x=wide, name="wave")

    return program


@pytest.mark.parametrize(("target", "legal", "said"), [("M1", False, "sin"), ("M4", True, OTHER_TARGET)])
def test_all_rules_about_an_op_are_told(target: str, legal: bool, said: str) -> None:
    found = why(sine(), "wave", Target.parse(target))
    assert found.row.legal is legal
    told = {consulted.rule.id: consulted.said for consulted in found.rules}
    assert told["sin-cos"].startswith(said)
    assert told["fp32"] == "no"
    assert "op-lstm" not in told  # a rule of another op
    assert {f.rule for f in found.row.findings} <= {c.rule.id for c in found.rules if c.found}
    assert [c.found for c in found.rules] == sorted((c.found for c in found.rules), reverse=True)


def test_the_command_names_rule_source_and_scope(tmp_path: Path) -> None:
    package = tmp_path / "m.mlpackage"
    ane.save(ane.load(sine()), package)
    shown = RUN.invoke(app, ["inspect", str(package), "--target", "M1", "--why", "wave"]).stdout
    for words in ("sin-cos", "no sine", "reported", "ane-guide", "expected on: CPU", "rules that do not apply"):
        assert words in shown
    plain = json.loads(RUN.invoke(app, ["inspect", str(package), "--why", "wide", "--json"]).stdout)
    assert plain["op"]["name"] == "wide"
    failed = RUN.invoke(app, ["inspect", str(package), "--why", "wav"])
    assert "wave" in str(failed.exception)


def test_the_command_says_what_samples_show_about_an_op(tmp_path: Path) -> None:
    ane.save(ane.load(sine()), tmp_path / "m.mlpackage")
    np.savez(tmp_path / "large.npz", x=np.full((1, 64), 2000, np.float32))
    given = ["--inputs", str(tmp_path / "large.npz"), "--json"]
    shown = RUN.invoke(app, ["inspect", str(tmp_path / "m.mlpackage"), "--why", "wide", *given]).stdout
    assert "overflow in fp16: a magnitude of 1.28e+05" in shown
