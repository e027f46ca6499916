"""Models that run one after the other as one program: what one gives, a later one reads by the same name.

For proofs of a chain against the uncut model. Names stay where they are free; a value that two models make, as
a mask that is computed again, gets another name in the later one. A half that passes as fp32 is read as the
half that it was: the way there and back loses nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from anesurgery.errors import LoadError
from anesurgery.files.package import Loaded
from anesurgery.files.protobuf import HeldWeights, from_proto, proto, to_proto
from anesurgery.files.sequence import ModelSequence
from anesurgery.mil import Program, function_of

HALF, FLOAT = proto.MIL_pb2.DataType.FLOAT16, proto.MIL_pb2.DataType.FLOAT32


def join(models: ModelSequence, outputs: Sequence[str]) -> Program:
    """One program of several models.

    Args:
        models: each runs its default function.
        outputs: what the whole gives.

    Raises:
        LoadError: they have different opsets, or one reads what none gives.
    """
    held = HeldWeights()
    whole = proto.MIL_pb2.Program(version=1)
    joined = _Joined(whole.functions["main"])
    for part in models.parts:
        name = default_function(part)
        joined.add(to_proto(part.program, part.version, held.store).functions[name])
    joined.finish(outputs)
    version = max(part.version for part in models.parts)
    return from_proto(whole, version, held.read, "the chain")


def default_function(part: Loaded) -> str:
    """The function that a model runs."""
    named = None if part.spec is None else part.spec.description.defaultFunctionName
    chosen = function_of(part.program, named or None)
    return next(name for name, f in part.program.functions.items() if f is chosen)


class _Joined:
    """A function in the making."""

    def __init__(self, function: Any) -> None:
        self._function = function
        self._block: Any = None
        self._taken: set[str] = set()
        self._known: dict[str, str] = {}
        """Name between the models -> name in the whole."""
        self._halves: set[str] = set()
        self._widened: dict[str, str] = {}
        """An fp32 value -> the half that was cast to it."""

    def add(self, part: Any) -> None:
        """Append the ops of one model."""
        if self._block is None:
            self._function.opset = part.opset
            self._block = self._function.block_specializations[part.opset]
        elif part.opset != self._function.opset:
            raise LoadError(
                f"the models have the opsets {self._function.opset} and {part.opset}; prove them singly"
            )
        names: dict[str, str] = {}
        for value in part.inputs:
            if value.name not in self._known:
                self._known[value.name] = self._free(value.name)
                self._function.inputs.add().CopyFrom(value)
                self._function.inputs[-1].name = self._known[value.name]
            names[value.name] = self._known[value.name]
        block = part.block_specializations[part.opset]
        for name in _made(block):
            names[name] = self._free(name)
        for op in block.operations:
            if (half := self._half(op, names)) is not None:
                names[op.outputs[0].name] = half
                continue
            _rename(op, names)
            self._block.operations.add().CopyFrom(op)
            self._remember(op)
        self._known |= {name: names[name] for name in block.outputs}

    def finish(self, outputs: Sequence[str]) -> None:
        """Say what the whole gives."""
        for name in outputs:
            if self._known.get(name) != name:
                raise LoadError(f"the chain does not give {name!r} under its name; cut the model again")
            self._block.outputs.append(name)

    def _half(self, op: Any, names: dict[str, str]) -> str | None:
        """The half that an op casts back to, from fp32."""
        if op.type != "cast" or _element(op.outputs[0]) != HALF:
            return None
        return self._widened.get(names[op.inputs["x"].arguments[0].name])

    def _remember(self, op: Any) -> None:
        """Note the element types of what an op makes, and halves that it casts to fp32."""
        self._halves |= {o.name for o in op.outputs if _element(o) == HALF}
        if op.type == "cast" and _element(op.outputs[0]) == FLOAT:
            source = op.inputs["x"].arguments[0].name
            if source in self._halves:
                self._widened[op.outputs[0].name] = source

    def _free(self, name: str) -> str:
        """The name, or one like it that is not taken yet."""
        free, n = name, 1
        while free in self._taken:
            n += 1
            free = f"{name}_{n}"
        self._taken.add(free)
        return free


def _element(value: Any) -> int:
    """The code of the element type of a value."""
    return int(value.type.tensorType.dataType)


def _made(block: Any) -> Iterator[str]:
    """Every name that the ops of a block make, nested blocks and their inputs included."""
    for op in block.operations:
        yield from (o.name for o in op.outputs)
        for nested in op.blocks:
            yield from (value.name for value in nested.inputs)
            yield from _made(nested)


def _rename(op: Any, names: dict[str, str]) -> None:
    """Let an op make and read values by their names in the whole."""
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
