"""Models in .zip archives: unpacked where it is safe, refused in words where it is not."""

from __future__ import annotations

import stat
import zipfile
from pathlib import Path

import numpy as np
import pytest

import anesurgery as ane
from anesurgery.errors import LoadError
from anesurgery.files.package import save
from anesurgery.files.source import unpack
from anesurgery.loading import load
from anesurgery.mil import Program, mb


def small() -> Program:
    """One op with a stored weight."""
    weight = np.eye(8, dtype=np.float32) * 2

    return mb.program(input_specs=[mb.TensorSpec((1, 8))])(lambda x: mb.linear(x=x, weight=weight, name="y"))


def packed(tmp_path: Path, inside: str) -> Path:
    """An archive with a package under a name, or at its root."""
    package = save(load(small()), tmp_path / "model.mlpackage")
    archive = tmp_path / "model.zip"
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as file:
        for one in package.rglob("*"):
            file.write(one, f"{inside}{one.relative_to(package)}")
        file.writestr("__MACOSX/._model.mlpackage", b"x")
        file.writestr("README.md", "how to use it")
    return archive


@pytest.mark.parametrize("inside", ["model.mlpackage/", "download/model.mlpackage/", ""])
def test_a_package_is_read_from_its_archive(inside: str, tmp_path: Path) -> None:
    archive = packed(tmp_path, inside)
    before = archive.read_bytes()
    x = np.arange(8, dtype=np.float32)[None]
    assert np.array_equal(ane.run(archive, {"x": x}, precision="fp32")["y"], 2 * x)
    assert ane.inspect(archive).model == str(archive)
    assert ane.apply(archive, []).save(tmp_path / "out.mlpackage").exists()
    assert archive.read_bytes() == before


def test_an_archive_that_was_exchanged_is_read_again(tmp_path: Path) -> None:
    archive = packed(tmp_path, "a.mlpackage/")
    assert len(load(archive).program.functions["main"].inputs) == 1
    archive.write_bytes(b"PK nothing")
    with pytest.raises(LoadError, match="cannot be unpacked"):
        load(archive)


def member(name: str, mode: int = 0) -> zipfile.ZipInfo:
    """An entry of an archive."""
    info = zipfile.ZipInfo(name)
    info.external_attr = mode << 16
    return info


@pytest.mark.parametrize(
    "hostile",
    [
        member("m.mlpackage/../../outside"),
        member("m.mlpackage/link", stat.S_IFLNK | 0o777),
        member("m.mlpackage/a\\..\\..\\outside"),
    ],
    ids=["dots", "link", "backslashes"],
)
def test_what_leads_out_is_refused_before_anything_is_written(hostile: zipfile.ZipInfo, tmp_path: Path) -> None:
    archive, folder = tmp_path / "m.zip", tmp_path / "into"
    folder.mkdir()
    with zipfile.ZipFile(archive, "w") as file:
        file.writestr("m.mlpackage/Manifest.json", "{}")
        file.writestr(hostile, "/etc/passwd")
    with pytest.raises(LoadError, match="leads out of it"):
        unpack(archive, folder)
    assert not list(folder.iterdir())
    assert not (tmp_path / "outside").exists()


def test_a_bomb_is_refused_by_what_it_says_and_by_what_comes_out(tmp_path: Path) -> None:
    archive, folder = tmp_path / "m.zip", tmp_path / "into"
    folder.mkdir()
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr("m.mlpackage/Manifest.json", b"0" * (1 << 22))
    with pytest.raises(LoadError, match="at most"):
        unpack(archive, folder, largest=1 << 20)
    content = bytearray(archive.read_bytes())
    for place in (content.index(b"PK\x03\x04") + 22, content.index(b"PK\x01\x02") + 24):
        content[place : place + 4] = (1000).to_bytes(4, "little")  # what it says of its size
    archive.write_bytes(bytes(content))
    with pytest.raises(LoadError, match="cannot be unpacked"):
        unpack(archive, folder, largest=1 << 20)
    assert sum(p.stat().st_size for p in folder.rglob("*") if p.is_file()) <= 1 << 20


@pytest.mark.parametrize(
    ("names", "words"),
    [([], "holds no model"), (["a.mlpackage/Manifest.json", "b.mlmodel"], "holds 2 models")],
    ids=["none", "two"],
)
def test_another_number_of_models_is_said(names: list[str], words: str, tmp_path: Path) -> None:
    archive = tmp_path / "m.zip"
    with zipfile.ZipFile(archive, "w") as file:
        file.writestr("notes.txt", "x")
        for name in names:
            file.writestr(name, "{}")
    with pytest.raises(LoadError, match=words):
        ane.inspect(archive)


def test_a_compiled_model_in_an_archive_is_to_be_unzipped(tmp_path: Path) -> None:
    archive = tmp_path / "m.zip"
    with zipfile.ZipFile(archive, "w") as file:
        file.writestr("m.mlmodelc/model.mil", "program(1.0)")
    with pytest.raises(LoadError, match="compiled model; unzip it"):
        ane.inspect(archive)


def test_an_unknown_way_of_packing_is_said(tmp_path: Path) -> None:
    """As Windows packs large files: a copy would be packed so, too."""
    archive = tmp_path / "m.zip"
    with zipfile.ZipFile(archive, "w") as file:
        file.writestr("m.mlmodel", "x")
    content = bytearray(archive.read_bytes())
    for start, place in ((b"PK\3\4", 8), (b"PK\1\2", 10)):
        content[content.index(start) + place] = 9
    archive.write_bytes(content)
    with pytest.raises(LoadError, match=r"packed in a way that is not known here .*; unzip it"):
        unpack(archive, tmp_path / "out")
