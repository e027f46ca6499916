"""Read and write `weight.bin`, the file with the weights of a package.

`WeightFile` maps a file into memory and returns weights as views of it, or unpacked if their elements take
less than a byte. `WeightWriter` writes a new file: unchanged weights are copied from file to file, and equal
contents are written once. A blob is 64 bytes of metadata, followed by the data, aligned to 64 bytes.
"""

from __future__ import annotations

import errno
import math
import os
import struct
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import astuple, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, cast

import numpy as np

from anesurgery.errors import LoadError
from anesurgery.files import sub_byte
from anesurgery.files.progress import advance
from anesurgery.files.source import SourceFile
from anesurgery.mil import Array, Var, types

ALIGNMENT = 64
HEADER = struct.Struct("<II")
METADATA = struct.Struct("<IIQQQ")
SENTINEL = 0xDEADBEEF
COPIED_PIECE = 1 << 24
"""Bytes that are copied at a time, after which the progress is reported. A choice."""
COMPARED_PIECE = 1 << 22
"""Bytes that are compared at a time, as both sides are in memory. A choice."""
SAMPLE = 256
"""Bytes at the start, the middle and the end by which most contents differ."""

TYPE_CODES: dict[str, int] = {
    "float16": 1,
    "float32": 2,
    "uint8": 3,
    "int8": 4,
    "int16": 6,
    "uint16": 7,
    "int32": 14,
    "uint32": 15,
}
"""Numpy dtype -> data type code of a blob, for dtypes that are stored as numpy holds them."""

PACKED_TYPE_CODES: dict[str, int] = {"int4": 8, "uint1": 9, "uint2": 10, "uint4": 11, "uint3": 12, "uint6": 13}
"""MIL dtype -> data type code of a blob, for dtypes of less than a byte."""

NO_KERNEL_COPY = {errno.ENOSYS, errno.EXDEV, errno.EINVAL, errno.EOPNOTSUPP, errno.EPERM, errno.EBADF}
"""The error codes of a kernel that cannot copy between two files."""


@dataclass(frozen=True)
class Blob:
    """One weight in a file."""

    code: int
    """The type of the elements, by `TYPE_CODES` or `PACKED_TYPE_CODES`."""
    size: int
    """Bytes of the data."""
    data: int
    """The offset of the data in the file."""
    padding: int
    """Bits of the last byte that hold no element."""
    place: int = 0
    """The offset of the metadata in the file."""


Reader = Callable[[int, int], bytes]
"""(offset, count) -> so many bytes of a content."""


class Mapped(np.memmap):
    """A mapped file, or a part of one that zeros follow."""

    source: SourceFile
    stored_bytes: int | None = None
    """How many bytes of the part are those of the file; None where all are."""


def _mapping_of(array: Any) -> Mapped | None:
    """Return the map of a file that an array is a view of; None for other arrays."""
    while isinstance(array, np.ndarray):
        if hasattr(array, "source"):  # views of a map have its class, and not this attribute
            return cast(Mapped, array)
        array = array.base
    return None


def source_of(array: Any) -> SourceFile | None:
    """Return the file that an array is a view of; None for other arrays.

    Check that file before you read the array: reading a mapped file that was truncated ends the process.
    """
    mapping = _mapping_of(array)
    return None if mapping is None else mapping.source


def followed_by_zeros(array: Array, shape: tuple[int, ...]) -> Array | None:
    """Return a stored weight in a longer shape, with zeros after its elements, without reading the weight.

    The result is a private map of the file: only the pages of the zeros take memory of their own.

    Returns:
        None where the array is no contiguous view of a mapped file, or the file is too short to map the shape.
    """
    mapping = _mapping_of(array)
    if mapping is None or mapping.stored_bytes is not None or not array.flags.c_contiguous:
        return None
    offset = array.ctypes.data - mapping.ctypes.data
    try:
        with open(mapping.source.handle, "rb", closefd=False) as file:
            longer = Mapped(file, dtype=array.dtype, mode="c", offset=offset, shape=shape)
    except ValueError:
        return None
    longer.reshape(-1)[array.size :] = 0
    longer.source, longer.stored_bytes = mapping.source, array.nbytes
    longer.flags.writeable = False
    return np.asarray(longer)


