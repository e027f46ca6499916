"""Compiled models out of packages, as Apple's compiler lays them out, for tests without one of its own."""

from __future__ import annotations

import shutil
from pathlib import Path

import anesurgery as ane
from anesurgery.files.compiled import DATA, PROGRAM_TEXT
from anesurgery.files.compiled_interface import BYTES_BEFORE_DESCRIPTION, KIND, LENGTH, TARGET
from anesurgery.files.protobuf import proto
from anesurgery.loading import load

GENERIC = b"generic"


def compile_package(package: Path, target: Path) -> Path:
    """Write the text of a package, its weights and its description as a compiled model."""
    loaded = load(package)
    target.mkdir()
    if loaded.weights is not None:
        shutil.copytree(loaded.weights.path.parent, target / "weights")
    (target / PROGRAM_TEXT).write_text(ane.to_text(loaded, dialect="mil"), encoding="utf-8")
    kind = proto.Model_pb2.Model.DESCRIPTOR.fields_by_name["mlProgram"].number
    description = loaded.spec.description.SerializeToString()
    (target / DATA).write_bytes(
        KIND.pack(kind).ljust(TARGET, b"\0")
        + LENGTH.pack(len(GENERIC))
        + GENERIC
        + KIND.pack(loaded.version)
        + bytes(BYTES_BEFORE_DESCRIPTION)
        + LENGTH.pack(len(description))
        + description
    )
    return target
