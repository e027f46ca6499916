"""MIL protobuf <-> coremltools program, with the weights left where they are.

coremltools' own transcription does the work; what it does with weights (reading, copying) is replaced. Nothing
else runs on the way out: no graph pass, no renaming.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from anesurgery.errors import LoadError
from anesurgery.mil import Function, Program, Var, ct, exclusive, quiet_host, types

with quiet_host():
    from coremltools import _OPSET, proto
    from coremltools.converters.mil.backend.mil import load as writer
    from coremltools.converters.mil.backend.mil.helper import create_file_value_tensor, types_to_proto_primitive
    from coremltools.converters.mil.frontend.milproto import helper
    from coremltools.converters.mil.frontend.milproto import load as reader
    from coremltools.converters.mil.mil.input_type import InputSpec
    from coremltools.converters.mil.mil.program import get_new_variadic_symbol

FetchWeight = Callable[[int, Any, tuple[int, ...]], Any]
"""(offset, numpy dtype or MIL sub-byte type, shape) -> array."""
StoreWeight = Callable[[Var], int]
"""constant -> offset."""

WEIGHT_FILE = "@model_path/weights/weight.bin"
_TARGETS = {name: version for version, name in _OPSET.items()}


@exclusive
def from_proto(spec: Any, version: int, fetch: FetchWeight) -> Program:
    """Build the program of a `Program` protobuf.

    Args:
        spec: MIL_pb2.Program.
        version: the specification version of the model.
        fetch: gives the array of a weight by its offset.

    Raises:
        LoadError: coremltools cannot transcribe it.
    """
    program = Program()
    with quiet_host(), _reading(fetch):
        for name in sorted(spec.functions, key=lambda n: (n != "main", n)):  # a map has no order
            function = spec.functions[name]
            try:
                opset = _TARGETS.get(function.opset, version)
                context = reader.TranscriptionContext("")
                program.add_function(name, reader._load_function(context, _bare(function), opset))
            except LoadError:
                raise
            except Exception as error:
                raise LoadError(f"function {name!r} cannot be read: {type(error).__name__}: {error}") from error
    return program


def weight_file_name(spec: Any) -> str:
    """The name of the weight file that a `Program` protobuf refers to (parts of a pipeline differ)."""
    for function in spec.functions.values():
        for block in function.block_specializations.values():
            for op in block.operations:
                for value in op.attributes.values():
                    if value.WhichOneof("value") == "blobFileValue":
                        return str(value.blobFileValue.fileName).rsplit("/", 1)[-1]
    return WEIGHT_FILE.rsplit("/", 1)[-1]


def _bare(function: Any) -> Any:
    """The function without attributes, which coremltools refuses (`attach_attributes` brings them back)."""
    if not function.attributes:
        return function
    copy = proto.MIL_pb2.Function()
    copy.CopyFrom(function)
    copy.attributes.clear()
    return copy


@contextmanager
def _reading(fetch: FetchWeight) -> Iterator[None]:
    """Replace how coremltools reads a weight file; and let it read what it writes by itself.

    It writes epsilons of fp32 beside inputs of fp16, and shapes of unknown rank, and refuses to read both.
    """
    load_value, validate, dimension = (reader._load_value, InputSpec.validate_inputs, helper.get_proto_dim)

    def value(context: Any, spec: Any) -> Any:
        if spec.WhichOneof("value") != "blobFileValue" or spec.type.WhichOneof("type") != "tensorType":
            return load_value(context, spec)
        tensor = spec.type.tensorType
        shape = tuple(d.constant.size for d in tensor.dimensions)
        return fetch(spec.blobFileValue.offset, types.PROTO_TO_BUILTIN_TYPE[tensor.dataType], shape)

    def check(self: Any, *given: Any) -> None:
        try:
            validate(self, *given)
        except ValueError as error:
            if "must have the same data type" not in str(error):
                raise

    def size(spec: Any) -> Any:
        variadic = spec.WhichOneof("dimension") == "unknown" and spec.unknown.variadic
        return get_new_variadic_symbol() if variadic else dimension(spec)

    reader._load_value, InputSpec.validate_inputs, helper.get_proto_dim = value, check, size
    try:
        yield
    finally:
        reader._load_value, InputSpec.validate_inputs = load_value, validate
        helper.get_proto_dim = dimension


class _Exporter(writer.MILProtoExporter):  # type: ignore[misc]
    """coremltools' exporter, writing weights through `store` and keeping each function's opset."""

    def __init__(self, program: Program, version: int, store: StoreWeight, opsets: dict[str, str]) -> None:
        super().__init__(program, "", version)
        self._store, self._opsets = store, opsets

    def create_file_value(self, var: Var) -> Any:
        element = var.sym_type.get_primitive() if hasattr(var.sym_type, "get_primitive") else var.sym_type
        return create_file_value_tensor(
            file_name=WEIGHT_FILE,
            offset=self._store(var),
            dim=var.val.shape,
            data_type=types_to_proto_primitive(element),
        )

    def get_milproto_value(self, var: Var) -> Any:
        value = var.val
        if not (isinstance(value, np.ndarray) and value.dtype == np.bool_ and value.size > 1):
            return super().get_milproto_value(var)
        made = proto.MIL_pb2.Value(type=self.types_to_proto(var.sym_type))  # the host appends one by one
        made.immediateValue.tensor.bools.values.extend(value.ravel().tolist())
        return made

    def export(self) -> Any:
        functions = {
            name: self.convert_function(f, self._opsets.get(name, _OPSET[self.specification_version]))
            for name, f in self.prog.functions.items()
        }
        return proto.MIL_pb2.Program(version=1, functions=functions)


@exclusive
def to_proto(program: Program, version: int, store: StoreWeight, source: Any = None) -> Any:
    """The `Program` protobuf of a program.

    Args:
        program: the program.
        version: the specification version to write for.
        store: puts the value of a constant somewhere and gives its offset.
        source: the protobuf that the program came from: opsets, attributes and documentation are kept.
    """
    opsets = {name: f.opset for name, f in source.functions.items()} if source is not None else {}
    with quiet_host():
        made = _Exporter(program, version, store, opsets).export()
    if source is not None:
        made.docString = source.docString
        for name, attribute in source.attributes.items():
            made.attributes[name].CopyFrom(attribute)
        for name, function in source.functions.items():
            for key, attribute in function.attributes.items():
                made.functions[name].attributes[key].CopyFrom(attribute)
    return made


def copy_program(program: Program) -> Program:
    """A program that can be edited without touching the original; the arrays of the constants are shared."""
    held: list[Any] = []

    def store(var: Var) -> int:
        held.append(var.val)
        return len(held) - 1

    version = version_of(program)
    return from_proto(to_proto(program, version, store), version, lambda at, dtype, shape: held[at])


def version_of(program: Program) -> int:
    """The lowest specification version that holds every function of a program (ML Programs begin at 6)."""
    return max([6, *(opset_version(f) for f in program.functions.values())])


def opset_version(function: Function) -> int:
    """The specification version of a function's opset."""
    opset = function.opset_version or ct.target.iOS15
    return int(opset.value)


def numpy_type(element: Any) -> Any:
    """The numpy dtype of a MIL element type."""
    return np.dtype(types.nptype_from_builtin(element))


__all__ = ["copy_program", "from_proto", "numpy_type", "opset_version", "proto", "to_proto", "version_of"]
