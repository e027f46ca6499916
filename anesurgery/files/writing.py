"""Put a file or folder in its place atomically, and only where it may go.

It is made in a scratch folder beside its place and moved in one step: after a failure, Ctrl-C, a kill or a
crash the old one is there, or the new one. A scratch folder is locked while its maker lives. The next save into
the same folder removes those of dead makers, and brings back what they had moved aside; what is not certainly
one of ours is left as it is, and a warning names it.

A scratch folder is one of ours if it is a folder and no link, belongs to this user, nobody else may write into
it, it holds nothing but `new` and `old`, and its name states its inode: a copy has another one.
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

from anesurgery.errors import LoadError

SCRATCH = ".anesurgery-"
"""How the names of scratch folders begin; their inode follows, in hexadecimal digits, and a random part."""
UNNAMED = re.compile(re.escape(SCRATCH) + "[0-9a-f]{16}")
"""The name of one that does not state its inode yet; nothing is in it."""
NEW, OLD = "new", "old"
"""Folders in it, for the new model and for the old one where a system cannot exchange two names."""
OTHERS_WRITE = 0o022
"""The bits of a mode that let the group or others write: a folder that has them may be somebody else's work."""
PATIENCE = 30.0
"""Seconds until a lock is given up; a save holds it for two renames."""
PAUSE = 0.02
"""Seconds between two tries. A choice: nobody notices it, and it costs no time of the processor."""
NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP, errno.EBADF}
"""What a file system says that has no locks."""
RENAMES = {"linux": ("renameat2", -100, 2, 1), "darwin": ("renameatx_np", -2, 2, 4)}
"""System -> function that renames with flags, its number for the current folder, its flag to exchange two
places, and its flag to refuse a place that is taken."""
UNSUPPORTED = {errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP}
"""What a system says that cannot do so on this file system."""
ATTEMPTS = 100
"""Times that a place is tried which others fill and empty meanwhile."""


def write_atomically(target: Path, write: Callable[[Path], object], overwrite: bool) -> Path:
    """Write a file or folder in a scratch folder, and move it to its place.

    Args:
        target: its place.
        write: writes it to a path whose name is that of `target`.
        overwrite: may what is there be replaced?

    Raises:
        LoadError: it cannot be written, or exists; what was there before is still there.
    """
    kept = None
    try:
        with _scratch(target.parent) as scratch:
            kept, fresh = scratch / OLD / target.name, scratch / NEW / target.name
            write(fresh)
            if not _states_inode(scratch, os.lstat(scratch)):  # somebody removed it, and a part was made anew
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
            if overwrite and os.path.lexists(target):
                _sync(fresh)  # the old one goes for good
            _place(fresh, target, kept, overwrite)
    except FileExistsError as error:
        raise LoadError(_exists(target)) from error
    except OSError as error:
        stays = kept is not None and os.path.lexists(kept)
        words = f"what was there is now {kept}" if stays else "nothing was changed"
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
    """A folder for temporary files, which goes away with its maker; those of dead makers go first."""
    with _scratch(parent) as scratch:
        yield scratch / NEW


@contextmanager
def _scratch(parent: Path) -> Iterator[Path]:
    """A locked scratch folder for what is being made; those of dead makers go first.

    A fork of the maker inherits the lock and has nothing to clean up.
    """
    recover(parent)
    scratch, handle = _make(parent)
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


def _make(parent: Path) -> tuple[Path, int]:
    """A new scratch folder and a handle that holds its lock."""
    while True:
        made = parent / f"{SCRATCH}{secrets.token_hex(8)}"
        try:
            made.mkdir(0o700)
            if (named := _named(made)) is not None:
                (named[0] / NEW).mkdir()
                return named
        except BaseException:
            for folder in parent.glob(f"{SCRATCH}*{made.name.removeprefix(SCRATCH)}"):
                shutil.rmtree(folder, ignore_errors=True)
            raise


