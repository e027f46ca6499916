"""Read and write `weight.bin`: mapped on the way in, copied file to file on the way out.

The file: a header of 64 bytes (number of blobs, version 2), then for each blob 64 bytes of metadata
(sentinel, data type, size, offset of the data, padding in bits) and the data, all aligned to 64 bytes.
"""

from __future__ import annotations

import hashlib
import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from anesurgery.errors import LoadError
from anesurgery.mil import Array, Var, types

ALIGNMENT = 64
HEADER = struct.Struct("<II")
METADATA = struct.Struct("<IIQQQ")
SENTINEL = 0xDEADBEEF
PIECE = 1 << 24

STORED: dict[str, int] = {
    "float16": 1,
    "float32": 2,
    "uint8": 3,
    "int8": 4,
    "int16": 6,
    "uint16": 7,
    "int32": 14,
    "uint32": 15,
}
"""Data type code of a blob by numpy dtype, for the types that numpy holds as they are stored."""


@dataclass(frozen=True)
class Blob:
    """One weight in a file."""

    code: int
    size: int
    data: int
    """Offset of the data in the file."""
    padding: int


class WeightFile:
    """A `weight.bin`, mapped into memory; its arrays are views and nothing is read before it is used."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._map = np.memmap(path, dtype=np.uint8, mode="r")
        except (OSError, ValueError) as error:
            raise LoadError(
                f"the weight file {path} cannot be read: {error}; copy the package again"
            ) from error
        self._address = self._map.ctypes.data
        self._blobs: dict[int, Blob] = {}

    def blob(self, offset: int) -> Blob:
        """The blob whose metadata stands at `offset`.

        Raises:
            LoadError: the file is too short or holds something else there.
        """
        if offset + METADATA.size > self._map.size:
            raise LoadError(self._short(offset))
        sentinel, code, size, data, padding = METADATA.unpack(
            self._map[offset : offset + METADATA.size].tobytes()
        )
        if sentinel != SENTINEL:
            raise LoadError(
                f"{self.path} holds no weight at offset {offset}; the file is damaged, copy it again"
            )
        if data + size > self._map.size:
            raise LoadError(self._short(data + size))
        blob = Blob(code, size, data, padding)
        self._blobs[self._address + data] = blob
        return blob

    def _short(self, wanted: int) -> str:
        return (
            f"{self.path} ends at byte {self._map.size}, but the model needs {wanted}: "
            "the file is cut short; copy the package again"
        )

    def array(self, offset: int, dtype: Any, shape: tuple[int, ...]) -> Array:
        """A view of a weight."""
        blob, dtype = self.blob(offset), np.dtype(dtype)
        if blob.size != int(np.prod(shape, dtype=np.int64)) * dtype.itemsize:
            raise LoadError(
                f"{self.path}: the weight at {offset} has {blob.size} bytes, expected {shape} {dtype}"
            )
        raw = self._map[blob.data : blob.data + blob.size]
        return np.asarray(raw).view(dtype).reshape(shape)

    def holds(self, array: Array) -> Blob | None:
        """The blob that an array is an unchanged view of, if it is one."""
        blob = self._blobs.get(array.ctypes.data)
        return blob if blob is not None and blob.size == array.nbytes and array.flags.c_contiguous else None


class WeightWriter:
    """Writes a new `weight.bin`, each content once."""

    def __init__(self, file: BinaryIO, source: WeightFile | None, scratch: Path) -> None:
        self._file, self._source, self._scratch = file, source, scratch
        self._count, self._end = 0, ALIGNMENT
        self._known: dict[Any, int] = {}
        file.write(bytes(ALIGNMENT))

    def add(self, var: Var) -> int:
        """Write the value of a constant, unless it is in the file; the offset of its metadata."""
        array = np.asarray(var.val)
        blob = self._source.holds(array) if self._source is not None else None
        if blob is not None and self._source is not None:
            if ("source", blob.data) not in self._known:
                with self._source.path.open("rb") as file:
                    self._known["source", blob.data] = self._copy(file, blob)
            return self._known["source", blob.data]
        if array.dtype.name not in STORED or _packed(var):
            return self._by_host(var)
        array = np.ascontiguousarray(array)
        raw: Any = array.reshape(-1).view(np.uint8)  # numpy's buffers are not typed as such
        key = (STORED[array.dtype.name], array.nbytes, hashlib.blake2b(raw, digest_size=16).digest())
        if key not in self._known:
            with self._entry(Blob(key[0], array.nbytes, 0, 0)) as offset:
                self._file.write(raw)
            self._known[key] = offset
        return self._known[key]

    def finish(self) -> None:
        """Write the header; the file is complete."""
        self._file.seek(0)
        self._file.write(HEADER.pack(self._count, 2))

    @contextmanager
    def _entry(self, blob: Blob) -> Iterator[int]:
        """Place the metadata of a blob; the caller writes the data behind it."""
        start = self._end
        self._file.seek(start)
        meta = METADATA.pack(SENTINEL, blob.code, blob.size, start + ALIGNMENT, blob.padding)
        self._file.write(meta.ljust(ALIGNMENT, b"\0"))
        yield start
        self._count += 1
        self._end = start + ALIGNMENT + -(-blob.size // ALIGNMENT) * ALIGNMENT

    def _copy(self, file: BinaryIO, blob: Blob) -> int:
        """Copy a blob from another file, by the kernel where it can."""
        with self._entry(blob) as offset:
            self._file.flush()
            at, left = blob.data, blob.size
            target = offset + ALIGNMENT
            while left:
                done = _copy_range(file, self._file, min(left, PIECE), at, target)
                at, target, left = at + done, target + done, left - done
            self._file.seek(target)
        return offset

    def _by_host(self, var: Var) -> int:
        """Let coremltools store a type that numpy does not have (sub-byte), and copy what it wrote."""
        from coremltools.converters.mil.backend.mil import helper
        from coremltools.libmilstoragepython import _BlobStorageWriter

        key = ("host", id(var.val))
        if key not in self._known:
            self._scratch.unlink(missing_ok=True)
            writer = _BlobStorageWriter(str(self._scratch))
            offset = helper._get_offset_by_writing_data(var, writer)
            del writer  # it writes when it goes
            with self._scratch.open("rb") as file:
                file.seek(offset)
                _, code, size, data, padding = METADATA.unpack(file.read(METADATA.size))
                self._known[key] = self._copy(file, Blob(code, size, data, padding))
            self._scratch.unlink()
        return self._known[key]


def _packed(var: Var) -> bool:
    """Is the element type smaller than a byte (numpy holds it in a wider one)?"""
    return bool(types.is_sub_byte(var.dtype))


def _copy_range(source: BinaryIO, target: BinaryIO, count: int, at: int, to: int) -> int:
    if hasattr(os, "copy_file_range"):
        try:
            return os.copy_file_range(source.fileno(), target.fileno(), count, at, to)
        except OSError as error:
            if error.errno is not None and os.strerror(error.errno) == os.strerror(28):
                raise  # no space left: a plain write would fail as well
    source.seek(at)
    target.seek(to)
    return target.write(source.read(count))
