"""What coremltools' reader of programs does otherwise here: weights stay in their file, errors name the op.

A type is described once: coremltools describes one anew at each question, of which an op has dozens.
It also reads back what coremltools itself writes and then refuses: epsilons of fp32 beside inputs of fp16,
shapes of unknown rank, and lists whose elements have dimensions with a name.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import numpy as np

from anesurgery.errors import LoadError
from anesurgery.forking import patched
from anesurgery.mil import is_symbolic, quiet_host, retype_defaults, types
from anesurgery.ops import CONTRACTIONS

with quiet_host():
    from coremltools.converters.mil.frontend.milproto import helper
    from coremltools.converters.mil.frontend.milproto import load as reader
    from coremltools.converters.mil.mil import program as symbols
    from coremltools.converters.mil.mil.input_type import InputSpec
    from coremltools.converters.mil.mil.operation import Operation as HostOperation
    from coremltools.converters.mil.mil.ops.defs.iOS15 import control_flow
    from coremltools.converters.mil.mil.ops.registry import SSAOpRegistry
    from coremltools.converters.mil.mil.types import type_mapping

FetchWeight = Callable[[int, Any, tuple[int, ...]], Any]
"""(offset, MIL element type, shape) -> array."""


LARGEST_VALUE = 1 << 30
"""Bytes of a value that is computed while a program is read, 1 GiB; a larger one stays an op, so that a small
file cannot fill the memory."""


MOST_PRODUCTS = 1 << 22
"""Products of a sum of constants that are computed while a program is read, some 0.01 s: numpy takes 3 ns for
each in fp16. A conformer projects its table of positions in every layer, and was opened in minutes."""


class OpError(LoadError):
    """An op cannot be read; names it."""


@contextmanager
def reading(fetch: FetchWeight) -> Iterator[None]:
    """Let coremltools' reader take weights from `fetch`, and read what it writes."""
    _skip_used_symbols()
    validate, dimension, infer = InputSpec.validate_inputs, helper.get_proto_dim, HostOperation._auto_val

    def check(self: Any, *arguments: Any) -> None:
        try:
            validate(self, *arguments)
        except ValueError as error:
            if "must have the same data type" not in str(error):
                raise

    def size(spec: Any) -> Any:
        variadic = spec.WhichOneof("dimension") == "unknown" and spec.unknown.variadic
        return symbols.get_new_variadic_symbol() if variadic else dimension(spec)

    def values(self: Any, kinds: Any) -> Any:
        large = self.op_type != "const" and (any(map(_too_large, kinds)) or _too_long(self, kinds))
        try:
            return tuple(None for _ in kinds) if large else infer(self, kinds)
        except TypeError:  # numpy 2 takes no `keep_dims` of its own type, which coremltools gives to reductions
            return tuple(None for _ in kinds)

    with (
        patched(HostOperation, "_auto_val", values),
        patched(reader, "_load_value", _values(fetch)),
        patched(reader, "_load_operation", _operations()),
        patched(InputSpec, "validate_inputs", check),
        patched(helper, "get_proto_dim", size),
        patched(control_flow, "get_existing_symbol", _names()),
        patched(type_mapping, "get_type_info", lru_cache(None)(type_mapping.get_type_info)),
    ):
        yield


def _too_large(kind: Any) -> bool:
    """Would a value of a type take more memory than is spent on what nobody may ask for?"""
    if not types.is_tensor(kind) or any(is_symbolic(size) for size in kind.get_shape()):
        return False
    element = np.dtype(types.nptype_from_builtin(kind.get_primitive()))
    return math.prod(int(size) for size in kind.get_shape()) * element.itemsize > LARGEST_VALUE


