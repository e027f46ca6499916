"""Arrays in files: those of the user, read with a clear error and written atomically; and those set aside.

What is set aside is mapped from a file that nobody else sees. It is read when it is needed, and the system
takes its memory back when it wants some. The file is gone when nobody reads the array any more, or when the
process ends, however that comes about.
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
    """The arrays of an .npz file by name.

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
        if os.path.isfile(path) and path.stat().st_size and not zipfile.is_zipfile(path):  # no path raises here
            words = "it is no archive of arrays, which np.savez writes"
        raise SurgeryError(f"{path} cannot be read as an .npz file: {words or 'it is empty'}") from error


def read_all(places: Sequence[Path] | None) -> list[dict[str, Array]] | None:
    """The sets of arrays of .npz files, and of those in folders, by name; None without a place.

    Raises:
        SurgeryError: a file cannot be read, or a folder holds none.
    """
    return [read(file) for place in places for file in _files(place.expanduser())] if places else None


def _files(place: Path) -> list[Path]:
    """A file, or the .npz files of a folder in the order of their names."""
    if not place.is_dir():
        return [place]
    files = sorted(place.glob("*.npz"))
    if not files:
        raise SurgeryError(f"the folder {place} holds no .npz file; write one with np.savez")
    return files


LARGEST_ARRAY = 1 << 30
"""Bytes of an array in an .npz file, 1 GB, which may be packed into a thousandth: a small file cannot fill the
memory so."""


def _check_members(archive: zipfile.ZipFile) -> None:
    """See that no array is larger than what is read, before any is unpacked.

    Raises:
        ValueError: one is; names it.
    """
    for member in archive.infolist():
        if member.file_size > LARGEST_ARRAY:
            raise ValueError(
                f"its member {member.filename} has {member.file_size:,} bytes, more than {LARGEST_ARRAY:,}; "
                "give a smaller one, or raise anesurgery.files.arrays.LARGEST_ARRAY"
            )


LONGEST = 255
"""Bytes of the name of a file, on every system in use."""


def beside(package: Path, name: str) -> Path:
    """The file beside a package that holds an array of the model; a name that no file has is spelled out."""
    plain = re.sub(r"[^\w.@-]", lambda character: f"%{ord(character[0]):02X}", name)
    full = f"{package.stem}.{plain}.npy"
    if len(os.fsencode(full)) > LONGEST:
        digest = hashlib.sha256(name.encode("utf-8", "surrogatepass")).hexdigest()[:16]
        full = f"{package.stem}.{digest}.npy"
    return package.with_name(full)


def read_one(path: Path) -> Array:
    """The array of an .npy file, mapped: it may be a large table.

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
    """See that a path does not lead to a pipe or a device, which would be waited for.

    Raises:
        SurgeryError: it does.
    """
    if os.path.exists(path) and not (os.path.isfile(path) or os.path.isdir(path)):
        raise SurgeryError(f"{path} is a pipe or a device and no file; give a file")


def write(path: Path, arrays: Mapping[str, Array], overwrite: bool = False, source: Path | None = None) -> None:
    """Write an .npz file.

    Args:
        path: the file.
        arrays: what is in it, by name.
        overwrite: may an existing file be replaced?
        source: the model that they come from, which is never written to.

    Raises:
        SurgeryError: it cannot be written, exists, or does not end in .npz.
    """
    if path.suffix != ".npz":
        raise SurgeryError(f"{path} is no name for arrays; let it end in .npz")
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


LEAST = 1 << 20
"""Bytes from which on an array is worth a file of its own: a choice, so that a model is not thousands of files.
"""


def set_aside(array: Array, folder: str | os.PathLike[str] | None = None, *, written: bool = False) -> Array:
    """The same numbers in a file; a small array as it is.

    Args:
        array: also of numbers of less than a byte, whose type is kept.
        folder: on the disk that has room; that of the system for temporary files by default.
        written: may the array be written to? What is written stays in memory.
    """
    if array.nbytes < LEAST:
        return array
    with tempfile.TemporaryFile(dir=folder) as file:
        np.ascontiguousarray(array).tofile(file)
        held = np.memmap(file, dtype=array.dtype.str, mode="c" if written else "r", shape=array.shape)
    return np.asarray(held).view(array.dtype)


__all__ = ["LEAST", "set_aside"]
