"""A lock of somebody else on a folder stops no save that does not need it, and none for ever."""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path

import numpy as np
import pytest

from anesurgery.errors import LoadError
from anesurgery.files import package, writing
from anesurgery.files.package import save, to_mlmodel
from anesurgery.files.writing import SCRATCH, write_atomically
from anesurgery.loading import load
from anesurgery.mil import Program, mb


@pytest.fixture(params=[fcntl.LOCK_EX, fcntl.LOCK_SH])
def lock(request: pytest.FixtureRequest, tmp_path: Path) -> int:
    """A lock on the folder, which is held until its handle is closed."""
    handle = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(handle, request.param)
    return handle


def program() -> Program:
    return mb.program(input_specs=[mb.TensorSpec((2, 3))])(
        lambda x: mb.sub(x=np.float32(1), y=mb.relu(x=x), name="y")
    )


def test_a_save_that_needs_no_lock_does_not_wait(tmp_path: Path, lock: int) -> None:
    for content in ("first", "second"):
        write_atomically(tmp_path / "x", lambda place, c=content: place.write_text(c), overwrite=True)  # type: ignore[misc]
    assert (tmp_path / "x").read_text() == "second"
    os.close(lock)


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_save_that_needs_the_lock_says_so(
    tmp_path: Path, lock: int, overwrite: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Systems that cannot exchange two names need two moves, which nobody may come between."""
    (tmp_path / "x").write_text("old")
    monkeypatch.setattr(writing, "_rename", lambda made, target, *, exchange: False)
    monkeypatch.setattr(writing, "LOCK_TIMEOUT", 0)
    place = tmp_path / ("x" if overwrite else "y")
    with pytest.raises(LoadError, match="is locked by another process .*; end it or wait for it, or save into"):
        write_atomically(place, lambda place: place.write_text("new"), overwrite=overwrite)
    assert (tmp_path / "x").read_text() == "old"
    assert os.listdir(tmp_path) == ["x"]
    os.close(lock)


def test_a_lock_that_is_given_up_is_waited_for(
    tmp_path: Path, lock: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses: list[float] = []

    def pause(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 3:
            os.close(lock)

    monkeypatch.setattr("time.sleep", pause)
    with writing.locked(tmp_path):
        assert len(pauses) == 3


def test_a_file_system_whose_locks_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One without locks is done without; any other failure is told."""
    codes = [errno.ENOLCK]

    def flock(handle: int, how: int) -> None:
        raise OSError(codes[0], os.strerror(codes[0]))

    monkeypatch.setattr(fcntl, "flock", flock)
    monkeypatch.setattr(writing, "_rename", lambda made, target, *, exchange: False)
    write_atomically(tmp_path / "x", lambda place: place.write_text("it"), overwrite=True)
    codes[0] = errno.EIO
    with pytest.raises(LoadError, match="Input/output error"):
        write_atomically(tmp_path / "x", lambda place: place.write_text("it"), overwrite=True)


def test_the_temporary_folder_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cleaners remove what is old, also of those that still run."""
    import shutil

    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    temporary = package._TemporaryFolder()
    monkeypatch.setattr(package, "_TEMPORARY", temporary)
    loaded = load(save(load(program()), tmp_path / "in.mlpackage"))
    first = Path(to_mlmodel(loaded).package_path)
    assert first.is_relative_to(tmp_path)
    for removed in (first.parents[1], first.parents[2]):
        shutil.rmtree(removed, ignore_errors=True)
        again = Path(to_mlmodel(loaded).package_path)
        assert again.is_dir()
        assert again.parents[2] != first.parents[2]
        assert again.parents[1] == temporary.folder(), "and it stays the same one"
    (left,) = [p for p in tmp_path.iterdir() if p.name.startswith(SCRATCH)]
    temporary.close()
    assert not left.exists()
