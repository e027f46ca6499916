"""Write a file or folder atomically (`write_atomically`), and check beforehand that its path is allowed.

The new content is written into a scratch folder next to the target and moved into place in one step: after a
failure, Ctrl-C, a kill or a crash either the old one or the new one is there. A scratch folder is locked while
the process that made it lives. The next save into the same folder removes the scratch folders of dead
processes, and moves back what they had moved aside. A folder that may not be a scratch folder is not touched; a
warning names it.

It counts as one if it is a folder and not a link, belongs to this user, is writable by nobody else, contains
only `new` and `old`, and its name has its inode number, which a copy of the folder does not match.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import re
import secrets
import shutil
import stat
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from anesurgery.errors import LoadError, no_folder

SCRATCH = ".anesurgery-"
"""The start of the names of scratch folders; their inode number in hexadecimal and a random part follow."""
UNNAMED = re.compile(re.escape(SCRATCH) + "[0-9a-f]{16}")
"""The name of a scratch folder that has no inode number in it yet, and is empty."""
NEW, OLD = "new", "old"
"""Folders in it: for the new model, and for the old one if the system cannot exchange two paths."""
OTHERS_WRITE = 0o022
"""Mode bits that let the group or others write: they may have put something into such a folder."""
LOCK_TIMEOUT = 30.0
"""Seconds to wait for a lock; a save holds it for two renames."""
LOCK_PAUSE = 0.02
"""Seconds between two attempts to lock. A choice: nobody notices it, and it costs no processor time."""
NO_LOCK_ERRORS = {errno.ENOLCK, errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP, errno.EBADF}
"""The error codes of a file system without locks."""
RENAMES = {"linux": ("renameat2", -100, 2, 1), "darwin": ("renameatx_np", -2, 2, 4)}
"""System -> (C function that renames with flags, its code for the current folder, its flag to exchange two
paths, its flag to refuse an existing target)."""
UNSUPPORTED_ERRORS = {errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP}
"""The error codes of a system that cannot do so on this file system."""
ATTEMPTS = 100
"""The most attempts to move to a path that other processes create and remove meanwhile."""


def write_atomically(target: Path, write: Callable[[Path], object], overwrite: bool) -> Path:
    """Write a file or folder into a scratch folder, and move it to the target.

    Args:
        target: the path to write to.
        write: writes to the path that it gets, whose name is that of `target`.
        overwrite: may an existing file or folder be replaced?

    Raises:
        LoadError: it cannot be written, or exists; the old content is then still there.
    """
    old = None
    try:
        with _scratch(target.parent) as scratch:
            old, fresh = scratch / OLD / target.name, scratch / NEW / target.name
            write(fresh)
            if not _states_inode(scratch, os.lstat(scratch)):  # it was removed, and `write` made a part again
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
            if overwrite and os.path.lexists(target):
                _sync(fresh)  # the old one goes for good
            _move_into_place(fresh, target, old, overwrite)
    except OSError as error:
        if isinstance(error, FileExistsError) and not overwrite and os.path.lexists(target):
            raise LoadError(_exists_words(target)) from error
        was_moved = old is not None and os.path.lexists(old)
        words = f"what was there is now {old}" if was_moved else "nothing was changed"
        raise LoadError(f"{target} was not written: {error.strerror or error}; {words}") from error
    return target


@contextmanager
def temporary_files() -> Iterator[None]:
    """Turn errors of writing into the system's temporary folder, inside the body, into a LoadError.

    Raises:
        LoadError: the folder cannot be written to.
    """
    try:
        yield
    except OSError as error:
        words = f"the temporary folder {tempfile.gettempdir()} cannot be written to: {error.strerror or error}"
        raise LoadError(f"{words}; free some space or set TMPDIR") from error


@contextmanager
def scratch_folder(parent: Path) -> Iterator[Path]:
    """Yield a folder for temporary files, and remove it afterwards; first remove those of dead processes."""
    with _scratch(parent) as scratch:
        yield scratch / NEW


@contextmanager
def _scratch(parent: Path) -> Iterator[Path]:
    """Yield a locked scratch folder, and remove it after the body; first remove those of dead processes.

    A fork of the process inherits the lock, and does not clean up.
    """
    recover(parent)
    scratch, handle = _make_scratch(parent)
    maker = os.getpid()
    try:
        yield scratch
    finally:
        try:
            if os.getpid() == maker:
                _remove(scratch)
        finally:
            with suppress(OSError):  # nothing was written through it that could fail to arrive
                os.close(handle)


def _make_scratch(parent: Path) -> tuple[Path, int]:
    """Make a scratch folder; return its path and a handle that holds its lock."""
    while True:
        made, handle = parent / f"{SCRATCH}{secrets.token_hex(8)}", None
        try:
            made.mkdir(0o700)
            if (named_and_locked := _state_inode_and_lock(made)) is not None:
                named, handle = named_and_locked
                (named / NEW).mkdir()
                return named, handle
        except BaseException:
            if handle is not None:
                os.close(handle)
            for folder in parent.glob(f"{SCRATCH}*{made.name.removeprefix(SCRATCH)}"):
                shutil.rmtree(folder, ignore_errors=True)
            raise


def _state_inode_and_lock(made: Path) -> tuple[Path, int] | None:
    """Lock an empty folder and rename it to include its inode; return None if another save removed it."""
    try:
        handle = os.open(made, os.O_RDONLY | os.O_DIRECTORY)
    except FileNotFoundError:
        return None
    try:
        with suppress(OSError):  # without locks nobody removes folders of dead processes
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        named = made.with_name(f"{SCRATCH}{os.fstat(handle).st_ino:x}-{made.name.removeprefix(SCRATCH)}")
        return made.rename(named), handle
    except FileNotFoundError:
        os.close(handle)
        return None
    except BaseException:
        os.close(handle)
        raise


def recover(parent: Path) -> None:
    """Remove the scratch folders of dead processes, after moving back what they had moved aside.

    A folder that only looks like one is not touched, and a warning names it.
    """
    try:
        names = sorted(name for name in os.listdir(parent) if name.startswith(SCRATCH))
    except OSError:
        return  # not ours to list
    for name in names:
        with suppress(OSError):
            _recover(parent / name)


def _recover(scratch: Path) -> None:
    state = os.lstat(scratch)
    if state.st_uid != os.geteuid():
        return  # other users have theirs in /tmp, too
    if not stat.S_ISDIR(state.st_mode):
        _warn_about(scratch)
        return
    if UNNAMED.fullmatch(scratch.name):
        with suppress(OSError):
            os.rmdir(scratch)  # empty: its process died before it renamed it, or will make another
    handle = os.open(scratch, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)  # fails while its process lives, and without locks
        if os.path.samestat(os.fstat(handle), os.lstat(scratch)):
            _remove(scratch) if _was_made_by_save(scratch, state) else _warn_about(scratch)
    finally:
        os.close(handle)


def _was_made_by_save(scratch: Path, state: os.stat_result) -> bool:
    """Was a folder certainly made by a save?"""
    modes = {name: os.lstat(scratch / name).st_mode for name in os.listdir(scratch)}
    has_only_own_folders = set(modes) <= {NEW, OLD} and all(map(stat.S_ISDIR, modes.values()))
    if not has_only_own_folders or state.st_mode & OTHERS_WRITE:
        return False
    return _states_inode(scratch, state)


def _states_inode(scratch: Path, state: os.stat_result) -> bool:
    return scratch.name.startswith(f"{SCRATCH}{state.st_ino:x}-")


def _warn_about(place: Path, why: str = "no save made it") -> None:
    words = f"{str(place)!r} is named like what a killed save leaves, but {why}"
    warnings.warn(f"{words}: it was left as it is; look into it, and remove it yourself", stacklevel=2)


def _remove(scratch: Path) -> None:
    """Remove a scratch folder after moving back what was moved aside; try again after Ctrl-C or a failure."""
    try:
        _bring_back_and_remove(scratch)
    except OSError:
        with suppress(OSError):
            _bring_back_and_remove(scratch)
    except BaseException:
        with suppress(OSError):
            _bring_back_and_remove(scratch)
        raise


def _bring_back_and_remove(scratch: Path) -> None:
    """Move back what is in `old` if its replacement is still in `new`, then remove the folder, `new` last."""
    with suppress(FileNotFoundError):  # a cleaner of temporary files may have been faster
        for name in os.listdir(scratch / OLD) if os.path.lexists(scratch / OLD) else ():
            if name in os.listdir(scratch / NEW):
                try:
                    _move(scratch / OLD / name, scratch.parent / name)
                except FileExistsError:
                    _warn_about(scratch, f"it holds the {name!r} that was to be replaced, whose place is taken")
                    return
        if os.path.lexists(scratch / OLD):
            shutil.rmtree(scratch / OLD)
        shutil.rmtree(scratch)


def _move_into_place(fresh: Path, target: Path, kept: Path, overwrite: bool) -> None:
    """Move the new content to the target; the old one, if any, is then in the scratch folder."""
    for _ in range(ATTEMPTS):
        replaces = overwrite and os.path.lexists(target)
        try:
            if not replaces:
                _move(fresh, target)
            elif not _rename(fresh, target, exchange=True):
                _replace(fresh, target, kept)
        except (FileExistsError, FileNotFoundError) as error:
            may_retry = not replaces if isinstance(error, FileExistsError) else os.path.lexists(fresh)
            if not (overwrite and may_retry):
                raise
        else:
            return
    raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST))


def _replace(fresh: Path, target: Path, kept: Path) -> None:
    """Move the old content aside and the new one to the target, if the system cannot exchange two paths."""
    with locked(target.parent):
        kept.parent.mkdir(exist_ok=True)
        target.rename(kept)
        fresh.rename(target)  # on failure `_remove` brings the old one back, now or at the next save


def _move(fresh: Path, target: Path) -> None:
    """Move to a path; raise a FileExistsError if it exists."""
    if _rename(fresh, target, exchange=False):
        return
    with locked(target.parent):
        if os.path.lexists(target):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST))
        fresh.rename(target)


def _rename(fresh: Path, target: Path, *, exchange: bool) -> bool:
    """Exchange two paths, or move to one that must not exist; return False if the system cannot do it."""
    if sys.platform not in RENAMES:
        return False
    name, here, swap, exclusive = RENAMES[sys.platform]
    call = getattr(ctypes.CDLL(None, use_errno=True), name, None)
    if call is None:
        return False
    if call(here, os.fsencode(fresh), here, os.fsencode(target), swap if exchange else exclusive) == 0:
        return True
    code = ctypes.get_errno()
    if code in UNSUPPORTED_ERRORS:
        return False
    raise OSError(code, os.strerror(code))


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the lock of a folder inside the body, if its file system has locks.

    Raises:
        LoadError: another process keeps the lock for too long.
        OSError: the system fails.
    """
    handle, end = os.open(folder, os.O_RDONLY | os.O_DIRECTORY), time.monotonic() + LOCK_TIMEOUT
    try:
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= end:
                    words = f"the folder {folder} is locked by another process (`lsof` on it may tell which)"
                    raise LoadError(f"{words}; end it or wait for it, or save into another folder") from None
                time.sleep(LOCK_PAUSE)
            except OSError as error:
                if error.errno not in NO_LOCK_ERRORS:
                    raise
                break
        yield
    finally:
        os.close(handle)  # this releases the lock


