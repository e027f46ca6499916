"""The Swift that is written parses, calls what Core ML has, and expects what the interpreter writes."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tree_sitter
import tree_sitter_swift
from checkpoints import save_checkpoint
from coremltools.converters.mil.mil import get_new_symbol
from typer.testing import CliRunner

import anesurgery as ane
from anesurgery.commands.app import app
from anesurgery.errors import LoadError, SurgeryError
from anesurgery.files.package import save
from anesurgery.files.size_index import Padding, SizeRow, index_text
from anesurgery.interpret.predictor import Predictor
from anesurgery.loading import load
from anesurgery.mil import ct, mb, types
from anesurgery.shipping import swift_package
from anesurgery.shipping.swift_package import SOURCES

SWIFT = sorted(SOURCES.rglob("*.swift"))
COREML = {
    "MLComputeUnits": "iOS 12",
    "MLDictionaryFeatureProvider": "iOS 11",
    "MLFeatureProvider": "iOS 11",
    "MLFeatureValue": "iOS 11",
    "MLModel": "iOS 11",
    "MLModelConfiguration": "iOS 12",
    "MLMultiArray": "iOS 11",
    "MLMultiArrayDataType": "iOS 11",
    "MLShapedArray": "iOS 15",
    "MLState": "iOS 18",
    "compileModel": "iOS 16",
    "computeUnits": "iOS 12",
    "cpuAndNeuralEngine": "iOS 16",
    "cpuOnly": "iOS 12",
    "featureNames": "iOS 11",
    "featureValue": "iOS 11",
    "float16": "iOS 16",
    "float32": "iOS 11",
    "int32": "iOS 11",
    "shape": "iOS 11",
    "functionName": "iOS 18",
    "inputDescriptionsByName": "iOS 11",
    "load": "iOS 15",
    "makeState": "iOS 18",
    "modelDescription": "iOS 11",
    "multiArrayValue": "iOS 11",
    "prediction": "iOS 11",
    "scalars": "iOS 15",
}
"""Types and members of Core ML -> the iOS that they came with (developer.apple.com/documentation/coreml)."""
LIBRARY = {
    "Bundle",
    "Data",
    "JSONDecoder",
    "append",
    "self",
    "NSNumber",
    "ProcessInfo",
    "Set",
    "String",
    "Task",
    "URL",
    "appendingPathComponent",
    "cancel",
    "checkCancellation",
    "compactMap",
    "contains",
    "copy",
    "count",
    "decode",
    "dropFirst",
    "environment",
    "filter",
    "finish",
    "fileURLWithPath",
    "hasSuffix",
    "indices",
    "init",
    "isEmpty",
    "keys",
    "last",
    "first",
    "library",
    "macOS",
    "mapValues",
    "merging",
    "max",
    "min",
    "iOS",
    "map",
    "module",
    "onTermination",
    "pathExtension",
    "prefix",
    "processInfo",
    "reduce",
    "sorted",
    "stringValue",
    "target",
    "testTarget",
    "union",
    "unit",
    "url",
    "write",
    "yield",
    "key",
    "value",
    "enumerated",
    "values",
}
"""Members of Swift and Foundation."""


def parsed(source: bytes) -> Any:
    return tree_sitter.Parser(tree_sitter.Language(tree_sitter_swift.language())).parse(source).root_node


def walk(node: Any) -> Any:
    yield node
    for child in node.children:
        yield from walk(child)


def wrong(source: bytes) -> list[str]:
    """What the grammar does not take."""
    return [n.text.decode()[:60] for n in walk(parsed(source)) if n.type == "ERROR" or n.is_missing]


def members(source: bytes) -> set[str]:
    """The names after a dot, and the types of Core ML."""
    code = re.sub(rb"//[^\n]*|\"(\\.|[^\"\\])*\"", b"", source)
    named = {n.text.decode().lstrip(".") for n in walk(parsed(code)) if n.type == "navigation_suffix"}
    return {n for n in named if n.isidentifier()} | set(re.findall(r"\bML[A-Z]\w*", code.decode()))


def own_names() -> set[str]:
    """What the package declares itself."""
    text = "".join(file.read_text() for file in SWIFT)
    return set(re.findall(r"(?:func|var|let|case|class|struct|enum)\s+(\w+)", text))


@pytest.mark.parametrize("file", SWIFT, ids=lambda f: f.name)
def test_it_parses(file: Path) -> None:
    assert wrong(file.read_bytes()) == []


def test_a_slip_would_be_found() -> None:
    source = (SOURCES / "Sources" / "Runner" / "Runner.swift").read_bytes()
    assert wrong(source.replace(b"guard let decode", b"guard let let decode"))
    assert wrong(source[:-3])


def test_the_reader_of_sizes_asks_for_what_is_written() -> None:
    """The keys that Swift decodes are those of `sizes.json`."""
    text = (SOURCES / "Sources" / "Runner" / "SizesFile.swift").read_text()
    asked = {*re.findall(r"public let (\w+):", text), *re.findall(r'case \w+ = "(\w+)"', text)} - {"whyNot"}
    row = SizeRow("size_3", None, "model.mlpackage", {"x": (1, 3)})
    whole = json.loads(index_text([row], Padding({}, {})))
    assert asked <= {*whole, *whole["sizes"][0], *whole["padding"]}
    assert f"file.version == {whole['version']}" in text
    assert whole["format"] in text


def test_it_calls_what_core_ml_has() -> None:
    known = {*COREML, *LIBRARY, *own_names()}
    asked = {name for file in SWIFT if file.name != "Package.swift" for name in members(file.read_bytes())}
    assert sorted(asked - known) == []
    assert "makeStates" in members(b"let s = model.makeStates()") - known


def test_the_fixture_is_what_the_interpreter_writes(tmp_path: Path) -> None:
    checkpoint = save_checkpoint(tmp_path / "checkpoint", layers=1)
    ane.build(checkpoint, tmp_path / "built", context=24, prefill=8, quiet=True)
    made = ane.swift(tmp_path / "built", tmp_path / "swift")
    fixture = json.loads((made / "Tests" / "RunnerTests" / "fixture.json").read_text())
    written = ane.generate(tmp_path / "built", fixture["prompt"], 16, stop=1, quiet=True).written
    assert tuple(fixture["written"]) == written
    assert sorted(p.name for p in made.rglob("*.swift")) == sorted(p.name for p in SWIFT)
    with pytest.raises(LoadError, match="exists"):
        ane.swift(tmp_path / "built", tmp_path / "swift")
    with pytest.raises(LoadError, match=r"holds no runner.json"):
        ane.swift(checkpoint, tmp_path / "other")


def plain_model(kind: Any = types.fp16) -> Any:
    """A product and a mask of integers."""

    return mb.program(input_specs=[mb.TensorSpec((2, 3), kind), mb.TensorSpec((2, 3), types.int32)])(
        lambda x, mask: mb.linear(
            x=mb.mul(x=x, y=mb.cast(x=mask, dtype="fp16")), weight=np.eye(3, dtype=np.float16), name="y"
        )
    )


def test_a_plain_model_has_a_fixture_of_arrays(tmp_path: Path) -> None:
    save(load(plain_model()), tmp_path / "plain.mlpackage")
    package = ane.swift(tmp_path / "plain.mlpackage", tmp_path / "swift")
    fixture = json.loads((package / "Tests" / "RunnerTests" / "fixture.json").read_text())
    (call,) = fixture["calls"]
    arrays = arrays_of(call["inputs"])
    assert {n: v["dtype"] for n, v in call["inputs"].items()} == {"x": "fp16", "mask": "int32"}
    expected = Predictor(tmp_path / "plain.mlpackage")(arrays)["y"]
    np.testing.assert_array_equal(arrays_of(call["outputs"])["y"], expected)
    assert (fixture["prompt"], fixture["written"]) == ([], [])


def arrays_of(numbers: Any) -> dict[str, Any]:
    """Numbers of a fixture as the arrays that they are."""
    kinds = {"fp16": np.float16, "fp32": np.float32, "int32": np.int32}
    return {
        name: np.array(one["values"], kinds[one["dtype"]]).reshape(one["shape"])
        for name, one in numbers.items()
    }


def masked_model(opset: Any) -> Any:
    """Attention of any length, with a mask that hides places."""

    @mb.program(
        input_specs=[
            mb.TensorSpec((1, length := get_new_symbol(), 4), types.fp32),
            mb.TensorSpec((1, length), types.fp32),
        ],
        opset_version=opset,
    )
    def program(x: Any, mask: Any) -> Any:
        hidden = mb.mul(x=mb.sub(x=1.0, y=mb.expand_dims(x=mask, axes=[1])), y=np.float32(-1e4))
        scores = mb.softmax(x=mb.add(x=mb.matmul(x=x, y=x, transpose_y=True), y=hidden), axis=-1)
        return mb.matmul(x=scores, y=x, name="y")

    return program


@pytest.mark.parametrize("opset", [ct.target.iOS17, ct.target.iOS18])
def test_a_folder_of_sizes_has_a_call_at_each_and_one_that_is_filled_up(opset: Any, tmp_path: Path) -> None:
    """One package with functions, or a package for each size: the calls are what `ane.run` gives."""
    sized = ane.sizes(masked_model(opset), {"x": [(1, 3, 4), (1, 6, 4)], "mask": [(1, 3), (1, 6)]})
    assert sized.one_package == (opset == ct.target.iOS18)
    folder = sized.save(tmp_path / "sized")
    words = ["swift", str(folder), "--to", str(tmp_path / "swift"), "--quiet"]
    assert CliRunner().invoke(app, words).exit_code == 0
    fixture = json.loads((tmp_path / "swift" / "Tests" / "RunnerTests" / "fixture.json").read_text())
    assert [call["inputs"]["x"]["shape"][1] for call in fixture["calls"]] == [3, 2, 6, 5]
    for call in fixture["calls"]:
        inputs, outputs = arrays_of(call["inputs"]), arrays_of(call["outputs"])
        assert inputs["mask"].all()
        assert outputs["y"].shape == inputs["x"].shape
        np.testing.assert_array_equal(outputs["y"], ane.run(folder, inputs)["y"])


def test_the_swift_of_sizes_calls_the_function_of_the_package() -> None:
    """It takes the size that the file chooses, from the package and the function that the file names."""
    text = (SOURCES / "Sources" / "Runner" / "SizedModel.swift").read_text()
    for words in (
        "file.choose(",
        "size.package",
        "size.function",
        "file.check(",
        "file.filled(",
        "file.cropped(",
    ):
        assert words in text
    declared = set(re.findall(r"func (\w+)", (SOURCES / "Sources" / "Runner" / "SizesFile.swift").read_text()))
    assert {"choose", "check", "filled", "cropped"} <= declared


def test_a_folder_that_nothing_made_is_refused_with_both_files(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(LoadError, match=r"holds no runner.json and no sizes.json"):
        ane.swift(tmp_path / "empty", tmp_path / "swift")


def test_what_is_no_plain_model_is_an_error_in_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(load(plain_model()), tmp_path / "plain.mlpackage")
    monkeypatch.setattr(swift_package, "MAX_NUMBERS", 5)
    with pytest.raises(SurgeryError, match="more than the 5 of a fixture"):
        ane.swift(tmp_path / "plain.mlpackage", tmp_path / "swift")
    assert not (tmp_path / "swift").exists()


@pytest.mark.parametrize("least", [0.0, -np.inf])
def test_outputs_that_json_cannot_hold_are_refused(least: float, tmp_path: Path) -> None:
    """The wrong version writes the words NaN and Infinity, which no JSON has."""
    program = mb.program(input_specs=[mb.TensorSpec((2, 3), types.fp32)])(
        lambda x: mb.log(x=mb.minimum(x=mb.abs(x=x), y=np.float32(least)), epsilon=np.float32(0), name="y")
    )
    save(load(program), tmp_path / "plain.mlpackage")
    with pytest.raises(SurgeryError, match="y holds NaN or infinity"):
        ane.swift(tmp_path / "plain.mlpackage", tmp_path / "swift")
