"""Every call that a save makes of the system fails once: the old package is there, or the new one, whole."""

from __future__ import annotations

import errno
import os
import signal
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from faults import calls, failing
from saved import model, scratches, state

import anesurgery as ane
from anesurgery.errors import OutOfMemory, SurgeryError
from anesurgery.files import writing
from anesurgery.files.package import Loaded, save
from anesurgery.loading import load

CODES = [errno.EIO, errno.ENOSPC, errno.EACCES, errno.EINTR]
SAMPLE = 10
"""Every how many calls are tried in the short run."""


@pytest.fixture(params=["exchange", "no exchange"])
def system(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param != "exchange":
        monkeypatch.setattr(writing, "_rename", lambda made, target, *, exchange: False)
    return str(request.param)


class Saving:
    """An old package, and a model that is to take its place."""

    def __init__(self, folder: Path, there: bool) -> None:
        self.folder, self.target = folder, folder / "target.mlpackage"
        self.old = save(model(1), folder / "old.mlpackage")
        self.new: Loaded = load(save(model(2), folder / "new.mlpackage"))
        self.there = there
        self.states = [state(self.old) if there else None, state(folder / "new.mlpackage")]

    def prepare(self) -> None:
        if self.there:
            save(load(self.old), self.target, overwrite=True)
        elif self.target.exists():
            os.rename(self.target, self.folder / "away")
            _remove(self.folder / "away")

    def save(self) -> None:
        save(self.new, self.target, overwrite=self.there)

    def check(self, raised: bool) -> None:
        """Old or new; the new one where nothing was raised; and the next save leaves nothing behind."""
        found = state(self.target)
        assert found in self.states
        assert raised or found == self.states[1]
        save(self.new, self.target, overwrite=True)
        assert state(self.target) == self.states[1]
        assert not scratches(self.folder)


def _remove(folder: Path) -> None:
    import shutil

    shutil.rmtree(folder)


def attempt(saving: Saving, at: int, act: Callable[[str], object]) -> bool:
    """Save, with one call going wrong; whether an error came of it, which is in words."""
    saving.prepare()
    with calls(at, act) as told:
        try:
            saving.save()
        except SurgeryError as error:
            words = str(error)
        else:
            return False
    assert str(saving.folder) in words
    assert len(told.names) >= at
    return True


def count(saving: Saving) -> int:
    saving.prepare()
    with calls() as told:
        saving.save()
    return len(told.names)


def fail_each(folder: Path, there: bool, every: int) -> None:
    saving = Saving(folder, there)
    raised = 0
    total = count(saving)
    assert total > 50
    for number, at in enumerate(range(1, total + 1, every)):
        for code in CODES if every == 1 else [CODES[number % len(CODES)]]:
            failed = attempt(saving, at, failing(code))
            saving.check(failed)
            raised += failed
    assert raised > 0.3 * total / every, "most calls matter"


@pytest.mark.one_of(2)
@pytest.mark.parametrize("there", [True, False])
@pytest.mark.usefixtures("system")
def test_a_call_that_fails(tmp_path: Path, there: bool) -> None:
    fail_each(tmp_path, there, SAMPLE)


@pytest.mark.slow
@pytest.mark.parametrize("there", [True, False])
@pytest.mark.usefixtures("system")
def test_every_call_that_fails(tmp_path: Path, there: bool) -> None:
    fail_each(tmp_path, there, 1)


@pytest.mark.parametrize("there", [True, False])
def test_a_move_that_is_made_and_reported_as_failed(tmp_path: Path, there: bool) -> None:
    """As a network file system may."""
    saving = Saving(tmp_path, there)
    for system in (writing._rename, lambda made, target, exchange: False):
        saving.prepare()
        move, rename = system, Path.rename

        def badly(*given: Any, **named: Any) -> bool:
            if move(*given, **named):  # noqa: B023 - called before the loop goes on
                failing(errno.EIO)("rename")
            return False

        def rename_badly(self: Path, target: Path) -> Path:
            rename(self, target)  # noqa: B023
            failing(errno.EIO)("rename")
            return target

        patches = mock.patch.object(writing, "_rename", badly), mock.patch.object(Path, "rename", rename_badly)
        with patches[0], patches[1], pytest.raises(SurgeryError):
            saving.save()
        saving.check(raised=True)


@pytest.mark.one_of(3)
@pytest.mark.parametrize("name", ["copy_file_range", "pread"])
@pytest.mark.parametrize("piece", [1, 7, 4096])
def test_copies_that_come_short(tmp_path: Path, name: str, piece: int) -> None:
    """The kernel may copy or read less than it was asked for, or nothing at all (`copy_file_range`)."""
    saving = Saving(tmp_path, there=True)
    saving.prepare()
    really = getattr(os, name)

    def short(*given: Any) -> Any:
        # (source, target, count, at, to) or (file, count, at); metadata is read in one piece
        place = 2 if name == "copy_file_range" else 1
        kept = list(given)
        kept[place] = given[place] if name == "pread" and given[place] < 64 else min(given[place], piece)
        return really(*kept)

    with mock.patch.object(os, name, short):
        if name == "pread":
            with mock.patch.object(os, "copy_file_range", return_value=0):
                saving.save()
        else:
            saving.save()
    saving.check(raised=False)


RARE = (MemoryError, SystemExit)
OFTEN = [SAMPLE, pytest.param(1, marks=pytest.mark.slow)]
"""Every how many calls are tried: in the short run, and in the long one."""


@pytest.mark.one_of(2)
@pytest.mark.parametrize("every", OFTEN)
@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("error", [KeyboardInterrupt, *(pytest.param(e, marks=pytest.mark.slow) for e in RARE)])
@pytest.mark.usefixtures("system")
def test_other_ends_of_a_save(tmp_path: Path, error: type[BaseException], after: bool, every: int) -> None:
    """Ctrl-C at any call, before it or after: nothing is left behind, at once and not by the next save."""
    saving = Saving(tmp_path, there=True)

    def act(name: str) -> None:
        raise error

    for at in range(1, count(saving) + 1, every):
        saving.prepare()
        with calls(at, act, after):
            try:
                saving.save()
                raised = False
            except (error, OutOfMemory):  # which a door makes of a MemoryError
                raised = True
        assert not scratches(tmp_path), at
        saving.check(raised)


@pytest.mark.slow
@pytest.mark.parametrize("every", OFTEN)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.usefixtures("system")
def test_signals_at_any_call(tmp_path: Path, number: int, every: int) -> None:
    """The process ends as it would have; what SIGTERM leaves, the next save removes."""
    saving = Saving(tmp_path, there=True)
    for at in range(1, count(saving) + 1, every):
        saving.prepare()
        child = os.fork()
        if not child:
            signal.signal(number, signal.SIG_DFL)
            with suppress(BaseException), calls(at, lambda name: signal.raise_signal(number)):
                saving.save()
            os._exit(0)
        ended = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        assert ended == -number, at
        writing.recover(tmp_path)  # between the two moves of a system that cannot exchange, it is a kill
        saving.check(raised=True)


def test_a_result_of_surgery_fails_in_words(tmp_path: Path) -> None:
    saved = save(model(1), tmp_path / "in.mlpackage")
    done = ane.apply(saved, "negate_subtract", prove=None, quiet=True)
    with calls() as told:
        done.save(tmp_path / "out.mlpackage")
    for at in range(1, len(told.names) + 1, SAMPLE):
        with calls(at, failing(errno.EIO)):
            try:
                done.save(tmp_path / f"out{at}.mlpackage")
            except SurgeryError:
                assert not (tmp_path / f"out{at}.mlpackage").exists()
