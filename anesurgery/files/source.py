"""A file that is opened once: what is read from it later is what was there when it was opened, or an error."""

from __future__ import annotations

import os
import stat
import weakref
from pathlib import Path

from anesurgery.errors import LoadError

LARGEST = 2**31 - 1
"""Bytes that are read at once: what protobuf can hold. Weights are mapped and may be larger."""
LARGEST_TEXT = 1 << 28
"""Bytes of a JSON file; manifests and plans of the largest models have a few million."""
SAMPLES, SAMPLE = 32, 4096
"""How many places of a file are compared where only its dates speak of a change, and bytes of each."""


def read_text(path: Path, largest: int = LARGEST_TEXT) -> str:
    """The content of a text file.

    Raises:
        LoadError: it is no file, too large, or cannot be read.
        UnicodeDecodeError: it is no text.
    """
    return SourceFile(path).read(largest).decode("utf-8")


def system_failed(error: LoadError) -> bool:
    """Is a file there, and could the system not read it? Nobody knows then what it would have said."""
    cause = error.__cause__
    return isinstance(cause, OSError) and not isinstance(cause, FileNotFoundError)


class SourceFile:
    """An open file, and the state in which it was found.

    A file that is replaced or deleted keeps its content for those who hold it open; one that is written to in
    place does not, so every use begins and ends with `check`.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self.handle = os.open(
                path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK
            )  # a pipe without a writer waits
            weakref.finalize(self, os.close, self.handle)
            self._found = os.fstat(self.handle)
            if not stat.S_ISREG(self._found.st_mode):
                raise LoadError(f"{path} is {_kind(self._found.st_mode)} and no file; copy the model again")
            self._sampled = self._samples()
        except OSError as error:
            raise LoadError(f"{path} cannot be read: {error.strerror}; is it yours to read?") from error

    @property
    def size(self) -> int:
        """Number of bytes when it was opened."""
        return self._found.st_size

    @property
    def identity(self) -> tuple[int, ...]:
        """Equal for two who have opened one file, unless somebody wrote to it in between."""
        status = self._found
        return (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)

    def check(self) -> None:
        """See that nobody wrote to the file.

        Raises:
            LoadError: its size or times are others now.
        """
        try:
            now = os.fstat(self.handle)
        except OSError as error:
            raise LoadError(f"{self.path} cannot be read any more: {error.strerror}; load it again") from error
        if _content(now) != _content(self._found) or self._dates_only(now):
            words = _difference(self._found, now)
            raise LoadError(f"{self.path} was changed after it was read ({words}); load it again")

    def _dates_only(self, now: os.stat_result) -> bool:
        """Was the content exchanged and the old date set again? Rights, owner and names change one date too."""
        return now.st_ctime_ns != self._found.st_ctime_ns and self._samples() != self._sampled

    def _samples(self) -> list[bytes]:
        """Pieces of the file from its beginning to its end."""
        last = max(0, self.size - SAMPLE)
        places = sorted({last * i // (SAMPLES - 1) for i in range(SAMPLES)})
        return [os.pread(self.handle, SAMPLE, at) for at in places]

    def read(self, largest: int = LARGEST) -> bytes:
        """The whole content, as it was when the file was opened.

        Raises:
            LoadError: it has more bytes than `largest`, cannot be read, or was changed.
        """
        if self.size > largest:
            raise LoadError(
                f"{self.path} has {self.size} bytes, and at most {largest} are read of such a file; it is "
                "damaged, or keep its weights in an .mlpackage, whose weight file may be of any size, or raise "
                f"anesurgery.files.source.{'LARGEST' if largest == LARGEST else 'LARGEST_TEXT'}"
            )
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


KINDS = {stat.S_IFIFO: "a pipe", stat.S_IFDIR: "a folder", stat.S_IFSOCK: "a socket"}


def _kind(mode: int) -> str:
    return KINDS.get(stat.S_IFMT(mode), "a device")


def _content(state: os.stat_result) -> tuple[int, int]:
    """What changes when a file is written to, unless the old date is set again."""
    return state.st_size, state.st_mtime_ns


def _difference(before: os.stat_result, after: os.stat_result) -> str:
    if before.st_size == after.st_size:
        return "its date is new"
    return f"{before.st_size} bytes became {after.st_size}"
