"""A lock that a forked process is not left with, and silence that is.

A fork copies the locks of every thread, but only the thread that forks. So a fork waits until no other thread
holds the lock: what is built and patched under it is whole in the new process.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import warnings
from contextlib import ExitStack
from functools import cached_property
from typing import Any, cast


def kept_from_forks() -> threading.RLock:
    """A re-entrant lock for the life of the process, which whoever forks waits for."""
    lock = threading.RLock()
    os.register_at_fork(before=lock.acquire, after_in_parent=lock.release, after_in_child=lock.release)
    return lock


class Silence:
    """Off while any thread is inside: what a logger says, and warnings."""

    def __init__(self, logger: str) -> None:
        self._logger = logging.getLogger(logger)
        self._lock, self._inside, self._restore = kept_from_forks(), list[int](), ExitStack()
        os.register_at_fork(after_in_child=self._forked)

    def __enter__(self) -> None:
        with self._lock:
            self._inside.append(threading.get_ident())
            if len(self._inside) > 1:
                return
            # Another level would empty the caches of all loggers, twice for each op that is built.
            self._restore.callback(setattr, self._logger, "disabled", self._logger.disabled)
            self._logger.disabled = True
            self._restore.enter_context(warnings.catch_warnings())
            warnings.simplefilter("ignore")

    def __exit__(self, *error: object) -> None:
        with self._lock:
            self._inside.remove(threading.get_ident())
            if not self._inside:
                self._restore.close()

    def _forked(self) -> None:
        """In a new process the other threads are not there."""
        silent, self._inside = bool(self._inside), [i for i in self._inside if i == threading.get_ident()]
        if silent and not self._inside:
            self._restore.close()


def _free_properties() -> None:
    """In a new process: free the locks of properties that other threads were computing."""
    ours = [m for name, m in list(sys.modules.items()) if name.partition(".")[0] == __name__.partition(".")[0]]
    for kind in [v for module in ours for v in vars(module).values() if isinstance(v, type)]:
        for member in vars(kind).values():
            if isinstance(member, cached_property):
                cast(Any, member).lock = threading.RLock()


if sys.version_info < (3, 12):  # from there on they have none
    os.register_at_fork(after_in_child=_free_properties)