def _sync(fresh: Path) -> None:
    """Write a file, or all files of a folder, to the disk before the content that they replace is removed."""
    for path in [fresh, *fresh.rglob("*")] if fresh.is_dir() else [fresh]:
        if path.is_symlink():
            continue
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def _exists_words(target: Path) -> str:
    return f"{target} exists; choose another name, or replace it with --overwrite (overwrite=True)"


def check_target(source: Path | None, target: Path, overwrite: bool, suffix: str = ".mlpackage") -> None:
    """Refuse a path that a model cannot be written to, before any work is done.

    Raises:
        LoadError: wrong suffix, missing folder, the input or a path in it, or the target exists.
    """
    if target.suffix != suffix:
        raise LoadError(f"{target.name!r} is not a name for this format; let it end in {suffix}")
    check_place(target, overwrite, source)


def check_place(target: Path, overwrite: bool, source: Path | None = None) -> None:
    """Refuse a path that a file cannot be written to, before any work is done.

    Raises:
        LoadError: missing folder, the input or a path in it, a path in a package, or the target exists.
    """
    try:
        if not target.parent.is_dir():
            raise LoadError(no_folder(target.parent))
        if not os.access(target.parent, os.W_OK):
            raise LoadError(f"cannot write into {target.parent}; choose another folder")
        _check_input(target, source)
        with suppress(FileNotFoundError):
            os.lstat(target)
            if not overwrite:
                raise LoadError(_exists_words(target))
    except (OSError, ValueError) as error:
        raise LoadError(f"cannot write {target}: {error}; choose another place") from error


def _check_input(target: Path, source: Path | None) -> None:
    """Refuse the input as a target: the input itself, a path in it, or a folder that contains it."""
    path = target.resolve()
    if source is not None:
        source = source.resolve()
        if path == source:
            raise LoadError(f"{target} is the input, which is never changed; choose another name")
        if path.is_relative_to(source):
            raise LoadError(f"{target} is inside the input, which is never changed; choose another folder")
        if source.is_relative_to(path):
            raise LoadError(f"{target} holds the input, which is never changed; choose another name")
    for folder in path.parents:
        if folder.suffix in (".mlpackage", ".mlmodelc") and (folder / "Manifest.json").is_file():
            raise LoadError(f"{target} is inside the package {folder}; choose another folder")


def link_or_copy(source: str | os.PathLike[str], target: str | os.PathLike[str]) -> None:
    """Hard-link a file, or copy it where the file system has no links."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)
