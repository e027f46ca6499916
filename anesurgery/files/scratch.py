"""Folders that saves work in, by open handles: recognised for certain, removed without following a link.

A folder beside a target is one of ours only if all of this holds; whatever fails it is not touched:

* its name is one that was drawn here, and it is a folder itself and no link;
* it is this user's, nobody else may write into it, and no living process holds its lock;
* its `journal` (a file of this user's, with one name) states the name and the inode that the folder has: a
  copy, or what an archive brings along, has others;
* it holds what saves put there and nothing else: `new`, what is being made, and `old`, what had to be moved
  aside. What is in `old` goes back to its place only if `moved` states its inode, kind and owner.

Folders are opened once and everything is done through that handle, so that nothing can be exchanged for a link
in between.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import secrets
import stat
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
"""How a folder is opened; with O_NOFOLLOW where a link would be none of ours."""


def close(handle: int) -> None:
    """Close a handle; nothing was written through it that could fail to arrive."""
    with suppress(OSError):
        os.close(handle)


def anchored(handle: int, path: Path) -> Path:
    """A path that leads to an open folder whatever happens to its names; its own path where there is none."""
    way = Path(f"/proc/self/fd/{handle}")
    return way if os.path.isdir(way) else path


def open_folder(path: Path) -> int:
    """A handle of a folder; of one that may be written to and not read, one that can only be gone through.

    Raises:
        OSError: it cannot be opened.
    """
    try:
        return os.open(path, FOLDER)
    except PermissionError:
        if not hasattr(os, "O_PATH"):
            raise
        return os.open(path, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)


def leads_to(parent: int, name: str, handle: int) -> bool:
    """Does a name still lead to an open folder?"""
    try:
        return os.path.samestat(os.lstat(name, dir_fd=parent), os.fstat(handle))
    except FileNotFoundError:
        return False


def clear(name: str, parent: int, device: int) -> None:
    """Remove a folder and all that is in it; a link goes, and not what it leads to."""
    handle = os.open(name, FOLDER | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=parent)
    try:
        if os.fstat(handle).st_dev != device:
            raise OSError(f"{name!r} is another file system")
        with os.scandir(handle) as entries:
            inner = [(entry.name, entry.is_dir(follow_symlinks=False)) for entry in entries]
        for one, is_folder in inner:
            if is_folder:
                clear(one, handle, device)
            else:
                os.unlink(one, dir_fd=handle)
    finally:
        close(handle)
    os.rmdir(name, dir_fd=parent)


SCRATCH = ".anesurgery-"
"""How the names of scratch folders begin."""
NAME = re.compile(re.escape(SCRATCH) + "[0-9a-f]{32}")
NEW, OLD = "new", "old"
"""Folders in it: what is being made, and what had to be moved aside."""
JOURNAL, MOVED = "journal", "moved"
"""Files in it: what it is, and what was moved aside."""
FORMAT = "anesurgery scratch 1"
LARGEST_JOURNAL = 1 << 16
"""Bytes; a name of a file has at most 255."""
OTHERS_WRITE = 0o022
"""The bits of a mode that let the group or others write: a folder that has them may be somebody else's work."""


class Foreign(Exception):  # noqa: N818 - reads as a statement
    """A folder that is not ours, or not as we left it; says why."""


@dataclass(frozen=True)
class Scratch:
    """A scratch folder that is open and locked."""

    folder: Path
    """The folder that it is in, as the caller named it."""
    name: str
    parent: int
    """A handle of that folder."""
    handle: int
    target: str | None
    """The name of what is made in it; None where it is for temporary files, which have no place elsewhere."""
    maker: int = field(default_factory=os.getpid)
    """The process; a fork of it has the handles too, and nothing to clean up."""

    @property
    def path(self) -> Path:
        """Where it is, in words for the user."""
        return self.folder / self.name

    @property
    def place(self) -> Path:
        """Where to write to: a path that nobody can lead elsewhere, where the system has one."""
        return anchored(self.handle, self.path)

    @property
    def beside(self) -> Path:
        """The folder that it is in, likewise."""
        return anchored(self.parent, self.folder)

    def close(self) -> None:
        """Give up the lock and the handles."""
        for handle in (self.handle, self.parent):
            close(handle)


def make(folder: Path, target: str | None) -> Scratch:
    """A new scratch folder, locked while its maker lives.

    Raises:
        OSError: it cannot be made; nothing is left of it.
    """
    parent = open_folder(folder)
    try:
        while True:
            if (scratch := _make(folder, parent, SCRATCH + secrets.token_hex(16), target)) is not None:
                return scratch
    except BaseException:
        close(parent)
        raise


