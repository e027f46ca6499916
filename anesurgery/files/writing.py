"""Put a file or folder in its place atomically, and only where it may go; Ctrl-C waits meanwhile.

It is made in a scratch folder beside its place and moved in one step: after a failure, a kill or a crash the
old one is there, or the new one. A scratch folder is locked while its maker lives; the next save into the same
place removes those of dead makers, and brings back what they had moved aside. What is not certainly one of ours
(`scratch.py` says how that is told) is left as it is, and a warning names it.

Python raises KeyboardInterrupt between any two instructions, also within the code that cleans up; SIGTERM ends
the process without any. Inside `held_back` both wait, but in parts marked `allowed`, where they raise at once.
What waited is raised again at the end, by the signal itself, so that the process ends as it would have.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import signal
import stat
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from anesurgery.errors import LoadError
from anesurgery.files import scratch as scratches
from anesurgery.files.scratch import NEW, OLD, SCRATCH, Foreign, Scratch

PATIENCE = 30.0
"""Seconds until a lock is given up; a save holds it for two renames."""
PAUSE = 0.02
"""Seconds between two tries. A choice: nobody notices it, and it costs no time of the processor."""
NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP, errno.EBADF}
"""What a file system says that has none."""
TABLE = Path("/proc/locks")


@contextmanager
def locked(handle: int, folder: Path) -> Iterator[None]:
    """Be the only saver at work in a folder, where its file system has locks.

    Args:
        handle: of the folder, opened for this alone.
        folder: what errors call it.

    Raises:
        LoadError: somebody else holds it, and does not let go.
        OSError: the system fails.
    """
    try:
        with allowed():
            _wait(handle, folder)
        yield
    finally:
        with suppress(OSError):
            os.close(handle)  # which lets go


def _wait(handle: int, folder: Path) -> None:
    end = time.monotonic() + PATIENCE
    while True:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= end:
                raise LoadError(_held(handle, folder)) from None
            time.sleep(PAUSE)
        except OSError as error:
            if error.errno not in NO_LOCKS:
                raise
            return
        else:
            return


def _held(handle: int, folder: Path) -> str:
    names = holders(handle)
    who = " and ".join(names) if names else "another process (`lsof` on the folder may tell which)"
    return f"the folder {folder} is locked by {who}; end it or wait for it, or save into another folder"


def holders(handle: int) -> list[str]:
    """The processes that have a lock on a file, in words; empty where the system does not tell."""
    state = os.fstat(handle)
    place = f"{os.major(state.st_dev):02x}:{os.minor(state.st_dev):02x}:{state.st_ino}"
    try:
        rows = [line.split() for line in TABLE.read_text().splitlines()]
    except OSError:
        return []
    pids = [row[4] for row in rows if len(row) > 5 and row[1] == "FLOCK" and row[5] == place]
    return [f"process {pid}{_command(pid)}" for pid in dict.fromkeys(pids) if int(pid) > 0]


def _command(pid: str) -> str:
    try:
        return f" ({Path('/proc', pid, 'comm').read_text().strip()})"
    except OSError:
        return ""


SIGNALS = (signal.SIGINT, signal.SIGTERM)


class _Ended(BaseException):
    """The process is to end by a signal; it unwinds so far that what was begun is cleaned up."""


class _Waiting:
    """Signals that were held back by one thread."""

    def __init__(self) -> None:
        self.open = False
        self.thread = threading.get_ident()
        self.caught: list[int] = []
        self.before: dict[int, Any] = {}

    def begin(self) -> None:
        """Take the signals, but for those that are ignored or not Python's to handle."""
        for number in SIGNALS:
            handler = signal.getsignal(number)
            if handler is not None and handler != signal.SIG_IGN:
                self.before[number] = handler
                signal.signal(number, self.arrived)

    def arrived(self, number: int, frame: Any) -> None:
        """A signal is here: remember it, or let it have its way."""
        handler: Callable[[int, Any], object] | Any = self.before[number]
        if self.open and callable(handler):
            handler(number, frame)
            return
        self.caught.append(number)
        if self.open:
            raise _Ended

    def give_back(self) -> None:
        """Handle signals as before."""
        for number, handler in self.before.items():
            signal.signal(number, handler)


_WAITING: list[_Waiting] = []
"""Those at work, the innermost last; of the main thread, the only one that handles signals."""


@contextmanager
def held_back() -> Iterator[None]:
    """Let Ctrl-C and SIGTERM wait until the body is done; other threads than the main one are never asked."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    waiting = _Waiting()
    _WAITING.append(waiting)
    try:
        waiting.begin()
        yield
    finally:
        _WAITING.remove(waiting)
        waiting.give_back()
        for number in dict.fromkeys(waiting.caught):
            signal.raise_signal(number)


@contextmanager
def allowed() -> Iterator[None]:
    """Let them come at once in the body, as where something long is written."""
    waiting = _WAITING[-1] if _WAITING else None
    if waiting is None or waiting.thread != threading.get_ident():
        yield
        return
    try:
        waiting.open = True
        caught, waiting.caught = waiting.caught, []
        for number in caught:
            waiting.arrived(number, None)
        yield
    finally:
        waiting.open = False


def _forked() -> None:
    """In a new process: what another thread held back is nobody's there."""
    for waiting in reversed([w for w in _WAITING if w.thread != threading.get_ident()]):
        _WAITING.remove(waiting)
        waiting.give_back()


