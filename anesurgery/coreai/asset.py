"""Check the folder of a Core AI model (`.aimodel`) before Apple's code reads it, and map its large weights.

Apple's reader ends the process on a program that is cut or empty, and its bindings do not return large weights.
So `Asset.open` parses the frame of the program (sections, strings, resources) itself, and checks its hash; ops,
types and attributes are left to Apple's code. The format is MLIR's:
https://mlir.llvm.org/docs/BytecodeFormat/. Every number in the file is checked before it is used.
"""

from __future__ import annotations

import hashlib
import mmap
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from anesurgery.errors import DAMAGED, LoadError, damage, missing
from anesurgery.files.source import SourceFile, read_json
from anesurgery.mil import Array

SUFFIX = ".aimodel"
PROGRAM, HASH, METADATA = "main.mlirb", "main.hash", "metadata.json"
"""The files of the folder."""
FORMAT = "2."
"""Prefix of known versions of the folder; coreai-core 1.0.0b3 writes 2.0, and no other is published."""
LARGEST = 1 << 38
"""The most bytes of a program, 275 GB: no published model has a tenth of it, and each byte is hashed."""
LARGEST_HASH = 1 << 22
"""The most bytes that are read of the file with the hash, which has 32: a larger one is named by its size."""

MAGIC = b"ML\xefR"
OLDEST, NEWEST = 1, 6
"""Versions of the format with this frame; MLIR writes 6 since 2023, and so does Core AI."""
ALIGNED, SECTION = 0x80, 0x7F
"""Bits of a section's first byte: one says that an alignment follows, the others are the section's number."""
STRINGS, RESOURCES, OFFSETS = 0, 5, 6
"""Numbers of the sections that are parsed."""
BLOB = 0
"""The kind of resource that holds bytes; others hold a flag or a string."""


@dataclass
class Cursor:
    """A position in a part of the file."""

    data: memoryview
    at: int
    end: int

    def byte(self) -> int:
        """Read the next byte."""
        self.check_remaining(1)
        self.at += 1
        return self.data[self.at - 1]

    def number(self) -> int:
        """Read a variable-length number: the low zero bits of its first byte count the bytes that follow."""
        first = self.byte()
        more = (first & -first).bit_length() - 1 if first else 8
        self.check_remaining(more)
        rest = int.from_bytes(self.data[self.at : self.at + more], "little")
        self.at += more
        return rest if more == 8 else (rest << (7 - more)) | (first >> (more + 1))

    def check_remaining(self, count: int) -> None:
        """Check that so many bytes follow."""
        if count < 0 or count > self.end - self.at:
            raise ValueError(f"byte {self.at} announces {count} more, and {self.end - self.at} follow")

    def part(self, count: int) -> Cursor:
        """Return a cursor over the next bytes, and skip them."""
        self.check_remaining(count)
        self.at += count
        return Cursor(self.data, self.at - count, self.at)

    def align(self, to: int) -> None:
        """Skip to the next multiple of a power of two."""
        if to < 1 or to & (to - 1):
            raise ValueError(f"byte {self.at} asks for an alignment of {to}, which is no power of 2")
        ahead = -self.at % to
        self.check_remaining(ahead)
        self.at += ahead


@dataclass
class Bytecode:
    """The frame of a bytecode file; a LoadError where it is no bytecode, is cut, or contradicts itself."""

    path: Path
    producer: str = field(init=False)
    resources: dict[str, tuple[int, int]] = field(init=False)
    """Key of a large constant -> (its first byte in the file, its number of bytes)."""

    def __post_init__(self) -> None:
        """Parse the frame; the content stays mapped."""
        self.source = SourceFile(self.path)
        try:
            if self.source.size == 0:
                raise ValueError("it is empty")
            self.data = memoryview(mmap.mmap(self.source.handle, 0, access=mmap.ACCESS_READ))
            self._read(Cursor(self.data, 0, len(self.data)))
        except (ValueError, UnicodeDecodeError, OSError) as error:
            raise LoadError(f"{self.path} is no program of Core AI, or is damaged: {error}") from error

    def _read(self, file: Cursor) -> None:
        if bytes(self.data[:4]) != MAGIC:
            raise ValueError("it does not begin as MLIR's bytecode does")
        file.part(4)
        if not OLDEST <= (version := file.number()) <= NEWEST:
            raise ValueError(f"its format is version {version}, and {OLDEST} to {NEWEST} are known")
        begin = file.at
        while file.byte():
            pass
        self.producer = bytes(self.data[begin : file.at - 1]).decode()
        sections: dict[int, Cursor] = {}
        while file.at < file.end:
            kind, length = file.byte(), file.number()
            if kind & ALIGNED:
                file.align(file.number())
            if kind & SECTION in sections:
                raise ValueError(f"section {kind & SECTION} comes twice")
            sections[kind & SECTION] = file.part(length)
        if STRINGS not in sections:
            raise ValueError("it has no strings")
        self.resources = _resources(sections, _strings(sections[STRINGS])) if OFFSETS in sections else {}

    def array(self, key: str, dtype: np.dtype[np.generic], count: int) -> Array:
        """Return `count` elements of a large constant, as a view of the file; uint8 for packed elements.

        Raises:
            LoadError: the file has no such constant, or it has another size.
        """
        if key not in self.resources:
            raise LoadError(f"{self.path} lacks the weight {key!r}; copy the model again")
        begin, size = self.resources[key]
        if size != count * dtype.itemsize:
            words = f"{size} bytes, and its type needs {count * dtype.itemsize}"
            raise LoadError(f"{self.path}: the weight {key!r} has {words}; copy the model again")
        return np.frombuffer(self.data, dtype, count, begin)


