"""Folders that are no sound Core AI models: each is an error in words, and nothing is killed."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from core_ai_models import HASH, PROGRAM, linear_asset, needs_core_ai, rehash

import anesurgery as ane
from anesurgery.errors import SurgeryError

pytestmark = needs_core_ai

METADATA = "metadata.json"


def content(edit: Callable[[bytes], bytes], fits: bool = True) -> Callable[[Path], None]:
    """Write another program into a folder."""

    def write(folder: Path) -> None:
        file = folder / PROGRAM
        file.write_bytes(edit(file.read_bytes()))
        if fits:
            rehash(folder)

    return write


def stated(**fields: object) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        held = json.loads((folder / METADATA).read_text()) | fields
        (folder / METADATA).write_text(json.dumps(held))

    return write


def in_place_of(name: str, make: Callable[[Path], object]) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        (folder / name).unlink()
        make(folder / name)

    return write


def sparse(size: int) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        os.truncate(folder / PROGRAM, size)

    return write


def cyclic(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.symlink_to(folder)


def nothing_inside(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.mkdir()


def a_file(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.write_bytes(b"PK\3\4")


def patched(at: int, new: bytes) -> Callable[[bytes], bytes]:
    return lambda data: data[:at] + new + data[at + len(new) :]


def swapped(old: bytes, new: bytes) -> Callable[[bytes], bytes]:
    """Another name of the same length in the table of strings."""
    assert len(old) == len(new)
    return lambda data: data.replace(old, new)


HOSTILE: dict[str, tuple[Callable[[Path], object], str]] = {
    "no folder": (lambda f: shutil.rmtree(f), "does not exist"),
    "an empty folder": (nothing_inside, "lacks metadata.json and main.mlirb and main.hash"),
    "a file": (a_file, "is no folder"),
    "a link to itself": (cyclic, "is a link that leads nowhere"),
    "no program": (lambda f: (f / PROGRAM).unlink(), "lacks main.mlirb"),
    "no hash": (lambda f: (f / HASH).unlink(), "lacks main.hash"),
    "no metadata": (lambda f: (f / METADATA).unlink(), "lacks metadata.json"),
    "an empty program": (content(lambda d: b""), "it is empty"),
    "one byte": (content(lambda d: d[:1]), "does not begin as MLIR's bytecode does"),
    "a magic number alone": (content(lambda d: d[:4]), "announces 1 more"),
    "half a program": (content(lambda d: d[: len(d) // 2]), "announces"),
    "all but the last byte": (content(lambda d: d[:-1]), "announces"),
    "a byte too many": (content(lambda d: d + b"\0"), "announces"),
    "text": (content(lambda d: b"module { coreai.graph @main() {} }"), "does not begin as"),
    "a zip file": (content(lambda d: b"PK\3\4" + d), "does not begin as"),
    "an unknown version": (content(patched(4, bytes([99 * 2 + 1]))), "its format is version 99"),
    "a producer without an end": (content(lambda d: d[:5] + b"x" * 200), "announces 1 more"),
    "a section of 2^63 bytes": (content(lambda d: d[:20] + b"\0\0" + b"\xff" * 8 + d[20:]), "announces"),
    "a wrong hash": (lambda f: (f / HASH).write_bytes(b"0" * 32), "is not what main.hash says"),
    "a short hash": (lambda f: (f / HASH).write_bytes(b"0"), "is not what main.hash says"),
    "a changed weight": (content(lambda d: d[:-900] + b"\x07" + d[-899:], fits=False), "is not what main.hash"),
    "a program of 1 TiB": (sparse(1 << 40), "bytes, and at most"),
    "zeros behind the end": (sparse(1 << 30), "is no program of Core AI, or is damaged"),
    "metadata that is no JSON": (lambda f: (f / METADATA).write_text("{"), "cannot be understood"),
    "metadata that is a list": (lambda f: (f / METADATA).write_text("[]"), "cannot be understood"),
    "metadata nested deeply": (lambda f: (f / METADATA).write_text("[" * 99999), "cannot be understood"),
    "metadata of the future": (stated(assetVersion="3.0"), "is of version 3.0"),
    "metadata without a version": (stated(assetVersion=None), "is of version None"),
    "a pipe for a program": (in_place_of(PROGRAM, os.mkfifo), "is a pipe and no file"),
    "a folder for a program": (in_place_of(PROGRAM, os.mkdir), "is a folder and no file"),
    "a folder for the hash": (in_place_of(HASH, os.mkdir), "is a folder and no file"),
    "no sections": (content(lambda d: d[: d.index(b"git\0") + 4]), "it has no strings"),
    "a foreign op": (content(swapped(b"broadcasting_add_v1", b"broadcasting_axe_v1")), "Apple's runtime"),
    "a foreign dialect": (content(swapped(b"aicode", b"axcode")), "Apple's runtime"),
}
"""What is wrong -> how a sound folder becomes so, and words of the error."""

ASKED: dict[str, Callable[[Path], object]] = {
    "run": lambda folder: ane.run(folder, {"x": np.ones((2, 3))}, engine="coreai"),
    "load": ane.load,
}


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return linear_asset(tmp_path_factory.mktemp("sound") / "sound.aimodel")


@pytest.mark.parametrize("wrong", HOSTILE)
@pytest.mark.parametrize("asked", ASKED)
def test_what_is_wrong_is_said(sound: Path, tmp_path: Path, wrong: str, asked: str) -> None:
    spoil, words = HOSTILE[wrong]
    folder = tmp_path / "wrong.aimodel"
    shutil.copytree(sound, folder)
    spoil(folder)
    with pytest.raises(SurgeryError, match=words):
        ASKED[asked](folder)


def test_the_table_is_not_of_sound_folders(sound: Path) -> None:
    """A check that can fail: the same folder, not spoilt, runs."""
    assert ane.run(sound, {"x": np.ones((2, 3))}, engine="coreai")["y"].shape == (2, 4)


def test_there_are_thirty() -> None:
    assert len(HOSTILE) >= 30