os.register_at_fork(after_in_child=_forked)


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
        with held_back(), _working(target.parent, target.name) as scratch:
            kept = scratch.path / OLD / target.name
            fresh = scratch.place / NEW / target.name
            with allowed():
                write(fresh)
            if overwrite and os.path.lexists(target):
                _sync(fresh)  # the old one goes for good
            _place(fresh, scratch.beside / target.name, scratch, overwrite)
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
    with _working(parent, None) as scratch:
        yield scratch.path / NEW


@contextmanager
def _working(parent: Path, target: str | None) -> Iterator[Scratch]:
    """A scratch folder for what is being made; those of dead makers go first."""
    recover(parent)
    scratch = scratches.make(parent, target)
    try:
        yield scratch
    finally:
        _retire(scratch)


def recover(parent: Path) -> None:
    """Remove the scratch folders of makers that are dead, after bringing back what they had moved aside.

    What only looks like one of them is left as it is, and a warning names it.
    """
    try:
        handle = os.open(parent, scratches.FOLDER)
    except OSError:
        return  # not ours to list
    try:
        for name in sorted(name for name in os.listdir(handle) if name.startswith(SCRATCH)):
            with suppress(OSError):
                _recover(parent, handle, name)
    except OSError:
        return
    finally:
        scratches.close(handle)


def _recover(parent: Path, handle: int, name: str) -> None:
    """Remove one of the folders of dead makers."""
    try:
        scratch = scratches.take(parent, handle, name)
    except Foreign as why:
        if not _of_others(handle, name):
            _warn(parent / name, str(why))
        return
    if scratch is not None:
        _retire(scratch)


def _of_others(handle: int, name: str) -> bool:
    """Is it a folder that another user keeps where all users keep such, as in /tmp? That is nobody's fault."""
    shared = os.fstat(handle).st_mode & stat.S_ISVTX
    return bool(shared) and os.lstat(name, dir_fd=handle).st_uid != os.geteuid()


def _warn(place: Path, why: str) -> None:
    words = f"{str(place)!r} is named like what a save leaves that was killed, but {why}"
    warnings.warn(f"{words}: it was left as it is; look into it, and remove it yourself", stacklevel=2)


def _retire(scratch: Scratch) -> None:
    """Remove a scratch folder; what was moved aside goes back to its place if that is empty.

    An interrupt or a failure in the middle of it is answered by trying once more.
    """
    try:
        if scratch.maker == os.getpid():
            _clean(scratch)
    except OSError:
        with suppress(OSError):
            _clean(scratch)
    except BaseException:
        with suppress(OSError):
            _clean(scratch)
        raise
    finally:
        scratch.close()


def _clean(scratch: Scratch) -> None:
    try:
        old = scratches.moved_aside(scratch)
        if old is not None:
            _move(old, scratch.beside / old.name, scratch)
    except FileExistsError:
        _warn(scratch.path, f"it holds the {scratch.target!r} that was to be replaced, whose place is taken")
    except (Foreign, LoadError) as why:
        _warn(scratch.path, str(why))
    else:
        scratches.remove(scratch)


def _place(fresh: Path, target: Path, scratch: Scratch, overwrite: bool) -> None:
    """Move what was made to its place; what was there, if anything, is then in the scratch folder."""
    for _ in range(ATTEMPTS):
        there = overwrite and os.path.lexists(target)
        try:
            if not there:
                _move(fresh, target, scratch)
            elif not _rename(fresh, target, exchange=True):
                _replace(fresh, target, scratch)
        except (FileExistsError, FileNotFoundError) as error:
            again = not there if isinstance(error, FileExistsError) else os.path.lexists(fresh)
            if not (overwrite and again):
                raise
        else:
            return
    raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST))


def _replace(fresh: Path, target: Path, scratch: Scratch) -> None:
    """Move what is there aside, and what was made to its place, where the system cannot exchange them."""
    with locked(scratches.open_folder(target.parent), scratch.folder):
        scratches.note_moved(scratch)
        target.rename(scratch.place / OLD / target.name)
        fresh.rename(target)  # on failure `_retire` brings the old one back, now or at the next save


def _move(fresh: Path, target: Path, scratch: Scratch) -> None:
    """Move to a place that must be empty.

    Raises:
        FileExistsError: it is not.
    """
    if _rename(fresh, target, exchange=False):
        return
    with locked(scratches.open_folder(target.parent), scratch.folder):
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


def _sync(fresh: Path) -> None:
    """Let the disk have a file, or all files of a folder, before what they replace is removed."""
    for path in [fresh, *fresh.rglob("*")] if fresh.is_dir() else [fresh]:
        if path.is_symlink():
            continue
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
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
