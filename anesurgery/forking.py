"""Locks and patches that a forked process is not left with.

A fork copies the locks and the patched functions of every thread, but only the thread that forks. What another
one held would be held for ever in the new process: there it is free, and what was patched is as it was before.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cached_property
from typing import Any, cast


class ForkLock:
    """A re-entrant lock for the life of the process; a forked one has it only if the forking thread held it."""

    def __init__(self, forget: Callable[[], object] = lambda: None) -> None:
        """`forget` is called in a new process where another thread held it: its work was cut short."""
        self._lock = threading.RLock()
        self._owner: int | None = None
        self._depth = 0
        self._forget = forget
        os.register_at_fork(after_in_child=self._forked)

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        """Take the lock, as `threading.RLock.acquire`."""
        taken = self._lock.acquire(blocking, timeout)
        if taken:
            self._owner, self._depth = threading.get_ident(), self._depth + 1
        return taken

    def release(self) -> None:
        """Give it up, as `threading.RLock.release`."""
        if self._owner != threading.get_ident():
            raise RuntimeError("cannot release a lock of another thread")
        self._depth -= 1
        if not self._depth:
            self._owner = None
        self._lock.release()

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *error: object) -> None:
        self.release()

    def _forked(self) -> None:
        if self._owner == threading.get_ident():
            return
        cut = self._owner is not None
        self._lock, self._owner, self._depth = threading.RLock(), None, 0
        if cut:
            self._forget()


class Silence:
    """Off while any thread is inside: what a logger says, and warnings."""

    def __init__(self, logger: str) -> None:
        self._logger = logging.getLogger(logger)
        self._lock, self._inside, self._restore = ForkLock(), Counter[int](), ExitStack()
        os.register_at_fork(after_in_child=self._forked)

    def __enter__(self) -> None:
        with self._lock:
            self._inside[threading.get_ident()] += 1
            if self._inside.total() > 1:
                return
            # Another level would empty the caches of all loggers, twice for each op that is built.
            self._restore.callback(setattr, self._logger, "disabled", self._logger.disabled)
            self._logger.disabled = True
            self._restore.enter_context(warnings.catch_warnings())
            warnings.simplefilter("ignore")

    def __exit__(self, *error: object) -> None:
        with self._lock:
            self._inside -= Counter([threading.get_ident()])
            if not self._inside:
                self._restore.close()

    def _forked(self) -> None:
        """The other threads are not there."""
        own = self._inside[threading.get_ident()]
        self._inside = Counter({threading.get_ident(): own} if own else {})
        if not own:
            self._restore.close()


_PATCHES: list[tuple[int, Any, str, Any]] = []
"""Thread, object, attribute and the value that it had, the latest last."""


@contextmanager
def patched(holder: Any, name: str, value: Any) -> Iterator[None]:
    """Give an attribute another value in the body, but not in a process that another thread forks meanwhile."""
    own = vars(holder).get(name) if isinstance(holder, type) else None
    patch = (
        threading.get_ident(),
        holder,
        name,
        own if isinstance(own, staticmethod) else getattr(holder, name),
    )
    _PATCHES.append(patch)
    setattr(holder, name, value)
    try:
        yield
    finally:
        setattr(holder, name, patch[3])
        _PATCHES.remove(patch)


def _forked() -> None:
    """In a new process: take back what other threads had patched, and free the locks of their properties."""
    for patch in [p for p in reversed(_PATCHES) if p[0] != threading.get_ident()]:
        _, holder, name, value = patch
        setattr(holder, name, value)
        _PATCHES.remove(patch)
    if sys.version_info >= (3, 12):
        return  # from here on they have none
    ours = [m for name, m in list(sys.modules.items()) if name.partition(".")[0] == __name__.partition(".")[0]]
    for kind in [v for module in ours for v in vars(module).values() if isinstance(v, type)]:
        for member in vars(kind).values():
            if isinstance(member, cached_property):
                cast(Any, member).lock = threading.RLock()


os.register_at_fork(after_in_child=_forked)
