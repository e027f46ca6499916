"""Arrays in files beside models: read with a clear error, written atomically."""

from __future__ import annotations

import os
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any

import numpy as np

from anesurgery.errors import SurgeryError
from anesurgery.files.writing import check_place, write_atomically
from anesurgery.mil import Array


def read(path: Path) -> dict[str, Array]:
    """The arrays of an .npz file by name.

    Raises:
        SurgeryError: there is no such file, or it is not an .npz file of plain arrays.
    """
    try:
        with np.load(path, allow_pickle=False) as file:
            return dict(file)
    except Exception as error:  # zipfile, zlib, struct and numpy each have their own for a damaged file
        words = error.strerror if isinstance(error, OSError) and error.strerror else error
        if os.path.isfile(path) and path.stat().st_size and not zipfile.is_zipfile(path):  # no path raises here
            words = "it is no archive of arrays, which np.savez writes"
        raise SurgeryError(f"{path} cannot be read as an .npz file: {words or 'it is empty'}") from error


def write(path: Path, arrays: Mapping[str, Array], overwrite: bool = False, source: Path | None = None) -> None:
    """Write an .npz file.

    Args:
        path: the file.
        arrays: what is in it, by name.
        overwrite: may an existing file be replaced?
        source: the model that they come from, which is never written to.

    Raises:
        SurgeryError: it cannot be written, or exists.
    """
    kept: dict[str, Any] = dict(arrays)
    _write(path, lambda file: np.savez(file, **kept), overwrite, source)


def write_one(path: Path, array: Array, overwrite: bool = False) -> None:
    """Write an .npy file.

    Raises:
        SurgeryError: it cannot be written, or exists.
    """
    _write(path, lambda file: np.save(file, array), overwrite)


def write_text(path: Path, text: str) -> Path:
    """Write a text file; an existing one is replaced.

    Raises:
        SurgeryError: it cannot be written.
    """
    content = text.encode("utf-8", "replace")
    _write(path, lambda file: file.write(content), overwrite=True)
    return path


def _write(
    path: Path, fill: Callable[[IO[bytes]], object], overwrite: bool, source: Path | None = None
) -> None:
    path = path.expanduser().absolute()
    check_place(path, overwrite, source)

    def write(place: Path) -> None:
        with place.open("wb") as file:
            fill(file)

    write_atomically(path, write, overwrite)