def _make(folder: Path, parent: int, name: str, target: str | None) -> Scratch | None:
    """The scratch folder of a name; None where it is taken, also by who took it for a dead one."""
    try:
        os.mkdir(name, 0o700, dir_fd=parent)
    except FileExistsError:
        return None
    except BaseException:
        with suppress(OSError):  # an interrupt may come when it is made already
            os.rmdir(name, dir_fd=parent)
        raise
    handle = None
    try:
        handle = os.open(name, FOLDER | os.O_NOFOLLOW, dir_fd=parent)
        if not _lock(handle) or not leads_to(parent, name, handle):
            close(handle)
            return None
        fresh = Scratch(folder, name, parent, handle, target)
        _write_note(fresh, JOURNAL, os.fstat(handle), target)
        os.mkdir(NEW, 0o700, dir_fd=handle)
    except FileNotFoundError:  # a save that cleans up after the dead was faster
        if handle is not None:
            close(handle)
        return None
    except BaseException:
        with suppress(OSError):
            _remove_empty(parent, name)
        if handle is not None:
            close(handle)
        raise
    return fresh


def _lock(handle: int) -> bool:
    """Lock a folder; False where another process has it. Without locks nobody cleans up after the dead."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        pass
    return True


def _remove_empty(parent: int, name: str) -> None:
    """Remove a folder that holds nothing but an empty `new` and notes."""
    handle = os.open(name, FOLDER | os.O_NOFOLLOW, dir_fd=parent)
    try:
        for note in (JOURNAL, MOVED):
            with suppress(FileNotFoundError):
                os.unlink(note, dir_fd=handle)
        with suppress(FileNotFoundError):
            os.rmdir(NEW, dir_fd=handle)
    finally:
        close(handle)
    os.rmdir(name, dir_fd=parent)


def note_moved(scratch: Scratch) -> None:
    """Write down what is about to be moved aside, so that it and nothing else is brought back."""
    assert scratch.target is not None
    state = os.lstat(scratch.beside / scratch.target)
    with suppress(FileNotFoundError):  # of an attempt before
        os.unlink(MOVED, dir_fd=scratch.handle)
    _write_note(scratch, MOVED, state, scratch.target)
    with suppress(FileExistsError):
        os.mkdir(OLD, 0o700, dir_fd=scratch.handle)


def _write_note(scratch: Scratch, file: str, state: os.stat_result, target: str | None) -> None:
    """A file that states the folder and an inode."""
    words = {"format": FORMAT, "name": scratch.name, "target": target, **_identity(state)}
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    handle = os.open(file, flags, 0o600, dir_fd=scratch.handle)
    try:
        os.write(handle, json.dumps(words).encode())
        os.fsync(handle)
    finally:
        close(handle)


def _identity(state: os.stat_result) -> dict[str, int]:
    """What a note states of a file or folder; numbers of inodes are used again, so its kind and owner too."""
    return {"inode": state.st_ino, "kind": stat.S_IFMT(state.st_mode), "owner": state.st_uid}


def take(folder: Path, parent: int, name: str) -> Scratch | None:
    """A scratch folder that a dead process left, locked; None where it is alive, gone or nobody can tell.

    Raises:
        Foreign: it is not one of ours.
        OSError: it cannot be looked at.
    """
    state = os.lstat(name, dir_fd=parent)
    _check_owner(state)
    handle = os.open(name, FOLDER | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=parent)
    try:
        if not os.path.samestat(os.fstat(handle), state) or not _dead(handle):
            close(handle)
            return None
        _check_folder(name, state)
        if _nothing_in(handle):
            os.rmdir(name, dir_fd=parent)
            close(handle)
            return None
        target = _check_journal(name, handle)
        scratch = Scratch(folder, name, os.dup(parent), handle, target)
    except BaseException:
        close(handle)
        raise
    return scratch


def _check_owner(state: os.stat_result) -> None:
    """See that a place is a folder of this user.

    Raises:
        Foreign: it is not.
    """
    if not stat.S_ISDIR(state.st_mode):
        raise Foreign("it is a link" if stat.S_ISLNK(state.st_mode) else "it is no folder")
    if state.st_uid != os.geteuid():
        raise Foreign("it belongs to another user")


def _check_folder(name: str, state: os.stat_result) -> None:
    """See that a folder of this user is one that saves may have made.

    Raises:
        Foreign: it is not.
    """
    if not NAME.fullmatch(name):
        raise Foreign("its name is none that a save gives")
    if state.st_mode & OTHERS_WRITE:
        raise Foreign("others may write into it")


def _dead(handle: int) -> bool:
    """Is nobody at work in a folder, as far as its lock tells? It is locked then."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False  # somebody is, or there are no locks
    return True


