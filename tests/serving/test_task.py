"""One piece of work: what comes of sound models, and of malicious ones."""

from __future__ import annotations

import json
import os
import shutil
import stat
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from children import run_child

import anesurgery as ane
from anesurgery.files.package import read_spec
from anesurgery.files.progress import Listener
from anesurgery.serving.task import _without_folders, answer, model_path

REQUEST: dict[str, Any] = {
    "task": "inspect",
    "target": "M1",
    "recipe": "auto",
    "prove": "sites",
    "memory": 1 << 33,
    "unpacked": 1 << 24,
}


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return ane.example("tiny", tmp_path_factory.mktemp("models") / "tiny.mlpackage")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """That of a visitor; the work changes the folder of the process."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "job/upload").mkdir(parents=True)
    return tmp_path / "job"


def worked(folder: Path, **request: Any) -> dict[str, Any]:
    return answer(folder, REQUEST | request, Listener())


def zipped(package: Path, place: Path) -> Path:
    return Path(shutil.make_archive(str(place.with_suffix("")), "zip", package.parent, package.name))


def test_a_zipped_package_is_reported_rewritten_and_packed(package: Path, folder: Path, tmp_path: Path) -> None:
    zipped(package, folder / "upload/tiny.zip")
    first = worked(folder)
    assert first["sentence"].startswith("On M1")
    page = (folder / "report.html").read_text(encoding="utf-8")
    assert "<h1>tiny.mlpackage</h1>" in page
    assert str(folder) not in page
    second = worked(folder, task="apply", recipe="gpt2_ane")
    assert "logits now has the last position only" in second["changes"]
    assert 'data-view="1"' in (folder / "report.html").read_text(encoding="utf-8")
    assert second["download"] == "tiny_ane.mlpackage.zip"
    zipfile.ZipFile(folder / "download.zip").extractall(tmp_path / "new")
    found = ane.compare(package, tmp_path / "new/tiny_ane.mlpackage", last=True)
    assert found.ok


def test_an_archive_is_unpacked_again_if_the_process_ended_before_it_noted_the_model(
    package: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The wrong version has deleted the archive by then: "0 files and folders were sent"."""
    zipped(package, folder / "upload/tiny.zip")
    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_text", lambda *_, **__: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            model_path(folder, 1 << 24)
    assert model_path(folder, 1 << 24) == model_path(folder, 1 << 24) == folder / "work/tiny.mlpackage"
    assert not list((folder / "upload").iterdir())


def test_a_text_names_no_folder_of_this_machine(folder: Path) -> None:
    parts = [f"{folder}/{part}x" for part in ("work/", "upload/", "out/", "")]
    assert _without_folders(" ".join(parts), folder) == "x x x x"


def test_the_graph_alone_is_reported(package: Path, folder: Path) -> None:
    shutil.copy(package / "Data/com.apple.CoreML/model.mlmodel", folder / "upload")
    assert worked(folder)["sentence"].startswith("On M1")
    assert "the weights are missing, so the graph alone gives the units" in (folder / "report.html").read_text(
        encoding="utf-8"
    )
    error = worked(folder, task="apply")["error"]
    assert error.startswith("model.mlmodel has no weights/weight.bin"), "and no folder of this machine"


@pytest.mark.slow
def test_a_network_stays_one(folder: Path) -> None:
    ane.example("network", folder / "upload/old.mlmodel")
    assert worked(folder, task="apply")["download"] == "old_ane.mlmodel.zip"


def bomb(place: Path) -> None:
    with zipfile.ZipFile(place, "w", zipfile.ZIP_DEFLATED) as made:
        made.writestr("net.mlpackage/Manifest.json", b"\0" * (1 << 25))


def lying_bomb(place: Path) -> None:
    """A member that says it is small, and is not."""
    bomb(place)
    size = (1 << 25).to_bytes(4, "little")
    place.write_bytes(place.read_bytes().replace(size, (100).to_bytes(4, "little")))


def leading_out(place: Path) -> None:
    with zipfile.ZipFile(place, "w") as made:
        made.writestr("net.mlpackage/Manifest.json", b"{}")
        made.writestr("net.mlpackage/../../../owned", b"x")


def absolute(place: Path) -> None:
    with zipfile.ZipFile(place, "w") as made:
        made.writestr("/tmp/net.mlmodel", b"x")


def link(place: Path) -> None:
    member = zipfile.ZipInfo("net.mlpackage/Data")
    member.external_attr = (stat.S_IFLNK | 0o777) << 16
    with zipfile.ZipFile(place, "w") as made:
        made.writestr("net.mlpackage/Manifest.json", b"{}")
        made.writestr(member, b"/etc")


def many(place: Path) -> None:
    with zipfile.ZipFile(place, "w") as made:
        made.writestr("net.mlpackage/Manifest.json", b"{}")
        for k in range(10_001):
            made.writestr(f"net.mlpackage/{k}", b"")


def no_archive(place: Path) -> None:
    place.write_bytes(b"PK\3\4" + b"\xff" * 100)


def manifest_leads_out(place: Path) -> None:
    manifest = {
        "fileFormatVersion": "1.0.0",
        "itemInfoEntries": {
            "a": {"author": "com.apple.CoreML", "name": "model.mlmodel", "path": "../../../../etc/passwd"}
        },
        "rootModelIdentifier": "a",
    }
    with zipfile.ZipFile(place, "w") as made:
        made.writestr("net.mlpackage/Manifest.json", json.dumps(manifest))


