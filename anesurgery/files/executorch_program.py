"""List and extract the Core ML models in an ExecuTorch program: `executorch("model.pte")`.

A `.pte` file is a FlatBuffers table, `Program`, followed by segments. Its methods call delegates. A Core ML
delegate is a model: its files one after another, and at the end their names, as JSON written backwards.
"""

from __future__ import annotations

import json
import mmap
import os
import struct
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple, TypeVar

from anesurgery.doors import door
from anesurgery.errors import DAMAGED, LoadError
from anesurgery.files.source import SourceFile
from anesurgery.files.writing import check_place, write_atomically

UINT8, UINT16, UINT32, UINT64, INT32 = map(struct.Struct, ("<B", "<H", "<I", "<Q", "<i"))


class Span(NamedTuple):
    """Where bytes, or the elements of a vector, are in a file."""

    start: int
    length: int


@dataclass(frozen=True)
class Table:
    """A FlatBuffers table in a file."""

    data: Any
    """The whole file, as bytes or mapped."""
    at: int
    """The offset of the table."""

    @classmethod
    def root(cls, data: Any) -> Table:
        """Return the table that a file starts with."""
        return cls(data, read(UINT32, data, 0))

    def number(self, field: int, kind: struct.Struct = UINT32) -> int:
        """Return the number in a field; 0, the default of every field here, if it is absent."""
        place = self._offset(field)
        return 0 if place is None else read(kind, self.data, place)

    def table(self, field: int) -> Table | None:
        """Return the table in a field; None if it is absent."""
        place = self._offset(field)
        return None if place is None else Table(self.data, _pointed_offset(self.data, place))

    def tables(self, field: int) -> list[Table]:
        """Return the vector of tables in a field; empty if it is absent."""
        start, count = self.vector(field, 4)
        return [Table(self.data, _pointed_offset(self.data, start + 4 * i)) for i in range(count)]

    def text(self, field: int) -> str:
        """Return the text in a field; "" if it is absent."""
        start, count = self.vector(field, 1)
        return bytes(self.data[start : start + count]).decode("utf-8")

    def vector(self, field: int, width: int) -> Span:
        """Return where a vector of elements of `width` bytes is; an empty one if the field is absent."""
        place = self._offset(field)
        if place is None:
            return Span(0, 0)
        place = _pointed_offset(self.data, place)
        count = read(UINT32, self.data, place)
        check_bounds(self.data, place + 4, count * width)
        return Span(place + 4, count)

    def _offset(self, field: int) -> int | None:
        """Return the offset of a field's value, by the table's vtable; None if the field is absent."""
        vtable = self.at - read(INT32, self.data, self.at)
        entry = 4 + 2 * field
        if entry + 2 > read(UINT16, self.data, vtable):
            return None
        relative = read(UINT16, self.data, vtable + entry)
        return self.at + relative if relative else None


def _pointed_offset(data: Any, place: int) -> int:
    """Return the absolute offset that a relative offset at `place` points to."""
    return place + read(UINT32, data, place)


def read(kind: struct.Struct, data: Any, at: int) -> int:
    """Return the number at an offset.

    Raises:
        LoadError: the offset is outside of the file.
    """
    check_bounds(data, at, kind.size)
    return int(kind.unpack_from(data, at)[0])


def check_bounds(data: Any, at: int, size: int) -> None:
    """Check that bytes lie in a file.

    Raises:
        LoadError: they do not.
    """
    if at < 0 or at + size > len(data):
        raise LoadError(f"{size} bytes at {at} are outside of its {len(data)}")


T = TypeVar("T")

