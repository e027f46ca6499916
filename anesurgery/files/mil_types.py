"""Tokens and types of the MIL text: `tensor<fp16, [1, ?]>`, `int32`, `list`, `state` <-> protobuf.

Errors show the line. Two forms of the text are in use. Up to program(1.0) a scalar is a tensor without
dimensions, `tensor<int32, []>`; from program(1.3) on it is `int32`. Both are read; the writer writes either.
"""

from __future__ import annotations

import re
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
"""How many characters of a long line an error shows on each side of the place."""


class Scanner:
    """A text and a position in it."""

    def __init__(self, text: str, where: str) -> None:
        self.text, self.where, self.at = text, where, 0

    def take(self, pattern: re.Pattern[str]) -> re.Match[str] | None:
        """What stands here, if it is of this form; then the position is after it."""
        token = pattern.match(self.text, self.at)
        if token is not None:
            self.at = token.end()
        return token

    def here(self, mark: str) -> bool:
        """Do these characters come next? Then the position is after them."""
        start = SPACE.match(self.text, self.at)
        place = self.at if start is None else start.end()
        if not self.text.startswith(mark, place):
            return False
        self.at = place + len(mark)
        return True

    def expect(self, mark: str) -> None:
        """Pass over these characters.

        Raises:
            LoadError: something else stands here.
        """
        if not self.here(mark):
            self.unexpected(repr(mark))

    def name(self) -> str:
        """A name; one with other characters than letters, digits, `_`, `@` and `.` stands in quotes."""
        if (token := self.take(NAME)) is not None:
            return token[1]
        if (quoted := self.take(STRING)) is not None:
            return unescape(quoted[1])
        self.unexpected("a name")

    def string(self) -> str:
        """A string in quotes, without its escapes."""
        token = self.take(STRING)
        if token is None:
            self.unexpected("a string")
        return unescape(token[1])

    def integer(self) -> int:
        """A whole number that is not negative."""
        token = self.take(INTEGER)
        if token is None:
            self.unexpected("a whole number")
        return int(token[1])

    def unexpected(self, wanted: str) -> NoReturn:
        """Say that something else was expected here."""
        token = TOKEN.match(self.text, self.at)
        word = "" if token is None or token[1] is None else token[1]
        start = len(self.text) if token is None else token.end() - len(word)
        self.fail(f"expected {wanted}, found {word[:SHOWN]!r}" if word else f"it ends before {wanted}", start)

    def fail(self, problem: str, at: int | None = None) -> NoReturn:
        """Raise an error that names the line and column and shows the line.

        Raises:
            LoadError: always.
        """
        place = self.at if at is None else at
        start = self.text.rfind("\n", 0, place) + 1
        end = self.text.find("\n", place)
        line = self.text[start : len(self.text) if end < 0 else end]
        column = place - start
        left, right = max(0, column - SHOWN), column + SHOWN
        shown = ("…" if left else "") + line[left:right] + ("…" if right < len(line) else "")
        mark = " " * (column - left + bool(left)) + "^"
        number = self.text.count("\n", 0, place) + 1
        raise LoadError(
            f"{self.where}, line {number}, column {column + 1}: {problem}\n    {printable(shown)}\n    {mark}"
        )


def printable(text: str) -> str:
    """A text without characters that a terminal would obey."""
    return "".join(c if c.isprintable() else " " if c == "\t" else "\N{REPLACEMENT CHARACTER}" for c in text)


def unescape(text: str) -> str:
    """The characters that a string in quotes stands for."""
    return ESCAPED.sub(_character, text) if "\\" in text else text


def _character(escape: re.Match[str]) -> str:
    code = escape[1]
    if code[0] in "xuU" and len(code) > 1:
        return chr(int(code[1:], 16)) if int(code[1:], 16) < 0x110000 else "\N{REPLACEMENT CHARACTER}"
    if code[0] in "01234567":
        return chr(int(code, 8))
    return ESCAPES.get(code, code)


def quote(text: str) -> str:
    """A string in quotes, with escapes where they are needed."""
    return '"' + "".join(PRINTED.get(c) or (c if c >= " " else f"\\x{ord(c):02x}") for c in text) + '"'


def name_text(name: str) -> str:
    """A name as it stands in the text."""
    plain = NAME.fullmatch(name)
    return name if plain is not None and plain[1] == name else quote(name)


MIL = proto.MIL_pb2

