"""Convert between the MIL protobuf and a coremltools program: `from_proto` and `to_proto`.

The reader and exporter of coremltools (the host) do the work, with some functions replaced while they run.
Weights stay in their file: `fetch` and `store` give arrays for offsets. Errors name the op. Writing runs no
graph pass and renames nothing. Descriptions of types are cached. Some programs that coremltools writes but
refuses to read are accepted: fp32 epsilons beside fp16 inputs, shapes of unknown rank, and lists with named
dimensions.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import numpy as np

from anesurgery.errors import LoadError
from anesurgery.mil import (
    Array,
    Function,
    Program,
    Var,
    ct,
    exclusive,
    is_symbolic,
    nesting,
    patched,
    quiet_host,
    retype_defaults,
    types,
)
from anesurgery.ops import CONTRACTIONS

with quiet_host():
    from coremltools import _OPSET
    from coremltools import proto as proto
    from coremltools.converters.mil.backend.mil import load as writer
    from coremltools.converters.mil.backend.mil.helper import (
        create_file_value_tensor,
        create_immediate_value,
        create_valuetype_tensor,
        types_to_proto_primitive,
    )
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
StoreWeight = Callable[[Var], int | None]
"""constant -> offset of its weight; None if the value is to be written into the protobuf."""

WEIGHT_FILE = "@model_path/weights/weight.bin"
_TARGETS = {name: version for version, name in _OPSET.items()}
"""Name of an opset ("CoreML6") -> coremltools' version of it."""
NEWEST = max(_OPSET)
"""The newest specification version that coremltools knows."""
LEAST_VERSION = 6
"""The first specification version with ML Programs."""
LARGEST_VALUE = 1 << 30
"""The most bytes of a value that is computed while a program is read, 1.1 GB. A larger one stays an op, so that
a small file cannot fill the memory."""
MOST_PRODUCTS = 1 << 22
"""The most multiplications of constants that are computed while a program is read, some 0.01 s: numpy takes 3
ns for each in fp16. A conformer projects its position table in every layer, and took minutes to open."""


class OpError(LoadError):
    """An op cannot be read; the message names it."""


@contextmanager
def reading(fetch: FetchWeight) -> Iterator[None]:
    """Patch coremltools' reader inside the body: weights come from `fetch`, and it reads all that it writes."""
    _skip_used_symbols()
    host_validate, host_infer = InputSpec.validate_inputs, HostOperation._auto_val
    host_dimension = helper.get_proto_dim

    def validate_inputs(self: Any, *arguments: Any) -> None:
        """Accept inputs of different float types, as an fp32 epsilon beside an fp16 input."""
        try:
            host_validate(self, *arguments)
        except ValueError as error:
            if "must have the same data type" not in str(error):
                raise

    def dimension(spec: Any) -> Any:
        """Return the length of a dimension; a variadic one, as shapes of unknown rank have, gets a symbol."""
        variadic = spec.WhichOneof("dimension") == "unknown" and spec.unknown.variadic
        return symbols.get_new_variadic_symbol() if variadic else host_dimension(spec)

    def infer_values(self: Any, result_types: Any) -> Any:
        """Return the values of an op of constants, one for each result; None for those that cost too much."""
        unknown = tuple(None for _ in result_types)
        is_large = any(map(_takes_too_much_memory, result_types))
        if self.op_type != "const" and (is_large or _takes_too_long(self, result_types)):
            return unknown
        try:
            return host_infer(self, result_types)
        except TypeError:  # numpy 2 takes no `keep_dims` of its own type, which coremltools gives to reductions
            return unknown

    with (
        patched(HostOperation, "_auto_val", infer_values),
        patched(reader, "_load_value", _value_reader(fetch)),
        patched(reader, "_load_operation", _operation_reader()),
        patched(InputSpec, "validate_inputs", validate_inputs),
        patched(helper, "get_proto_dim", dimension),
        patched(control_flow, "get_existing_symbol", _symbol_of_name()),
        patched(type_mapping, "get_type_info", lru_cache(None)(type_mapping.get_type_info)),
    ):
        yield