# Fields of the tables, by number, as ExecuTorch's schema/program.fbs declares them.
PROGRAM_PLANS, PROGRAM_DELEGATE_DATA, PROGRAM_SEGMENTS, PROGRAM_NAMED_DATA = 1, 3, 4, 7
PLAN_NAME, PLAN_OPERATORS, PLAN_DELEGATES = 0, 6, 7
OPERATOR_NAME, OPERATOR_OVERLOAD = 0, 1
DELEGATE_BACKEND, DELEGATE_REFERENCE = 0, 1
REFERENCE_LOCATION, REFERENCE_INDEX = 0, 1
DATA_BYTES = 0
SEGMENT_OFFSET, SEGMENT_SIZE = 0, 1
NAMED_KEY, NAMED_SEGMENT = 0, 1

SUFFIX = ".pte"
IDENTIFIER = slice(4, 8)
"""The bytes of the file identifier: "ET" and two digits."""
HEADER, SEGMENTS = 8, 8 + 16
"""The offsets of the extended header, if there is one, and of its field with the offset of the segments."""
BACKEND = "CoreMLBackend"
IN_SEGMENT = 1
REFERENCE = b"CMJR"
"""The first bytes of a delegate that only refers to a model; JSON with a key of the named data follows."""
MODELS = (".mlpackage", ".mlmodelc")
FOLDER = 1
"""The kind of a folder in the file list of a model; that of a file is 0."""
LARGEST_FILE_LIST = 1 << 24
"""The most bytes of the file list; a list of three files has about 500."""


@dataclass(frozen=True)
class Method:
    """An entry point of a program."""

    name: str
    """Its name, such as "forward"."""
    delegates: tuple[str, ...]
    """Names of the backends that it calls."""
    operators: tuple[str, ...]
    """The operators that run outside of the delegates, on the CPU."""

    def __str__(self) -> str:
        called = ", ".join(f"{n} {name}" for name, n in Counter(self.delegates).items()) or "none"
        return f"{self.name}: delegates: {called}; operators outside: {', '.join(self.operators) or 'none'}"


@dataclass(frozen=True)
class Part:
    """A Core ML model in a program."""

    name: str
    """The name of its folder when it is extracted."""
    methods: tuple[str, ...]
    """Names of the methods that call it."""
    model: str
    """The path of the package or compiled model in that folder."""
    files: dict[str, Span] = field(repr=False)
    """Path -> its bytes in the program."""

    @property
    def bytes(self) -> int:
        """The number of bytes of all files."""
        return sum(span.length for span in self.files.values())

    def __str__(self) -> str:
        return f"{self.name}/{self.model}: {self.bytes:,} bytes, called by {', '.join(self.methods)}"


@dataclass(frozen=True)
class ExecuTorch:
    """The contents of a `.pte` file.

    Attributes:
        path: the path of the file.
        methods: its entry points.
        parts: its Core ML models; a model that several methods call is listed once.
    """

    path: Path
    methods: tuple[Method, ...]
    parts: tuple[Part, ...]
    _content: Any = field(repr=False, compare=False)

    def extract(self, folder: str | os.PathLike[str], *, overwrite: bool = False) -> tuple[Path, ...]:
        """Write the Core ML parts, each into a folder of its own.

        Args:
            folder: the folder to make.
            overwrite: may it be replaced?

        Returns:
            The paths of the models.

        Raises:
            LoadError: there are no such parts, or they cannot be written.
        """
        if not self.parts:
            raise LoadError(f"{self.path} has no part for Core ML; {'; '.join(map(str, self.methods))}")
        target = Path(folder).expanduser().absolute()
        check_place(target, overwrite, self.path)
        write_atomically(target, self._write, overwrite)
        return tuple(target / part.name / part.model for part in self.parts)

    def _write(self, folder: Path) -> None:
        folder.mkdir()
        for part in self.parts:
            self.write_part(part, folder / part.name)

    def write_part(self, part: Part, folder: Path) -> None:
        """Write the files of one part into a folder."""
        for name, (start, size) in part.files.items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            with open(path, "xb") as written:
                written.write(memoryview(self._content)[start : start + size])

    def to_json(self) -> dict[str, Any]:
        """Return plain data."""
        return {
            "path": str(self.path),
            "methods": [
                {"name": m.name, "delegates": list(m.delegates), "operators": list(m.operators)}
                for m in self.methods
            ],
            "parts": [
                {"name": p.name, "methods": list(p.methods), "model": p.model, "bytes": p.bytes}
                for p in self.parts
            ],
        }

    def __str__(self) -> str:
        plural = "" if len(self.parts) == 1 else "s"
        head = f"{self.path}: {len(self.parts)} Core ML part{plural}"
        return "\n".join([head, *(f"  {line}" for line in (*self.methods, *self.parts))])