ELEMENTS: dict[str, int] = {
    name.lower().replace("bfloat", "bf").replace("float", "fp"): code
    for name, code in MIL.DataType.items()
    if code
}
"""Name of an element type in the text -> its code."""
NAMES = {code: name for name, code in ELEMENTS.items()}

TENSOR = re.compile(r"\s*tensor\s*<\s*(\w+)\s*,\s*\[([\d?,\s]*)\]\s*>")
PLAIN = re.compile(r"\s*(" + "|".join(sorted(ELEMENTS, key=len, reverse=True)) + r")(?![\w@.<])")
DIGITS = 18
"""Longest size of a dimension: all numbers of 18 digits fit into 64 bits."""


class TypeReader:
    """Reads types; each tensor type is built once."""

    def __init__(self, scanner: Scanner) -> None:
        self._scanner = scanner
        self._known: dict[str, Any] = {}

    def read(self) -> Any:
        """The type that stands here.

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

    def _tensor(self, element: int, dims: list[str], at: int) -> Any:
        tensor = MIL.ValueType(tensorType=MIL.TensorType(dataType=element))
        for dim in dims if dims != [""] else []:
            if dim == "?":
                tensor.tensorType.dimensions.add().unknown.variadic = False
            elif dim.isdecimal() and len(dim) <= DIGITS:
                tensor.tensorType.dimensions.add().constant.size = int(dim)
            else:
                self._scanner.fail(f"{dim!r} is not a size of a dimension", at)
        tensor.tensorType.rank = len(tensor.tensorType.dimensions)
        return tensor

    def _compound(self) -> Any:
        scanner = self._scanner
        start = scanner.at
        word = scanner.take(NAME)
        if word is None:
            scanner.unexpected("a type")
        read = {
            "tensor": self._odd_tensor,
            "list": self._list,
            "dict": self._dict,
            "tuple": self._tuple,
            "state": self._state,
        }.get(word[1])
        if read is None or not scanner.here("<"):
            scanner.at = start
            scanner.unexpected("a type")
        kind = read()
        scanner.expect(">")
        return kind

    def _odd_tensor(self) -> Any:
        """A tensor of unknown rank, or with dimensions that have names."""
        scanner = self._scanner
        word = scanner.take(NAME)
        if word is None or word[1] not in ELEMENTS:
            scanner.at = scanner.at if word is None else word.start(1)
            scanner.unexpected("an element type")
        tensor = MIL.ValueType(tensorType=MIL.TensorType(dataType=ELEMENTS[word[1]], rank=-1))
        scanner.expect(",")
        if scanner.here("?"):
            return tensor
        scanner.expect("[")
        while not scanner.here("]"):
            self._dimension(tensor.tensorType.dimensions.add())
            if not scanner.here(","):
                scanner.expect("]")
                break
        dims = tensor.tensorType.dimensions
        tensor.tensorType.rank = -1 if any(d.unknown.variadic for d in dims) else len(dims)
        return tensor

    def _dimension(self, dimension: Any) -> None:
        """A size, `?`, `...` (any number of dimensions), or a symbol (a dynamic size, as `?` is)."""
        scanner = self._scanner
        if scanner.here("..."):
            dimension.unknown.variadic = True
        elif scanner.here("?") or scanner.take(NAME):
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
        while self._scanner.here(","):
            pair.tupleType.types.add().CopyFrom(self.read())
        return pair

    def _state(self) -> Any:
        state = MIL.ValueType()
        state.stateType.wrappedType.CopyFrom(self.read())
        return state


def element_name(kind: Any) -> str:
    """The element type of a tensor type, as it stands in the text.

    Raises:
        LoadError: it is of no type that there is.
    """
    code = kind.tensorType.dataType
    if code not in NAMES:
        raise LoadError(
            f"a value has elements of type {code}, which MIL does not have; convert the model again"
        )
    return NAMES[code]


def type_text(kind: Any, scalars: bool) -> str:
    """A type as it stands in the text.

    Args:
        kind: MIL_pb2.ValueType.
        scalars: is a scalar `int32`, and not `tensor<int32, []>`?

    Raises:
        LoadError: it says no type.
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
    """The sizes of a tensor type; None where one is dynamic."""
    dims = kind.tensorType.dimensions
    if kind.tensorType.rank != len(dims) or any(d.WhichOneof("dimension") != "constant" for d in dims):
        return None
    return tuple(int(d.constant.size) for d in dims)