def _takes_too_much_memory(kind: Any) -> bool:
    """Does a value of a type take more than `LARGEST_VALUE` bytes?"""
    if not types.is_tensor(kind) or any(map(is_symbolic, kind.get_shape())):
        return False
    return bool(
        math.prod(map(int, kind.get_shape())) * numpy_type(kind.get_primitive()).itemsize > LARGEST_VALUE
    )


def _takes_too_long(op: Any, result_types: Any) -> bool:
    """Does a product of constants take more than `MOST_PRODUCTS` multiplications?

    An (m, k) times a (k, n) gives an (m, n) in m * k * n multiplications: the root of the product of all sizes.
    A batch in both operands counts more than it takes, which leaves a product as it is.
    """
    if op.op_type not in CONTRACTIONS:
        return False
    read = [v.sym_type for v in op.get_flattened_inputs() if v is not None and v.val is not None and v.rank > 1]
    lengths = [n for kind in (*read, *result_types) if types.is_tensor(kind) for n in kind.get_shape()]
    return not any(map(is_symbolic, lengths)) and math.sqrt(math.prod(map(int, lengths))) > MOST_PRODUCTS


def _value_reader(fetch: FetchWeight) -> Callable[[Any, Any], Any]:
    """Return a replacement of coremltools' function that reads a value: tensors in a file come from `fetch`."""
    load_value = reader._load_value

    def value(context: Any, spec: Any) -> Any:
        if spec.WhichOneof("value") != "blobFileValue" or spec.type.WhichOneof("type") != "tensorType":
            return load_value(context, spec)
        tensor = spec.type.tensorType
        shape = tuple(d.constant.size for d in tensor.dimensions)
        return fetch(spec.blobFileValue.offset, types.PROTO_TO_BUILTIN_TYPE[tensor.dataType], shape)

    return value


def _operation_reader() -> Callable[[Any, Any], None]:
    """Return a replacement of coremltools' function that reads an op: errors name the op."""
    load_operation = reader._load_operation

    def operation(context: Any, spec: Any) -> None:
        try:
            load_operation(context, spec)
        except LoadError:
            raise
        except Exception as error:
            raise OpError(cannot_read(spec, error_words(error))) from error

    return operation


def _symbol_of_name() -> Callable[[str], Any]:
    """Return a function that gives the symbol of a named dimension; names hold for one program only."""
    dimensions: dict[str, Any] = {}

    def symbol(name: str) -> Any:
        if name not in dimensions:
            dimensions[name] = symbols.get_new_symbol()
        return dimensions[name]

    return symbol


def _skip_used_symbols() -> None:
    """Make coremltools number new symbols after those in use; at a used one it would fail each time."""
    taken = [int(n[2:]) + 1 for n in symbols.k_used_symbols if n.startswith("is") and n[2:].isdecimal()]
    symbols.k_num_internal_syms = max([symbols.k_num_internal_syms, *taken])


def cannot_read(spec: Any, reason: str) -> str:
    """Return why an op cannot be read, in words."""
    op_types = SSAOpRegistry.core_ops
    if spec.type not in op_types:
        near = difflib.get_close_matches(spec.type, op_types, n=3, cutoff=0.5)
        hint = f"did you mean {' or '.join(map(repr, near))}?" if near else "upgrade coremltools"
        return f"op {_op_name(spec)} is of the unknown type {spec.type!r}; {hint}"
    return f"op {_op_name(spec)} ({spec.type}) cannot be read: {reason}; convert the model again"


def _op_name(spec: Any) -> str:
    """Return the name of an op in a protobuf: its attribute, else its first output."""
    named = spec.attributes["name"].immediateValue.tensor.strings.values if "name" in spec.attributes else ()
    return repr(str(named[0] if named else spec.outputs[0].name if spec.outputs else "without a name"))


def error_words(error: Exception) -> str:
    """Return the message of a coremltools error on one line."""
    words = str(error) if type(error) is ValueError else f"{type(error).__name__}: {error}"
    return " ".join(words.split())


