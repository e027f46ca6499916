"""Compiled models: equal to the packages they were compiled from in interface, ops, weights and numbers."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import anesurgery as ane
from anesurgery.commands.app import app
from anesurgery.errors import LoadError
from anesurgery.files.compiled import read_compiled
from anesurgery.files.compiled_interface import read_container
from anesurgery.files.package import read_spec
from anesurgery.interpret import Predictor
from anesurgery.loading import interface, load, load_sequence
from anesurgery.mil import ct, quiet_host, walk_ops
from anesurgery.rewriting.ml_program import op_counts

TWINS = ["silero_unified", "silero_unified_palette_4bit"]
MODEL = "Data/com.apple.CoreML/model.mlmodel"
WEIGHTS = "Data/com.apple.CoreML/weights/weight.bin"


@pytest.fixture(params=TWINS)
def twins(request: pytest.FixtureRequest, corpus: Path) -> tuple[Path, Path]:
    """A compiled model and the package that it was compiled from."""
    return corpus / f"{request.param}.mlmodelc", corpus / f"{request.param}.mlpackage"


@pytest.fixture
def copied(corpus: Path, tmp_path: Path) -> Path:
    """A compiled model that may be damaged."""
    target = tmp_path / "copied.mlmodelc"
    shutil.copytree(corpus / "silero_unified.mlmodelc", target)
    for path in [target, *target.rglob("*")]:
        path.chmod(0o755)
    return target


@pytest.fixture
def compiled(tmp_path: Path) -> Callable[..., Path]:
    """Make a compiled model of a MIL text, without `coremldata.bin`."""

    def make(text: str, metadata: Any = None, name: str = "made.mlmodelc") -> Path:
        folder = tmp_path / name
        folder.mkdir()
        (folder / "model.mil").write_text(text, encoding="utf-8")
        if metadata is not None:
            (folder / "metadata.json").write_text(json.dumps([metadata]), encoding="utf-8")
        return folder

    return make


RELU = """program(1.3)
{
    func main<ios17>(tensor<fp32, [2, 3]> x) {
            tensor<fp32, [2, 3]> y = relu(x = x)[name = string("y")];
        } -> (y);
}"""


def test_a_compiled_model_is_the_package_it_was_compiled_from(twins: tuple[Path, Path]) -> None:
    ours, theirs = map(load, twins)
    assert ours.notes == ()
    assert interface(ours).difference(interface(theirs)) == ""
    assert ane.to_text(ours.program) == ane.to_text(theirs.program)
    assert op_counts(ours.program) == op_counts(theirs.program)


def test_the_protobuf_of_a_compiled_model_is_that_of_its_package(twins: tuple[Path, Path]) -> None:
    """The two differ in nothing but the versions that the compiler adds to the program."""
    ours, theirs = read_compiled(twins[0]).spec, read_spec(twins[1] / MODEL)
    ours.mlProgram.attributes.clear()
    theirs.mlProgram.attributes.clear()
    assert ours.SerializeToString(deterministic=True) == theirs.SerializeToString(deterministic=True)


@pytest.mark.one_of(3)
@pytest.mark.parametrize("precision", ["fp32", "fp16", "ane"])
def test_twins_give_the_same_bits(twins: tuple[Path, Path], precision: str) -> None:
    ours, theirs = (Predictor(path, precision=precision) for path in twins)
    values = theirs.sample(7)
    found, expected = ours(values), theirs(values)
    assert found.keys() == expected.keys()
    assert expected
    for name in expected:
        np.testing.assert_array_equal(np.asarray(found[name]), np.asarray(expected[name]), strict=True)


def test_other_weights_give_other_bits(copied: Path, corpus: Path) -> None:
    """The comparison of twins can fail: one weight of the compiled model is doubled here."""
    file = copied / "weights" / "weight.bin"
    content = bytearray(file.read_bytes())
    content[128:4224] = bytes(4096)  # the first weight of the model begins at 128
    file.write_bytes(content)
    twin = Predictor(corpus / "silero_unified.mlpackage", precision="fp32")
    values = twin.sample(7)
    found, expected = Predictor(copied, precision="fp32")(values), twin(values)
    assert any(not np.array_equal(np.asarray(found[n]), np.asarray(expected[n])) for n in expected)


def test_a_model_without_weights_runs(corpus: Path) -> None:
    logits = np.zeros(1025, np.float16)
    logits[77] = 2
    made = ane.run(corpus / "fluid_argmax.mlmodelc", {"logits": logits})
    assert np.asarray(made["index"]).item() == 77
    assert np.asarray(made["score"]).item() == 2


@pytest.mark.slow
def test_every_verb_takes_a_compiled_model(twins: tuple[Path, Path], tmp_path: Path) -> None:
    path, package = twins
    ours, theirs = (json.loads(json.dumps(ane.inspect(p, "M1/macOS 14").to_json())) for p in twins)
    assert [row["preferred"] for row in ours["ops"]] == [row["preferred"] for row in theirs["ops"]]
    assert ane.compare(path, package).ok
    assert ane.ranges(path).to_json()
    assert load_sequence(path).parts[0].notes == ()
    surgery = ane.apply(path, "negate_subtract", prove=None, quiet=True)
    surgery.save(tmp_path / "made.mlpackage")
    assert ane.compare(path, tmp_path / "made.mlpackage").ok


@pytest.mark.parametrize("name", [*TWINS, "fluid_argmax"])
def test_decompiling_gives_a_package_that_coremltools_reads(name: str, corpus: Path, tmp_path: Path) -> None:
    source = corpus / f"{name}.mlmodelc"
    made = ane.decompile(source, tmp_path / "made.mlpackage")
    assert made.notes == ()
    assert str(made) == f"wrote {made.path}"
    with quiet_host():
        model = ct.models.MLModel(str(made.path), skip_model_load=True)
        program = ct.converters.mil.frontend.milproto.load.load(
            model.get_spec(), model.get_spec().specificationVersion, model.weights_dir or ""
        )
    expected = Counter(op.op_type for op in walk_ops(load(source).program))
    assert Counter(op.op_type for op in walk_ops(program)) == expected
    if (source / "weights").is_dir():
        assert (made.path / WEIGHTS).read_bytes() == (source / "weights" / "weight.bin").read_bytes()
        twin = read_spec(corpus / f"{name}.mlpackage" / MODEL)
        spec = read_spec(made.path / MODEL)
        assert spec.description == twin.description
        assert spec.mlProgram.functions == twin.mlProgram.functions


def test_decompiling_refuses_what_it_would_lose(copied: Path, corpus: Path, tmp_path: Path) -> None:
    target = tmp_path / "made.mlpackage"
    with pytest.raises(LoadError, match="is not a compiled model"):
        ane.decompile(corpus / "silero_unified.mlpackage", target)
    ane.decompile(copied, target)
    with pytest.raises(LoadError, match="exists; choose another name"):
        ane.decompile(copied, target)
    ane.decompile(copied, target, overwrite=True)
    weights = copied / "weights" / "weight.bin"
    weights.write_bytes(weights.read_bytes()[:4096])
    with pytest.raises(LoadError, match="cut short"):
        ane.decompile(copied, tmp_path / "cut.mlpackage")
    weights.unlink()
    with pytest.raises(LoadError, match=r"lacks its weight file weights/weight\.bin"):
        ane.decompile(copied, tmp_path / "cut.mlpackage")
    assert not (tmp_path / "cut.mlpackage").exists()


def test_weights_outside_of_the_folder_are_refused(copied: Path, tmp_path: Path) -> None:
    text = (copied / "model.mil").read_text()
    (copied / "model.mil").write_text(text.replace("@model_path/weights/", "@model_path/../../", 1))
    with pytest.raises(LoadError, match="do not trust it"):
        ane.decompile(copied, tmp_path / "made.mlpackage")


def test_the_command_line_decompiles(corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "made.mlpackage"
    app(["decompile", str(corpus / "fluid_argmax.mlmodelc"), str(target)], standalone_mode=False)
    assert capsys.readouterr().out.replace("\n", "").startswith(f"wrote {target}")
    assert ane.compare(target, corpus / "fluid_argmax.mlmodelc").ok


@pytest.mark.slow
def test_the_command_line_compares_the_mil_texts(
    twins: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    """Twins differ in the versions of the compiler, and nowhere else."""
    assert app(["diff", *map(str, twins), "--dialect", "mil", "--json"], standalone_mode=False) == 1
    found = json.loads(capsys.readouterr().out)
    changed = [line for line in found["text"][2:] if line[0] in "+-"]
    assert changed
    assert all("buildInfo" in line for line in changed)
    assert not app(["diff", *map(str, twins)], standalone_mode=False)


@pytest.mark.parametrize("name", ["coremldata.bin", "metadata.json"])
def test_what_the_disk_does_not_give_is_not_taken_for_absent(
    name: str, copied: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = os.open

    def refused(path: Any, *options: Any, **more: Any) -> int:
        if Path(path).name == name:
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
        return opened(path, *options, **more)

    monkeypatch.setattr(os, "open", refused)
    with pytest.raises(LoadError, match=f"{name} cannot be read: Input/output error"):
        load(copied)


@pytest.mark.one_of(2)
@pytest.mark.parametrize("damage", ["absent", "short", "layout"])
def test_without_coremldata_the_interface_comes_from_the_metadata(
    damage: str, copied: Path, corpus: Path
) -> None:
    file = copied / "coremldata.bin"
    content = file.read_bytes()
    if damage == "absent":
        file.unlink()
    else:
        file.write_bytes(content[:40] if damage == "short" else bytes(4) + content[4:])
    loaded, twin = load(copied), load(corpus / "silero_unified.mlpackage")
    assert len(loaded.notes) == 1
    assert "coremldata.bin was not used" in loaded.notes[0]
    assert "metadata.json, which has no defaults of optional inputs" in loaded.notes[0]
    assert loaded.spec.description == twin.spec.description
    assert interface(loaded).difference(interface(twin)) == ""
    assert loaded.spec.specificationVersion == twin.spec.specificationVersion


def test_metadata_gives_images_options_and_plain_values(compiled: Callable[..., Path]) -> None:
    text = RELU.replace("tensor<fp32, [2, 3]> x", "tensor<fp32, [1, 3, 8, 4]> x, tensor<fp16, [2]> z")
    text = text.replace("tensor<fp32, [2, 3]> y", "tensor<fp32, [1, 3, 8, 4]> y")
    image = {"name": "x", "type": "Image", "width": "4", "height": "8", "colorspace": "BGR"}
    array = {"name": "z", "type": "MultiArray", "dataType": "Float32", "isOptional": "1"}
    metadata = {
        "inputSchema": [image, array],
        "outputSchema": [{"name": "y", "type": "Dictionary", "formattedType": "Dictionary (Int64 → Double)"}],
        "userDefinedMetadata": {"a": "b"},
        "author": "me",
    }
    described = read_compiled(compiled(text, metadata)).spec.description
    x, z = described.input
    assert (x.type.imageType.width, x.type.imageType.height) == (4, 8)
    assert x.type.imageType.colorSpace == x.type.imageType.ColorSpace.Value("BGR")
    assert z.type.isOptional
    assert not x.type.isOptional
    assert list(z.type.multiArrayType.shape) == [2]
    assert described.output[0].type.dictionaryType.WhichOneof("KeyType") == "int64KeyType"
    assert described.metadata.userDefined == {"a": "b"}
    assert described.metadata.author == "me"


def test_without_any_description_the_types_of_the_program_are_the_interface(
    compiled: Callable[..., Path],
) -> None:
    loaded = load(compiled(RELU))
    assert "the types of the program" in loaded.notes[0]
    assert loaded.spec.specificationVersion == 8
    assert np.asarray(ane.run(loaded, {"x": -np.ones((2, 3), np.float32)})["y"]).max() == 0


def test_a_description_of_another_model_is_refused(copied: Path, corpus: Path) -> None:
    shutil.copy(corpus / "fluid_argmax.mlmodelc" / "coremldata.bin", copied / "coremldata.bin")
    with pytest.raises(LoadError, match="its description has logits; the files are of two models or damaged"):
        load(copied)


FLEXIBLE = """program(1.0)
{
    func main<ios17>(tensor<fp32, [1, ?]> x) [FlexibleShapeInformation = tuple<tuple<tensor<string, []>, dict<
        tensor<string, []>, tensor<int32, [?]>>>, tuple<tensor<string, []>, KIND>>((
        ("DefaultShapes", {{"x", [1, 4]}}), SHAPES))] {
            tensor<fp32, [1, ?]> y = relu(x = x)[name = tensor<string, []>("y")];
        } -> (y);
}"""
RANGES = "dict<tensor<string, []>, list<tensor<int32, [2]>, ?>>", '("RangeDims", {{"x", [[1, 1], [2, 32000]]}})'
ENUMERATED = (
    "dict<tensor<string, []>, dict<tensor<string, []>, tensor<int32, [?]>>>",
    '("EnumeratedShapes", {{"543d0f94", {{"x", [1, 4]}}}, {"697b758f", {{"x", [1, 8]}}}})',
)


@pytest.mark.parametrize(("kind", "shapes"), [RANGES, ENUMERATED])
def test_flexible_shapes_are_kept(
    kind: str, shapes: str, compiled: Callable[..., Path], tmp_path: Path
) -> None:
    folder = compiled(FLEXIBLE.replace("KIND", kind).replace("SHAPES", shapes))
    array = read_compiled(folder).spec.description.input[0].type.multiArrayType
    assert list(array.shape) == [1, 4]
    if "RangeDims" in shapes:
        sizes = [(r.lowerBound, r.upperBound) for r in array.shapeRange.sizeRanges]
        assert sizes == [(1, 1), (2, 32000)]
    else:
        assert [list(s.shape) for s in array.enumeratedShapes.shapes] == [[1, 4], [1, 8]]
    made = ane.decompile(folder, tmp_path / "made.mlpackage")
    assert not read_spec(made.path / MODEL).mlProgram.functions["main"].attributes
    y = ane.run(made.path, {"x": np.full((1, 8), -1, np.float32)})["y"]
    assert np.asarray(y).shape == (1, 8)


BARE = FLEXIBLE.partition(" [FlexibleShapeInformation")[0] + FLEXIBLE[FLEXIBLE.index(" {\n            ") :]


@pytest.mark.parametrize(("text", "is_noted"), [(BARE, True), (RELU, False)])
def test_sizes_that_vary_without_ranges_are_noted(
    text: str, is_noted: bool, compiled: Callable[..., Path]
) -> None:
    assert any("issue 738" in note for note in read_compiled(compiled(text)).notes) == is_noted


UNKNOWN = RELU.replace(
    'relu(x = x)[name = string("y")]', 'fancy(x = x)[backend = string("ane"), name = string("y")]'
)


def test_ops_that_coremltools_does_not_know_are_named_and_kept(
    compiled: Callable[..., Path], tmp_path: Path
) -> None:
    folder = compiled(UNKNOWN)
    with pytest.raises(
        LoadError, match=r"does not know fancy \(1 op\(s\) of the type fancy, the first gives y"
    ):
        load(folder)
    made = ane.decompile(folder, tmp_path / "made.mlpackage")
    op = read_spec(made.path / MODEL).mlProgram.functions["main"].block_specializations["CoreML7"].operations[0]
    assert op.type == "fancy"
    assert sorted(op.attributes) == ["backend", "name"]


def test_attributes_that_coremltools_does_not_know_are_noted(compiled: Callable[..., Path]) -> None:
    loaded = load(compiled(UNKNOWN.replace("fancy", "relu")))
    assert "y: attribute 'backend' of relu is not known to coremltools and is left out" in loaded.notes
    assert op_counts(loaded.program) == {"relu": 1}


def test_several_weight_files_are_copied_and_not_run(copied: Path, tmp_path: Path) -> None:
    first, text = copied / "weights" / "weight.bin", (copied / "model.mil").read_text()
    shutil.copy(first, first.with_name("0-weight.bin"))
    (copied / "model.mil").write_text(text.replace("weights/weight.bin", "weights/0-weight.bin", 1))
    with pytest.raises(LoadError, match="has its weights in 2 files"):
        load(copied)
    made = ane.decompile(copied, tmp_path / "made.mlpackage")
    names = sorted(p.name for p in (made.path / WEIGHTS).parent.iterdir())
    assert names == ["0-weight.bin", "weight.bin"]


def test_compiled_models_of_other_kinds_are_named(copied: Path, tmp_path: Path) -> None:
    file = copied / "coremldata.bin"
    content = file.read_bytes()
    text = (copied / "model.mil").read_text()
    (copied / "model.mil").unlink()
    with pytest.raises(LoadError, match=r"lacks model\.mil"):
        load(copied)
    code = ct.proto.Model_pb2.Model.DESCRIPTOR.fields_by_name["treeEnsembleClassifier"].number
    file.write_bytes(code.to_bytes(4, "little") + content[4:])
    with pytest.raises(LoadError, match="compiled model of the kind treeEnsembleClassifier"):
        load(copied)
    (copied / "model.espresso.net").write_text("{}")
    with pytest.raises(LoadError, match="has format_version None"):
        load(copied)
    (copied / "model.espresso.net").unlink()
    (copied / "model0").mkdir()
    (copied / "model0" / "model.mil").write_text(text)
    with pytest.raises(LoadError, match=r"of 1 models \(model0\).*give one of its parts"):
        ane.decompile(copied, tmp_path / "made.mlpackage")
    with pytest.raises(LoadError, match="has no weights"):
        load(copied / "model0")


def test_a_container_that_is_no_container_says_why() -> None:
    assert read_container(b"") == "it is cut short"
    assert read_container(bytes(200)) == "its layout is not known"
