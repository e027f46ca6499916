"""The page, the plot and the JSON of a compression: what they say, and that names stay names."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from typer.testing import CliRunner

import anesurgery as ane
from anesurgery.commands import app as cli
from anesurgery.errors import SurgeryError
from anesurgery.mil import Program, Var, ct, mb, types
from anesurgery.show.compressions import LEAST, _height, compression_page, compression_plot

RNG = np.random.default_rng(41)
WIDTH = 48
WEIGHTS = [(RNG.standard_normal((WIDTH, WIDTH)) / 5).astype(np.float16) for _ in range(2)]
SAMPLES: list[dict[str, Any]] = [{"x": RNG.standard_normal((8, WIDTH)).astype(np.float16)} for _ in range(8)]
EVIL = "<script>alert(1)</script>"


def model() -> Program:
    @mb.program(input_specs=[mb.TensorSpec((8, WIDTH), dtype=types.fp16)], opset_version=ct.target.iOS18)
    def program(x: Var) -> Var:
        x = mb.relu(x=mb.linear(x=x, weight=mb.const(val=WEIGHTS[0], name=EVIL)))
        return mb.softmax(x=mb.linear(x=x, weight=WEIGHTS[1]), name="y")

    return program


@pytest.fixture(scope="module")
def found() -> ane.Compression:
    modes = ("linear-8", "linear-4")
    return ane.compress(model(), 4, inputs=SAMPLES, for_="size", mixed=False, smallest=100, against=modes)


def test_points_are_of_the_samples_held_out(found: ane.Compression) -> None:
    """The wrong version measures on what it calibrated with."""
    assert [one.mode for one in found.points] == ["linear-8", "linear-4"]
    assert found.loss is not None
    assert all(one.loss.rows == found.loss.rows == 2 * 8 for one in found.points)
    eight, four = found.points
    assert eight.bytes > 1.5 * four.bytes
    assert 0 < eight.loss.kl < four.loss.kl
    assert found.bytes[1] < 1.1 * four.bytes
    content = json.loads(json.dumps(found.to_json()))
    assert [one["mode"] for one in content["points"]] == ["linear-8", "linear-4"]
    assert content["points"][0]["loss"]["kl"] == eight.loss.kl
    assert "coremltools' linear-4: " in str(found)


def test_the_page_says_what_the_report_says(found: ane.Compression, tmp_path: Path) -> None:
    text = found.save_html(tmp_path / "page.html").read_text(encoding="utf-8")
    for line in str(found).splitlines():
        if line.startswith(("on 2 samples", "ops expected")):
            assert line in text.replace("&gt;", ">").replace("&#39;", "'")
    assert text.count("palette4") >= 2
    assert EVIL not in text
    assert "&lt;script&gt;" in text
    assert "<svg" in text
    assert "http://" not in text.replace("http://www.w3.org/", "").replace("http://purl.org/", "").replace(
        "http://creativecommons.org/", ""
    )


@pytest.mark.slow
def test_the_plot_holds_every_point(found: ane.Compression, tmp_path: Path) -> None:
    place = found.save_plot(tmp_path / "plot.svg")
    words = "".join(ElementTree.parse(place).getroot().itertext())
    assert all(name in words for name in ("linear-8", "linear-4", "compress, for size", "MB of weights"))
    assert found.save_plot(tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
    assert found.save_plot(tmp_path / "plot.png").exists()  # an old one is replaced
    with pytest.raises(SurgeryError, match="plots end in .png, .svg, .pdf"):
        found.save_plot(tmp_path / "plot.txt")
    assert compression_plot(found, "svg") == compression_plot(found, "svg")


def test_a_loss_of_none_is_drawn_at_the_bottom(found: ane.Compression) -> None:
    same = ane.compress(model(), 8, inputs=SAMPLES, smallest=10**6)
    assert same.loss is not None
    assert _height(same.loss, True) == LEAST
    assert compression_plot(same).startswith(b"\x89PNG")


def test_what_cannot_be_drawn_is_said(found: ane.Compression, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.warns(ane.SurgeryWarning):
        alone = ane.compress(model(), 4, inputs=SAMPLES[:1], smallest=100)
    with pytest.raises(SurgeryError, match="no sample was held out"):
        compression_plot(alone)
    assert "<svg" not in compression_page(alone)
    with pytest.warns(ane.SurgeryWarning), pytest.raises(SurgeryError, match="give two or more"):
        ane.compress(model(), 4, inputs=SAMPLES[:1], smallest=100, against=["linear-8"])
    with pytest.raises(SurgeryError, match="there is no mode 'nonsense'"):
        ane.compress(model(), 4, inputs=SAMPLES, smallest=100, against=["nonsense"])
    spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "matplotlib" else spec(name))
    with pytest.raises(SurgeryError, match=r"pip install .anesurgery\[plot\]"):
        compression_plot(found)
    assert "<svg" not in compression_page(found)


def test_what_coremltools_does_not_take_has_no_points(tmp_path: Path) -> None:
    one = ane.save(ane.load(model()), tmp_path / "one.mlpackage")
    both = ane.merge({"a": one, "b": one}, tmp_path / "both.mlpackage")
    found = ane.compress(both, 4, inputs=SAMPLES, smallest=100, function="a", against=["linear-8"])
    assert not found.points
    assert any("takes one package with one function" in note for note in found.notes)


@pytest.mark.slow
def test_the_command_writes_them(tmp_path: Path) -> None:
    package = ane.save(ane.load(model()), tmp_path / "model.mlpackage")
    options: list[Any] = []
    for number, values in enumerate(SAMPLES):
        np.savez(tmp_path / f"{number}.npz", **values)
        options += ["--inputs", tmp_path / f"{number}.npz"]
    call = ["compress", package, tmp_path / "out.mlpackage", *options, "--smallest", 100, "--json"]
    call += ["--html", tmp_path / "page.html", "--plot", tmp_path / "plot.pdf", "--against", "linear-8"]
    done = CliRunner().invoke(cli.app, list(map(str, call)))
    assert done.exit_code == 0, done.output
    assert [one["mode"] for one in json.loads(done.stdout)["points"]] == ["linear-8"]
    assert (tmp_path / "plot.pdf").read_bytes().startswith(b"%PDF")
    assert "linear-8" in (tmp_path / "page.html").read_text(encoding="utf-8")
    again = CliRunner().invoke(cli.app, list(map(str, [*call, "--overwrite"])))
    assert again.exit_code == 0
    refused = CliRunner().invoke(cli.app, list(map(str, [*call[:2], tmp_path / "b.mlpackage", *call[3:]])))
    assert "page.html exists" in str(refused.exception)
