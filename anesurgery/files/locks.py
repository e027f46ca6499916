"""Locks on folders: waited for a bounded time, then it is said who has them."""

from __future__ import annotations

import errno
import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from anesurgery.errors import LoadError
from anesurgery.files.interruption import allowed

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
