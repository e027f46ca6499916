"""Networks that are damaged, too new or contradict themselves: one clear error each, and nothing is written."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from bad_networks import BAD, SIZE, build, spoiled
from one_layer import floats

import anesurgery as ane
from anesurgery.commands import app as cli
from anesurgery.commands.options import BAD_INPUT
from anesurgery.errors import LoadError
from anesurgery.files import package
from anesurgery.files.protobuf import proto
from anesurgery.mil import quiet_host

with quiet_host():
    from coremltools.models import datatypes
    from coremltools.models.neural_network import NeuralNetworkBuilder

Model = proto.Model_pb2.Model
Use = Callable[[Path], object]

USES: tuple[Use, ...] = (
    ane.upgrade,
    ane.Predictor,
    lambda path: ane.run(path, {}),
    lambda path: ane.apply(path, ["negate_subtract"]),
    lambda path: ane.apply(path, ["legacy_add_multiply"]),
)
"""What a user does with a file; each needs the whole network."""

FILES: dict[str, tuple[Callable[[bytes], bytes], tuple[str, ...]]] = {
    "truncated": (lambda whole: whole[: len(whole) // 2], ("is damaged", "export it again")),
    "empty": (lambda whole: b"", ("holds no model", "convert it again")),
    "text": (lambda whole: b"version https://", ("is not a Core ML model", "give an .mlmodel")),
    "a newer kind": (
        lambda whole: b"\x08\x63\xc2\xb8\x02\x00",  # specification 99, and field 5000
        ("newer than this coremltools", "convert it again"),
    ),
}
"""What is wrong -> what becomes of the bytes of a good file, and what is said."""


def in_pipeline(spec: Any) -> Any:
    """A pipeline of a good network and this one."""
    first = NeuralNetworkBuilder([("x", datatypes.Array(3))], [("z", None)])
    first.add_activation("first", "RELU", "x", "z")
    made = Model(specificationVersion=4)
    made.pipeline.models.extend([first.spec, spec])
    made.description.input.extend([*first.spec.description.input, *spec.description.input])
    made.description.output.extend(spec.description.output)
    return made


@pytest.fixture
def scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where temporary files go; the test must leave it empty."""
    folder = tmp_path / "scratch"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    monkeypatch.setattr(
        package, "_TEMPORARY", package._TemporaryFolder()
    )  # that of earlier tests lies elsewhere
    return folder


def refused(use: Use, path: Path) -> str:
    """What is said, in one line."""
    with pytest.raises(LoadError) as caught:
        use(path)
    (line,) = str(caught.value).splitlines()
    return line


@pytest.mark.parametrize("mode", [None, "classifier"])
def test_nothing_is_wrong_with_the_network(mode: str | None, tmp_path: Path) -> None:
    path = tmp_path / "good.mlmodel"
    path.write_bytes(build(mode).SerializeToString())
    assert not any("no ML Program" in note for note in ane.inspect(path).notes)
    found = ane.run(path, {"image": floats(1, 3, *SIZE)})
    assert np.isclose(sum(found["y"].values()) if mode else found["y"].sum(), 1)


@pytest.mark.one_of(2)
@pytest.mark.parametrize("name", BAD)
def test_a_bad_network_is_refused_with_one_clear_error(name: str, tmp_path: Path, scratch: Path) -> None:
    path = tmp_path / "bad.mlmodel"
    path.write_bytes(spoiled(name).SerializeToString())
    for use in USES:
        said = refused(use, path)
        assert said.startswith(f"{path}: ")
        assert [w for w in BAD[name].words if w not in said] == [], said
    assert list(scratch.iterdir()) == []
    assert sorted(p.name for p in tmp_path.iterdir()) == ["bad.mlmodel", "scratch"]


@pytest.mark.one_of(5)
@pytest.mark.parametrize("name", BAD)
def test_a_bad_network_in_a_pipeline_is_named(name: str, tmp_path: Path, scratch: Path) -> None:
    path = tmp_path / "pipeline.mlmodel"
    path.write_bytes(in_pipeline(spoiled(name)).SerializeToString())
    for use in (ane.upgrade, ane.Predictor):
        said = refused(use, path)
        assert said.startswith("model 1 of the pipeline: ")
        assert [w for w in BAD[name].words if w not in said] == [], said
    assert list(scratch.iterdir()) == []


def test_a_good_network_in_a_pipeline_is_upgraded(tmp_path: Path, scratch: Path) -> None:
    path = tmp_path / "pipeline.mlmodel"
    path.write_bytes(in_pipeline(build()).SerializeToString())
    values = {"image": floats(1, 3, *SIZE), "x": floats(3)}
    before, after = ane.run(path, values), ane.run(ane.upgrade(path, precision="fp32"), values)
    np.testing.assert_array_equal(before["y"], after["y"])
    assert list(scratch.iterdir()), "the scratch folder is where temporary files go"


@pytest.mark.parametrize("name", FILES)
def test_a_file_that_is_no_model_is_refused(name: str, tmp_path: Path, scratch: Path) -> None:
    path = tmp_path / "bad.mlmodel"
    change, words = FILES[name]
    path.write_bytes(change(build().SerializeToString()))
    for use in (*USES, ane.inspect):
        said = refused(use, path)
        assert said.startswith(str(path))
        assert [w for w in words if w not in said] == [], said
    assert list(scratch.iterdir()) == []


def test_each_cut_through_a_file_is_noticed(tmp_path: Path) -> None:
    path, whole = tmp_path / "bad.mlmodel", build().SerializeToString()
    for size in range(0, len(whole), 41):
        path.write_bytes(whole[:size])
        refused(ane.Predictor, path)


def test_a_file_that_the_schema_of_today_calls_corrupt(corpus: Path) -> None:
    path = corpus / "nnv2_simple_layer.mlmodel"
    for use in (*USES, ane.inspect):
        said = refused(use, path)
        assert "is not a Core ML model, or is damaged" in said
        assert said.endswith("export it again")


@pytest.mark.one_of(2)
@pytest.mark.parametrize("name", ["few weights", "a cycle", "a scaler for nothing", "few labels"])
@pytest.mark.parametrize(
    "words", [("run", "IN", "--out", "OUT.npz"), ("apply", "IN", "negate_subtract", "OUT.mlpackage")]
)
def test_the_command_line_says_it_in_a_line(
    words: tuple[str, ...],
    name: str,
    tmp_path: Path,
    scratch: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: Any,
) -> None:
    path = tmp_path / "bad.mlmodel"
    path.write_bytes(spoiled(name).SerializeToString())
    places = [w.replace("IN", str(path)).replace("OUT", str(tmp_path / "out")) for w in words]
    monkeypatch.setattr(sys, "argv", ["anesurgery", *places])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == BAD_INPUT
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"anesurgery: {path}: ")
    assert err.count("\n") == 1
    assert [w for w in BAD[name].words if w not in err] == []
    assert list(scratch.iterdir()) == []
    assert sorted(p.name for p in tmp_path.iterdir()) == ["bad.mlmodel", "scratch"]
