"""Put a file or folder in its place atomically, and only where it may go.

It is made in a scratch folder beside its place and moved in one step: after a failure, a kill or a crash the
old one is there, or the new one. A scratch folder is locked while its maker lives; the next save into the same
place removes those of dead makers, and brings back what they had moved aside.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from anesurgery.errors import LoadError

SCRATCH = ".anesurgery-"
"""How the names of scratch folders begin."""
NEW, OLD = "new", "old"
"""What a scratch folder holds: what is being made, and what had to be moved aside."""

RENAMES = {"linux": ("renameat2", -100, 2, 1), "darwin": ("renameatx_np", -2, 2, 4)}
"""System -> function that renames with flags, its number for the current folder, its flag to exchange two
places, and its flag to refuse a place that is taken."""
UNSUPPORTED = {errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP}
"""What a system says that cannot do so on this file system."""


def write_atomically(target: Path, write: Callable[[Path], object], overwrite: bool) -> Path:
    """Write a file or folder in a scratch folder, and move it to its place.

    Args:
        target: its place.
        write: writes it to a path whose name is that of `target`.
        overwrite: may what is there be replaced?

    Raises:
        LoadError: it cannot be written, or exists; what was there before is still there.
    """
    scratch = None
    try:
        with scratch_folder(target.parent) as scratch:
            made = scratch / NEW / target.name
            made.parent.mkdir()
            write(made)
            if overwrite and os.path.lexists(target):
                _sync(made)  # the old one goes for good
            with _locked(target.parent):
                _place(made, target, scratch, overwrite)
    except FileExistsError as error:
        raise LoadError(_exists(target)) from error
    except OSError as error:
        kept = scratch / OLD / target.name if scratch is not None else None
        words = "nothing was changed" if kept is None or not kept.exists() else f"what was there is now {kept}"
        raise LoadError(f"{target} was not written: {error.strerror or error}; {words}") from error
    return target


@contextmanager
def temporary_files() -> Iterator[None]:
    """Around what writes into the temporary folder of the system.

    Raises:
        LoadError: it cannot be written to.
    """
    try:
        yield
    except OSError as error:
        words = f"the temporary folder {tempfile.gettempdir()} cannot be written to: {error.strerror or error}"
        raise LoadError(f"{words}; free some space or set TMPDIR") from error


@contextmanager
def scratch_folder(parent: Path) -> Iterator[Path]:
    """A folder for what is being made, which goes away with its maker; those of dead makers go first."""
    with _locked(parent):
        recover(parent)
        scratch = Path(tempfile.mkdtemp(prefix=SCRATCH, dir=parent))
        lock = os.open(scratch, os.O_RDONLY)
        with suppress(OSError):  # a file system without locks: then nobody cleans up after the dead
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    try:
        yield scratch
    finally:
        try:
            _retire(scratch)
        finally:
            _close(lock)


def recover(parent: Path) -> None:
    """Remove the scratch folders of makers that are dead, after bringing back what they had moved aside."""
    try:
        found = [Path(e.path) for e in os.scandir(parent) if e.name.startswith(SCRATCH) and e.is_dir()]
    except OSError:
        return  # not ours to list
    for scratch in found:
        with suppress(OSError):
            lock = os.open(scratch, os.O_RDONLY | os.O_NOFOLLOW)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                _retire(scratch)
            finally:
                _close(lock)


def _retire(scratch: Path) -> None:
    """Remove a scratch folder; what was moved aside goes back to its place if that is empty."""
    aside = scratch / OLD
    for old in aside.iterdir() if aside.is_dir() else ():
        with suppress(FileExistsError):
            _move(old, scratch.parent / old.name)
    shutil.rmtree(scratch, ignore_errors=True)


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Be the only saver at work in a folder, where its file system has locks."""
    try:
        lock = os.open(folder, os.O_RDONLY)
    except PermissionError:  # it may be written to and not read
        yield
        return
    try:
        with suppress(OSError):
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        _close(lock)


def _close(lock: int) -> None:
    """Give up a lock; nothing was written through it that could fail to arrive."""
    with suppress(OSError):
        os.close(lock)


def _place(made: Path, target: Path, scratch: Path, overwrite: bool) -> None:
    """Move what was made to its place; what was there, if anything, is then in the scratch folder."""
    if not (overwrite and os.path.lexists(target)):
        _move(made, target)
    elif not _rename(made, target, exchange=True):
        aside = scratch / OLD / target.name
        aside.parent.mkdir()
        target.rename(aside)
        made.rename(target)  # on failure `_retire` brings the old one back, now or at the next save


def _move(made: Path, target: Path) -> None:
    """Move to a place that must be empty.

    Raises:
        FileExistsError: it is not.
    """
    if not _rename(made, target, exchange=False):
        if os.path.lexists(target):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST))
        made.rename(target)


def _rename(made: Path, target: Path, *, exchange: bool) -> bool:
    """Exchange two places, or move to one that must be empty; False where the system cannot."""
    if sys.platform not in RENAMES:
        return False
    name, here, swap, exclusive = RENAMES[sys.platform]
    call = getattr(ctypes.CDLL(None, use_errno=True), name, None)
    if call is None:
        return False
    if call(here, os.fsencode(made), here, os.fsencode(target), swap if exchange else exclusive) == 0:
        return True
    code = ctypes.get_errno()
    if code in UNSUPPORTED:
        return False
    raise OSError(code, os.strerror(code))


def _sync(made: Path) -> None:
    """Let the disk have a file, or all files of a folder, before what they replace is removed."""
    for path in [made, *made.rglob("*")] if made.is_dir() else [made]:
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def _exists(target: Path) -> str:
    return f"{target} exists; choose another name, or overwrite it on request"


def check_target(source: Path | None, target: Path, overwrite: bool, suffix: str = ".mlpackage") -> None:
    """Refuse a place that a model cannot be written to, before any work is done.

    Raises:
        LoadError: wrong suffix, no such folder, the input or a place in it, or something is there already.
    """
    if target.suffix != suffix:
        raise LoadError(f"{target.name!r} is not a name for this format; let it end in {suffix}")
    check_place(target, overwrite, source)


def check_place(target: Path, overwrite: bool, source: Path | None = None) -> None:
    """Refuse a place that a file cannot be written to, before any work is done.

    Raises:
        LoadError: no such folder, the input or a place in it, in a package, or something is there already.
    """
    try:
        if not target.parent.is_dir():
            raise LoadError(f"the folder {target.parent} does not exist; make it first")
        if not os.access(target.parent, os.W_OK):
            raise LoadError(f"cannot write into {target.parent}; choose another folder")
        _check_input(target, source)
        with suppress(FileNotFoundError):
            os.lstat(target)
            if not overwrite:
                raise LoadError(_exists(target))
    except (OSError, ValueError) as error:
        raise LoadError(f"cannot write {target}: {error}; choose another place") from error


def _check_input(target: Path, source: Path | None) -> None:
    """The input is never written to: not itself, not a file in it, not a folder that holds it."""
    place = target.resolve()
    if source is not None:
        source = source.resolve()
        if place == source:
            raise LoadError(f"{target} is the input, which is never changed; choose another name")
        if place.is_relative_to(source):
            raise LoadError(f"{target} is inside the input, which is never changed; choose another folder")
        if source.is_relative_to(place):
            raise LoadError(f"{target} holds the input, which is never changed; choose another name")
    for folder in place.parents:
        if folder.suffix in (".mlpackage", ".mlmodelc") and (folder / "Manifest.json").is_file():
            raise LoadError(f"{target} is inside the package {folder}; choose another folder")
