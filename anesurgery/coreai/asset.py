"""Check the folder of a Core AI model (`.aimodel`) before Apple's code reads it.

Apple's reader ends the process on a program that is cut or empty, so `Asset.open` checks the frame of the
program (`bytecode`) and its hash first.
"""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from anesurgery.coreai.bytecode import Bytecode
from anesurgery.errors import LoadError, missing
from anesurgery.files.source import SourceFile, read_text

SUFFIX = ".aimodel"
PROGRAM, HASH, METADATA = "main.mlirb", "main.hash", "metadata.json"
"""The files of the folder."""
FORMAT = "2."
"""Prefix of known versions of the folder; coreai-core 1.0.0b3 writes 2.0, and no other is published."""
LARGEST = 1 << 38
"""The most bytes of a program, 275 GB: no published model has a tenth of it, and each byte is hashed."""
PIECE = 1 << 22
"""Bytes that are hashed at once: 4.2 MB, a choice."""


@dataclass(frozen=True)
class Asset:
    """A folder that was checked, and may be given to Apple's code."""

    path: Path
    metadata: dict[str, Any]
    bytecode: Bytecode

    @classmethod
    def open(cls, path: Path) -> Asset:
        """Open and check a folder.

        Raises:
            LoadError: it is missing, no Core AI model, of an unknown version, or damaged.
        """
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
    """Read the folder's metadata.

    Raises:
        LoadError: it is no JSON, or of an unknown version.
    """
    try:
        metadata = json.loads(read_text(file))
        version = metadata["assetVersion"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise LoadError(f"{file} cannot be understood: {error!r}; copy the model again") from error
    if not str(version).startswith(FORMAT):
        raise LoadError(f"{file} is of version {version}, and {FORMAT}x is known; update anesurgery")
    return metadata


def _check_hash(bytecode: Bytecode, stated: SourceFile) -> None:
    """Check that the program is the one that the folder was written with.

    Raises:
        LoadError: the hashes differ.
    """
    digest, data = hashlib.sha256(), bytecode.data
    for at in range(0, len(data), PIECE):
        digest.update(data[at : at + PIECE])
    if stated.read(PIECE) != digest.digest():
        raise LoadError(f"{bytecode.path} is not what {HASH} says; it was changed or cut: copy the model again")
