"""Read and write MIL text (`model.mil` of a compiled model), from and to the protobuf of a package.

::

    program(1.0)
    [buildInfo = dict<tensor<string, []>, tensor<string, []>>({{"coremltools-version", "9.0"}})]
    {
        func main<ios16>(tensor<fp16, [1025]> logits) {
                tensor<int32, []> axis = const()[val = tensor<int32, []>(-1)];
                tensor<int32, [1]> index = reduce_argmax(axis = axis, x = logits)[name = ...];
            } -> (index);
    }

The reader is written by hand, as a recursive descent over regular expressions: a grammar library builds a
tree of all tokens first, while a type, an argument or all numbers of a tensor are one expression here. Weights
are not read: BLOBFILE becomes a file value with the same path and offset. Ops and attributes that coremltools
does not know are read as all others are.

How the compiler writes nested blocks (of cond and while_loop) is not documented, and no compiled model with one
was found. They are read before or after the attributes of an op, with or without names and commas::

    tensor<fp32, [2]> y = cond(pred = p)[name = string("y")]
        yes() { ... } -> (a),
        no() { ... } -> (b);
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from anesurgery.errors import LoadError
from anesurgery.files import sub_byte
from anesurgery.files.mil_types import (
    MIL,
    NAME,
    NAMES,
    STRING,
    VERSION,
    Scanner,
    TypeReader,
    element_name,
    name_text,
    quote,
    sizes_of_type,
    type_text,
    unescape,
)
from anesurgery.mil import Array

# Values: numbers, strings, lists, dicts, tuples and references into a weight file.
#
# The type before a value says how to read what is in the parentheses::
#
#     tensor<fp16, [2]>([0x1p-1, -inf])
#     dict<string, string>({{"coremltools-version", "9.0"}})
#     tensor<fp16, [8, 4]>(BLOBFILE(path = string("@model_path/weights/weight.bin"), offset = uint64(64)))

_TEXT = r"(?:tensor\s*<\s*string\s*,\s*\[\s*\]\s*>|string)"
_UINT64 = r"(?:tensor\s*<\s*uint64\s*,\s*\[\s*\]\s*>|uint64)"
BLOB = re.compile(
    rf'\s*BLOBFILE\s*\(\s*path\s*=\s*{_TEXT}\s*\(\s*"((?:[^"\\]|\\.)*)"\s*\)\s*,'
    rf"\s*offset\s*=\s*{_UINT64}\s*\(\s*(\d{{1,18}})\s*\)\s*\)"
)
SCALAR = re.compile(r'\s*([^\s"(){}\[\],;]+)')
BRACKET = re.compile(r'[\[\]"(){};]')
WITHOUT_BRACKETS = str.maketrans("[]", "  ")

INTEGER_TYPE = re.compile(r"(u?)int(\d+)")
STORED_AS_BYTES = {"fp16", "int4", "int8", "uint1", "uint2", "uint3", "uint4", "uint6", "uint8", "uint32"}
"""Dtypes whose values the protobuf holds as bytes; elements of less than 8 bits are packed."""
FIELD_OF_DTYPE: dict[str, tuple[str, Any]] = {
    "bool": ("bools", np.bool_),
    "fp32": ("floats", np.float32),
    "fp64": ("doubles", np.float64),
    "int16": ("ints", np.int32),
    "uint16": ("ints", np.int32),
    "int32": ("ints", np.int32),
    "int64": ("longInts", np.int64),
    "uint64": ("longInts", np.int64),
}
"""Dtype -> (field of the protobuf's TensorValue, numpy dtype), for the other dtypes."""
BOOLS = {"true": True, "false": False}


class ValueReader:
    """Reads values into MIL_pb2.Value."""

    def __init__(self, scanner: Scanner, types: TypeReader) -> None:
        self._scanner, self._types = scanner, types

    def read(self) -> Any:
        """Read a type and a value of that type in parentheses.

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
        """Read a value of a type (a `ValueType` message), without the type, into a `Value` message."""
        value.type.CopyFrom(kind)
        which = kind.WhichOneof("type")
        if which == "tensorType":
            self._tensor(value, kind)
        elif which == "listType":
            value.immediateValue.list.SetInParent()
            element = kind.listType.type
            items = value.immediateValue.list.values
            self._scanner.sequence("[", "]", lambda: self._fill(items.add(), element))
        elif which == "dictionaryType":
            value.immediateValue.dictionary.SetInParent()
            pairs = value.immediateValue.dictionary.values
            self._scanner.sequence("{", "}", lambda: self._pair(pairs.add(), kind.dictionaryType))
        elif which == "tupleType":
            self._tuple(value, list(kind.tupleType.types))
        else:
            self._scanner.fail("a state has no value")

    def _pair(self, pair: Any, kind: Any) -> None:
        """Read an entry of a dict, `{key, value}`."""
        self._scanner.expect("{")
        self._fill(pair.key, kind.keyType)
        self._scanner.expect(",")
        self._fill(pair.value, kind.valueType)
        self._scanner.expect("}")

    def _tuple(self, value: Any, kinds: Sequence[Any]) -> None:
        value.immediateValue.tuple.SetInParent()
        items = value.immediateValue.tuple.values

        def read_item() -> None:
            if len(items) >= len(kinds):
                self._scanner.fail(f"the tuple has {len(kinds)} types, and more values")
            self._fill(items.add(), kinds[len(items) - 1])

        self._scanner.sequence("(", ")", read_item)
        if len(items) != len(kinds):
            self._scanner.fail(f"the tuple has {len(kinds)} types, and {len(items)} values")

    def _tensor(self, value: Any, kind: Any) -> None:
        scanner = self._scanner
        start = scanner.position
        if (blob := scanner.take(BLOB)) is not None:
            value.blobFileValue.fileName = unescape(blob[1])
            value.blobFileValue.offset = int(blob[2])
            return
        if scanner.accept("BLOBFILE"):
            scanner.fail("BLOBFILE needs a path and an offset", start)
        name = NAMES[kind.tensorType.dataType]
        values = self._strings() if name == "string" else self._numbers(name)
        shape = sizes_of_type(kind)
        if shape is not None and len(values) != math.prod(shape):
            words = f"the type says {math.prod(shape)} element(s)"
            scanner.fail(f"{words}, the value has {len(values)}", start)
        store_elements(value.immediateValue.tensor, name, values)

    def _strings(self) -> list[str]:
        scanner = self._scanner
        if (string := scanner.take(STRING)) is not None:
            return [unescape(string[1])]
        strings: list[str] = []
        scanner.sequence("[", "]", lambda: strings.extend(self._strings()))
        return strings

    def _numbers(self, name: str) -> Any:
        """Read the elements of a tensor, in brackets of any depth, as a flat array."""
        scanner = self._scanner
        start, text = scanner.position, self._number_text()
        words = text.translate(WITHOUT_BRACKETS).split(",")
        if len(words) == 1 and not words[0].strip():
            return np.zeros(0, np.int64)
        try:
            return _parse(name, words)
        except (ValueError, KeyError, OverflowError):
            scanner.fail(_bad_element(name, words), start)

    def _number_text(self) -> str:
        """Read one number, or bracketed numbers: the text between the outermost brackets."""
        scanner = self._scanner
        start = scanner.position
        if not scanner.accept("["):
            number = scanner.take(SCALAR)
            if number is None:
                scanner.unexpected("a number")
            return number[1]
        depth, begin = 1, scanner.position
        while depth:
            bracket = BRACKET.search(scanner.text, scanner.position)
            if bracket is None or bracket[0] not in "[]":
                scanner.fail("this bracket is not closed", start)
            depth += 1 if bracket[0] == "[" else -1
            scanner.position = bracket.end()
        return scanner.text[begin : scanner.position - 1]


def _parse(name: str, words: list[str]) -> Any:
    """Return words as an array of the dtype `name`; ValueError if one is not a number, or does not fit."""
    if name == "bool":
        return np.array([BOOLS[word.strip()] for word in words])
    if (integer := INTEGER_TYPE.fullmatch(name)) is not None:
        bits = int(integer[2])
        low, high = (0, 2**bits) if integer[1] else (-(2 ** (bits - 1)), 2 ** (bits - 1))
        numbers = [int(word) for word in words if "_" not in word]
        if len(numbers) != len(words) or min(numbers) < low or max(numbers) >= high:
            raise ValueError(name)
        return np.array(numbers, np.uint64 if integer[1] else np.int64)
    reals = np.array([float.fromhex(w) if "x" in w else float(w) for w in words if "_" not in w])
    with np.errstate(over="ignore"):
        narrow = reals.astype({"fp16": np.float16, "fp64": np.float64}.get(name, np.float32))
    if len(reals) != len(words) or np.any(np.isinf(narrow) & ~np.isinf(reals)):
        raise ValueError(name)
    return narrow


def _bad_element(name: str, words: list[str]) -> str:
    """Return the error about the first word that is not of the dtype `name`."""
    for number, word in enumerate(words):
        try:
            _parse(name, [word])
        except (ValueError, KeyError, OverflowError):
            return f"{word.strip()[:40]!r} (element {number}) is no {name}"
    return f"these are not values of {name}"


def _numpy_dtype(name: str) -> Any:
    """Return the numpy dtype that holds one element of a MIL dtype stored as bytes."""
    integer = INTEGER_TYPE.fullmatch(name)
    if integer is None:
        return np.dtype(np.float16)
    return np.dtype(f"{'u' if integer[1] else ''}int{max(8, int(integer[2]))}")


def _bits_of(name: str) -> int:
    integer = INTEGER_TYPE.fullmatch(name)
    return 16 if integer is None else int(integer[2])


def store_elements(tensor: Any, name: str, values: Any) -> None:
    """Put elements of the dtype `name` into a TensorValue."""
    if name == "string":
        tensor.strings.SetInParent()
        tensor.strings.values.extend(values)
    elif name in STORED_AS_BYTES:
        array = np.asarray(values).astype(_numpy_dtype(name))
        tensor.bytes.SetInParent()
        packed = array if _bits_of(name) >= 8 else sub_byte.pack(array, _bits_of(name))
        tensor.bytes.values = packed.tobytes()
    elif name in FIELD_OF_DTYPE:
        field, dtype = FIELD_OF_DTYPE[name]
        getattr(tensor, field).SetInParent()
        getattr(tensor, field).values.extend(np.asarray(values).astype(dtype).tolist())
    else:  # bf16 and the floats of eight bits: coremltools has no values of them
        tensor.floats.SetInParent()
        tensor.floats.values.extend(np.asarray(values, np.float32).tolist())


def elements_of(tensor: Any, name: str, count: int | None) -> Any:
    """Return the elements of a TensorValue: a list of strings, or a flat array."""
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
    if _bits_of(name) >= 8:
        dtype = np.dtype(_numpy_dtype(name))
        if len(raw) % dtype.itemsize:
            raise LoadError(f"a constant of {name} has {len(raw)} bytes; convert the model again")
        return raw.view(dtype)
    count = len(raw) * 8 // _bits_of(name) if count is None else count
    return sub_byte.unpack(raw, _bits_of(name), name.startswith("int"), (count,))


# Reading programs.

FIRST_OPSET = 10
"""The text writes `CoreML5` as `ios15`; the two numbers differ by ten, up to ios18."""
NEWER_OPSETS = {"ios26": "CoreML9"}
OPSET = re.compile(r"ios1([3-8])")
PROTO_OPSET = re.compile(r"CoreML([3-8])")

# Each expression reads a piece of the text at once: `axis = x`; the name before a type's or op's bracket; an op
# without output, `op(` or `() = op(`.
PLAIN_ARGUMENT = re.compile(r"\s*([^\W\d][\w@.]*)\s*=\s*([^\W\d][\w@.]*)(?=\s*[,)])")
CALLED = re.compile(r"\s*([^\W\d][\w@.]*)(?=\s*[(<])")
NO_OUTPUT = re.compile(r"\s*(?:\(\s*\)\s*=\s*)?([^\W\d][\w@.]*)\s*(?=\()")


@dataclass(frozen=True)
class MilText:
    """The content of a MIL text."""

    program: Any
    """MIL_pb2.Program."""
    version: str
    """The version of the text: "1.0", "1.3"."""


def read_mil(text: str, where: str = "the MIL text") -> MilText:
    """Read a MIL text.

    Args:
        text: the text.
        where: its name in errors.

    Raises:
        LoadError: it is not MIL text, or damaged; the error shows line, column and the text of the line.
    """
    reader = _Reader(Scanner(text, where))
    try:
        return reader.program()
    except RecursionError:
        raise LoadError(f"{where} nests types or blocks too deeply to be read; it is damaged") from None


def opset_of(text: str) -> str:
    """Return the protobuf's name of an opset: `CoreML6` for `ios16`; unknown names are not changed."""
    opset = OPSET.fullmatch(text)
    return NEWER_OPSETS.get(text, text) if opset is None else f"CoreML{opset[1]}"


def opset_text(opset: str) -> str:
    """Return the text's name of an opset: `ios16` for `CoreML6`."""
    core_ml = PROTO_OPSET.fullmatch(opset)
    if core_ml is not None:
        return f"ios{FIRST_OPSET + int(core_ml[1])}"
    return {v: k for k, v in NEWER_OPSETS.items()}.get(opset, opset)


class _Reader:
    """A recursive-descent parser: one method for each form of the grammar, which fills a protobuf message."""

    def __init__(self, scanner: Scanner) -> None:
        self._scanner = scanner
        self._types = TypeReader(scanner)
        self._values = ValueReader(scanner, self._types)
        self._scopes: list[set[str]] = []

    def program(self) -> MilText:
        scanner = self._scanner
        scanner.expect("program")
        scanner.expect("(")
        version = scanner.take(VERSION)
        if version is None:
            scanner.unexpected("the version of the text, as in program(1.0)")
        scanner.expect(")")
        program_spec = MIL.Program(version=int(version[1].split(".")[0]))
        self._attributes(program_spec.attributes)
        scanner.expect("{")
        while scanner.accept("func"):
            self._function(program_spec.functions)
        scanner.expect("}")
        if scanner.text[scanner.position :].strip():
            scanner.unexpected("the end of the program")
        if not program_spec.functions:
            scanner.fail("the program has no function")
        return MilText(program_spec, version[1])

    def _function(self, functions: Any) -> None:
        scanner = self._scanner
        position = scanner.position
        name = scanner.name()
        if name in functions:
            scanner.fail(f"function {name!r} is defined twice", position)
        function = functions[name]
        scanner.expect("<")
        function.opset = opset_of(scanner.name())
        scanner.expect(">")
        with self._scope():
            self._parameters(function.inputs)
            self._attributes(function.attributes)
            block = function.block_specializations[function.opset]
            self._body(block)
        scanner.accept(";")

    def _parameters(self, inputs: Any) -> None:
        """Read the inputs of a function or block, and define them."""

        def read_input() -> None:
            value = inputs.add()
            position = self._typed_name(value)
            self._define(value.name, position)

        self._scanner.sequence("(", ")", read_input)

    def _typed_name(self, value: Any) -> int:
        """Read a type and a name into a value that is not defined yet; return the position of the name."""
        value.type.CopyFrom(self._types.read())
        position = self._scanner.position
        value.name = self._scanner.name()
        return position

    def _define(self, name: str, position: int) -> None:
        """Add a name to the innermost scope."""
        if name in self._scopes[-1]:
            self._scanner.fail(f"{name!r} is defined twice", position)
        self._scopes[-1].add(name)

    @contextmanager
    def _scope(self) -> Any:
        """Open a scope: names that are defined inside the `with` block are visible there only."""
        self._scopes.append(set())
        yield
        self._scopes.pop()

    def _body(self, block: Any) -> None:
        """Read the ops of a block, and its outputs."""
        scanner = self._scanner
        scanner.expect("{")
        while not scanner.accept("}"):
            self._operation(block.operations.add())
        scanner.expect("->")
        scanner.sequence("(", ")", lambda: block.outputs.append(self._defined_name()))

    def _defined_name(self) -> str:
        """Read the name of a value that was defined before."""
        position = self._scanner.position
        name = self._scanner.name()
        if not any(name in scope for scope in self._scopes):
            near = difflib.get_close_matches(name, [n for s in self._scopes for n in s], n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            self._scanner.fail(f"{name!r} is not defined here{hint}", position)
        return name

    def _operation(self, op: Any) -> None:
        """Read an op; its outputs are defined after it, so that it cannot read them."""
        scanner = self._scanner
        positions: list[int] = []
        if (without_output := scanner.take(NO_OUTPUT)) is not None:
            op.type = without_output[1]
        else:
            positions.append(self._typed_name(op.outputs.add()))
            while scanner.accept(","):
                positions.append(self._typed_name(op.outputs.add()))
            scanner.expect("=")
            op.type = scanner.name()
        scanner.sequence("(", ")", lambda: self._argument(op.inputs))
        self._attributes(op.attributes)
        self._blocks(op.blocks)
        self._attributes(op.attributes)
        scanner.expect(";")
        for output, position in zip(op.outputs, positions, strict=True):
            self._define(output.name, position)

    def _argument(self, inputs: Any) -> None:
        """Read an argument, `axis = x`, where x is a binding, or several in parentheses."""
        scanner = self._scanner
        position = scanner.position
        plain = scanner.take(PLAIN_ARGUMENT)
        name = scanner.name() if plain is None else plain[1]
        if name in inputs:
            scanner.fail(f"input {name!r} is given twice", position)
        bindings = inputs[name].arguments
        if plain is not None:  # most arguments: one expression reads them whole
            scanner.position = plain.start(2)
            bindings.add().name = self._defined_name()
            return
        scanner.expect("=")
        if not scanner.comes_next("("):
            self._binding(bindings.add())
            return
        inputs[name].SetInParent()
        scanner.sequence("(", ")", lambda: self._binding(bindings.add()))

    def _binding(self, binding: Any) -> None:
        """Read the name of a value, or a literal value."""
        scanner = self._scanner
        start = scanner.position
        if scanner.take(CALLED) is None:
            binding.name = self._defined_name()
            return
        scanner.position = start
        binding.value.CopyFrom(self._values.read())

    def _attributes(self, attributes: Any) -> None:
        """Read attributes in brackets, if there are any."""
        if self._scanner.comes_next("["):
            self._scanner.sequence("[", "]", lambda: self._attribute(attributes))

    def _attribute(self, attributes: Any) -> None:
        scanner = self._scanner
        position = scanner.position
        name = scanner.name()
        if name in attributes:
            scanner.fail(f"attribute {name!r} is given twice", position)
        scanner.expect("=")
        attributes[name].CopyFrom(self._values.read())

    def _blocks(self, blocks: Any) -> None:
        """Read the nested blocks of an op, each with its inputs and outputs."""
        scanner = self._scanner
        while True:
            start = scanner.position
            if blocks and not scanner.accept(","):
                scanner.position = start
            scanner.take(NAME)
            has_parameters = scanner.comes_next("(")
            if not has_parameters and not scanner.comes_next("{"):
                scanner.position = start
                return
            block = blocks.add()
            with self._scope():
                if has_parameters:
                    self._parameters(block.inputs)
                    self._attributes(block.attributes)
                self._body(block)


# Writing programs as Apple's compiler does; `read_mil` reads the text back.
#
# Maps of the protobuf (functions, inputs of ops, attributes) are written in the order of their names, as the
# compiler does. The dialect is that of the compiled models at hand: version 1.0 writes a scalar as
# `tensor<int32, []>`, later versions as `int32`.

WRITTEN_VERSION = "1.3"
"""The version of the text that is written by default."""
INDENT = " " * 4
AGAIN = "convert the model again"


def write_mil(program: Any, version: str = WRITTEN_VERSION) -> str:
    """Return the text of a MIL_pb2.Program, without a newline at the end.

    Args:
        program: the protobuf.
        version: the version of the text; "1.0" writes scalars as tensors without dimensions.

    Raises:
        LoadError: a value has no type or no content, or a function no block of its opset.
    """
    return "\n".join(_Writer(version).program(program))


class _Writer:
    """Yields the lines of a MIL text."""

    def __init__(self, version: str) -> None:
        self._version = version
        # does this version write a scalar as `int32`, not as `tensor<int32, []>`?
        self._scalars = tuple(map(int, version.split("."))) > (1, 0)

    def program(self, program: Any) -> Iterator[str]:
        yield f"program({self._version})"
        if program.attributes:
            yield self._attributes(program.attributes)
        yield "{"
        for name in sorted(program.functions):
            yield from self._function(name, program.functions[name])
        yield "}"

    def _function(self, name: str, function: Any) -> Iterator[str]:
        attributes = f" {self._attributes(function.attributes)}" if function.attributes else ""
        head = f"func {name_text(name)}<{name_text(opset_text(function.opset))}>"
        if function.opset not in function.block_specializations:  # asking a protobuf map for it would add it
            raise LoadError(f"the function {name!r} has no block of its opset {function.opset!r}; {AGAIN}")
        block = function.block_specializations[function.opset]
        yield f"{INDENT}{head}({self._named(function.inputs)}){attributes} {{"
        for op in block.operations:
            yield from self._operation(op, INDENT * 3)
        yield f"{INDENT * 2}}} -> ({', '.join(map(name_text, block.outputs))});"

    def _named(self, values: Any) -> str:
        return ", ".join(f"{type_text(v.type, self._scalars)} {name_text(v.name)}" for v in values)

    def _operation(self, op: Any, indent: str) -> Iterator[str]:
        left = f"{self._named(op.outputs)} = " if op.outputs else ""
        inputs = [f"{name_text(n)} = {self._argument(op, n)}" for n in sorted(op.inputs)]
        line = f"{indent}{left}{name_text(op.type)}({', '.join(inputs)})"
        line += self._attributes(op.attributes) if op.attributes else ""
        if not op.blocks:
            yield f"{line};"
            return
        yield line
        for number, block in enumerate(op.blocks):
            attributes = f" {self._attributes(block.attributes)}" if block.attributes else ""
            yield f"{indent}{INDENT}block{number}({self._named(block.inputs)}){attributes} {{"
            for nested in block.operations:
                yield from self._operation(nested, indent + INDENT * 2)
            end = ";" if number + 1 == len(op.blocks) else ","
            yield f"{indent}{INDENT}}} -> ({', '.join(map(name_text, block.outputs))}){end}"

    def _argument(self, op: Any, name: str) -> str:
        bindings = op.inputs[name].arguments
        written = [
            name_text(b.name) if b.WhichOneof("binding") == "name" else self.value(b.value) for b in bindings
        ]
        alone = len(written) == 1 and not _takes_tuple(op.type, name)
        return written[0] if alone else f"({', '.join(written)})"

    def _attributes(self, attributes: Any) -> str:
        return f"[{', '.join(f'{name_text(n)} = {self.value(attributes[n])}' for n in sorted(attributes))}]"

    def value(self, value: Any) -> str:
        """Return a value with its type before it."""
        return f"{type_text(value.type, self._scalars)}({self._literal(value)})"

    def _literal(self, value: Any) -> str:
        if value.WhichOneof("value") == "blobFileValue":
            blob = value.blobFileValue
            types = ("string", "uint64")
            text, uint64 = types if self._scalars else (f"tensor<{name}, []>" for name in types)
            return f"BLOBFILE(path = {text}({quote(blob.fileName)}), offset = {uint64}({blob.offset}))"
        content = value.immediateValue
        which = content.WhichOneof("value")
        if which == "tensor":
            return self._tensor(content.tensor, value.type)
        if which == "dictionary":
            pairs = sorted((self._literal(p.key), self._literal(p.value)) for p in content.dictionary.values)
            return "{" + ", ".join(f"{{{key}, {item}}}" for key, item in pairs) + "}"
        if which is None:
            raise LoadError(f"a constant has no value; {AGAIN}")
        items = ", ".join(map(self._literal, getattr(content, which).values))
        return f"[{items}]" if which == "list" else f"({items})"

    def _tensor(self, tensor: Any, kind: Any) -> str:
        name, shape = element_name(kind), sizes_of_type(kind)
        values = elements_of(tensor, name, None if shape is None else math.prod(shape))
        texts = _element_texts(name, values)
        if not kind.tensorType.rank and len(texts) == 1:
            return texts[0]
        return _nested_text(texts, shape if shape is not None else (len(texts),))


def _element_texts(name: str, values: Any) -> list[str]:
    """Return the elements of a tensor of the dtype `name` as the text writes them."""
    if name == "string":
        return [quote(v) for v in values]
    if name == "bool":
        return [str(bool(v)).lower() for v in values]
    if np.asarray(values).dtype.kind == "f":
        return hexadecimal(np.asarray(values))
    if np.asarray(values).dtype.kind not in "iub":
        raise LoadError(f"a constant of {name} holds something else; {AGAIN}")
    return [str(int(v)) for v in values]


def hexadecimal(array: Array) -> list[str]:
    """Return numbers as C's %a prints them: exact, without trailing zeros."""
    return [_hexadecimal(v) for v in array.astype(np.float64).ravel().tolist()]


def _hexadecimal(number: float) -> str:
    if not math.isfinite(number):
        return str(number)
    digits, exponent = number.hex().split("p")
    return f"{digits.rstrip('0').rstrip('.') if '.' in digits else digits}p{exponent}".replace("0xp", "0x0p")


def _nested_text(texts: Sequence[str], shape: tuple[int, ...]) -> str:
    """Return elements in nested brackets: of shape (2, 2) "[[1, 2], [3, 4]]"."""
    if len(shape) <= 1:
        return f"[{', '.join(texts)}]"
    step = len(texts) // shape[0] if shape[0] else 0
    return f"[{', '.join(_nested_text(texts[i * step : (i + 1) * step], shape[1:]) for i in range(shape[0]))}]"


@lru_cache(maxsize=4096)
def _takes_tuple(op_type: str, name: str) -> bool:
    """Is a parameter of an op a tuple of values, so that even a single one is written in parentheses?"""
    from coremltools.converters.mil.mil.input_type import TupleInputType
    from coremltools.converters.mil.mil.ops.registry import SSAOpRegistry

    versions = SSAOpRegistry.core_ops.get(op_type, {})
    kinds = [v.input_spec.input_types.get(name) for v in versions.values()]
    return any(isinstance(kind, TupleInputType) for kind in kinds)
