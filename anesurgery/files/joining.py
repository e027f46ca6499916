"""Join models that run one after the other into one program, to prove a chain against the uncut model.

An output of one model becomes the value that later models read as the input of that name. Values keep their
names where these are free; if two models compute values of one name, such as a mask, the later gets another
name. Inputs and outputs of the whole keep theirs. A value that a model reads in another dtype is cast. Where an
fp16 value passes between models as fp32, the two casts are left out: they change nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from anesurgery.errors import LoadError, SurgeryError
from anesurgery.files.package import Loaded
from anesurgery.files.protobuf import InMemoryWeights, from_proto, proto, to_proto
from anesurgery.files.sequence import ModelSequence
from anesurgery.mil import Program, function_of

HALF, FLOAT = proto.MIL_pb2.DataType.FLOAT16, proto.MIL_pb2.DataType.FLOAT32
CASTS = {HALF: "fp16", FLOAT: "fp32", proto.MIL_pb2.DataType.INT32: "int32"}
"""Code of a dtype -> the name that `cast` takes."""


def join(models: ModelSequence, outputs: Sequence[str]) -> Program:
    """Return one program that computes what several models compute.

    Args:
        models: the models; of each the default function is used.
        outputs: the names of the outputs of the program.

    Raises:
        LoadError: the models have different opsets, or none computes one of the outputs.
    """
    weights = InMemoryWeights()
    joined_spec = proto.MIL_pb2.Program(version=1)
    parts = [
        to_proto(part.program, part.version, weights.store).functions[default_function(part)]
        for part in models.parts
    ]
    names, between = set(outputs), set[str]()
    for part in parts:
        names |= {value.name for value in part.inputs} - between
        between |= set(part.block_specializations[part.opset].outputs)
    joiner = _FunctionJoiner(joined_spec.functions["main"], names)
    for part in parts:
        joiner.add(part)
    joiner.finish(outputs)
    version = max(part.version for part in models.parts)
    return from_proto(joined_spec, version, weights.read, "the chain")


def joined(models: ModelSequence, place: Path) -> Loaded:
    """Return one model that computes what several models compute, with the inputs and outputs of the whole.

    Args:
        models: the models, of one opset.
        place: the package or folder that they were read from.

    Raises:
        LoadError: as `join` raises it.
        SurgeryError: a picture passes between two models, where it is rounded to whole numbers.
    """
    described = models.spec.description
    ends = {f.name for f in (*described.input, *described.output)}
    for part in models.parts:
        for feature in () if part.spec is None else part.spec.description.output:
            if feature.name not in ends and feature.type.WhichOneof("Type") == "imageType":
                raise SurgeryError(
                    f"the picture {feature.name} passes between two models of {place}, and is rounded there to "
                    "whole numbers; give each model by itself"
                )
    spec = proto.Model_pb2.Model(specificationVersion=max(part.version for part in models.parts))
    spec.description.CopyFrom(described)
    spec.mlProgram.SetInParent()
    files = tuple(f for part in models.parts for f in (part.weights, *part.other_weights) if f is not None)
    whole = join(models, [f.name for f in described.output])
    return Loaded(whole, spec, place.resolve(), other_weights=files)


def default_function(part: Loaded) -> str:
    """Return the name of the function that a model runs by default."""
    named = None if part.spec is None else part.spec.description.defaultFunctionName
    chosen = function_of(part.program, named or None)
    return next(name for name, f in part.program.functions.items() if f is chosen)


class _FunctionJoiner:
    """Appends the ops of one model after another to a function protobuf."""

    def __init__(self, function: Any, reserved: set[str]) -> None:
        self._function = function
        self._block: Any = None
        self._taken = reserved
        """Names that no further value may have: those of inputs and outputs, and of values that are there."""
        self._known: dict[str, str] = {}
        """Name of a value between the models -> its name in the joined function."""
        self._halves: set[str] = set()
        """The fp16 values."""
        self._widened: dict[str, str] = {}
        """An fp32 value -> the fp16 value that was cast to it."""
        self._types: dict[str, Any] = {}
        """The type of each value."""

    def add(self, part: Any) -> None:
        """Append the ops of one model."""
        if self._block is None:
            self._function.opset = part.opset
            self._block = self._function.block_specializations[part.opset]
        elif part.opset != self._function.opset:
            raise LoadError(
                f"the models have the opsets {self._function.opset} and {part.opset}; convert them for one OS"
            )
        names: dict[str, str] = {}
        for value in part.inputs:
            if value.name not in self._known:
                self._known[value.name] = value.name
                self._function.inputs.add().CopyFrom(value)
                self._types[value.name] = value.type
            names[value.name] = self._as_type(self._known[value.name], value.type)
        block = part.block_specializations[part.opset]
        for name in _result_names(block):
            names[name] = self._free(name)
        for op in block.operations:
            if (half := self._original_half(op, names)) is not None:
                names[op.outputs[0].name] = half
                continue
            _rename(op, names)
            self._block.operations.add().CopyFrom(op)
            self._remember(op)
        self._known |= {name: names[name] for name in block.outputs}

    def finish(self, outputs: Sequence[str]) -> None:
        """Set the outputs of the joined function, whose values get their names.

        Raises:
            LoadError: no model makes one of them, or two of them are one value.
        """
        inputs = {value.name for value in self._function.inputs}
        names = {name: name for name in self._taken}
        for name in outputs:
            value = self._known.get(name)
            if value is None or value in inputs or names[value] != value:
                raise LoadError(f"the chain gives no {name!r} of its own; cut the model again")
            names[value] = name
            self._block.outputs.append(name)
        for op in self._block.operations:
            _rename(op, names)

    def _original_half(self, op: Any, names: dict[str, str]) -> str | None:
        """Return the fp16 value that an op casts back to from fp32; None for other ops."""
        if op.type != "cast" or _dtype_code(op.outputs[0]) != HALF:
            return None
        return self._widened.get(names[op.inputs["x"].arguments[0].name])

    def _as_type(self, name: str, wanted: Any) -> str:
        """Return the name of a value in the dtype that a model reads it in."""
        dtype = wanted.tensorType.dataType
        if self._types[name].tensorType.dataType == dtype or dtype not in CASTS:
            return name
        if dtype == HALF and name in self._widened:
            return self._widened[name]
        op = self._block.operations.add(type="cast")
        op.inputs["x"].arguments.add(name=name)
        literal = op.inputs["dtype"].arguments.add().value
        literal.type.tensorType.dataType = proto.MIL_pb2.DataType.STRING
        literal.immediateValue.tensor.strings.values.append(CASTS[dtype])
        op.outputs.add(name=self._free(f"{name}_as_{CASTS[dtype]}")).type.CopyFrom(wanted)
        self._remember(op)
        return str(op.outputs[0].name)

    def _remember(self, op: Any) -> None:
        """Note the types of an op's results: which are fp16, and which are fp16 values cast to fp32."""
        self._types |= {o.name: o.type for o in op.outputs}
        self._halves |= {o.name for o in op.outputs if _dtype_code(o) == HALF}
        if op.type == "cast" and _dtype_code(op.outputs[0]) == FLOAT:
            source = op.inputs["x"].arguments[0].name
            if source in self._halves:
                self._widened[op.outputs[0].name] = source

    def _free(self, name: str) -> str:
        """Return the name, or the name with a number if it is taken."""
        free, n = name, 1
        while free in self._taken:
            n += 1
            free = f"{name}_{n}"
        self._taken.add(free)
        return free


def _dtype_code(value: Any) -> int:
    """Return the code of the dtype of a value."""
    return int(value.type.tensorType.dataType)


def _result_names(block: Any) -> Iterator[str]:
    """Yield the name of every result in a block, including those of nested blocks and their inputs."""
    for op in block.operations:
        yield from (o.name for o in op.outputs)
        for nested in op.blocks:
            yield from (value.name for value in nested.inputs)
            yield from _result_names(nested)


def _rename(op: Any, names: dict[str, str]) -> None:
    """Replace the names in an op, and in its blocks, by those in the joined function."""
    for output in op.outputs:
        output.name = names[output.name]
    if op.outputs and "name" in op.attributes:
        op.attributes["name"].immediateValue.tensor.strings.values[0] = op.outputs[0].name
    for operand in op.inputs.values():
        for argument in operand.arguments:
            if argument.WhichOneof("binding") == "name":
                argument.name = names[argument.name]
    for nested in op.blocks:
        for value in nested.inputs:
            value.name = names[value.name]
        for inner in nested.operations:
            _rename(inner, names)
        for number, name in enumerate(nested.outputs):
            nested.outputs[number] = names[name]