@door()
def executorch(path: str | os.PathLike[str]) -> ExecuTorch:
    """List what is in a program of ExecuTorch, a `.pte` file: its methods, and their Core ML parts.

    Args:
        path: the path of the file; it is mapped, not read as a whole.

    Returns:
        The methods with their inputs and outputs, and the Core ML parts, whose packages `write_part` writes.

    Raises:
        LoadError: it cannot be read, is not such a file, or is damaged.
        SurgeryError: an argument is not what the call takes.
    """
    source = SourceFile(Path(path).expanduser())
    if not source.size:
        raise LoadError(f"{source.path} is empty; copy it again")
    content = mmap.mmap(source.handle, 0, access=mmap.ACCESS_READ)
    if content[IDENTIFIER][:2] != b"ET":
        raise LoadError(
            f"{source.path} is no program of ExecuTorch; its bytes 4 to 8 are {content[IDENTIFIER]!r}"
        )
    methods, parts = _with_damage_named(source.path, partial(_read, content))
    source.check()
    return ExecuTorch(source.path, methods, parts, content)


def unpack_part(path: Path, folder: Path) -> Path:
    """Write the only Core ML part of a program into a folder.

    Returns:
        The path of its model.

    Raises:
        LoadError: there are none or several.
    """
    program = executorch(path)
    if len(program.parts) != 1:
        listed = ", ".join(f"{p.name} ({', '.join(p.methods)})" for p in program.parts[:6]) or "none"
        raise LoadError(
            f"{path} has {len(program.parts)} Core ML parts: {listed}; extract them with "
            f"`anesurgery executorch {path.name} --out parts`, and give one"
        )
    program.write_part(program.parts[0], folder)
    return folder / program.parts[0].model


def _with_damage_named(path: Path, reading: Callable[[], T]) -> T:
    """Return the result of `reading()`; errors of any kind become a LoadError that names the file."""
    try:
        return reading()
    except (LoadError, *DAMAGED) as error:
        raise LoadError(f"{path} is damaged: {error}; export or copy it again") from error


def _read(content: Any) -> tuple[tuple[Method, ...], tuple[Part, ...]]:
    program = Table.root(content)
    methods: list[Method] = []
    callers: dict[Span, list[str]] = {}
    for plan in program.tables(PROGRAM_PLANS):
        name, delegates = plan.text(PLAN_NAME), plan.tables(PLAN_DELEGATES)
        backends = tuple(delegate.text(DELEGATE_BACKEND) for delegate in delegates)
        operators = {
            ".".join(filter(None, (operator.text(OPERATOR_NAME), operator.text(OPERATOR_OVERLOAD))))
            for operator in plan.tables(PLAN_OPERATORS)
        }
        methods.append(Method(name, backends, tuple(sorted(operators))))
        for delegate, backend in zip(delegates, backends, strict=True):
            if backend == BACKEND:
                callers.setdefault(_data_of_delegate(program, delegate), []).append(name)
    parts = (
        _part(content, data, f"part_{i}", tuple(dict.fromkeys(names)))
        for i, (data, names) in enumerate(callers.items(), start=1)
    )
    return tuple(methods), tuple(parts)


