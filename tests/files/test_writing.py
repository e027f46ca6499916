"""A file or folder takes its place atomically, and only where it may go."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from leftovers import die

import anesurgery as ane
from anesurgery.commands import app as cli
from anesurgery.commands.options import BAD_INPUT
from anesurgery.errors import LoadError, SurgeryError
from anesurgery.files import arrays, writing
from anesurgery.files.package import save, to_mlmodel
from anesurgery.files.protobuf import InMemoryWeights, to_proto
from anesurgery.files.writing import (
    NEW,
    OLD,
    SCRATCH,
    check_place,
    check_target,
    scratch_folder,
    write_atomically,
)
from anesurgery.loading import load
from anesurgery.mil import Program, ct, mb, quiet_host, types


def program() -> Program:
    return mb.program(input_specs=[mb.TensorSpec((2, 3))])(lambda x: mb.relu(x=x, name="y"))


@pytest.fixture
def package(tmp_path: Path) -> Path:
    return save(load(program()), tmp_path / "in.mlpackage")


@pytest.fixture(params=["as here", "without exchange", "without flags"])
def system(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Systems whose renaming can do less than this one's."""
    rename = writing._rename

    def less(made: Path, target: Path, *, exchange: bool) -> bool:
        if request.param == "without flags" or exchange:
            return False
        return rename(made, target, exchange=exchange)

    if request.param != "as here":
        monkeypatch.setattr(writing, "_rename", less)
    return str(request.param)


def folder(content: str) -> Callable[[Path], None]:
    def write(place: Path) -> None:
        place.mkdir()
        (place / "content").write_text(content)

    return write


def file(content: str) -> Callable[[Path], object]:
    return lambda place: place.write_text(content)


def content(place: Path) -> str:
    return (place / "content" if place.is_dir() else place).read_text()


@pytest.mark.parametrize("kind", [folder, file])
@pytest.mark.usefixtures("system")
def test_new_and_overwritten(tmp_path: Path, kind: Any) -> None:
    target = tmp_path / "x"
    assert write_atomically(target, kind("first"), overwrite=False) == target
    assert content(target) == "first"
    write_atomically(target, kind("second"), overwrite=True)
    assert content(target) == "second"
    with pytest.raises(LoadError, match="exists; choose another name"):
        write_atomically(target, kind("third"), overwrite=False)
    assert content(target) == "second"
    assert [p.name for p in tmp_path.iterdir()] == ["x"]


@pytest.mark.usefixtures("system")
def test_what_appears_in_the_meantime_is_not_overwritten(tmp_path: Path) -> None:
    target = tmp_path / "x"

    def write(place: Path) -> None:
        folder("ours")(place)
        folder("theirs")(target)

    with pytest.raises(LoadError, match="exists; choose another name"):
        write_atomically(target, write, overwrite=False)
    assert content(target) == "theirs"


@pytest.mark.usefixtures("system")
@pytest.mark.parametrize("kind", [folder, file])
def test_a_failed_move_leaves_what_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: Any
) -> None:
    target = tmp_path / "x"
    write_atomically(target, kind("old"), overwrite=False)
    move = Path.rename

    def fail(self: Path, to: Path) -> Path:
        if self.parent.name == NEW:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return move(self, to)

    def cannot(made: Path, target: Path, *, exchange: bool) -> bool:
        if made.parent.name == NEW and not exchange:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return False

    monkeypatch.setattr(Path, "rename", fail)
    monkeypatch.setattr(writing, "_rename", cannot)
    with pytest.raises(LoadError, match="was not written: Input/output error; nothing was changed"):
        write_atomically(target, kind("new"), overwrite=True)
    assert content(target) == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["x"]


def test_what_cannot_be_brought_back_is_kept_and_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "x"
    write_atomically(target, folder("old"), overwrite=False)
    move = Path.rename

    def fail(self: Path, to: Path) -> Path:
        if to.name == target.name and to.parent.name != OLD:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return move(self, to)

    monkeypatch.setattr(Path, "rename", fail)
    monkeypatch.setattr(writing, "_rename", lambda made, target, exchange: False)
    with pytest.raises(LoadError, match=r"what was there is now .*/old/x"):
        write_atomically(target, folder("new"), overwrite=True)
    assert not target.exists()
    monkeypatch.undo()
    write_atomically(tmp_path / "another", file("it"), overwrite=False)
    assert content(target) == "old"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["another", "x"]


def test_what_living_makers_work_on_stays(tmp_path: Path) -> None:
    with scratch_folder(tmp_path) as theirs:
        write_atomically(tmp_path / "z", file("it"), overwrite=False)
        assert theirs.is_dir()
    assert [p.name for p in tmp_path.iterdir()] == ["z"]


