"""Read and write the user's .npz and .npy files, and move large arrays out of memory.

Reading gives a clear error, writing is atomic. `set_aside` returns an array that is mapped from an unnamed
temporary file: the system loads it when it is needed and may free its memory at any time. The file disappears
with the last reference to the array, or with the process.
"""

from __future__ import annotations

import hashlib
import os
import re
import tempfile
import zipfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np

from anesurgery.errors import SurgeryError
from anesurgery.files.writing import check_place, write_atomically
from anesurgery.mil import Array


def read(path: Path) -> dict[str, Array]:
    """Return the arrays of an .npz file by name.

    Raises:
        SurgeryError: there is no such file, or it is not an .npz file of plain arrays.
    """
    _check_file(path)
    try:
        with np.load(path, allow_pickle=False) as file:
            _check_members(file.zip)
            return dict(file)
    except Exception as error:  # zipfile, zlib, struct and numpy each have their own for a damaged file
        words = error.strerror if isinstance(error, OSError) and error.strerror else error
        if os.path.isdir(path):
            words = "it is a folder; name one of its files"
        if "Object arrays" in str(error):
            words = "it holds Python objects; save arrays of numbers"
        if os.path.isfile(path) and not zipfile.is_zipfile(path):  # no path raises here
            form = "no archive of arrays" if path.stat().st_size else "empty"
            words = f"it is {form}; write one with np.savez"
        raise SurgeryError(f"{path} cannot be read as an .npz file: {words}") from error


def read_all(paths: Sequence[Path] | None) -> list[dict[str, Array]] | None:
    """Return the arrays of each .npz file, and of each such file in a folder; None without a path.

    Raises:
        SurgeryError: a file cannot be read, or a folder holds none.
    """
    if not paths:
        return None
    return [read(file) for path in paths for file in _npz_files(path.expanduser())]


def _npz_files(path: Path) -> list[Path]:
    """Return a file, or the .npz files of a folder in the order of their names."""
    if not path.is_dir():
        return [path]
    files = sorted(path.glob("*.npz"))
    if not files:
        raise SurgeryError(f"the folder {path} holds no .npz file; write one with np.savez")
    return files


LARGEST_ARRAY = 1 << 30
"""The most bytes of one array in an .npz file, 1 GB. Arrays may be compressed to a thousandth, so that without
this limit a small file could fill the memory."""


def _check_members(archive: zipfile.ZipFile) -> None:
    """Raise a ValueError if an array is too large, before any is decompressed."""
    for member in archive.infolist():
        if member.file_size > LARGEST_ARRAY:
            raise ValueError(
                f"its member {member.filename} has {member.file_size:,} bytes, more than {LARGEST_ARRAY:,}; "
                "give a smaller one, or raise anesurgery.files.arrays.LARGEST_ARRAY"
            )


LONGEST_NAME = 255
"""The most bytes in the name of a file, on every system in use."""


def path_beside(package: Path, name: str) -> Path:
    """Return the path of the .npy file next to a package for one of its arrays, such as "gpt2.wte.npy".

    Characters that a file name cannot have are escaped as %XX; a name that is too long becomes a hash.
    """
    plain = re.sub(r"[^\w.@-]", lambda character: f"%{ord(character[0]):02X}", name)
    full = f"{package.stem}.{plain}.npy"
    if len(os.fsencode(full)) > LONGEST_NAME:
        digest = hashlib.sha256(name.encode("utf-8", "surrogatepass")).hexdigest()[:16]
        full = f"{package.stem}.{digest}.npy"
    return package.with_name(full)


def read_one(path: Path) -> Array:
    """Return the array of an .npy file, memory-mapped, since it may be a large table.

    Raises:
        SurgeryError: there is no such file, or it is not an .npy file of one plain array.
    """
    _check_file(path)
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except Exception as error:  # numpy has several for a damaged file
        raise SurgeryError(f"{path} cannot be read as an .npy file: {error or 'it is empty'}") from error
    if not isinstance(array, np.ndarray):
        raise SurgeryError(f"{path} cannot be read as an .npy file: it is an archive of several arrays")
    return array


def _check_file(path: Path) -> None:
    """Raise a SurgeryError for a pipe or device, on which reading would wait."""
    if os.path.exists(path) and not (os.path.isfile(path) or os.path.isdir(path)):
        raise SurgeryError(f"{path} is a pipe or a device and no file; give a file")


def write(path: Path, arrays: Mapping[str, Array], overwrite: bool = False, source: Path | None = None) -> None:
    """Write an .npz file.

    Args:
        path: the file.
        arrays: name -> array.
        overwrite: may an existing file be replaced?
        source: the model that they come from; it is never overwritten.

    Raises:
        SurgeryError: it cannot be written, exists, or does not end in .npz.
    """
    if path.suffix != ".npz":
        raise SurgeryError(f"{path} is no name for arrays; let it end in .npz")
    named: dict[str, Any] = dict(arrays)
    _write(path, lambda file: np.savez(file, **named), overwrite, source)


def write_one(path: Path, array: Array, overwrite: bool = False) -> None:
    """Write an .npy file.

    Raises:
        SurgeryError: it cannot be written, or exists.
    """
    _write(path, lambda file: np.save(file, array), overwrite)


def write_text(path: Path, text: str) -> Path:
    """Write a text file, and replace an existing one; return its path.

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


LEAST_SET_ASIDE = 1 << 20
"""Bytes from which an array gets a file of its own. A choice, so that a model does not open too many files."""


def set_aside(array: Array, folder: str | os.PathLike[str] | None = None, *, written: bool = False) -> Array:
    """Return an array with the same numbers, mapped from a temporary file; a small array is returned unchanged.

    Args:
        array: any array; numpy dtypes that stand for less than a byte are kept.
        folder: a folder on a disk with room; the system's folder for temporary files by default.
        written: may the result be written to? What is written stays in memory.
    """
    if array.nbytes < LEAST_SET_ASIDE:
        return array
    with tempfile.TemporaryFile(dir=folder) as file:
        np.ascontiguousarray(array).tofile(file)
        mapped = np.memmap(file, dtype=array.dtype.str, mode="c" if written else "r", shape=array.shape)
    return np.asarray(mapped).view(array.dtype)