def _undo_host_changes(function: Any, spec: Any) -> None:
    """Undo changes of coremltools' reader: added constants, numbered names, and dtypes of defaults."""
    named = {v.name for op in nested_operations(spec) for v in op.outputs}
    pending = [function]
    while pending:
        block = pending.pop()
        for op in list(block.operations):
            pending.extend(op.blocks)
            retype_defaults(op)
            var = op.outputs[0]
            if op.op_type == "coreml_update_state":  # the reader numbers it
                op.name = var.name
            unused = not var.child_ops and var not in block.outputs
            if op.op_type == "const" and unused and var.name not in named:
                block.remove_ops([op])


@exclusive()
def from_proto(spec: Any, version: int, fetch: FetchWeight, where: str = "the program") -> Program:
    """Build the program of a `Program` protobuf.

    Args:
        spec: MIL_pb2.Program.
        version: the specification version of the model.
        fetch: returns the array of a weight for its offset.
        where: the name of the program in errors.

    Raises:
        LoadError: coremltools cannot transcribe it.
    """
    if not spec.functions:
        raise LoadError(f"{where} has no functions; convert the model again")
    if version > NEWEST:
        raise LoadError(
            f"{where} is of specification {version}, this coremltools knows up to {NEWEST}; upgrade coremltools"
        )
    program = Program()
    with quiet_host(), reading(fetch):
        for name in sorted(spec.functions, key=lambda n: (n != "main", n)):  # a map has no order
            function = spec.functions[name]
            try:
                opset = _TARGETS.get(function.opset, version)
                for block in function.block_specializations.values():
                    _check_block(block, function.inputs)
                context = reader.TranscriptionContext("")
                built = reader._load_function(context, _without_attributes(function), opset)
                _undo_host_changes(built, function)
                program.add_function(name, built)
            except OpError as error:
                raise LoadError(f"{where}: {error}") from error
            except LoadError:
                raise
            except Exception as error:
                words = f"{where}: function {name!r} cannot be read: {error_words(error)}"
                raise LoadError(f"{words}; convert the model again") from error
    return program


def weight_file_name(spec: Any, where: object = "the program") -> str:
    """Return the name of the weight file that a `Program` protobuf refers to; it differs in pipelines.

    Raises:
        LoadError: it refers to several.
    """
    names = sorted({value.fileName.rsplit("/", 1)[-1] for value in blob_values(spec)})
    if len(names) > 1:
        raise LoadError(f"{where} has its weights in {len(names)} files, {', '.join(names)}; put them into one")
    return names[0] if names else WEIGHT_FILE.rsplit("/", 1)[-1]


def has_weights(spec: Any) -> bool:
    """Does a `Program` protobuf refer to a weight file?"""
    return next(blob_values(spec), None) is not None


def move_weights(spec: Any, file_name: str) -> None:
    """Make the ops of a `Program` protobuf refer to a weight file of another name."""
    for value in blob_values(spec):
        value.fileName = f"{WEIGHT_FILE.rsplit('/', 1)[0]}/{file_name}"


def weight_files(program: Any) -> list[str]:
    """Return the paths of the weight files that a `Program` protobuf refers to, starting with `@model_path`."""
    return list(dict.fromkeys(blob.fileName for blob in blob_values(program)))


def blob_values(program: Any) -> Iterator[Any]:
    """Yield the places in weight files that a `Program` protobuf refers to (`blobFileValue` messages)."""
    values = (value for op in operations(program) for value in literal_values(op))
    return (v.blobFileValue for v in values if v.WhichOneof("value") == "blobFileValue")


def literal_values(op: Any) -> Iterator[Any]:
    """Yield the values stored in an op itself: its attributes, and inputs given as a value, not by name."""
    yield from op.attributes.values()
    for argument in op.inputs.values():
        yield from (b.value for b in argument.arguments if b.WhichOneof("binding") == "value")


def operations(program: Any) -> Iterator[Any]:
    """Yield every op of a `Program` protobuf, including those of nested blocks."""
    for function in program.functions.values():
        yield from nested_operations(function)


def nested_operations(function: Any) -> Iterator[Any]:
    """Yield every op of a `Function` protobuf, including those of nested blocks."""
    pending = [*function.block_specializations.values()]
    while pending:
        for op in pending.pop().operations:
            yield op
            pending.extend(op.blocks)