def _nothing_in(handle: int) -> bool:
    """Is a folder empty, but for a journal without content? Its maker died before it had written any."""
    names = os.listdir(handle)
    if names == [JOURNAL] and _own_file(handle, JOURNAL).st_size == 0:
        os.unlink(JOURNAL, dir_fd=handle)
        return True
    return not names


def _own_file(handle: int, name: str) -> os.stat_result:
    """The state of a file that only we can have written.

    Raises:
        Foreign: it is not.
    """
    try:
        state = os.lstat(name, dir_fd=handle)
    except FileNotFoundError:
        raise Foreign(f"it has no {name}") from None
    if not stat.S_ISREG(state.st_mode) or state.st_uid != os.geteuid() or state.st_nlink != 1:
        raise Foreign(f"its {name} is no file of this user's alone")
    return state


def _check_journal(name: str, handle: int) -> str | None:
    """The name of what was made in a folder.

    Raises:
        Foreign: its journal is that of another folder, or there is more in it than a save puts there.
    """
    state = os.fstat(handle)
    identity, target = _note(name, handle, JOURNAL)
    if identity != _identity(state):
        raise Foreign("its journal is that of another folder")
    if strange := sorted(set(os.listdir(handle)) - {JOURNAL, MOVED, NEW, OLD}):
        raise Foreign(f"it holds {strange[0]!r}")
    for part in (NEW, OLD):
        with suppress(FileNotFoundError):
            inner = os.lstat(part, dir_fd=handle)
            if not stat.S_ISDIR(inner.st_mode) or inner.st_dev != state.st_dev:
                raise Foreign(f"its {part} is no folder in it")
            held = _names(handle, part)
            if (target is not None or part == OLD) and (strange := sorted(held - {str(target)})):
                raise Foreign(f"its {part} holds {strange[0]!r}")
    return target


def _names(handle: int, part: str) -> set[str]:
    """What is in a folder in a scratch folder."""
    inner = os.open(part, FOLDER | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=handle)
    try:
        return set(os.listdir(inner))
    finally:
        close(inner)


def _note(name: str, handle: int, file: str) -> tuple[dict[str, int], str | None]:
    """What a note states of a file or folder, and the name of the target.

    Raises:
        Foreign: it is not one of ours.
    """
    _own_file(handle, file)
    note = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=handle)
    try:
        content = os.read(note, LARGEST_JOURNAL)
    finally:
        close(note)
    try:
        words: Any = json.loads(content)
        kind, owner, target = (words[key] for key in ("format", "name", "target"))
        identity = {key: words[key] for key in ("inode", "kind", "owner")}
    except (ValueError, LookupError, TypeError, RecursionError):
        raise Foreign(f"its {file} is none that a save writes") from None
    sound = target is None or (isinstance(target, str) and _is_name(target))
    if (kind, owner) != (FORMAT, name) or not sound:
        raise Foreign(f"its {file} is that of another folder")
    return identity, target


def _is_name(name: str) -> bool:
    """Is it the name of something in a folder, and no path?"""
    return name not in ("", ".", "..") and "/" not in name and "\0" not in name


def moved_aside(scratch: Scratch) -> Path | None:
    """What was moved aside and has to go back, as the new one did not come to its place; None: nothing.

    Raises:
        Foreign: something else is there.
    """
    if scratch.target is None:
        return None
    try:
        state = os.lstat(scratch.place / OLD / scratch.target)
    except (FileNotFoundError, NotADirectoryError):
        return None
    identity, target = _note(scratch.name, scratch.handle, MOVED)
    device = os.fstat(scratch.handle).st_dev
    if (identity, target, device) != (_identity(state), scratch.target, state.st_dev):
        raise Foreign(f"its {OLD} holds something else than what was moved there")
    waits = os.path.lexists(scratch.place / NEW / scratch.target)
    return scratch.place / OLD / scratch.target if waits else None


def remove(scratch: Scratch) -> None:
    """Remove a scratch folder; the journal goes last, so that what is left after a failure is recognised.

    Raises:
        OSError: it cannot be removed as a whole.
    """
    device = os.fstat(scratch.handle).st_dev
    for part in (NEW, OLD):
        with suppress(FileNotFoundError):
            clear(part, scratch.handle, device)
    for note in (MOVED, JOURNAL):
        with suppress(FileNotFoundError):
            os.unlink(note, dir_fd=scratch.handle)
    if leads_to(scratch.parent, scratch.name, scratch.handle):
        os.rmdir(scratch.name, dir_fd=scratch.parent)