def _named(made: Path) -> tuple[Path, int] | None:
    """An empty folder renamed to state its inode, and locked; None where a save took it for a dead one."""
    try:
        handle = os.open(made, os.O_RDONLY | os.O_DIRECTORY)
    except FileNotFoundError:
        return None
    try:
        with suppress(OSError):  # without locks nobody cleans up after the dead
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
    """Remove the scratch folders of makers that are dead, after bringing back what they had moved aside.

    What only looks like one of them is left as it is, and a warning names it.
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
        return  # others keep theirs in /tmp, too
    if not stat.S_ISDIR(state.st_mode):
        _warn(scratch)
        return
    if UNNAMED.fullmatch(scratch.name):
        with suppress(OSError):
            os.rmdir(scratch)  # an empty one: its maker died before it stated the inode, or makes another one
    handle = os.open(scratch, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)  # fails where its maker lives, or nobody can tell
        if os.path.samestat(os.fstat(handle), os.lstat(scratch)):
            _remove(scratch) if _is_ours(scratch, state) else _warn(scratch)
    finally:
        os.close(handle)


def _is_ours(scratch: Path, state: os.stat_result) -> bool:
    """Did a save make it?"""
    held = {name: os.lstat(scratch / name).st_mode for name in os.listdir(scratch)}
    if not set(held) <= {NEW, OLD} or not all(map(stat.S_ISDIR, held.values())) or state.st_mode & OTHERS_WRITE:
        return False
    return _states_inode(scratch, state)


def _states_inode(scratch: Path, state: os.stat_result) -> bool:
    return scratch.name.startswith(f"{SCRATCH}{state.st_ino:x}-")


def _warn(place: Path, why: str = "no save made it") -> None:
    words = f"{str(place)!r} is named like what a killed save leaves, but {why}"
    warnings.warn(f"{words}: it was left as it is; look into it, and remove it yourself", stacklevel=2)


def _remove(scratch: Path) -> None:
    """Remove a scratch folder; what was moved aside goes back first. Ctrl-C or a failure: once more."""
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
    """What was moved aside goes back where the new one is in `new` still; that tells it, so it goes last."""
    with suppress(FileNotFoundError):  # some cleaner of temporary files may have been faster
        for name in os.listdir(scratch / OLD) if os.path.lexists(scratch / OLD) else ():
            if name in os.listdir(scratch / NEW):
                try:
                    _move(scratch / OLD / name, scratch.parent / name)
                except FileExistsError:
                    _warn(scratch, f"it holds the {name!r} that was to be replaced, whose place is taken")
                    return
        if os.path.lexists(scratch / OLD):
            shutil.rmtree(scratch / OLD)
        shutil.rmtree(scratch)


def _place(fresh: Path, target: Path, kept: Path, overwrite: bool) -> None:
    """Move what was made to its place; what was there, if anything, is then in the scratch folder."""
    for _ in range(ATTEMPTS):
        there = overwrite and os.path.lexists(target)
        try:
            if not there:
                _move(fresh, target)
            elif not _rename(fresh, target, exchange=True):
                _replace(fresh, target, kept)
        except (FileExistsError, FileNotFoundError) as error:
            again = not there if isinstance(error, FileExistsError) else os.path.lexists(fresh)
            if not (overwrite and again):
                raise
        else:
            return
    raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST))


def _replace(fresh: Path, target: Path, kept: Path) -> None:
    """Move what is there aside, and what was made to its place, where the system cannot exchange them."""
    with locked(target.parent):
        kept.parent.mkdir(exist_ok=True)
        target.rename(kept)
        fresh.rename(target)  # on failure `_remove` brings the old one back, now or at the next save


def _move(fresh: Path, target: Path) -> None:
    """Move to a place that must be empty.

    Raises:
        FileExistsError: it is not.
    """
    if _rename(fresh, target, exchange=False):
        return
    with locked(target.parent):
        if os.path.lexists(target):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST))
        fresh.rename(target)


def _rename(fresh: Path, target: Path, *, exchange: bool) -> bool:
    """Exchange two places, or move to one that must be empty; False where the system cannot."""
    if sys.platform not in RENAMES:
        return False
    name, here, swap, exclusive = RENAMES[sys.platform]
    call = getattr(ctypes.CDLL(None, use_errno=True), name, None)
    if call is None:
        return False
    if call(here, os.fsencode(fresh), here, os.fsencode(target), swap if exchange else exclusive) == 0:
        return True
    code = ctypes.get_errno()
    if code in UNSUPPORTED:
        return False
    raise OSError(code, os.strerror(code))


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Be the only saver at work in a folder, where its file system has locks.

    Raises:
        LoadError: somebody else holds it, and does not let go.
        OSError: the system fails.
    """
    handle, end = os.open(folder, os.O_RDONLY | os.O_DIRECTORY), time.monotonic() + PATIENCE
    try:
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= end:
                    words = f"the folder {folder} is locked by another process (`lsof` on it may tell which)"
                    raise LoadError(f"{words}; end it or wait for it, or save into another folder") from None
                time.sleep(PAUSE)
            except OSError as error:
                if error.errno not in NO_LOCKS:
                    raise
                break
        yield
    finally:
        os.close(handle)  # which lets go


def _sync(fresh: Path) -> None:
    """Let the disk have a file, or all files of a folder, before what they replace is removed."""
    for path in [fresh, *fresh.rglob("*")] if fresh.is_dir() else [fresh]:
        if path.is_symlink():
            continue
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def _exists(target: Path) -> str:
    return f"{target} exists; choose another name, or replace it with --overwrite (overwrite=True)"


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