ARCHIVES: dict[Callable[[Path], None], str] = {
    bomb: "are unpacked",
    lying_bomb: "cannot be unpacked",
    leading_out: "leads out of it",
    absolute: "leads out of it",
    link: "leads out of it",
    many: "are unpacked",
    no_archive: "cannot be unpacked",
    manifest_leads_out: "outside the package",
}
"""What makes a malicious archive -> what is said of it."""


SLOW = pytest.mark.slow
CASES = [pytest.param(make, id=make.__name__, marks=SLOW if make is many else ()) for make in ARCHIVES]


@pytest.mark.parametrize("make", CASES)
def test_a_malicious_archive_is_refused_and_writes_nothing_elsewhere(
    make: Callable[[Path], None], folder: Path, tmp_path: Path
) -> None:
    make(folder / "upload/net.zip")
    error = worked(folder)["error"]
    assert ARCHIVES[make] in error
    assert str(tmp_path) not in error
    assert "root:" not in error
    assert [path.name for path in tmp_path.iterdir()] == ["job"]
    written = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    assert written <= REQUEST["unpacked"] + (1 << 22)


@pytest.mark.parametrize(
    "content",
    [b"", b"\xff" * 5000, b"\x0a" * 100_000, b"\x12\xff\xff\xff\xff\x0f" + b"a" * 50],
    ids=["0", "1", "2", "3"],
)
def test_a_broken_model_is_an_error(content: bytes, folder: Path) -> None:
    (folder / "upload/net.mlmodel").write_bytes(content)
    assert worked(folder)["error"].startswith("net.mlmodel")


def test_a_model_cut_short_is_an_error(package: Path, folder: Path) -> None:
    whole = (package / "Data/com.apple.CoreML/model.mlmodel").read_bytes()
    (folder / "upload/net.mlmodel").write_bytes(whole[: len(whole) // 2])
    assert worked(folder)["error"].startswith("net.mlmodel")


@pytest.mark.parametrize("place", ["@model_path/../../../../../secret/weight.bin", "{secret}"])
def test_weights_of_others_are_not_read(place: str, package: Path, folder: Path, tmp_path: Path) -> None:
    """A model that says its weights lie elsewhere on the machine, where another visitor's are."""
    inside = Path("Data/com.apple.CoreML")
    model = Path(shutil.copytree(package, folder / "upload/net.mlpackage"))
    shutil.move(model / inside / "weights", tmp_path / "secret")
    spec = read_spec(model / inside / "model.mlmodel")
    (block,) = spec.mlProgram.functions["main"].block_specializations.values()
    pointers = [v.blobFileValue for op in block.operations for v in op.attributes.values()]
    for pointer in pointers:
        if pointer.fileName:
            pointer.fileName = place.format(secret=tmp_path / "secret/weight.bin")
    (model / inside / "model.mlmodel").write_bytes(spec.SerializeToString())
    assert "has no weights/weight.bin" in worked(folder, task="apply")["error"]


@pytest.mark.parametrize("names", [[], ["a.mlmodel", "b.mlmodel"], ["a.txt"], ["a.mlmodelc"]], ids=str)
def test_what_is_no_model_is_said(names: list[str], folder: Path) -> None:
    for name in names:
        (folder / "upload" / name).write_bytes(b"x")
    assert "model" in worked(folder)["error"]


BOUND = """
import sys
from anesurgery.serving.task import bind
bind(1 << 28, 1000)
try:
    bytearray(1 << 29)
    print("allocated")
except MemoryError:
    print("memory")
try:
    open(sys.argv[1], "wb", buffering=0).write(b"x" * 2000)
    open(sys.argv[1], "ab", buffering=0).write(b"x" * 2000)
except OSError as error:
    print(error.strerror)
import socket
for call in (lambda: socket.create_connection(("127.0.0.1", 9)), lambda: socket.getaddrinfo("a.example", 80)):
    try:
        call()
    except PermissionError as error:
        print(error)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not hold a limit on memory")
def test_a_bound_process_allocates_writes_and_connects_no_further(tmp_path: Path) -> None:
    done = run_child([sys.executable, "-c", BOUND, str(tmp_path / "file")], check=True)
    memory, file, *refused = done.stdout.splitlines()
    assert (memory, file) == ("memory", "File too large")
    assert len(refused) == 2
    assert all("no reason" in words for words in refused)
    assert (tmp_path / "file").stat().st_size == 1000


def test_it_ends_with_the_process_that_started_it(tmp_path: Path) -> None:
    """Its standard input is closed then."""
    (tmp_path / "upload").mkdir()
    waits = "import anesurgery.serving.task as t, threading, time; t._end_with_the_server(); time.sleep(600)"
    started = subprocess.Popen([sys.executable, "-c", waits], stdin=subprocess.PIPE)
    assert started.stdin is not None
    started.stdin.close()
    assert started.wait(600) == 1
    assert os.path.isdir(tmp_path)


def test_a_file_of_another_format_is_named_with_what_to_do(folder: Path) -> None:
    (folder / "upload" / "w.safetensors").write_bytes(b"")
    assert "give the folder of its checkpoint to `anesurgery build`" in worked(folder)["error"]