class WeightFile:
    """A `weight.bin`, mapped into memory. Its arrays are views, and nothing is read before it is used."""

    def __init__(self, path: Path) -> None:
        self.path, self.source = path, SourceFile(path)
        try:
            with open(self.source.handle, "rb", closefd=False) as file:
                self._map = Mapped(file, dtype=np.uint8, mode="r")
        except (OSError, ValueError) as error:
            raise LoadError(
                f"the weight file {path} cannot be read: {error}; copy the package again"
            ) from error
        self._map.source = self.source
        self._address = self._map.ctypes.data
        self._blobs: dict[int, Blob] = {}
        """Address of a blob's data in memory -> the blob."""
        self._unpacked: dict[int, tuple[Blob, weakref.ref[Array]]] = {}
        """Address of an unpacked array -> its blob, and the array: another one may get its address later."""

    def blob(self, offset: int) -> Blob:
        """Read the metadata at `offset` and return the blob.

        Raises:
            LoadError: the file is too short, or has no metadata there.
        """
        if offset + METADATA.size > self._map.size:
            raise LoadError(self._truncated(offset + METADATA.size))
        sentinel, code, size, data, padding = METADATA.unpack(self._metadata(offset))
        if sentinel != SENTINEL:
            raise LoadError(
                f"{self.path} holds no weight at offset {offset}; the file is damaged, copy it again"
            )
        if data + size > self._map.size:
            raise LoadError(self._truncated(data + size))
        if data < ALIGNMENT or (data < offset + ALIGNMENT and data + size > offset):
            raise LoadError(f"{self.path}: the weight at {offset} lies over what describes it; copy it again")
        blob = Blob(code, size, data, padding, offset)
        self._blobs[self._address + data] = blob
        return blob

    def _metadata(self, offset: int) -> bytes:
        """Return the metadata at an offset, read from the file: the map of a truncated file cannot be read."""
        try:
            metadata = os.pread(self.source.handle, METADATA.size, offset)
        except OSError as error:
            raise LoadError(f"{self.path} cannot be read: {error.strerror}; copy the package again") from error
        if len(metadata) < METADATA.size:
            raise LoadError(f"{self.path} was cut short after it was opened; load it again")
        return metadata

    def _truncated(self, wanted: int) -> str:
        return (
            f"{self.path} ends at byte {self._map.size}, but the model needs {wanted}: "
            "the file is cut short; copy the package again"
        )

    def array(self, offset: int, dtype: Any, shape: tuple[int, ...]) -> Array:
        """Return a view of the weight at an offset."""
        blob, dtype = self.blob(offset), np.dtype(dtype)
        code = TYPE_CODES.get(dtype.name, blob.code)
        # the padding is not checked: old writers left the field unset for whole bytes
        expected = replace(blob, code=code, size=math.prod(shape) * dtype.itemsize)
        self._check_blob(blob, expected, f"{shape} {dtype}")
        raw = self._map[blob.data : blob.data + blob.size]
        return np.asarray(raw).view(dtype).reshape(shape)

    def unpacked(self, offset: int, element: Any, shape: tuple[int, ...]) -> Array:
        """Return a weight whose elements take less than a byte, unpacked into an array of its own."""
        blob, bits = self.blob(offset), int(element.get_bitwidth())
        count, name = math.prod(shape), str(types.builtin_to_string(element))
        size = (count * bits + 7) // 8
        code = PACKED_TYPE_CODES.get(name, blob.code)
        expected = replace(blob, code=code, size=size, padding=8 * size - count * bits)
        self._check_blob(blob, expected, f"{shape} {name}")
        raw = np.asarray(self._map[blob.data : blob.data + blob.size])
        array = sub_byte.unpack(raw, bits, not element.is_unsigned(), shape)
        array = array.view(types.nptype_from_builtin(element))  # which tells coremltools the type
        array.flags.writeable = False
        self._unpacked[array.ctypes.data] = (blob, weakref.ref(array))
        return array

    def _check_blob(self, blob: Blob, expected: Blob, words: str) -> None:
        """Raise a LoadError if a blob has another size, type or padding than the program declares, in words."""
        if blob.size != expected.size:
            raise LoadError(f"{self.path}: the weight at {blob.place} has {blob.size} bytes, expected {words}")
        if blob != expected:
            raise LoadError(
                f"{self.path}: the weight at {blob.place} is of the type {blob.code} with {blob.padding} bits "
                f"of padding, expected {expected.code} with {expected.padding} for {words}; it is that of "
                "another model"
            )

    def blob_of(self, array: Array) -> Blob | None:
        """Return the blob that an array is an unchanged view of; None for other arrays."""
        if not array.flags.c_contiguous:
            return None
        if (unpacked := self._unpacked.get(array.ctypes.data)) is not None:
            packed_blob, original = unpacked
            if array is original():
                return packed_blob
        blob = self._blobs.get(array.ctypes.data)
        return blob if blob is not None and blob.size == array.nbytes else None

    def copy_to(self, file: BinaryIO) -> None:
        """Copy the whole file, as it was when it was opened, into a new file.

        Raises:
            LoadError: it was changed in between.
        """
        _copy_bytes(self.source, file, count=self.source.size, start=0, target=0)
        self.source.check()

    def read(self, blob: Blob, offset: int, count: int) -> bytes:
        """Return some bytes of a blob, read from the file: mapped pages would stay in memory."""
        return os.pread(self.source.handle, min(count, blob.size - offset), blob.data + offset)

    def check(self, blob: Blob) -> None:
        """Check that the file and the metadata of a blob have not changed.

        Raises:
            LoadError: they have.
        """
        self.source.check()
        if self._metadata(blob.place) != METADATA.pack(SENTINEL, blob.code, blob.size, blob.data, blob.padding):
            raise LoadError(f"{self.path} was changed after it was read; load it again")