def _check_block(block: Any, inputs: Any, outer_scopes: Sequence[set[str]] = ()) -> None:
    """Check a block, and those nested in it.

    Args:
        block: a `Block` message.
        inputs: its inputs; those of a function for its outermost block.
        outer_scopes: the names that each enclosing block has defined so far.

    Raises:
        OpError: two values have the same name, so that the wrong one would be read; an op reads a value that
            is not defined before it; or a loop or branch does not fit its blocks.
    """
    own: set[str] = set()
    scopes = [*outer_scopes, own]
    _define(inputs, own)
    for op in block.operations:
        _check_nested(op)
        _check_read(op, scopes)
        for nested in op.blocks:
            _check_block(nested, nested.inputs, scopes)
        _define(op.outputs, own)


def _define(values: Any, scope: set[str]) -> None:
    """Add the names of values to a scope; raise an OpError if one is there already."""
    for value in values:
        if value.name in scope:
            raise OpError(f"two values have the name {value.name!r}; convert the model again")
        scope.add(value.name)


def _check_read(op: Any, scopes: Sequence[set[str]]) -> None:
    """Raise an OpError if an op reads a value that is in no scope."""
    for parameter in sorted(op.inputs):
        for argument in op.inputs[parameter].arguments:
            if argument.WhichOneof("binding") == "name" and not any(argument.name in s for s in scopes):
                words = f"its {parameter} is {argument.name!r}, which is not defined before it"
                raise OpError(cannot_read(op, words))


def _check_nested(op: Any) -> None:
    """Raise an OpError if a block of a loop or branch is missing, or has a wrong number of values."""
    if op.type not in ("while_loop", "cond"):
        return
    results, outputs = len(op.outputs), [len(block.outputs) for block in op.blocks]
    if op.type == "cond":
        fits = outputs == [results, results]
    else:
        carried = len(op.inputs["loop_vars"].arguments) if "loop_vars" in op.inputs else 0
        inputs = [len(block.inputs) for block in op.blocks]
        fits = results == carried and outputs == [1, carried] and inputs == [carried, carried]
    if not fits:
        name = op.outputs[0].name if op.outputs else ""
        raise OpError(f"the {op.type} {name!r} does not have the blocks that it needs; convert the model again")


def _without_attributes(function: Any) -> Any:
    """Return a function message without attributes, which coremltools refuses; `to_proto` restores them."""
    if not function.attributes:
        return function
    copy = proto.MIL_pb2.Function()
    copy.CopyFrom(function)
    copy.attributes.clear()
    return copy


def _file_value(shape: Sequence[int], element: Any, offset: int) -> Any:
    """Return the `Value` message of a constant in the weight file; `element` is a MIL type."""
    return create_file_value_tensor(
        file_name=WEIGHT_FILE, offset=offset, dim=shape, data_type=types_to_proto_primitive(element)
    )


def _file_value_of(var: Var, offset: int) -> Any:
    """Return the `Value` message of a constant in the weight file."""
    element = var.sym_type.get_primitive() if hasattr(var.sym_type, "get_primitive") else var.sym_type
    return _file_value(var.val.shape, element, offset)


@contextmanager
def without_weights() -> Iterator[None]:
    """Make coremltools' exporter write no weight file inside the body, if only the rest is needed."""
    with patched(writer.MILProtoExporter, "create_file_value", lambda self, var: _file_value_of(var, 0)):
        yield


def opset_name(version: int) -> str:
    """Return the name of the opset of a specification version: "CoreML6"."""
    return str(_OPSET[version])


def stored_value(array: Array, weights: InMemoryWeights) -> Any:
    """Return the `Value` message of an array that is kept in `weights`; its dtype gives the number of bits."""
    weights.append(array)
    return _file_value(array.shape, types.numpy_type_to_builtin_type(array.dtype), len(weights) - 1)


