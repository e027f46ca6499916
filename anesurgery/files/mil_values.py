"""Values in the MIL text: numbers, strings, lists, dicts, tuples and places in a weight file <-> protobuf.

A type stands in front and says how to read what is in the parentheses::

    tensor<fp16, [2]>([0x1p-1, -inf])
    dict<string, string>({{"coremltools-version", "9.0"}})
    tensor<fp16, [8, 4]>(BLOBFILE(path = string("@model_path/weights/weight.bin"), offset = uint64(64)))
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from anesurgery.errors import LoadError
from anesurgery.files import sub_byte
from anesurgery.files.mil_tokens import STRING, Scanner, unescape
from anesurgery.files.mil_types import MIL, NAMES, TypeReader, sizes_of_type
from anesurgery.mil import Array

_TEXT = r"(?:tensor\s*<\s*string\s*,\s*\[\s*\]\s*>|string)"
_UINT64 = r"(?:tensor\s*<\s*uint64\s*,\s*\[\s*\]\s*>|uint64)"
BLOB = re.compile(
    rf'\s*BLOBFILE\s*\(\s*path\s*=\s*{_TEXT}\s*\(\s*"((?:[^"\\]|\\.)*)"\s*\)\s*,'
    rf"\s*offset\s*=\s*{_UINT64}\s*\(\s*(\d{{1,18}})\s*\)\s*\)"
)
SCALAR = re.compile(r'\s*([^\s"(){}\[\],;]+)')
BRACKET = re.compile(r'[\[\]"(){};]')
FLAT = str.maketrans("[]", "  ")

WHOLE = re.compile(r"(u?)int(\d+)")
BYTES = {"fp16", "int4", "int8", "uint1", "uint2", "uint3", "uint4", "uint6", "uint8", "uint32"}
"""Element types whose values the protobuf holds as bytes; below eight bits several share one."""
FIELDS: dict[str, tuple[str, Any]] = {
    "bool": ("bools", np.bool_),
    "fp32": ("floats", np.float32),
    "fp64": ("doubles", np.float64),
    "int16": ("ints", np.int32),
    "uint16": ("ints", np.int32),
    "int32": ("ints", np.int32),
    "int64": ("longInts", np.int64),
    "uint64": ("longInts", np.int64),
}
"""The other element types -> the field of the protobuf, and what it holds."""
BOOLS = {"true": True, "false": False}


class ValueReader:
    """Reads values."""

    def __init__(self, scanner: Scanner, types: TypeReader) -> None:
        self._scanner, self._types = scanner, types

    def read(self) -> Any:
        """The value that stands here, its type in front: MIL_pb2.Value.

        Raises:
            LoadError: there is none.
        """
        kind = self._types.read()
        self._scanner.expect("(")
        value = MIL.Value()
        self._fill(value, kind)
        self._scanner.expect(")")
        return value

    def _fill(self, value: Any, kind: Any) -> None:
        value.type.CopyFrom(kind)
        which = kind.WhichOneof("type")
        if which == "tensorType":
            self._tensor(value, kind)
        elif which == "listType":
            value.immediateValue.list.SetInParent()
            element = kind.listType.type
            self._items("[", "]", lambda at: self._fill(value.immediateValue.list.values.add(), element))
        elif which == "dictionaryType":
            value.immediateValue.dictionary.SetInParent()
            self._items("{", "}", lambda at: self._pair(value, kind.dictionaryType))
        elif which == "tupleType":
            self._tuple(value, list(kind.tupleType.types))
        else:
            self._scanner.fail("a state has no value")

    def _items(self, opening: str, closing: str, read: Callable[[int], None]) -> None:
        """What stands between two brackets, with commas."""
        self._scanner.expect(opening)
        if self._scanner.here(closing):
            return
        count = 0
        while not count or self._scanner.here(","):
            read(count)
            count += 1
        self._scanner.expect(closing)

    def _pair(self, value: Any, kind: Any) -> None:
        pair = value.immediateValue.dictionary.values.add()
        self._scanner.expect("{")
        self._fill(pair.key, kind.keyType)
        self._scanner.expect(",")
        self._fill(pair.value, kind.valueType)
        self._scanner.expect("}")

    def _tuple(self, value: Any, kinds: Sequence[Any]) -> None:
        value.immediateValue.tuple.SetInParent()

        def read(at: int) -> None:
            if at >= len(kinds):
                self._scanner.fail(f"the tuple has {len(kinds)} types, and more values")
            self._fill(value.immediateValue.tuple.values.add(), kinds[at])

        self._items("(", ")", read)
        if (count := len(value.immediateValue.tuple.values)) != len(kinds):
            self._scanner.fail(f"the tuple has {len(kinds)} types, and {count} values")

    def _tensor(self, value: Any, kind: Any) -> None:
        scanner = self._scanner
        start = scanner.at
        if (blob := scanner.take(BLOB)) is not None:
            value.blobFileValue.fileName = unescape(blob[1])
            value.blobFileValue.offset = int(blob[2])
            return
        if scanner.here("BLOBFILE"):
            scanner.fail("BLOBFILE needs a path and an offset", start)
        name = NAMES[kind.tensorType.dataType]
        values = self._strings() if name == "string" else self._numbers(name)
        shape = sizes_of_type(kind)
        if shape is not None and len(values) != math.prod(shape):
            words = f"the type says {math.prod(shape)} element(s)"
            scanner.fail(f"{words}, the value has {len(values)}", start)
        store(value.immediateValue.tensor, name, values)

    def _strings(self) -> list[str]:
        scanner = self._scanner
        if (one := scanner.take(STRING)) is not None:
            return [unescape(one[1])]
        strings: list[str] = []
        self._items("[", "]", lambda at: strings.extend(self._strings()))
        return strings

    def _numbers(self, name: str) -> Any:
        """The elements of a tensor, however they are nested."""
        scanner = self._scanner
        start, text = scanner.at, self._number_text()
        words = text.translate(FLAT).split(",")
        if len(words) == 1 and not words[0].strip():
            return np.zeros(0, np.int64)
        try:
            return _parse(name, words)
        except (ValueError, KeyError, OverflowError):
            scanner.fail(_bad_element(name, words), start)

    def _number_text(self) -> str:
        scanner = self._scanner
        start = scanner.at
        if not scanner.here("["):
            one = scanner.take(SCALAR)
            if one is None:
                scanner.unexpected("a number")
            return one[1]
        depth, begin = 1, scanner.at
        while depth:
            bracket = BRACKET.search(scanner.text, scanner.at)
            if bracket is None or bracket[0] not in "[]":
                scanner.fail("this bracket is not closed", start)
            depth += 1 if bracket[0] == "[" else -1
            scanner.at = bracket.end()
        return scanner.text[begin : scanner.at - 1]


def _parse(name: str, words: list[str]) -> Any:
    """The numbers of the words; ValueError where one is none, or does not fit its type."""
    if name == "bool":
        return np.array([BOOLS[word.strip()] for word in words])
    if (whole := WHOLE.fullmatch(name)) is not None:
        bits = int(whole[2])
        low, high = (0, 2**bits) if whole[1] else (-(2 ** (bits - 1)), 2 ** (bits - 1))
        numbers = [int(word) for word in words if "_" not in word]
        if len(numbers) != len(words) or min(numbers) < low or max(numbers) >= high:
            raise ValueError(name)
        return np.array(numbers, np.uint64 if whole[1] else np.int64)
    reals = np.array([float.fromhex(w) if "x" in w else float(w) for w in words if "_" not in w])
    with np.errstate(over="ignore"):
        narrow = reals.astype({"fp16": np.float16, "fp64": np.float64}.get(name, np.float32))
    if len(reals) != len(words) or np.any(np.isinf(narrow) & ~np.isinf(reals)):
        raise ValueError(name)
    return narrow


def _bad_element(name: str, words: list[str]) -> str:
    """Which of the words is not a value of a type."""
    for at, word in enumerate(words):
        try:
            _parse(name, [word])
        except (ValueError, KeyError, OverflowError):
            return f"{word.strip()[:40]!r} (element {at}) is no {name}"
    return f"these are not values of {name}"


def _container(name: str) -> Any:
    """What holds one element of a type that is stored as bytes."""
    whole = WHOLE.fullmatch(name)
    if whole is None:
        return np.dtype(np.float16)
    return np.dtype(f"{'u' if whole[1] else ''}int{max(8, int(whole[2]))}")


def _bits(name: str) -> int:
    whole = WHOLE.fullmatch(name)
    return 16 if whole is None else int(whole[2])


def store(tensor: Any, name: str, values: Any) -> None:
    """Put elements into a TensorValue."""
    if name == "string":
        tensor.strings.SetInParent()
        tensor.strings.values.extend(values)
    elif name in BYTES:
        array = np.asarray(values).astype(_container(name))
        tensor.bytes.SetInParent()
        whole = _bits(name) >= 8
        tensor.bytes.values = (array if whole else sub_byte.pack(array, _bits(name))).tobytes()
    elif name in FIELDS:
        field, dtype = FIELDS[name]
        getattr(tensor, field).SetInParent()
        getattr(tensor, field).values.extend(np.asarray(values).astype(dtype).tolist())
    else:  # bf16 and the floats of eight bits: coremltools has no values of them
        tensor.floats.SetInParent()
        tensor.floats.values.extend(np.asarray(values, np.float32).tolist())


def elements(tensor: Any, name: str, count: int | None) -> Any:
    """The elements of a TensorValue: strings, or an array."""
    field = tensor.WhichOneof("value")
    if field is None:
        return []
    if field != "bytes":
        values = getattr(tensor, field).values
        if field == "strings":
            return list(values)
        array: Array = np.array(values)
        return array.astype(np.uint64) if name == "uint64" else array
    raw = np.frombuffer(tensor.bytes.values, np.uint8)
    if _bits(name) >= 8:
        dtype = np.dtype(_container(name))
        if len(raw) % dtype.itemsize:
            raise LoadError(f"a constant of {name} has {len(raw)} bytes; convert the model again")
        return raw.view(dtype)
    count = len(raw) * 8 // _bits(name) if count is None else count
    return sub_byte.unpack(raw, _bits(name), name.startswith("int"), (count,))
