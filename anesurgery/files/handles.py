"""Folders by open handles: what is done through one happens in that folder, wherever its name leads by then."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

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