def bools_value(array: Array) -> Any:
    """Return the `Value` message of an array of bools: in a file one field of bytes, each 0 or 1."""
    tensor = proto.MIL_pb2.TensorValue
    packed = tensor.RepeatedBytes(values=array.tobytes()).SerializeToString()
    kind = create_valuetype_tensor(array.shape, types_to_proto_primitive(types.bool))
    stated = proto.MIL_pb2.Value(type=kind)
    stated.immediateValue.tensor.bools.CopyFrom(tensor.RepeatedBools.FromString(packed))
    return stated


class _Exporter(writer.MILProtoExporter):  # type: ignore[misc]
    """coremltools' exporter, but weights go through `store`, and each function keeps its opset.

    coremltools would give every function the opset of the file, in which an op may mean something else. Where
    an opset must be raised, `rewriting.newer_opsets` has done so before.
    """

    def __init__(self, program: Program, version: int, store: StoreWeight, opsets: dict[str, str]) -> None:
        super().__init__(program, "", version)
        self._store, self._opsets = store, opsets

    def create_file_value(self, var: Var) -> Any:
        offset = self._store(var)
        return create_immediate_value(var) if offset is None else _file_value_of(var, offset)

    def get_milproto_value(self, var: Var) -> Any:
        value = var.val
        if not (isinstance(value, np.ndarray) and value.dtype == np.bool_ and value.size > 1):
            return super().get_milproto_value(var)
        return bools_value(value)  # the host appends one by one

    def export(self) -> Any:
        functions = {
            name: self.convert_function(
                f, self._opsets.get(name) or opset_name(max(LEAST_VERSION, opset_version(f)))
            )
            for name, f in self.prog.functions.items()
        }
        return proto.MIL_pb2.Program(version=1, functions=functions)


DEEPEST = 40
"""The deepest nesting of blocks that is written. Readers of protobuf accept 100 nested messages; each block of
control flow takes two, and the rest of the specification up to 18."""


def check_depth(program: Program) -> None:
    """Refuse a program whose control flow is nested too deeply for a file.

    Raises:
        LoadError: it is nested deeper than `DEEPEST` blocks.
    """
    if (depth := nesting(program)) > DEEPEST:
        words = f"control flow is nested {depth} deep, and a file can hold {DEEPEST}"
        raise LoadError(f"{words}; unroll inner loops (unroll_loop), or convert branches as select")


@exclusive()
def to_proto(program: Program, version: int, store: StoreWeight, source: Any = None) -> Any:
    """Return the `Program` protobuf of a program.

    Args:
        program: the program.
        version: the specification version to write for.
        store: keeps the value of a constant and returns its offset.
        source: the protobuf that the program was read from; its opsets, attributes and documentation are kept.

    Raises:
        LoadError: its control flow is nested deeper than `DEEPEST` blocks.
    """
    check_depth(program)
    functions = {} if source is None else source.functions
    kept = {name: function for name, function in functions.items() if name in program.functions}
    opsets = {name: f.opset for name, f in kept.items() if f.opset not in _TARGETS}  # unknown to coremltools
    with quiet_host():
        exported = _Exporter(program, version, store, opsets).export()
    if source is not None:
        exported.docString = source.docString
        for name, attribute in source.attributes.items():
            exported.attributes[name].CopyFrom(attribute)
        for name, function in kept.items():
            for key, attribute in function.attributes.items():
                exported.functions[name].attributes[key].CopyFrom(attribute)
    return exported


class InMemoryWeights(list[Array]):
    """The weights of a message that is not in a file: an offset is an index of this list."""

    def store(self, var: Var) -> int:
        """Append the value of a constant, without a copy, and return its offset."""
        self.append(var.val)
        return len(self) - 1

    def read(self, offset: int, dtype: Any, shape: Sequence[int]) -> Array:
        """Return the value at an offset."""
        return self[offset]


def version_of(program: Program) -> int:
    """Return the lowest specification version that fits every function of a program."""
    return max([LEAST_VERSION, *(opset_version(f) for f in program.functions.values())])


def opset_version(function: Function) -> int:
    """Return the specification version of a function's opset."""
    opset = function.opset_version or ct.target.iOS15
    return int(opset.value)


def numpy_type(element: Any) -> Any:
    """Return the numpy dtype of a MIL element type."""
    return np.dtype(types.nptype_from_builtin(element))
