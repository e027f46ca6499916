"""What is read has a kind and a size: pipes, devices, huge files, weights that are not as described."""

from __future__ import annotations

import os
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import anesurgery as ane
from anesurgery.errors import LoadError, SurgeryError
from anesurgery.files import arrays, protobuf, source
from anesurgery.files.package import read_spec, save
from anesurgery.files.source import SourceFile
from anesurgery.files.weights import METADATA, SENTINEL
from anesurgery.loading import load
from anesurgery.mil import Program, Var, ct, mb, types, walk_ops
from anesurgery.placement.calibration import read_plan
from anesurgery.placement.corrections import read_corrections

MODEL = "Data/com.apple.CoreML/model.mlmodel"
WEIGHTS = "Data/com.apple.CoreML/weights/weight.bin"


def program() -> Program:
    table = np.arange(64 * 8, dtype=np.float16).reshape(64, 8)

    return mb.program(input_specs=[mb.TensorSpec((2, 8), dtype=types.fp16)], opset_version=ct.target.iOS16)(
        lambda x: mb.linear(x=mb.relu(x=x, name="hidden"), weight=table, name="y")
    )


@pytest.fixture
def package(tmp_path: Path) -> Path:
    return save(load(program()), tmp_path / "network.mlpackage")


def instead(place: Path, kind: str) -> None:
    place.unlink(missing_ok=True)
    if kind == "pipe":
        os.mkfifo(place)
    else:
        place.symlink_to("/dev/zero")


@pytest.mark.parametrize("kind", ["pipe", "device"])
@pytest.mark.parametrize("part", [MODEL, WEIGHTS, "Manifest.json"])
def test_a_part_that_is_no_file(package: Path, part: str, kind: str) -> None:
    instead(package / part, kind)
    with pytest.raises(LoadError):
        load(package)


@pytest.mark.parametrize("kind", ["pipe", "device"])
@pytest.mark.parametrize("part", ["coremldata.bin", "metadata.json", "model.mil"])
def test_a_part_of_a_compiled_model_that_is_no_file(tmp_path: Path, part: str, kind: str) -> None:
    folder = tmp_path / "x.mlmodelc"
    folder.mkdir()
    (folder / "model.mil").write_text(ane.to_text(program(), dialect="mil"))
    instead(folder / part, kind)
    try:
        load(folder)  # the descriptions may be absent
    except LoadError:
        assert part == "model.mil"


@pytest.mark.parametrize(("kind", "words"), [("pipe", "is a pipe"), ("device", "is a device")])
def test_the_error_says_what_it_is(tmp_path: Path, kind: str, words: str) -> None:
    instead(tmp_path / "x", kind)
    with pytest.raises(LoadError, match=f"{words} and no file"):
        SourceFile(tmp_path / "x")


READERS: dict[str, Callable[[Path], object]] = {
    "npz": arrays.read,
    "npy": arrays.read_one,
    "plan": read_plan,
    "rates": read_corrections,
}


@pytest.mark.parametrize("kind", ["pipe", "device"])
@pytest.mark.parametrize("reader", READERS)
def test_other_files_that_are_none(tmp_path: Path, reader: str, kind: str) -> None:
    instead(tmp_path / "x", kind)
    with pytest.raises(SurgeryError, match="a pipe|a device"):
        READERS[reader](tmp_path / "x")


@pytest.mark.parametrize("content", [b"", b"\x93NUMPY\x01\x00", b"no array", b"PK\x03\x04", b"\x80\x04N."])
def test_a_damaged_array(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "x.npy").write_bytes(content)
    with pytest.raises(SurgeryError, match=r"x\.npy cannot be read as an \.npy file"):
        arrays.read_one(tmp_path / "x.npy")


@pytest.mark.parametrize("reader", ["plan", "rates"])
def test_a_plan_that_nests_deeply(tmp_path: Path, reader: str) -> None:
    (tmp_path / "plan.json").write_text("[" * 100_000)
    with pytest.raises(LoadError, match=r"plan\.json is no"):
        READERS[reader](tmp_path / "plan.json")


