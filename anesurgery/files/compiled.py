"""Read a compiled ML Program (`.mlmodelc`, a folder) into the specification of a package.

=================== ======================================================================================
`model.mil`         the program as text; becomes the protobuf of a package, op for op
`weights/`          the weight files, unchanged: offsets in the text are offsets in the file
`coremldata.bin`    the description of the model as a package holds it
`metadata.json`     the same in words, for people and Xcode; used where `coremldata.bin` cannot be
=================== ======================================================================================

The compiler puts inputs in the order of their names (the description has them in the old order), and adds its
versions to the program's `buildInfo`.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from anesurgery.errors import LoadError
from anesurgery.files.compiled_interface import CompiledDescription, describe_compiled, read_container
from anesurgery.files.mil_text import read_mil
from anesurgery.files.protobuf import operations, proto, weight_files
from anesurgery.files.source import SourceFile, not_fetched, read_json, system_failed
from anesurgery.mil import ct

PROGRAM_TEXT = "model.mil"
TEXT_SUFFIX = ".mil"
DATA = "coremldata.bin"
METADATA = "metadata.json"
NETWORK = "model.espresso.net"
SUFFIX = ".mlmodelc"
WEIGHTS = "weights"


@dataclass(frozen=True)
class Compiled:
    """The content of a compiled model."""

    spec: Any
    """Model protobuf; its weights are in the folder `weights` of the compiled model."""
    version: str
    """The version of the MIL text: "1.0", "1.3"."""
    notes: tuple[str, ...]
    """What could not be recovered, or came from another file than usual."""
    source: SourceFile
    """The file of the text."""


def is_compiled(path: Path) -> bool:
    """Is a path a compiled model?"""
    if not os.path.isdir(path):  # unlike Path's, it takes any name
        return False
    return path.suffix == SUFFIX or any((path / name).is_file() for name in (DATA, PROGRAM_TEXT, NETWORK))


def is_network(path: Path) -> bool:
    """Is a path a compiled neural network, which has no program?"""
    return os.path.isfile(path / NETWORK) and not os.path.exists(path / PROGRAM_TEXT)


def is_text(path: Path) -> bool:
    """Is a path a file of MIL text?"""
    return path.suffix == TEXT_SUFFIX and os.path.isfile(path)


def read_compiled(folder: Path, name: str = PROGRAM_TEXT) -> Compiled:
    """Read a compiled ML Program.

    Args:
        folder: the folder with the text, `weights/` and the descriptions, as far as they exist.
        name: the name of the text file.

    Raises:
        LoadError: it is damaged, or holds something else.
    """
    file = folder / name
    if not file.is_file():
        raise LoadError(_why_no_program(folder))
    opened = SourceFile(file)
    raw = opened.read()
    if why_not := not_fetched(file, raw):
        raise LoadError(why_not)
    try:
        content = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise LoadError(f"{file} is not a text: {error}; copy the compiled model again") from error
    text = read_mil(content, str(file))
    described = describe_compiled(text.program, _read_description(folder), _metadata(folder), str(folder))
    spec = proto.Model_pb2.Model(
        specificationVersion=described.version, description=described.description, mlProgram=text.program
    )
    return Compiled(spec, text.version, described.notes, opened)


def readable_by_coremltools(spec: Any, where: str) -> tuple[Any, tuple[str, ...]]:
    """Return a copy of a specification without attributes unknown to coremltools, and notes on these.

    Raises:
        LoadError: it has ops that coremltools does not know, or weights in several files.
    """
    unknown = sorted({op.type for op in operations(spec.mlProgram)} - known_ops())
    if unknown:
        ops = [op for op in operations(spec.mlProgram) if op.type == unknown[0]]
        first = ", ".join(o.name for o in ops[0].outputs) or "nothing"
        raise LoadError(
            f"{where}: coremltools {ct.__version__} does not know {', '.join(unknown)} ({len(ops)} op(s) of "
            f"the type {unknown[0]}, the first gives {first}); `decompile` keeps them in a package"
        )
    if len(files := weight_files(spec.mlProgram)) > 1:
        raise LoadError(f"{where} has its weights in {len(files)} files ({', '.join(files)}); one can be read")
    program_spec = proto.Model_pb2.Model()
    program_spec.CopyFrom(spec)
    notes = []
    for op in operations(program_spec.mlProgram):
        if op.type == "const" or op.type.startswith("constexpr_"):
            continue
        for name in sorted(set(op.attributes) - {"name"}):
            place = ", ".join(o.name for o in op.outputs) or op.type
            notes.append(
                f"{place}: attribute {name!r} of {op.type} is not known to coremltools and is left out"
            )
            del op.attributes[name]
    return program_spec, tuple(notes)


def known_ops() -> set[str]:
    """Return the types of ops that coremltools can read; `write_state` is one, but in no registry."""
    from coremltools.converters.mil.mil.ops.registry import SSAOpRegistry

    return {*SSAOpRegistry.core_ops, "write_state"}


def _read_description(folder: Path) -> CompiledDescription | str:
    """Return the description in `coremldata.bin`, or why there is none."""
    try:
        content = SourceFile(folder / DATA).read()
        why_not = not_fetched(folder / DATA, content)
        return why_not or read_container(content)
    except LoadError as error:
        if system_failed(error):
            raise
        return str(error)


def _metadata(folder: Path) -> dict[str, Any]:
    """Return the first entry of `metadata.json`; {} if it cannot be read."""
    try:
        entries = read_json(folder / METADATA)
    except (LoadError, ValueError, RecursionError) as error:
        if isinstance(error, LoadError) and system_failed(error):
            raise
        return {}
    entry = entries[0] if isinstance(entries, list) and entries else entries
    return entry if isinstance(entry, dict) else {}


def _why_no_program(folder: Path) -> str:
    """Return the error about a compiled model without a MIL text: what it is, and what to do."""
    kind = _model_kind(folder)
    numbered = [p for p in folder.glob("model*") if p.name.removeprefix("model").isdecimal() and p.is_dir()]
    parts = sorted((p.name for p in numbered if any(p.glob("*.*"))), key=lambda name: (len(name), name))
    if parts or kind.startswith("pipeline"):
        words = f"a compiled {kind or 'pipeline'} of {len(parts)} models ({', '.join(parts)})"
        part = folder / (parts[0] if parts else "model0")
        return f"{folder} is {words}; only compiled ML Programs can be read: give one of its parts, as {part}"
    if is_network(folder):
        return f"{folder} is a compiled neural network; `upgrade` turns it into an ML Program"
    if kind and kind != "mlProgram":
        return f"{folder} is a compiled model of the kind {kind}; only compiled ML Programs can be read"
    return f"{folder} lacks {PROGRAM_TEXT}; copy the compiled model again"


def _model_kind(folder: Path) -> str:
    """Return the kind of model that `coremldata.bin` or `metadata.json` names; "" if neither does."""
    described = _read_description(folder)
    if isinstance(described, CompiledDescription):
        return described.kind
    kind = _metadata(folder).get("modelType")
    name = kind.get("name") if isinstance(kind, dict) else None
    return name.removeprefix("MLModelType_") if isinstance(name, str) else ""
