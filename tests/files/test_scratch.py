"""Only folders that a save left are cleaned up; whatever merely looks like one stays as it is, and is named."""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from leftovers import die

import anesurgery as ane
from anesurgery.errors import LoadError
from anesurgery.files import writing
from anesurgery.files.package import save, to_mlmodel
from anesurgery.files.writing import NEW, OLD, SCRATCH, recover, write_atomically
from anesurgery.loading import load
from anesurgery.mil import Program, mb


def package(place: Path, content: str = "old") -> Path:
    place.mkdir()
    (place / "content").write_text(content)
    return place


def saved(target: Path) -> Path:
    return write_atomically(target, lambda place: place.write_text("it"), overwrite=False)


def everything(folder: Path) -> dict[str, Any]:
    """What is in a folder: of each place its kind and owner, and its content or where it leads."""
    found: dict[str, Any] = {}
    for path in sorted(folder.rglob("*")):
        state = path.lstat()
        content = os.readlink(path) if path.is_symlink() else path.read_bytes() if path.is_file() else b""
        found[str(path.relative_to(folder))] = (state.st_mode, state.st_uid, state.st_ino, content)
    return found


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """The home of somebody who keeps something in it."""
    home = tmp_path / "home"
    home.mkdir(mode=0o700)
    (home / "id_rsa").write_text("secret")
    package(home / "x", "theirs")
    return home


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Where models are saved."""
    made = tmp_path / "models"
    made.mkdir()
    return made


def test_what_the_dead_left_is_removed_and_brought_back(folder: Path) -> None:
    package(folder / "x")
    left = die(folder / "x", "between")
    assert len(left) == 1
    assert not (folder / "x").exists()
    assert sorted(os.listdir(left[0])) == [NEW, OLD]
    saved(folder / "z")
    assert (folder / "x" / "content").read_text() == "old"
    assert sorted(os.listdir(folder)) == ["x", "z"]


def test_what_was_half_written_is_removed(folder: Path) -> None:
    package(folder / "x")
    assert len(die(folder / "x", "at the write")) == 1
    saved(folder / "z")
    assert (folder / "x" / "content").read_text() == "old"
    assert sorted(os.listdir(folder)) == ["x", "z"]


def test_a_place_that_is_taken_since_is_left_and_the_old_one_too(folder: Path) -> None:
    """Nobody knows which of both is wanted."""
    package(folder / "x")
    (left,) = die(folder / "x", "between")
    package(folder / "x", "another")
    with pytest.warns(UserWarning, match="whose place is taken"):
        saved(folder / "z")
    assert (folder / "x" / "content").read_text() == "another"
    assert (left / OLD / "x" / "content").read_text() == "old"


def forged(folder: Path) -> Path:
    """A folder that is in every way like one of ours, and that nobody works in."""
    made, handle = writing._make_scratch(folder)
    os.close(handle)
    (made / OLD).mkdir()
    package(made / OLD / "x", "planted")
    package(made / NEW / "x", "planted")
    return made


def test_the_forgery_is_a_good_one(folder: Path) -> None:
    forged(folder)
    recover(folder)
    assert os.listdir(folder) == ["x"]


def _link(place: Path, home: Path) -> None:
    shutil.rmtree(place)
    place.symlink_to(home)


def _copied(place: Path) -> None:
    """As an archive brings it along, or a backup."""
    os.rename(place, place.with_name("original"))
    shutil.copytree(place.with_name("original"), place)
    shutil.rmtree(place.with_name("original"))


def _elsewhere(place: Path, home: Path) -> None:
    os.rename(place, home / place.name)
    place.symlink_to(home / place.name)


def _instead(place: Path, make: Callable[[], object]) -> None:
    shutil.rmtree(place)
    make()


PLANTED: dict[str, Callable[[Path, Path], object]] = {
    "old leads elsewhere": lambda p, h: _link(p / OLD, h),
    "new leads elsewhere": lambda p, h: _link(p / NEW, h),
    "the folder itself leads elsewhere": lambda p, h: _link(p, h),
    "it leads to one of ours": _elsewhere,
    "a copy": lambda p, h: _copied(p),
    "others may write into it": lambda p, h: p.chmod(0o770),
    "something foreign in it": lambda p, h: (p / "id_rsa").write_text("mine"),
    "another name": lambda p, h: os.rename(p, p.with_name(f"{SCRATCH}f-{p.name}")),
    "a file": lambda p, h: _instead(p, p.touch),
    "a pipe": lambda p, h: _instead(p, lambda: os.mkfifo(p)),
}


@pytest.mark.parametrize("kind", PLANTED)
def test_what_is_not_ours_is_left_and_named(kind: str, folder: Path, home: Path) -> None:
    PLANTED[kind](forged(folder), home)
    before = everything(folder), everything(home)
    with pytest.warns(UserWarning, match="but no save made it: it was left as it is; look into it, and remove"):
        saved(folder / "z")
    (folder / "z").unlink()
    assert (everything(folder), everything(home)) == before


def program() -> Program:
    return mb.program(input_specs=[mb.TensorSpec((2, 3))])(
        lambda x: mb.sub(x=np.float32(1), y=mb.relu(x=x), name="y")
    )


USES: dict[str, Callable[[Path], object]] = {
    "save": lambda folder: save(load(program()), folder / "out.mlpackage"),
    "model": lambda folder: to_mlmodel(load(program())),
    "apply": lambda folder: ane.apply(program(), "negate_subtract", quiet=True).model,
    "report": lambda folder: ane.inspect(program()).save_html(folder / "report.html"),
    "merge": lambda folder: ane.merge({"a": program(), "b": program()}, folder / "out.mlpackage"),
}


@pytest.mark.parametrize("use", USES)
def test_no_use_of_the_library_follows_a_planted_link(
    use: str, folder: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("anesurgery.files.package._TEMPORARY", type(ane.files.package._TEMPORARY)())
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    planted = folder / f"{SCRATCH}x"
    planted.mkdir(mode=0o700)
    (planted / OLD).symlink_to(home)
    before = everything(home), everything(planted)
    with pytest.warns(UserWarning, match="but no save made it"):
        USES[use](folder)
    assert (everything(home), everything(planted)) == before


def test_folders_of_other_users_in_a_shared_folder_are_nobodys_fault(folder: Path) -> None:
    if os.geteuid():
        pytest.skip("only root can give a file away")
    folder.chmod(0o1777)
    os.chown(forged(folder), 12345, 12345)
    before = everything(folder)
    saved(folder / "z").unlink()  # a warning is an error in these tests
    assert everything(folder) == before


def test_links_within_what_is_removed_are_not_followed(folder: Path, home: Path) -> None:
    before = everything(home)

    def write(place: Path) -> None:
        package(place)
        (place / "home").symlink_to(home)
        (place / "deeper").mkdir()
        (place / "deeper" / "key").symlink_to(home / "id_rsa")

    write_atomically(folder / "x", write, overwrite=False)
    write_atomically(folder / "x", write, overwrite=True)  # which removes the first one
    assert everything(home) == before
    assert os.listdir(folder) == ["x"]


@pytest.mark.parametrize("exchange", [True, False])
def test_a_target_that_is_a_link_is_replaced_and_not_followed(
    folder: Path, home: Path, monkeypatch: pytest.MonkeyPatch, exchange: bool
) -> None:
    before = everything(home)
    (folder / "x").symlink_to(home / "x")
    if not exchange:
        monkeypatch.setattr(writing, "_rename", lambda made, target, *, exchange: False)
    write_atomically(folder / "x", lambda place: package(place, "new"), overwrite=True)
    assert not (folder / "x").is_symlink()
    assert everything(home) == before
    assert os.listdir(folder) == ["x"]


def test_a_parent_that_becomes_a_link_in_between(folder: Path, home: Path) -> None:
    """Nothing is written where its name leads by then."""
    before = everything(home)

    def write(place: Path) -> None:
        package(place, "new")
        os.rename(folder, folder.with_name("away"))
        folder.symlink_to(home)

    with pytest.raises(LoadError, match="was not written"):
        write_atomically(folder / "y", write, overwrite=False)
    assert everything(home) == before


def test_a_scratch_folder_is_for_its_owner(folder: Path) -> None:
    with writing.scratch_folder(folder) as made:
        assert stat.S_IMODE(made.parent.stat().st_mode) == 0o700


def test_a_maker_that_died_at_once_leaves_nothing(folder: Path) -> None:
    (folder / f"{SCRATCH}0123456789abcdef").mkdir(mode=0o700)
    saved(folder / "z")
    assert os.listdir(folder) == ["z"]


def test_an_empty_folder_of_the_user_stays(folder: Path) -> None:
    (folder / f"{SCRATCH}cache").mkdir(mode=0o700)
    with pytest.warns(UserWarning, match="but no save made it"):
        saved(folder / "z")
    assert sorted(os.listdir(folder)) == [f"{SCRATCH}cache", "z"]