class WeightWriter:
    """Writes a new `weight.bin`, each content once."""

    def __init__(self, file: BinaryIO, *sources: WeightFile | None) -> None:
        self._file, self._sources = file, [source for source in sources if source is not None]
        self._count, self._end = 0, ALIGNMENT
        self._copies: dict[Any, int] = {}
        """(source file, place in it) -> its offset in the new file."""
        self._contents: dict[Any, list[int]] = {}
        """(type, size, sample) -> offsets of contents with these."""
        file.write(bytes(ALIGNMENT))

    def add(self, var: Var) -> int:
        """Write the value of a constant unless the file has it already; return the offset of its metadata."""
        array = np.asarray(var.val)
        for source in self._sources:
            if (blob := source.blob_of(array)) is not None:  # stored unchanged in a source file
                source_blob = (source.source.identity, blob.data)
                return self._copied_once(source_blob, blob.size, partial(self._copy_or_reuse, source, blob))
        mapping = _mapping_of(array)
        if mapping is not None:
            mapping.source.check()
        blob, raw = _encoded(var, array)
        if mapping is not None and mapping.stored_bytes is not None and mapping.nbytes == raw.nbytes:
            # stored with zeros behind it, see `followed_by_zeros`; numpy says where the map begins in the file
            part = replace(blob, data=mapping.offset)
            copy = partial(self._copy, mapping.source, part, mapping.stored_bytes)
            return self._copied_once((mapping.source.identity, *astuple(part)), blob.size, copy)
        return self._deduplicated(
            blob, lambda offset, count: raw[offset : offset + count].tobytes(), lambda: self._write(blob, raw)
        )

    def _copied_once(self, key: Any, size: int, copy: Callable[[], int]) -> int:
        """Return the offset of what was copied from a file; copy it if it was not yet."""
        if key in self._copies:
            advance(size)
        else:
            self._copies[key] = copy()
        return self._copies[key]

    def finish(self) -> None:
        """Write the header, which completes the file.

        Raises:
            LoadError: a source file was changed in between.
        """
        self._file.seek(0)
        self._file.write(HEADER.pack(self._count, 2))
        self._file.truncate(self._end)
        for source in self._sources:
            source.source.check()

    @contextmanager
    def _new_entry(self, blob: Blob) -> Iterator[int]:
        """Write the metadata of a blob and yield its offset; the caller writes the data after it."""
        start = self._end
        self._file.seek(start)
        meta = METADATA.pack(SENTINEL, blob.code, blob.size, start + ALIGNMENT, blob.padding)
        self._file.write(meta.ljust(ALIGNMENT, b"\0"))
        yield start
        self._count += 1
        self._end = start + ALIGNMENT + -(-blob.size // ALIGNMENT) * ALIGNMENT

    def _copy_or_reuse(self, source: WeightFile, blob: Blob) -> int:
        """Copy a blob and return its offset; with several sources, reuse an equal content."""
        source.check(blob)
        copy = partial(self._copy, source.source, blob, blob.size)
        return copy() if len(self._sources) == 1 else self._deduplicated(blob, partial(source.read, blob), copy)

    def _write(self, blob: Blob, raw: Any) -> int:
        with self._new_entry(blob) as offset:
            self._file.write(raw)
        advance(blob.size)
        return offset

    def _deduplicated(self, blob: Blob, read: Reader, write: Callable[[], int]) -> int:
        """Return the offset of a content in this file; write it if it is not there yet.

        Samples exclude most contents; those with the same sample are compared as a whole.
        """
        middle = max(0, blob.size // 2 - SAMPLE)
        sample = b"".join(read(offset, SAMPLE) for offset in (0, middle, max(0, blob.size - SAMPLE)))
        offsets = self._contents.setdefault((blob.code, blob.size, sample), [])
        for offset in offsets:
            if self._is_written_at(offset + ALIGNMENT, blob.size, read):
                advance(blob.size)
                return offset
        offsets.append(write())
        return offsets[-1]

    def _is_written_at(self, start: int, size: int, read: Reader) -> bool:
        """Is the content at `start` of this file equal to the one that `read` returns?"""
        self._file.flush()
        handle = self._file.fileno()
        for offset in range(0, size, COMPARED_PIECE):
            count = min(COMPARED_PIECE, size - offset)
            if os.pread(handle, count, start + offset) != read(offset, count):
                return False
        return True

    def _copy(self, source: SourceFile, blob: Blob, count: int) -> int:
        """Copy the first `count` bytes of a blob, inside the kernel if possible; zeros follow in the file.

        Returns:
            Its offset.
        """
        with self._new_entry(blob) as offset:
            self._file.flush()
            target = offset + ALIGNMENT
            _copy_bytes(source, self._file, count=count, start=blob.data, target=target, reported=True)
            advance(blob.size - count)
            self._file.seek(target + count)
        return offset


def _encoded(var: Var, array: Array) -> tuple[Blob, Array]:
    """Return the blob of a constant, not yet in a file, and its bytes as an array of uint8."""
    if types.is_sub_byte(var.dtype):
        bits = int(var.dtype.get_bitwidth())
        raw = sub_byte.pack(array, bits)
        code = PACKED_TYPE_CODES[types.builtin_to_string(var.dtype)]
        return Blob(code, raw.nbytes, data=0, padding=8 * raw.nbytes - array.size * bits), raw
    if array.dtype.name not in TYPE_CODES:
        raise LoadError(f"%{var.name}: a weight file cannot hold {array.dtype}; cast it to fp16 or fp32")
    raw = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    return Blob(TYPE_CODES[array.dtype.name], raw.nbytes, data=0, padding=0), raw


def _copy_bytes(
    source: SourceFile, file: BinaryIO, *, count: int, start: int, target: int, reported: bool = False
) -> None:
    """Copy bytes from the offset `start` of a file to the offset `target` of another; may report each piece.

    Raises:
        LoadError: the source ends before.
    """
    end = start + count
    while start < end:
        copied = _copy_range(source.handle, file, min(end - start, COPIED_PIECE), start, target)
        if not copied:
            raise LoadError(f"{source.path} was cut short after it was read; copy the package again")
        start, target = start + copied, target + copied
        if reported:
            advance(copied)


def _copy_range(source: int, file: BinaryIO, count: int, start: int, target: int) -> int:
    """Copy up to `count` bytes from one offset to another; return how many, 0 at the end of the source."""
    if hasattr(os, "copy_file_range"):
        try:
            copied = os.copy_file_range(source, file.fileno(), count, start, target)
        except OSError as error:
            if error.errno not in NO_KERNEL_COPY:
                raise
        else:
            if copied:
                return copied  # some file systems return 0 for files that they cannot copy
    file.seek(target)
    return file.write(os.pread(source, count, start))
