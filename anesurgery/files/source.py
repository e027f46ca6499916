"""A file that is opened once: what is read from it later is what was there when it was opened, or an error."""

from __future__ import annotations

import os
import weakref
from pathlib import Path
from typing import Any

from anesurgery.errors import LoadError


class SourceFile:
    """An open file, and the state in which it was found.

    A file that is replaced or deleted keeps its content for those who hold it open; one that is written to in
    place does not, so every use begins and ends with `check`.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self.handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            weakref.finalize(self, os.close, self.handle)
            self._found = os.fstat(self.handle)
        except OSError as error:
            raise LoadError(f"{path} cannot be read: {error.strerror}; is it yours to read?") from error

    @property
    def size(self) -> int:
        """Number of bytes when it was opened."""
        return self._found.st_size

    @property
    def identity(self) -> tuple[int, ...]:
        """Equal for two who have opened one file, unless somebody wrote to it in between."""
        found = self._found
        return (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)

    def check(self) -> None:
        """See that nobody wrote to the file.

        Raises:
            LoadError: its size or times are others now.
        """
        try:
            now = os.fstat(self.handle)
        except OSError as error:
            raise LoadError(f"{self.path} cannot be read any more: {error.strerror}; load it again") from error
        if _content(now, self._found) != _content(self._found, now):
            words = _difference(self._found, now)
            raise LoadError(f"{self.path} was changed after it was read ({words}); load it again")

    def read(self) -> bytes:
        """The whole content, as it was when the file was opened."""
        try:
            with open(self.handle, "rb", closefd=False) as file:
                file.seek(0)
                content = file.read()
        except OSError as error:
            raise LoadError(f"{self.path} cannot be read: {error.strerror}; copy it again") from error
        self.check()
        return content

    def check_place(self) -> None:
        """See that the path still leads to this file, and that nobody wrote to it.

        Raises:
            LoadError: another file is there, or none, or it was changed.
        """
        self.check()
        try:
            same = os.path.samestat(os.stat(self.path), self._found)
        except OSError:
            same = False
        if not same:
            raise LoadError(f"{self.path} was replaced while the model was read; load it again")


def _content(state: os.stat_result, other: os.stat_result) -> tuple[Any, ...]:
    """What changes when a file is written to.

    The time of the last change of any kind tells of a copy that keeps the old date; it does not count where a
    name was added or removed, which changes it too.
    """
    times = (state.st_mtime_ns, state.st_ctime_ns if state.st_nlink == other.st_nlink else None)
    return (state.st_size, *times)


def _difference(before: os.stat_result, after: os.stat_result) -> str:
    if before.st_size == after.st_size:
        return "its date is new"
    return f"{before.st_size} bytes became {after.st_size}"