def test_a_specification_that_is_too_large_is_not_read(tmp_path: Path) -> None:
    """A sparse file: it takes no room on the disk, and would in memory."""
    (tmp_path / "x.mlmodel").touch()
    os.truncate(tmp_path / "x.mlmodel", 8 << 30)
    with pytest.raises(
        LoadError, match=r"has 8589934592 bytes, and at most 2147483647 .*weight file may be of any"
    ):
        load(tmp_path / "x.mlmodel")


def test_a_manifest_that_is_too_large_is_not_read(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    os.truncate(package / "Manifest.json", source.LARGEST_TEXT + 1)
    with pytest.raises(LoadError, match=r"or raise anesurgery\.files\.source\.LARGEST_TEXT"):
        load(package)


def described(package: Path) -> int:
    """The offset of the metadata of the first weight."""
    return (package / WEIGHTS).read_bytes().index(struct.pack("<I", SENTINEL))


BAD_BLOBS: dict[str, tuple[tuple[int, ...], str]] = {
    "another type": ((SENTINEL, 2, 1024, 128, 0), "is of the type 2 .* expected 1"),
    "another size": ((SENTINEL, 1, 512, 128, 0), "has 512 bytes, expected"),
    "data over the header": ((SENTINEL, 1, 1024, 0, 0), "lies over what describes it"),
    "data over its metadata": ((SENTINEL, 1, 1024, 96, 0), "lies over what describes it"),
    "data beyond the end": ((SENTINEL, 1, 1024, 1 << 40, 0), "the file is cut short"),
    "an offset that overflows": ((SENTINEL, 1, 1024, 2**64 - 1, 0), "the file is cut short"),
    "another sentinel": ((7, 1, 1024, 128, 0), "holds no weight at offset 64"),
}


@pytest.mark.parametrize("kind", BAD_BLOBS)
def test_a_weight_that_is_not_what_it_is_said_to_be(package: Path, kind: str) -> None:
    fields, words = BAD_BLOBS[kind]
    content = bytearray((package / WEIGHTS).read_bytes())
    at = described(package)
    assert at == 64
    content[at : at + METADATA.size] = METADATA.pack(*fields)
    (package / WEIGHTS).write_bytes(content)
    with pytest.raises(LoadError, match=words):
        load(package)


def test_padding_of_packed_numbers(tmp_path: Path) -> None:
    """Fifteen numbers of four bits fill seven bytes and a half."""
    kind = types.nptype_from_builtin(types.string_to_builtin("uint4"))
    indices = (np.arange(15, dtype=np.uint8)).reshape(15, 1).astype(kind)

    @mb.program(input_specs=[mb.TensorSpec((15, 1), types.fp16)], opset_version=ct.target.iOS18)
    def made(x: Var) -> Var:
        lut = np.arange(16, dtype=np.float16).reshape(1, 1, 16, 1)
        return mb.mul(x=x, y=mb.constexpr_lut_to_dense(indices=indices, lut=lut), name="y")

    saved = save(load(made), tmp_path / "packed.mlpackage")
    content = bytearray((saved / WEIGHTS).read_bytes())
    at = next(i for i in range(64, len(content), 64) if content[i : i + 8] == struct.pack("<II", SENTINEL, 11))
    fields = list(METADATA.unpack(content[at : at + METADATA.size]))
    assert fields[4] == 4
    content[at : at + METADATA.size] = METADATA.pack(*fields[:4], 0)
    (saved / WEIGHTS).write_bytes(content)
    with pytest.raises(LoadError, match="with 0 bits of padding, expected 11 with 4"):
        load(saved)


def test_two_values_of_one_name(package: Path) -> None:
    spec = read_spec(package / MODEL)
    (block,) = spec.mlProgram.functions["main"].block_specializations.values()
    relu = next(op for op in block.operations if op.type == "relu")
    block.operations.add().CopyFrom(relu)
    (package / MODEL).write_bytes(spec.SerializeToString())
    with pytest.raises(LoadError, match="two values have the name 'hidden'"):
        load(package)


def test_a_large_value_is_not_computed_while_it_is_read(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = mb.program(input_specs=[mb.TensorSpec((1,))], opset_version=ct.target.iOS16)(
        lambda x: mb.add(
            x=x, y=mb.fill(shape=np.array([100], np.int32), value=np.float32(2), name="many"), name="y"
        )
    )

    saved = save(load(made), package.with_name("filled.mlpackage"))

    def value() -> object:
        return next(op for op in walk_ops(load(saved).program) if op.op_type == "fill").outputs[0].val

    assert value() is not None
    monkeypatch.setattr(protobuf, "LARGEST_VALUE", 399)
    assert value() is None
    np.testing.assert_array_equal(ane.run(saved, {"x": np.ones(1, np.float32)})["y"], np.full(100, 3))


def test_a_reduction_of_constants_is_read(package: Path) -> None:
    """coremltools gives numpy 2 a `keep_dims` that it refuses; the wrong version takes it for damage."""

    @mb.program(input_specs=[mb.TensorSpec((2, 3))], opset_version=ct.target.iOS16)
    def made(x: Var) -> Var:
        table = np.arange(6, dtype=np.float32).reshape(2, 3)
        return mb.mul(x=x, y=mb.reduce_sum(x=table, axes=[1], keep_dims=True, name="sum"), name="y")

    saved = save(load(made), package.with_name("sums.mlpackage"))
    (y,) = ane.run(saved, {"x": np.ones((2, 3), np.float32)}).values()
    np.testing.assert_array_equal(y, [[3] * 3, [12] * 3])


@pytest.mark.parametrize("most", [protobuf.MOST_PRODUCTS, 1 << 30])
def test_large_products_of_constants_are_not_computed_while_they_are_read(
    package: Path, monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    """As a conformer projects its table of positions in each layer; the wrong version computes them."""
    rng = np.random.default_rng(0)
    table, weight, few = (
        rng.standard_normal(n).astype(np.float16) for n in ((1, 200, 160), (160, 160), (2, 4))
    )

    @mb.program(input_specs=[mb.TensorSpec((1, 200, 160), dtype=types.fp16)], opset_version=ct.target.iOS16)
    def made(x: Var) -> Var:
        projected = mb.linear(x=table, weight=weight, name="projected")
        one = mb.reduce_sum(x=mb.matmul(x=few, y=few, transpose_y=True, name="small"))
        turned = mb.matmul(x=table, y=weight, name="turned")
        return mb.mul(x=mb.add(x=mb.add(x=x, y=projected), y=turned), y=one, name="y")

    saved = save(load(made), package.with_name("table.mlpackage"))
    monkeypatch.setattr(protobuf, "MOST_PRODUCTS", most)
    values = {op.name: op.outputs[0].val for op in walk_ops(load(saved).program)}
    skipped = most < 1 << 30
    assert [values[n] is None for n in ("projected", "turned", "small")] == [skipped, skipped, False]
    x = rng.standard_normal((1, 200, 160)).astype(np.float16)
    product = table.astype(np.float64) @ weight.astype(np.float64)
    turned = table.astype(np.float64) @ weight.astype(np.float64).T
    wanted = (x + product + turned) * float((few.astype(np.float64) @ few.T.astype(np.float64)).sum())
    np.testing.assert_allclose(
        ane.run(saved, {"x": x})["y"], wanted, rtol=1e-3, atol=1e-2 * np.abs(wanted).max()
    )


@pytest.mark.parametrize("name", ["a/b", "../a", "x" * 300, "a\nb", "\0", "ü"])
def test_any_name_of_an_input_has_a_file_of_its_own(tmp_path: Path, name: str) -> None:
    place = arrays.path_beside(tmp_path / "model.mlpackage", name)
    assert place.parent == tmp_path
    arrays.write_one(place, np.arange(3))
    assert arrays.read_one(place).tolist() == [0, 1, 2]
    others = {
        arrays.path_beside(tmp_path / "model.mlpackage", other) for other in ("ab", "a_b", "x" * 301, "a%2Fb")
    }
    assert place not in others