def test_a_file_system_without_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing tells the dead from the living there, so nothing is removed."""

    def none(*given: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", none)
    (left,) = die(tmp_path / "x", "at the write")
    write_atomically(tmp_path / "z", file("it"), overwrite=False)
    assert sorted(p.name for p in tmp_path.iterdir()) == [left.name, "z"]


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_clash_in_what_is_written_does_not_blame_the_target(tmp_path: Path, overwrite: bool) -> None:
    def write(fresh: Path) -> None:
        fresh.mkdir()
        fresh.mkdir()

    with pytest.raises(LoadError, match=r"new\.mlpackage was not written: File exists; nothing was changed"):
        write_atomically(tmp_path / "new.mlpackage", write, overwrite)


def test_a_scratch_folder_that_cannot_be_made_leaves_nothing_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mkdir, handles, lock = Path.mkdir, list[int](), writing._state_inode_and_lock

    def locked(made: Path) -> Any:
        named, handle = lock(made) or pytest.fail("it was removed")
        handles.append(handle)
        return named, handle

    def full(path: Path, *arguments: Any, **options: Any) -> None:
        if path.name == NEW:
            raise OSError(errno.ENOSPC, "full")
        mkdir(path, *arguments, **options)

    monkeypatch.setattr(Path, "mkdir", full)
    monkeypatch.setattr(writing, "_state_inode_and_lock", locked)
    with pytest.raises(LoadError, match="full"):
        write_atomically(tmp_path / "new", Path.touch, overwrite=False)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(handles[0])
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("mask", [0o022, 0o077, 0o002])
def test_rights_follow_the_umask(package: Path, tmp_path: Path, mask: int) -> None:
    """Saved by us, or by coremltools from the MLModel that we give."""
    before = os.umask(mask)
    try:
        save(load(package), tmp_path / "ours.mlpackage")
        with quiet_host():
            to_mlmodel(load(package)).save(str(tmp_path / "theirs.mlpackage"))
        arrays.write(tmp_path / "some.npz", {"x": np.zeros(3)})
    finally:
        os.umask(before)

    def mode(path: Path) -> int:
        return stat.S_IMODE(path.stat().st_mode)

    for name in ("ours", "theirs"):
        for path in [tmp_path / f"{name}.mlpackage", *(tmp_path / f"{name}.mlpackage").rglob("*")]:
            assert mode(path) == (0o777 if path.is_dir() else 0o666) & ~mask, path
    assert mode(tmp_path / "some.npz") == 0o666 & ~mask


@pytest.mark.slow
def test_temporary_packages_are_for_their_owner_and_go_with_the_process(package: Path, tmp_path: Path) -> None:
    made = Path(to_mlmodel(load(package)).package_path)
    assert stat.S_IMODE(made.parents[1].stat().st_mode) == 0o700
    code = (
        "import sys, anesurgery as ane; from anesurgery.files.package import to_mlmodel\n"
        "print(to_mlmodel(ane.load(sys.argv[1])).package_path)"
    )
    for ending in ("\nimport os; sys.stdout.flush(); os._exit(1)", ""):
        done = subprocess.run(
            [sys.executable, "-c", code + ending, str(package)],
            env={**os.environ, "TMPDIR": str(tmp_path)},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.stdout.startswith(str(tmp_path)), done.stderr
        left = [p.name for p in tmp_path.iterdir() if p.name.startswith(SCRATCH)]
        assert len(left) == (1 if ending else 0), "what a killed process left is removed by the next"


def test_a_full_temporary_folder(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*given: Any) -> Any:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("anesurgery.files.weights.WeightWriter.finish", full)
    with pytest.raises(LoadError, match="No space left on device; free some space or set TMPDIR"):
        _ = ane.apply(package, "negate_subtract", prove=None, quiet=True).model


@pytest.mark.parametrize("where", ["in.mlpackage/Data/out.mlpackage", "in.mlpackage/out.mlpackage"])
def test_nothing_is_written_into_the_input(package: Path, where: str) -> None:
    before = sorted(package.rglob("*"))
    with pytest.raises(LoadError, match="is inside the input, which is never changed"):
        save(load(package), package.parent / where, overwrite=True)
    assert sorted(package.rglob("*")) == before


def test_nothing_is_written_into_any_package(package: Path, tmp_path: Path) -> None:
    other = save(load(program()), tmp_path / "other.mlpackage")
    with pytest.raises(LoadError, match="is inside the package"):
        save(load(package), other / "Data" / "out.mlpackage")
    with pytest.raises(SurgeryError, match="is inside the package"):
        arrays.write(other / "out.npz", {"x": np.zeros(3)})


def test_the_input_is_found_through_links(package: Path, tmp_path: Path) -> None:
    (tmp_path / "link.mlpackage").symlink_to(package)
    (tmp_path / "folder").symlink_to(tmp_path)
    for name in ("link.mlpackage", "folder/in.mlpackage"):
        with pytest.raises(LoadError, match="is the input"):
            save(load(package), tmp_path / name, overwrite=True)


def test_a_folder_that_holds_the_input_is_not_replaced(package: Path) -> None:
    source = package / "Data" / "com.apple.CoreML" / "model.mlmodel"
    with pytest.raises(LoadError, match="holds the input"):
        check_target(source, package, overwrite=True)


def test_files_beside_a_model_are_not_overwritten_by_themselves(tmp_path: Path) -> None:
    arrays.write(tmp_path / "a.npz", {"x": np.zeros(3)})
    with pytest.raises(SurgeryError, match="exists; choose another name"):
        arrays.write(tmp_path / "a.npz", {"x": np.ones(3)})
    assert not arrays.read(tmp_path / "a.npz")["x"].any()
    arrays.write(tmp_path / "a.npz", {"x": np.ones(3)}, overwrite=True)
    assert arrays.read(tmp_path / "a.npz")["x"].all()


def test_run_does_not_replace_a_file_unasked(
    package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    inputs = tmp_path / "inputs.npz"
    np.savez(inputs, x=np.ones((2, 3), np.float32))
    before = inputs.read_bytes()
    command = ["anesurgery", "run", str(package), "--inputs", str(inputs), "--out", str(inputs)]
    monkeypatch.setattr(sys, "argv", command)
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == BAD_INPUT
    assert "exists; choose another name" in capsys.readouterr().err
    assert inputs.read_bytes() == before
    monkeypatch.setattr(sys, "argv", [*command, "--overwrite"])
    with suppress(SystemExit):
        cli.main()
    assert capsys.readouterr().err == ""
    assert list(arrays.read(inputs)) == ["y"]


def test_an_artifact_is_not_overwritten_by_itself(package: Path, tmp_path: Path) -> None:
    done = ane.apply(package, "negate_subtract", prove=None, quiet=True)
    done.artifacts["table"] = np.zeros(3)
    (tmp_path / "out.table.npy").write_text("mine")
    with pytest.raises(LoadError, match=r"out\.table\.npy exists"):
        done.save(tmp_path / "out.mlpackage")
    assert not (tmp_path / "out.mlpackage").exists()
    done.save(tmp_path / "out.mlpackage", overwrite=True)
    assert np.load(tmp_path / "out.table.npy").shape == (3,)


@pytest.mark.parametrize("name", ["x" * 5000, "/".join(["folder"] * 1000), "x" * 300, "x\0y"])
def test_paths_that_no_system_takes(package: Path, name: str) -> None:
    with pytest.raises(LoadError):
        save(load(package), package.parent / f"{name}.mlpackage")
    with pytest.raises(LoadError):
        load(package.parent / f"{name}.mlpackage")
    with pytest.raises(SurgeryError):
        arrays.write(package.parent / f"{name}.npz", {})
    with pytest.raises(SurgeryError):
        arrays.read(package.parent / f"{name}.npz")


def test_a_name_as_long_as_the_system_takes(package: Path) -> None:
    name = "x" * (255 - len(".mlpackage")) + ".mlpackage"
    assert save(load(package), package.parent / name).is_dir()
    save(load(package), package.parent / name, overwrite=True)


def test_no_folder_to_write_into(tmp_path: Path) -> None:
    with pytest.raises(LoadError, match="does not exist; make it first"):
        check_place(tmp_path / "no" / "x.npz", overwrite=False)


def test_saving_a_bare_program_writes_no_weights_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """coremltools describes it, by a conversion that would write the weights into the temporary folder."""
    from coremltools.converters.mil.backend.mil import load as host

    monkeypatch.setattr(host, "BlobWriter", lambda path: pytest.fail(f"weights are written into {path}"))
    table = np.ones((64, 64), np.float16)

    made = mb.program(input_specs=[mb.TensorSpec((2, 64), types.fp16)], opset_version=ct.target.iOS16)(
        lambda x: mb.linear(x=x, weight=table, name="y")
    )

    save(load(made), tmp_path / "out.mlpackage")
    spec = load(tmp_path / "out.mlpackage").spec.description
    assert [f.name for f in (*spec.input, *spec.output)] == ["x", "y"]


def test_a_full_temporary_folder_for_a_bare_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*given: Any, **named: Any) -> Any:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("tempfile.mkdtemp", full)
    monkeypatch.setattr("coremltools.models.model._tempfile.mkdtemp", full)
    with pytest.raises(LoadError, match="No space left on device"):
        save(load(program()), tmp_path / "out.mlpackage")
    assert not list(tmp_path.iterdir())


def test_a_full_temporary_folder_for_a_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from bad_networks import build

    def full(*given: Any, **named: Any) -> Any:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    (tmp_path / "in.mlmodel").write_bytes(build().SerializeToString())
    done = ane.apply(tmp_path / "in.mlmodel", "fold_batchnorm", prove=None, quiet=True)
    monkeypatch.setattr("coremltools.models.model._tempfile.NamedTemporaryFile", full)
    with pytest.raises(LoadError, match="No space left on device; free some space or set TMPDIR"):
        _ = done.model


def test_attributes_of_a_function_that_was_removed_do_not_bring_it_back(package: Path) -> None:
    source = load(package).spec.mlProgram
    source.functions["gone"].CopyFrom(source.functions["main"])
    for function in source.functions.values():
        function.attributes["note"].CopyFrom(source.attributes["note"])
    written = to_proto(program(), 6, InMemoryWeights().store, source)
    assert {name: list(function.attributes) for name, function in written.functions.items()} == {
        "main": ["note"]
    }
