"""Programs made of a stretch of another one: what it reads from elsewhere enters, what others read leaves."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from anesurgery.files.mil_types import ELEMENTS
from anesurgery.files.protobuf import from_proto, proto
from anesurgery.mil import Program
from anesurgery.splitting.graph import WRITING, Graph, dtype

HALF = 7
"""The first specification version (iOS 16) whose inputs and outputs may be fp16."""
WIDE = "_fp32"
"""What is added to the name of an fp16 value that passes as fp32."""


@dataclass(frozen=True)
class Stretch:
    """A chunk: its nodes in order, and the values at its ends."""

    nodes: tuple[int, ...]
    inputs: tuple[str, ...]
    """Inputs of the function and values of earlier chunks."""
    outputs: tuple[str, ...]
    """Values that later chunks read, and outputs of the function."""


def stretches(graph: Graph, places: Sequence[int]) -> list[Stretch]:
    """The chunks between places; an op that nobody reads is in none, such an input is in the first."""
    spans = list(itertools.pairwise(places))
    chunk_of = {i: number for number, (a, b) in enumerate(spans) for i in range(a, b)}
    wanted: list[dict[str, None]] = [{} for _ in spans]
    for name in graph.outputs:  # an input or a constant that is an output leaves the last chunk
        wanted[chunk_of[graph.maker[name]] if name in graph.maker else -1][name] = None
    backwards: list[Stretch] = []
    for number in range(len(spans) - 1, -1, -1):  # a chunk must know what those after it read
        kept, entering = _backwards(graph, spans[number], wanted[number])
        for name in entering:
            if name in graph.maker:
                wanted[chunk_of[graph.maker[name]]].setdefault(name)
        backwards.append(Stretch(tuple(kept), tuple(entering), tuple(wanted[number])))
    read = {name for stretch in backwards for name in stretch.inputs}
    unread = tuple(name for name in graph.inputs if name not in read)
    return [replace(backwards[-1], inputs=(*backwards[-1].inputs, *unread)), *backwards[-2::-1]]


def _backwards(graph: Graph, span: tuple[int, int], wanted: dict[str, None]) -> tuple[list[int], list[str]]:
    """The nodes that make the wanted values, and what they read from elsewhere.

    Nodes of the span that change a state are kept whether or not somebody reads them.
    """
    kept = {i for i in range(*span) if graph.nodes[i].op.type in WRITING}
    pending = [graph.maker[name] for name in wanted if name in graph.maker]
    pending += kept
    entering: dict[str, None] = {name: None for name in wanted if name in graph.inputs}
    while pending:
        number = pending.pop()
        kept.add(number)
        for name in graph.nodes[number].reads:
            maker = graph.maker.get(name)
            if maker is None:
                if name in graph.inputs:
                    entering[name] = None
            elif maker >= span[0] or name in graph.again:
                if maker not in kept:
                    pending.append(maker)
            else:
                entering[name] = None
    order = {name: i for i, name in enumerate((*graph.inputs, *graph.maker))}
    return sorted(kept), sorted(entering, key=order.__getitem__)


def carve(graph: Graph, stretch: Stretch, version: int, where: str) -> Program:
    """The program of a chunk; its weights are those of the whole."""
    return carve_functions({"main": (graph, stretch)}, version, where)


def carve_functions(pieces: Mapping[str, tuple[Graph, Stretch]], version: int, where: str) -> Program:
    """The program of a chunk with a function for each piece."""
    whole = proto.MIL_pb2.Program(version=1)
    for name, (graph, stretch) in pieces.items():
        _carve(whole.functions[name], graph, stretch, version)
    held = next(graph.held for graph, _ in pieces.values())
    return from_proto(whole, version, held.read, where)


def _carve(function: Any, graph: Graph, stretch: Stretch, version: int) -> None:
    """Fill a function with the ops of a stretch."""
    function.opset = graph.function.opset
    block = function.block_specializations[function.opset]
    nodes = [graph.nodes[i] for i in stretch.nodes]
    widened = {n for n in (*stretch.inputs, *stretch.outputs) if widens(graph, n, version)}
    for name in stretch.inputs:
        kind = function.inputs.add(name=name).type
        kind.CopyFrom(graph.type_of(name))
        if name in widened:
            function.inputs[-1].name = f"{name}{WIDE}"
            block.operations.extend(_cast(f"{name}{WIDE}", name, kind, "fp16"))
            kind.tensorType.dataType = ELEMENTS["fp32"]
    read = [name for node in nodes for name in node.reads]
    block.operations.extend(_constants(graph, [*read, *stretch.outputs]))
    block.operations.extend(node.op for node in nodes)
    for name in stretch.outputs:
        if name in widened:
            block.operations.extend(_cast(name, f"{name}{WIDE}", graph.type_of(name), "fp32"))
        block.outputs.append(f"{name}{WIDE}" if name in widened else name)


def widens(graph: Graph, name: str, version: int) -> bool:
    """Must a value be fp32 between two chunks? fp16 that no input of the model's specification can be."""
    inner = name in graph.maker and name not in graph.outputs
    return inner and version < HALF and dtype(graph.type_of(name)) == "fp16"


def _cast(source: str, target: str, kind: Any, to: str) -> list[Any]:
    """The ops that cast a value: the constant with the name of the type, and the cast."""
    word, cast = proto.MIL_pb2.Operation(type="const"), proto.MIL_pb2.Operation(type="cast")
    text = proto.MIL_pb2.Value()
    text.type.tensorType.dataType = ELEMENTS["string"]
    text.immediateValue.tensor.strings.values.append(to)
    named = f"{target}_dtype"
    for op, name in ((word, named), (cast, target)):
        op.attributes["name"].CopyFrom(text)
        op.attributes["name"].immediateValue.tensor.strings.values[0] = name
        op.outputs.add(name=name)
    word.attributes["val"].CopyFrom(text)
    word.outputs[0].type.CopyFrom(text.type)
    cast.outputs[0].type.CopyFrom(kind)
    cast.outputs[0].type.tensorType.dataType = ELEMENTS[to]
    cast.inputs["x"].arguments.add(name=source)
    cast.inputs["dtype"].arguments.add(name=named)
    return [word, cast]


def _constants(graph: Graph, names: Sequence[str]) -> list[Any]:
    """The constants that are read, each after what it is decoded from."""
    read = {id(op) for op in graph.constants_of(names)}
    unique = {id(op): op for op in graph.constants.values()}
    return [op for number, op in unique.items() if number in read]
