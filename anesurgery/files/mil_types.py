"""Read and write the types in MIL text, such as `tensor<fp16, [1, ?]>` or `int32`, from and to protobuf.

`Scanner` splits the text into tokens for `mil_text.py`; its errors show the line. Two forms of the text are in
use: up to program(1.0) a scalar is a tensor without dimensions, `tensor<int32, []>`; from program(1.3) on it is
`int32`. Both are read, and the writer can write either.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, NoReturn

from anesurgery.errors import LoadError
from anesurgery.files.protobuf import proto

NAME = re.compile(r"\s*([^\W\d][\w@.]*)")
INTEGER = re.compile(r"\s*(\d{1,19})(?![\w.])")
VERSION = re.compile(r"\s*(\d{1,9}(?:\.\d{1,9})*)")
STRING = re.compile(r'\s*"((?:[^"\\]|\\.)*)"', re.DOTALL)
SPACE = re.compile(r"\s*")
TOKEN = re.compile(r'\s*("(?:[^"\\\n]|\\.)*"?|[\w@.]+|->|.)?', re.DOTALL)

ESCAPED = re.compile(r"\\(x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|[0-7]{1,3}|.)", re.DOTALL)
ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "a": "\a", "b": "\b", "f": "\f", "v": "\v"}
PRINTED = {"\\": "\\\\", '"': '\\"', "\n": "\\n", "\t": "\\t", "\r": "\\r"}

SHOWN = 60
"""Characters of a long line that an error shows on each side of the position."""


class Scanner:
    """A text and the current position in it."""

    def __init__(self, text: str, where: str) -> None:
        self.text, self.where, self.position = text, where, 0

    def take(self, pattern: re.Pattern[str]) -> re.Match[str] | None:
        """Match a pattern at the position; on success move behind the match and return it, else return None."""
        token = pattern.match(self.text, self.position)
        if token is not None:
            self.position = token.end()
        return token

    def accept(self, mark: str) -> bool:
        """Move behind these characters if they come next, after white space; return whether they do."""
        start = SPACE.match(self.text, self.position)
        place = self.position if start is None else start.end()
        if not self.text.startswith(mark, place):
            return False
        self.position = place + len(mark)
        return True

    def comes_next(self, mark: str) -> bool:
        """Do these characters come next, after white space? The position stays."""
        start = self.position
        try:
            return self.accept(mark)
        finally:
            self.position = start

    def expect(self, mark: str) -> None:
        """Move behind these characters.

        Raises:
            LoadError: something else comes next.
        """
        if not self.accept(mark):
            self.unexpected(repr(mark))

    def sequence(self, opening: str, closing: str, read_item: Callable[[], object]) -> None:
        """Read items separated by commas between two brackets; there may be none.

        Raises:
            LoadError: a bracket or a comma is missing.
        """
        self.expect(opening)
        if self.accept(closing):
            return
        read_item()
        while self.accept(","):
            read_item()
        self.expect(closing)

    def name(self) -> str:
        """Read a name; one with other characters than letters, digits, `_`, `@` and `.` is quoted."""
        if (token := self.take(NAME)) is not None:
            return token[1]
        if (quoted := self.take(STRING)) is not None:
            return unescape(quoted[1])
        self.unexpected("a name")

    def string(self) -> str:
        """Read a quoted string, and return it without escapes."""
        token = self.take(STRING)
        if token is None:
            self.unexpected("a string")
        return unescape(token[1])

    def integer(self) -> int:
        """Read an integer that is not negative."""
        token = self.take(INTEGER)
        if token is None:
            self.unexpected("a whole number")
        return int(token[1])

    def unexpected(self, wanted: str) -> NoReturn:
        """Raise an error: something else was expected at the position."""
        token = TOKEN.match(self.text, self.position)
        word = "" if token is None or token[1] is None else token[1]
        start = len(self.text) if token is None else token.end() - len(word)
        self.fail(f"expected {wanted}, found {word[:SHOWN]!r}" if word else f"it ends before {wanted}", start)

    def fail(self, problem: str, position: int | None = None) -> NoReturn:
        """Raise an error that names the line and column and shows the line.

        Raises:
            LoadError: always.
        """
        offset = self.position if position is None else position
        start = self.text.rfind("\n", 0, offset) + 1
        end = self.text.find("\n", offset)
        line = self.text[start : len(self.text) if end < 0 else end]
        column = offset - start
        left, right = max(0, column - SHOWN), column + SHOWN
        shown = ("…" if left else "") + line[left:right] + ("…" if right < len(line) else "")
        mark = " " * (column - left + bool(left)) + "^"
        number = self.text.count("\n", 0, offset) + 1
        raise LoadError(
            f"{self.where}, line {number}, column {column + 1}: {problem}\n    {printable(shown)}\n    {mark}"
        )


def printable(text: str) -> str:
    """Return a text without control characters."""
    return "".join(c if c.isprintable() else " " if c == "\t" else "\N{REPLACEMENT CHARACTER}" for c in text)


def unescape(text: str) -> str:
    """Replace the escapes in the content of a quoted string."""
    return ESCAPED.sub(_character, text) if "\\" in text else text


def _character(escape: re.Match[str]) -> str:
    code = escape[1]
    if code[0] in "xuU" and len(code) > 1:
        return chr(int(code[1:], 16)) if int(code[1:], 16) < 0x110000 else "\N{REPLACEMENT CHARACTER}"
    if code[0] in "01234567":
        return chr(int(code, 8))
    return ESCAPES.get(code, code)


def quote(text: str) -> str:
    """Return a string in quotes, with escapes where needed."""
    return '"' + "".join(PRINTED.get(c) or (c if c >= " " else f"\\x{ord(c):02x}") for c in text) + '"'


def name_text(name: str) -> str:
    """Return a name as the text writes it, quoted where needed."""
    plain = NAME.fullmatch(name)
    return name if plain is not None and plain[1] == name else quote(name)


MIL = proto.MIL_pb2

ELEMENTS: dict[str, int] = {
    name.lower().replace("bfloat", "bf").replace("float", "fp"): code
    for name, code in MIL.DataType.items()
    if code
}
"""Name of a dtype in the text -> its code in the protobuf."""
NAMES = {code: name for name, code in ELEMENTS.items()}

TENSOR = re.compile(r"\s*tensor\s*<\s*(\w+)\s*,\s*\[([\d?,\s]*)\]\s*>")
PLAIN = re.compile(r"\s*(" + "|".join(sorted(ELEMENTS, key=len, reverse=True)) + r")(?![\w@.<])")
DIGITS = 18
"""The most digits of a size: all numbers of 18 digits fit into 64 bits."""


class TypeReader:
    """Reads types into MIL_pb2.ValueType; equal tensor types are built once and shared."""

    def __init__(self, scanner: Scanner) -> None:
        self._scanner = scanner
        self._known: dict[str, Any] = {}

    def read(self) -> Any:
        """Read the type at the position.

        Raises:
            LoadError: there is none.
        """
        scanner = self._scanner
        word = scanner.take(TENSOR) or scanner.take(PLAIN)
        if word is None:
            return self._compound()
        text = word[0]
        if text not in self._known:
            element = ELEMENTS.get(word[1])
            if element is None:
                scanner.fail(f"there is no element type {word[1]!r}", word.start(1))
            dims = word[2] if word.re is TENSOR else ""
            self._known[text] = self._tensor(element, [d.strip() for d in dims.split(",")], word.start())
        return self._known[text]

    def _tensor(self, element: int, dims: list[str], position: int) -> Any:
        tensor = MIL.ValueType(tensorType=MIL.TensorType(dataType=element))
        for dim in dims if dims != [""] else []:
            if dim == "?":
                tensor.tensorType.dimensions.add().unknown.variadic = False
            elif dim.isdecimal() and len(dim) <= DIGITS:
                tensor.tensorType.dimensions.add().constant.size = int(dim)
            else:
                self._scanner.fail(f"{dim!r} is not a size of a dimension", position)
        tensor.tensorType.rank = len(tensor.tensorType.dimensions)
        return tensor

    def _compound(self) -> Any:
        scanner = self._scanner
        start = scanner.position
        word = scanner.take(NAME)
        if word is None:
            scanner.unexpected("a type")
        read = {
            "tensor": self._irregular_tensor,
            "list": self._list,
            "dict": self._dict,
            "tuple": self._tuple,
            "state": self._state,
        }.get(word[1])
        if read is None or not scanner.accept("<"):
            scanner.position = start
            scanner.unexpected("a type")
        kind = read()
        scanner.expect(">")
        return kind

    def _irregular_tensor(self) -> Any:
        """Read a tensor type of unknown rank, or with named dimensions."""
        scanner = self._scanner
        word = scanner.take(NAME)
        if word is None or word[1] not in ELEMENTS:
            scanner.position = scanner.position if word is None else word.start(1)
            scanner.unexpected("an element type")
        tensor = MIL.ValueType(tensorType=MIL.TensorType(dataType=ELEMENTS[word[1]], rank=-1))
        scanner.expect(",")
        if scanner.accept("?"):
            return tensor
        scanner.expect("[")
        while not scanner.accept("]"):
            self._dimension(tensor.tensorType.dimensions.add())
            if not scanner.accept(","):
                scanner.expect("]")
                break
        dims = tensor.tensorType.dimensions
        tensor.tensorType.rank = -1 if any(d.unknown.variadic for d in dims) else len(dims)
        return tensor

    def _dimension(self, dimension: Any) -> None:
        """Read a size, `?`, `...` (any number of dimensions), or a symbol (a dynamic size like `?`)."""
        scanner = self._scanner
        if scanner.accept("..."):
            dimension.unknown.variadic = True
        elif scanner.accept("?") or scanner.take(NAME):
            dimension.unknown.variadic = False
        else:
            dimension.constant.size = scanner.integer()

    def _list(self) -> Any:
        listed = MIL.ValueType()
        listed.listType.type.CopyFrom(self.read())
        self._scanner.expect(",")
        self._dimension(listed.listType.length)
        return listed

    def _dict(self) -> Any:
        dictionary = MIL.ValueType()
        dictionary.dictionaryType.keyType.CopyFrom(self.read())
        self._scanner.expect(",")
        dictionary.dictionaryType.valueType.CopyFrom(self.read())
        return dictionary

    def _tuple(self) -> Any:
        pair = MIL.ValueType(tupleType=MIL.TupleType())
        pair.tupleType.types.add().CopyFrom(self.read())
        while self._scanner.accept(","):
            pair.tupleType.types.add().CopyFrom(self.read())
        return pair

    def _state(self) -> Any:
        state = MIL.ValueType()
        state.stateType.wrappedType.CopyFrom(self.read())
        return state


def element_name(kind: Any) -> str:
    """Return the name of the dtype of a tensor type, as the text writes it.

    Raises:
        LoadError: the dtype does not exist.
    """
    code = kind.tensorType.dataType
    if code not in NAMES:
        raise LoadError(
            f"a value has elements of type {code}, which MIL does not have; convert the model again"
        )
    return NAMES[code]


def type_text(kind: Any, scalars: bool) -> str:
    """Return a type as the text writes it.

    Args:
        kind: MIL_pb2.ValueType.
        scalars: write a scalar as `int32`, and not as `tensor<int32, []>`?

    Raises:
        LoadError: the message holds no type.
    """
    which = kind.WhichOneof("type")
    if which is None:
        raise LoadError("a value has no type; convert the model again")
    if which == "tensorType":
        tensor = kind.tensorType
        name = element_name(kind)
        if scalars and not tensor.rank:
            return name
        if tensor.rank < 0 and not tensor.dimensions:
            return f"tensor<{name}, ?>"
        return f"tensor<{name}, [{', '.join(map(_dimension_text, tensor.dimensions))}]>"
    if which == "listType":
        return f"list<{type_text(kind.listType.type, scalars)}, {_dimension_text(kind.listType.length)}>"
    if which == "dictionaryType":
        pair = kind.dictionaryType
        return f"dict<{type_text(pair.keyType, scalars)}, {type_text(pair.valueType, scalars)}>"
    if which == "tupleType":
        return f"tuple<{', '.join(type_text(t, scalars) for t in kind.tupleType.types)}>"
    return f"state<{type_text(kind.stateType.wrappedType, scalars)}>"


def _dimension_text(dimension: Any) -> str:
    if dimension.WhichOneof("dimension") == "constant":
        return str(dimension.constant.size)
    return "..." if dimension.unknown.variadic else "?"


def sizes_of_type(kind: Any) -> tuple[int, ...] | None:
    """Return the sizes of a tensor type; None if one is dynamic."""
    dims = kind.tensorType.dimensions
    if kind.tensorType.rank != len(dims) or any(d.WhichOneof("dimension") != "constant" for d in dims):
        return None
    return tuple(int(d.constant.size) for d in dims)
