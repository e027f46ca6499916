"""Write a MIL protobuf as the MIL text that Apple's compiler writes; `read_mil` reads it back.

Maps of the protobuf (functions, inputs of ops, attributes) are written in the order of their names, as the
compiler does. The dialect is that of the compiled models at hand: version 1.0 writes a scalar as
`tensor<int32, []>`, later versions as `int32`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from anesurgery.errors import LoadError
from anesurgery.files.mil_text import opset_text
from anesurgery.files.mil_tokens import name_text, quote
from anesurgery.files.mil_types import element_name, sizes_of_type, type_text
from anesurgery.files.mil_values import elements
from anesurgery.mil import Array

VERSION = "1.3"
"""The version that is written by default."""
INDENT = " " * 4
AGAIN = "convert the model again"


def write_mil(program: Any, version: str = VERSION) -> str:
    """The text of a MIL_pb2.Program (no trailing newline).

    Args:
        program: the protobuf.
        version: of the text; "1.0" writes scalars as tensors without dimensions.

    Raises:
        LoadError: a value has no type or no content, or a function no block of its opset.
    """
    return "\n".join(_Writer(version).program(program))


class _Writer:
    def __init__(self, version: str) -> None:
        self._version = version
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
        for at, block in enumerate(op.blocks):
            attributes = f" {self._attributes(block.attributes)}" if block.attributes else ""
            yield f"{indent}{INDENT}block{at}({self._named(block.inputs)}){attributes} {{"
            for nested in block.operations:
                yield from self._operation(nested, indent + INDENT * 2)
            end = ";" if at + 1 == len(op.blocks) else ","
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
        """A value, its type in front."""
        return f"{type_text(value.type, self._scalars)}({self._literal(value)})"

    def _literal(self, value: Any) -> str:
        if value.WhichOneof("value") == "blobFileValue":
            text, uint64 = (
                ("string", "uint64") if self._scalars else ("tensor<string, []>", "tensor<uint64, []>")
            )
            blob = value.blobFileValue
            return f"BLOBFILE(path = {text}({quote(blob.fileName)}), offset = {uint64}({blob.offset}))"
        held = value.immediateValue
        which = held.WhichOneof("value")
        if which == "tensor":
            return self._tensor(held.tensor, value.type)
        if which == "dictionary":
            pairs = sorted((self._literal(p.key), self._literal(p.value)) for p in held.dictionary.values)
            return "{" + ", ".join(f"{{{key}, {item}}}" for key, item in pairs) + "}"
        if which is None:
            raise LoadError(f"a constant has no value; {AGAIN}")
        items = ", ".join(map(self._literal, getattr(held, which).values))
        return f"[{items}]" if which == "list" else f"({items})"

    def _tensor(self, tensor: Any, kind: Any) -> str:
        name, shape = element_name(kind), sizes_of_type(kind)
        values = elements(tensor, name, None if shape is None else math.prod(shape))
        texts = _texts(name, values)
        if not kind.tensorType.rank and len(texts) == 1:
            return texts[0]
        return _nested(texts, shape if shape is not None else (len(texts),))


def _texts(name: str, values: Any) -> list[str]:
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
    """Numbers as C's %a prints them: exact, without trailing zeros."""
    return [_hexadecimal(v) for v in array.astype(np.float64).ravel().tolist()]


def _hexadecimal(number: float) -> str:
    if not math.isfinite(number):
        return str(number)
    digits, exponent = number.hex().split("p")
    return f"{digits.rstrip('0').rstrip('.') if '.' in digits else digits}p{exponent}".replace("0xp", "0x0p")


def _nested(texts: Sequence[str], shape: tuple[int, ...]) -> str:
    if len(shape) <= 1:
        return f"[{', '.join(texts)}]"
    step = len(texts) // shape[0] if shape[0] else 0
    return f"[{', '.join(_nested(texts[i * step : (i + 1) * step], shape[1:]) for i in range(shape[0]))}]"


@lru_cache(maxsize=4096)
def _takes_tuple(op_type: str, name: str) -> bool:
    """Does an op take several values under this name, so that one alone stands in parentheses?"""
    from coremltools.converters.mil.mil.input_type import TupleInputType
    from coremltools.converters.mil.mil.ops.registry import SSAOpRegistry

    versions = SSAOpRegistry.core_ops.get(op_type, {})
    kinds = [v.input_spec.input_types.get(name) for v in versions.values()]
    return any(isinstance(kind, TupleInputType) for kind in kinds)