def _data_of_delegate(program: Table, delegate: Table) -> Span:
    """Return where the data of a delegate is: in a segment, in a table, or in the data that these name."""
    reference = delegate.table(DELEGATE_REFERENCE)
    if reference is None:
        raise LoadError("a delegate has no data")
    index = reference.number(REFERENCE_INDEX)
    if reference.number(REFERENCE_LOCATION, UINT8) == IN_SEGMENT:
        data = _segment(program, index)
    else:
        data = program.tables(PROGRAM_DELEGATE_DATA)[index].vector(DATA_BYTES, 1)
    start, size = data
    if bytes(program.data[start : start + len(REFERENCE)]) != REFERENCE:
        return data
    key = json.loads(bytes(program.data[start + len(REFERENCE) : start + size]))["key"]
    for named in program.tables(PROGRAM_NAMED_DATA):
        if named.text(NAMED_KEY) == key:
            return _segment(program, named.number(NAMED_SEGMENT))
    raise LoadError(f"a delegate is stored as {key!r}, which the file does not hold")


def _segment(program: Table, index: int) -> Span:
    """Return where a segment is."""
    if bytes(program.data[HEADER : HEADER + 2]) != b"eh":
        raise LoadError("it has segments, and no header that says where")
    segment = program.tables(PROGRAM_SEGMENTS)[index]
    start = read(UINT64, program.data, SEGMENTS) + segment.number(SEGMENT_OFFSET, UINT64)
    size = segment.number(SEGMENT_SIZE, UINT64)
    check_bounds(program.data, start, size)
    return Span(start, size)


def _part(content: Any, data: Span, name: str, methods: tuple[str, ...]) -> Part:
    """Return the model in the data of a delegate, whose files follow each other there."""
    start, size = data
    files = {
        str(file): Span(start + at, count) for file, at, count in _walk_files(_file_nodes(content, start, size))
    }
    if sum(count for _, count in files.values()) > size:
        raise LoadError(f"the files of {name} have more bytes than the {size} of the part")
    for at, count in files.values():
        if at + count > start + size:
            raise LoadError(f"a file of {name} ends outside of it")
    roots = {PurePosixPath(file).parts[0] for file in files}
    models = sorted(root for root in roots if root.endswith(MODELS))
    if len(models) != 1:
        raise LoadError(f"{name} holds {', '.join(sorted(roots)) or 'nothing'}, and one model is expected")
    return Part(name, methods, models[0], files)


def _file_nodes(content: Any, start: int, size: int) -> list[dict[str, Any]]:
    """Return the nodes (files and folders) of a part: JSON whose first character is the part's last byte."""
    backwards = bytes(content[max(start, start + size - LARGEST_FILE_LIST) : start + size])[::-1]
    _, end = json.JSONDecoder().raw_decode(backwards.decode("latin-1"))
    nodes = json.loads(backwards[:end])["nodes"]
    if not isinstance(nodes, list) or not nodes:
        raise LoadError("a part lists no files")
    return nodes


def _walk_files(nodes: list[dict[str, Any]]) -> Iterator[tuple[PurePosixPath, int, int]]:
    """Yield (path, offset, size) of each file of a part; the last node is the root folder."""
    pending, seen = [(len(nodes) - 1, PurePosixPath())], set[int]()
    while pending:
        index, path = pending.pop()
        if index in seen or not 0 <= index < len(nodes):
            raise LoadError(f"{str(path)!r} is number {index} of its {len(nodes)} files, which cannot be")
        seen.add(index)
        node = nodes[index]
        if node["kind"] != FOLDER:
            at, size = int(node["dataRegion"]["offset"]), int(node["dataRegion"]["size"])
            if min(at, size) < 0:
                raise LoadError(f"{path} has {size} bytes at {at}")
            yield path, at, size
            continue
        for name, child in node["children"].items():
            if name in ("", ".", "..") or set(name) & set("/\\\0"):
                raise LoadError(f"it holds a file {name!r}, which leads out of it; do not trust it")
            pending.append((int(child), path / name))