def _strings(section: Cursor) -> list[str]:
    """Parse the strings; their lengths come first, in reverse order."""
    count = section.number()
    section.check_remaining(count)  # each length takes a byte at least
    lengths = [section.number() for _ in range(count)][::-1]
    pieces = [section.part(length) for length in lengths]
    return [bytes(p.data[p.at : p.end]).rstrip(b"\0").decode() for p in pieces]


def _resources(sections: dict[int, Cursor], strings: list[str]) -> dict[str, tuple[int, int]]:
    """Parse where the bytes of each resource are; the group without a dialect comes first."""
    offsets, found = sections[OFFSETS], dict[str, tuple[int, int]]()
    values = sections.get(RESOURCES, Cursor(offsets.data, 0, 0))
    offsets.number()  # groups that belong to no dialect
    while offsets.at < offsets.end:
        offsets.number()  # whose group it is
        for _ in range(offsets.number()):
            key, size, kind = offsets.number(), offsets.number(), offsets.byte()
            value = values.part(size)
            if key >= len(strings):
                raise ValueError(f"a weight is named by string {key}, and there are {len(strings)}")
            if kind == BLOB:
                alignment, length = value.number(), value.number()
                value.align(alignment)
                value.check_remaining(length)
                found[strings[key]] = (value.at, length)
    return found


@dataclass(frozen=True)
class Asset:
    """A folder that was checked, and may be given to Apple's code."""

    path: Path
    metadata: dict[str, Any]
    bytecode: Bytecode

    @classmethod
    def open(cls, path: Path) -> Asset:
        """Open a folder; a LoadError where it is missing, damaged, no model, or of an unknown version."""
        if not path.exists():
            raise LoadError(missing(path))
        if not path.is_dir():
            raise LoadError(f"{path} is no folder, as models of Core AI are; unzip it, or copy it again")
        if absent := [name for name in (METADATA, PROGRAM, HASH) if not os.path.lexists(path / name)]:
            raise LoadError(f"{path} lacks {' and '.join(absent)}; copy the whole folder again")
        metadata, program = _read_metadata(path / METADATA), SourceFile(path / PROGRAM)
        if program.size > LARGEST:
            words = f"{program.size} bytes, and at most {LARGEST} are read"
            raise LoadError(f"{program.path} has {words}; it is damaged, or raise {__name__}.LARGEST")
        bytecode = Bytecode(path / PROGRAM)
        _check_hash(bytecode, SourceFile(path / HASH))
        bytecode.source.check_place()
        return cls(path, metadata, bytecode)


def _read_metadata(file: Path) -> dict[str, Any]:
    """Read the folder's metadata; its version must be known."""
    try:
        metadata = read_json(file)
        version = metadata["assetVersion"]
    except DAMAGED as error:
        raise LoadError(f"{file} cannot be understood: {damage(error)}; copy the model again") from error
    if not str(version).startswith(FORMAT):
        raise LoadError(f"{file} is of version {version}, and {FORMAT}x is known; update anesurgery")
    return metadata


def _check_hash(bytecode: Bytecode, stated: SourceFile) -> None:
    """Check that the program is the one that the folder was written with."""
    if stated.read(LARGEST_HASH) != hashlib.sha256(bytecode.data).digest():
        raise LoadError(f"{bytecode.path} is not what {HASH} says; it was changed or cut: copy the model again")
