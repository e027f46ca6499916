"""Arrays in files beside models: read with a clear error, written whole or not at all."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any

import numpy as np

from anesurgery.errors import SurgeryError
from anesurgery.mil import Array


def read(path: Path) -> dict[str, Array]:
    """The arrays of an .npz file by name.

    Raises:
        SurgeryError: there is no such file, or it is no .npz file of plain arrays.
    """
    try:
        with np.load(path, allow_pickle=False) as file:
            return dict(file)
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise SurgeryError(f"{path} cannot be read as an .npz file: {error}") from error


def write(path: Path, arrays: Mapping[str, Array]) -> None:
    """Write an .npz file.

    Raises:
        SurgeryError: it cannot be written.
    """
    kept: dict[str, Any] = dict(arrays)
    write_whole(path, lambda file: np.savez(file, **kept))


def write_one(path: Path, array: Array) -> None:
    """Write an .npy file.

    Raises:
        SurgeryError: it cannot be written.
    """
    write_whole(path, lambda file: np.save(file, array))


def write_text(path: Path, text: str) -> Path:
    """Write a text file; an existing one is replaced.

    Raises:
        SurgeryError: it cannot be written.
    """
    content = text.encode("utf-8", "replace")
    write_whole(path, lambda file: file.write(content))
    return path


def write_whole(path: Path, fill: Callable[[IO[bytes]], object]) -> None:
    """Write a file beside its place, and move it there when it is whole.

    Raises:
        SurgeryError: it cannot be written.
    """
    try:
        with tempfile.NamedTemporaryFile(dir=path.parent, suffix=path.suffix, delete=False) as file:
            try:
                fill(file)
            except BaseException:
                os.unlink(file.name)
                raise
        os.chmod(file.name, _mode())
        os.replace(file.name, path)
    except OSError as error:
        raise SurgeryError(f"cannot write {path}: {error.strerror}; choose another place") from error


def _mode() -> int:
    """What a new file may be to others: temporary files are for their owner alone."""
    mask = os.umask(0)
    os.umask(mask)
    return 0o666 & ~mask
