"""Files that are damaged, contradict themselves or lead elsewhere are refused, with file and op."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from anesurgery.errors import LoadError, SurgeryError
from anesurgery.files import arrays
from anesurgery.files.package import read_spec, save
from anesurgery.interpret import run
from anesurgery.interpret.sampling import sample_inputs
from anesurgery.loading import load
from anesurgery.mil import Program, ct, mb, types

MODEL = Path("Data/com.apple.CoreML/model.mlmodel")
WEIGHTS = Path("Data/com.apple.CoreML/weights/weight.bin")


def program() -> Program:
    table = np.arange(64 * 8, dtype=np.float16).reshape(64, 8)

    return mb.program(input_specs=[mb.TensorSpec((2, 8), dtype=types.fp16)], opset_version=ct.target.iOS16)(
        lambda x: mb.linear(x=mb.relu(x=x, name="hidden"), weight=table, name="y")
    )


@pytest.fixture
def package(tmp_path: Path) -> Path:
    return save(load(program()), tmp_path / "network.mlpackage")


def block(spec: Any) -> Any:
    return next(iter(spec.mlProgram.functions["main"].block_specializations.values()))


def op(spec: Any, kind: str) -> Any:
    return next(o for o in block(spec).operations if o.type == kind)


def wrong_output_type(spec: Any) -> None:
    op(spec, "linear").outputs[0].type.tensorType.dimensions[1].constant.size = 63


def two_weight_files(spec: Any) -> None:
    value = block(spec).operations.add(type="const").attributes["val"]
    value.blobFileValue.fileName = "@model_path/weights/other.bin"


SPOILED: dict[str, tuple[Callable[[Any], object], str]] = {
    "a newer specification": (
        lambda s: setattr(s, "specificationVersion", 4000),
        r"network\.mlpackage is of specification 4000, this coremltools knows up to \d+; upgrade coremltools",
    ),
    "no functions": (
        lambda s: s.mlProgram.functions.clear(),
        r"network\.mlpackage has no functions; convert the model again",
    ),
    "a misspelt op": (
        lambda s: setattr(op(s, "linear"), "type", "linaer"),
        r"network\.mlpackage: op 'y' is of the unknown type 'linaer'; did you mean 'linear'",
    ),
    "an op that nobody knows": (
        lambda s: setattr(op(s, "linear"), "type", "zzz"),
        r"network\.mlpackage: op 'y' is of the unknown type 'zzz'; upgrade coremltools",
    ),
    "a missing input": (
        lambda s: op(s, "linear").inputs.pop("weight"),
        r"network\.mlpackage: op 'y' \(linear\) cannot be read: .*weight.*; convert the model again",
    ),
    "an input that nothing makes": (
        lambda s: setattr(op(s, "linear").inputs["x"].arguments[0], "name", "nobody"),
        r"network\.mlpackage: op 'y' \(linear\) cannot be read: .*nobody.*; convert the model again",
    ),
    "another type of output": (
        wrong_output_type,
        r"network\.mlpackage: op 'y' \(linear\) cannot be read: .*Mismatch.*; convert the model again",
    ),
    "no block": (
        lambda s: s.mlProgram.functions["main"].block_specializations.clear(),
        r"network\.mlpackage: function 'main' cannot be read: Missing block specialization .*; convert",
    ),
    "an image without colours": (
        lambda s: s.description.input[0].type.imageType.SetInParent(),
        r"'x' has the colour space 0, which this coremltools does not know",
    ),
    "two weight files": (
        two_weight_files,
        r"network\.mlpackage has its weights in 2 files, other\.bin, weight\.bin; put them into one",
    ),
}


def image_spec(code: int) -> Any:
    from bad_networks import build

    spec = build()
    spec.description.input[0].type.imageType.colorSpace = code
    return spec


def test_a_colour_space_that_nobody_knows(tmp_path: Path) -> None:
    (tmp_path / "network.mlmodel").write_bytes(image_spec(127).SerializeToString())
    with pytest.raises(
        LoadError, match="'image' has the colour space 127, which this coremltools does not know"
    ):
        load(tmp_path / "network.mlmodel")
    pipeline = type(image_spec(127))(specificationVersion=5)
    pipeline.pipeline.models.add().CopyFrom(image_spec(127))
    (tmp_path / "pipeline.mlmodel").write_bytes(pipeline.SerializeToString())
    with pytest.raises(LoadError, match="colour space 127"):
        load(tmp_path / "pipeline.mlmodel")


def test_an_element_type_that_nobody_knows(package: Path) -> None:
    spec = read_spec(package / MODEL)
    spec.description.input[0].type.multiArrayType.dataType = 77
    (package / MODEL).write_bytes(spec.SerializeToString())
    with pytest.raises(LoadError, match="'x' has the element type 77"):
        load(package)


@pytest.mark.parametrize("name", SPOILED)
def test_a_program_that_cannot_be_read_is_named_with_its_op(package: Path, name: str) -> None:
    spoil, words = SPOILED[name]
    spec = read_spec(package / MODEL)
    spoil(spec)
    (package / MODEL).write_bytes(spec.SerializeToString())
    with pytest.raises(LoadError, match=words):
        load(package)


@pytest.mark.parametrize("place", ["/etc/passwd", "../../outside", "a/../../../outside", "x\0y"])
@pytest.mark.parametrize("item", ["model.mlmodel", "weights"])
def test_a_manifest_that_leads_outside_is_refused(package: Path, place: str, item: str) -> None:
    manifest = json.loads((package / "Manifest.json").read_text())
    (entry,) = [i for i in manifest["itemInfoEntries"].values() if i["name"] == item]
    entry["path"] = place
    (package / "Manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(LoadError, match=r"Manifest\.json names .* which is outside the package"):
        load(package)


MANIFESTS = [
    "",
    "[]",
    "{}",
    '{"itemInfoEntries": []}',
    "[" * 100_000,
    "\xff",
    "null",
    '{"rootModelIdentifier": []}',
]


@pytest.mark.parametrize("content", MANIFESTS, ids=range(len(MANIFESTS)))
def test_a_manifest_without_sense(package: Path, content: str) -> None:
    (package / "Manifest.json").write_text(content, encoding="latin-1")
    with pytest.raises(LoadError, match=r"Manifest\.json cannot be understood"):
        load(package)


@pytest.mark.parametrize("item", [{"path": 7}, {"path": None}, {}, 7])
def test_an_entry_of_a_manifest_without_sense(package: Path, item: object) -> None:
    entries = {"itemInfoEntries": {"a": item}, "rootModelIdentifier": "a"}
    (package / "Manifest.json").write_text(json.dumps(entries))
    with pytest.raises(LoadError, match=r"Manifest\.json cannot be understood"):
        load(package)


@pytest.mark.parametrize("size", [88, 127, 64, 200])
def test_a_weight_file_that_is_cut_short_says_how_much_is_needed(package: Path, size: int) -> None:
    with (package / WEIGHTS).open("r+b") as file:
        file.truncate(size)
    with pytest.raises(LoadError, match="the file is cut short") as raised:
        load(package)
    ends, needs = (int(w.strip(",:")) for w in str(raised.value).split() if w.strip(",:").isdigit())
    assert ends == size < needs <= 64 + 64 + 64 * 8 * 2


@pytest.mark.parametrize("damage", [b"", b"PK", b"no array", None])
def test_arrays_that_cannot_be_read(tmp_path: Path, damage: bytes | None) -> None:
    file = tmp_path / "inputs.npz"
    np.savez(file, x=np.ones((40, 3)))
    content = file.read_bytes()
    file.write_bytes(content[: len(content) // 2] if damage is None else damage)
    with pytest.raises(SurgeryError, match=r"inputs\.npz cannot be read as an \.npz file: .+"):
        arrays.read(file)


@pytest.mark.parametrize(
    ("place", "said"), [(".", "it is a folder; name one of its files"), ("nowhere.npz", "No such file")]
)
def test_arrays_that_are_not_there(tmp_path: Path, place: str, said: str) -> None:
    with pytest.raises(SurgeryError, match=rf"cannot be read as an \.npz file: {said}"):
        arrays.read(tmp_path / place)


def test_names_of_dimensions_do_not_collide(corpus: Path) -> None:
    """It holds `make_list` with a dimension called as coremltools calls its own."""
    name = corpus / "dtln_aec_128_part2_fp16.mlpackage"
    models = [load(name), load(name), load(corpus / "basic_pitch_nmp.mlpackage")]
    for model in models[:2]:
        for value in run(model.program, sample_inputs(model.program)).values():
            assert np.isfinite(value).all()

    later = mb.program(input_specs=[mb.TensorSpec((2, 8))])(lambda x: mb.reshape(x=x, shape=mb.shape(x=x)))

    assert load(later).program is later


def test_a_symbol_that_is_taken_is_passed_over(tmp_path: Path) -> None:
    """As after a read that failed half way: coremltools then fails at every new symbol, for good."""
    from coremltools.converters.mil.mil import program as symbols

    shape = (symbols.get_new_symbol(), 3)

    flexible = mb.program(input_specs=[mb.TensorSpec(shape)])(lambda x: mb.relu(x=x, name="y"))

    saved = save(load(flexible), tmp_path / "flexible.mlpackage")
    symbols.Symbol(f"is{symbols.k_num_internal_syms}")
    with pytest.raises(ValueError, match="is used already"):
        symbols.get_new_symbol()
    assert load(saved).program.functions["main"].inputs["x"].shape[1] == 3