def _too_long(op: Any, kinds: Any) -> bool:
    """Would products of constants take too long? Their number is the root of all sizes of two matrices."""
    if op.op_type not in CONTRACTIONS:
        return False
    read = [v.sym_type for v in op.get_flattened_inputs() if v is not None and v.val is not None and v.rank > 1]
    sizes = [kind.get_shape() for kind in (*read, *kinds) if types.is_tensor(kind)]
    if any(is_symbolic(size) for shape in sizes for size in shape):
        return False
    return math.sqrt(math.prod(int(size) for shape in sizes for size in shape)) > MOST_PRODUCTS


def _values(fetch: FetchWeight) -> Callable[[Any, Any], Any]:
    """Reads a value; a tensor in a weight file comes from `fetch`."""
    load_value = reader._load_value

    def value(context: Any, spec: Any) -> Any:
        if spec.WhichOneof("value") != "blobFileValue" or spec.type.WhichOneof("type") != "tensorType":
            return load_value(context, spec)
        tensor = spec.type.tensorType
        shape = tuple(d.constant.size for d in tensor.dimensions)
        return fetch(spec.blobFileValue.offset, types.PROTO_TO_BUILTIN_TYPE[tensor.dataType], shape)

    return value


def _operations() -> Callable[[Any, Any], None]:
    """Reads an op; an error names it."""
    load_operation = reader._load_operation

    def operation(context: Any, spec: Any) -> None:
        try:
            load_operation(context, spec)
        except LoadError:
            raise
        except Exception as error:
            raise OpError(cannot_read(spec, said(error))) from error

    return operation


def _names() -> Callable[[str], Any]:
    """Gives the dimension of a name in a list's shape; other programs may use the same names."""
    dimensions: dict[str, Any] = {}

    def symbol(name: str) -> Any:
        if name not in dimensions:
            dimensions[name] = symbols.get_new_symbol()
        return dimensions[name]

    return symbol


def _skip_used_symbols() -> None:
    """Let coremltools number new symbols after those that are taken; at one that is, it would fail for good."""
    taken = [int(n[2:]) + 1 for n in symbols.k_used_symbols if n.startswith("is") and n[2:].isdecimal()]
    symbols.k_num_internal_syms = max([symbols.k_num_internal_syms, *taken])


def cannot_read(spec: Any, reason: str) -> str:
    """Why an op cannot be read, in words."""
    op_types = SSAOpRegistry.core_ops
    if spec.type not in op_types:
        near = difflib.get_close_matches(spec.type, op_types, n=3, cutoff=0.5)
        hint = f"did you mean {' or '.join(map(repr, near))}?" if near else "upgrade coremltools"
        return f"op {_op_name(spec)} is of the unknown type {spec.type!r}; {hint}"
    return f"op {_op_name(spec)} ({spec.type}) cannot be read: {reason}; convert the model again"


def _op_name(spec: Any) -> str:
    """The name of an op in a protobuf: its attribute, else its first output."""
    named = spec.attributes["name"].immediateValue.tensor.strings.values if "name" in spec.attributes else ()
    return repr(str(named[0] if named else spec.outputs[0].name if spec.outputs else "without a name"))


def said(error: Exception) -> str:
    """An error of coremltools in words, on one line."""
    words = str(error) if type(error) is ValueError else f"{type(error).__name__}: {error}"
    return " ".join(words.split())


def tidy(function: Any, spec: Any) -> None:
    """Undo what coremltools adds: constants beside nested blocks, counted names of updates, defaults apart."""
    named = {v.name for block in spec.block_specializations.values() for v in _outputs(block)}
    pending = [function]
    while pending:
        block = pending.pop()
        for op in list(block.operations):
            pending.extend(op.blocks)
            retype_defaults(op)
            var = op.outputs[0]
            if op.op_type == "coreml_update_state":
                op.name = var.name
            unused = not var.child_ops and var not in block.outputs
            if op.op_type == "const" and unused and var.name not in named:
                block.remove_ops([op])


def _outputs(block: Any) -> Iterator[Any]:
    """The values that the ops of a block make, nested blocks included."""
    for op in block.operations:
        yield from op.outputs
        for nested in op.blocks:
            yield from _outputs(nested)
