"""Do something at the n-th call of the system that a piece of code makes: fail, or change a file under it."""

from __future__ import annotations

import builtins
import fcntl
import io
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from unittest import mock

from anesurgery.files import writing

if TYPE_CHECKING:
    from typing_extensions import Self

CALLS: dict[Any, tuple[str, ...]] = {
    os: (
        *("open", "close", "mkdir", "rmdir", "unlink", "rename", "stat", "lstat", "fstat", "access"),
        *("scandir", "listdir", "fsync", "copy_file_range", "pread", "write"),
    ),
    fcntl: ("flock",),
    writing: ("_rename",),
}
"""What a save asks of the system, besides what it does with open files."""
FILE = ("read", "write", "truncate", "flush", "close")
"""What it does with an open file."""


class Calls:
    """Counts calls, and acts at one of them."""

    def __init__(self, at: int | None, act: Callable[[str], object], after: bool) -> None:
        self.at, self.act, self.after = at, act, after
        self.names: list[str] = []

    def tell(self, name: str) -> None:
        """A call is about to be made."""
        self.names.append(name)
        if len(self.names) == self.at:
            self.act(name)

    def wrap(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """The call, told about first; a file is closed even where closing fails."""

        def told(*given: Any, **named: Any) -> Any:
            if not (self.after or name.endswith("close")):
                self.tell(name)
                return call(*given, **named)
            done = call(*given, **named)
            self.tell(name)
            return done

        return told


class _File:
    """An open file whose calls are told about."""

    def __init__(self, file: Any, calls: Calls) -> None:
        self._file, self._calls = file, calls

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._file, name)
        return self._calls.wrap(f"file.{name}", found) if name in FILE else found

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


@contextmanager
def calls(
    at: int | None = None, act: Callable[[str], object] = lambda name: None, after: bool = False
) -> Iterator[Calls]:
    """Count the calls of the system made inside, and act before or after the one numbered `at` (from 1)."""
    told = Calls(at, act, after)
    really = io.open

    def opened(*given: Any, **named: Any) -> Any:
        told.tell("open")
        return _File(really(*given, **named), told)

    patches = [
        mock.patch.object(m, n, told.wrap(n, getattr(m, n))) for m, names in CALLS.items() for n in names
    ]
    patches += [mock.patch.object(io, "open", opened), mock.patch.object(builtins, "open", opened)]
    for patch in patches:
        patch.start()
    try:
        yield told
    finally:
        for patch in patches:
            patch.stop()


def failing(code: int) -> Callable[[str], object]:
    """An action: the call fails with a number of `errno`."""

    def act(name: str) -> None:
        raise OSError(code, os.strerror(code))

    return act
