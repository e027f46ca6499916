"""The ops of a function in order, with what they read and the weights they need; and parts of them as programs.

`read_graph` makes a `Graph` of a function. `stretches` cuts it at some places, and `carve` makes a program of
one stretch: values from elsewhere become inputs, and values that others read become outputs. Weights are never
copied.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from anesurgery.files.mil_types import ELEMENTS, element_name, sizes_of_type
from anesurgery.files.protobuf import InMemoryWeights, from_proto, literal_values, proto, to_proto
from anesurgery.mil import Program
from anesurgery.ops import IMPURE
from anesurgery.ops import names as words

WRITING = words("coreml_update_state write_state")
"""Ops that change a state; `coreml_update_state` is written as `write_state` and `read_state`."""
STATEFUL = WRITING | words("read_state")
HEAVY = words(
    "conv conv_transpose linear matmul einsum scaled_dot_product_attention lstm gru rnn while_loop cond"
)
"""Ops that are never computed again in another chunk, however few weights they need."""
FEW_TERMS = 4
"""A matmul that sums at most so many terms costs no more than other ops."""
PORT_TYPES = ("fp16", "fp32", "int32")
"""Element types of a model's inputs and outputs."""
MOST_REPEATED_BYTES = 1 << 20
"""The most bytes of weights that a chunk may repeat to compute a value that cannot be passed: 1 MB, small for a
chunk."""
MOST_REPEATED_OPS = 48
"""The most ops that a chunk may repeat instead of reading a value. A choice: masks and rotary tables have
fewer."""


@dataclass(frozen=True)
class Node:
    """An op, in the order of the program."""

    op: Any
    """MIL_pb2.Operation."""
    reads: tuple[str, ...]
    """Values that it reads, in nested blocks too, constants included."""
    makes: tuple[str, ...]


@dataclass
class Graph:
    """One function; weights are kept apart, by number."""

    function: Any
    """A MIL_pb2.Function; its weights are offsets into `held`."""
    held: InMemoryWeights
    nodes: tuple[Node, ...]
    constants: Mapping[str, Any]
    """Name -> op that holds or decodes a constant."""

    @cached_property
    def block(self) -> Any:
        """The block of the function's opset."""
        return self.function.block_specializations[self.function.opset]

    @cached_property
    def inputs(self) -> dict[str, Any]:
        """Name -> ValueType of the inputs, states included."""
        return {value.name: value.type for value in self.function.inputs}

    @cached_property
    def maker(self) -> dict[str, int]:
        """Value -> number of the node that computes it."""
        return {name: i for i, node in enumerate(self.nodes) for name in node.makes}

    @cached_property
    def outputs(self) -> tuple[str, ...]:
        """Outputs of the function, in order."""
        return tuple(self.block.outputs)

    @cached_property
    def types(self) -> dict[str, Any]:
        """Name -> ValueType of the inputs and of the nodes' results."""
        return self.inputs | {o.name: o.type for node in self.nodes for o in node.op.outputs}

    def can_pass(self, name: str) -> bool:
        """Return whether a value can be an output of one model and an input of another."""
        kind = self.types[name]
        if kind.WhichOneof("type") != "tensorType" or element_name(kind) not in PORT_TYPES:
            return False
        return 1 <= kind.tensorType.rank <= 5 and sizes_of_type(kind) is not None

    def size(self, name: str) -> int:
        """Return the bytes of a value; flexible axes count as 1, and values other than tensors as 0."""
        kind = self.types[name]
        if kind.WhichOneof("type") != "tensorType":
            return 0
        return math.prod(max(1, d.constant.size) for d in kind.tensorType.dimensions) * bits(kind) // 8

    @cached_property
    def state_users(self) -> dict[str, list[int]]:
        """State -> the nodes that use it, in order."""
        by_state: dict[str, list[int]] = {}
        for number, node in enumerate(self.nodes):
            for name in node.reads:
                if name in self.inputs and self.inputs[name].WhichOneof("type") == "stateType":
                    by_state.setdefault(name, []).append(number)
        return by_state

    @cached_property
    def weights(self) -> tuple[Mapping[int, int], ...]:
        """For each node, the weights that it reads: address -> bytes."""
        return tuple(self.weights_of(node.reads) for node in self.nodes)

    def weights_of(self, names: Sequence[str]) -> dict[int, int]:
        """Return the weights behind constants, also compressed ones."""
        sizes: dict[int, int] = {}
        for op in self.constants_of(names):
            for value in literal_values(op):
                if value.WhichOneof("value") == "blobFileValue":
                    array = self.held[value.blobFileValue.offset]
                    sizes[array.ctypes.data] = array.nbytes
        return sizes

    def constants_of(self, names: Sequence[str]) -> list[Any]:
        """Return the constants among some values, after those from which they are decoded."""
        needed: dict[str, Any] = {}
        pending = [n for n in names if n in self.constants]
        while pending:
            name = pending.pop()
            if name not in needed:
                needed[name] = self.constants[name]
                pending += [n for n in reads_of(self.constants[name]) if n in self.constants]
        return list(needed.values())

    @cached_property
    def repeated(self) -> Mapping[str, frozenset[int]]:
        """Value -> the nodes that compute it from the inputs, where repeating them is cheaper than passing it.

        Such nodes are few, none is heavy or uses a state, and their weights are no larger than the value. For a
        value that cannot be passed, such as a boolean mask, the weights may be larger.
        """
        nodes_of: dict[str, frozenset[int]] = {name: frozenset() for name in self.inputs}
        for number, node in enumerate(self.nodes):
            computed = [name for name in node.reads if name not in self.constants]
            if self._is_heavy(node) or node.op.blocks or not all(name in nodes_of for name in computed):
                continue
            numbers = frozenset({number}).union(*(nodes_of[name] for name in computed))
            if len(numbers) > MOST_REPEATED_OPS:
                continue
            needed: dict[int, int] = {}
            for other in numbers:
                needed |= self.weights[other]
            for name in node.makes:
                passed = self.can_pass(name) or self.types[name].WhichOneof("type") != "tensorType"
                if sum(needed.values()) <= (self.size(name) if passed else MOST_REPEATED_BYTES):
                    nodes_of[name] = numbers
        return {name: numbers for name, numbers in nodes_of.items() if name not in self.inputs}

    def _is_heavy(self, node: Node) -> bool:
        """Return whether an op is better computed once. A product of a few terms (rotary angles) is not."""
        if node.op.type != "matmul":
            return node.op.type in HEAVY | STATEFUL | IMPURE
        x, out = (sizes_of_type(kind) for kind in (self._operand(node, "x"), node.op.outputs[0].type))
        if x is None or out is None or min(len(x), len(out)) < 2:
            return True
        return x[-1] * x[-2] > FEW_TERMS * out[-2]  # x is (rows, terms) or, transposed, (terms, rows)

    def _operand(self, node: Node, name: str) -> Any:
        """Return the ValueType of an operand, also a constant."""
        read = node.op.inputs[name].arguments[0].name
        if read in self.constants:
            return next(o.type for o in self.constants[read].outputs if o.name == read)
        return self.types[read]


def bits(kind: Any) -> int:
    """Return the bits of an element of a tensor's ValueType: 16 for "fp16", 8 for "bool"."""
    return int("".join(filter(str.isdigit, element_name(kind))) or 8)


def reads_of(op: Any) -> list[str]:
    """Return the names that an op reads from outside, also in nested blocks."""
    names = [
        b.name for operand in op.inputs.values() for b in operand.arguments if b.WhichOneof("binding") == "name"
    ]
    for block in op.blocks:
        own = {value.name for value in block.inputs}
        for inner in block.operations:
            names += [n for n in reads_of(inner) if n not in own]
            own |= {o.name for o in inner.outputs}
        names += [n for n in block.outputs if n not in own]
    return list(dict.fromkeys(names))


def read_graphs(program: Program, version: int, names: Sequence[str]) -> dict[str, Graph]:
    """Return the graphs of some functions of a program, which share their weights."""
    held = InMemoryWeights()
    whole = to_proto(program, version, held.store)
    return {name: _read_function(whole.functions[name], held) for name in names}


def read_graph(program: Program, version: int, name: str) -> Graph:
    """Return the graph of one function of a program."""
    return read_graphs(program, version, [name])[name]


def _read_function(function: Any, held: InMemoryWeights) -> Graph:
    constants: dict[str, Any] = {}
    nodes = []
    for op in function.block_specializations[function.opset].operations:
        reads = reads_of(op)
        if op.type == "const" or op.type.startswith("constexpr_"):
            constants |= {o.name: op for o in op.outputs}
        else:
            nodes.append(Node(op, tuple(reads), tuple(o.name for o in op.outputs)))
    return Graph(function, held, tuple(nodes), constants)


HALF = 7
"""The first specification version (iOS 16) whose inputs and outputs may be fp16."""
WIDE = "_fp32"
"""Suffix of the name of an fp16 value that is passed as fp32."""


@dataclass(frozen=True)
class Stretch:
    """A part of a graph for one chunk: its nodes in order, and the values at its ends."""

    nodes: tuple[int, ...]
    inputs: tuple[str, ...]
    """Inputs of the function and values of earlier chunks."""
    outputs: tuple[str, ...]
    """Values that later chunks read, and outputs of the function."""


def stretches(graph: Graph, places: Sequence[int]) -> list[Stretch]:
    """Return the stretches between places. Ops that nobody reads are in none; such inputs are in the first."""
    spans = list(itertools.pairwise(places))
    chunk_of = {i: number for number, (a, b) in enumerate(spans) for i in range(a, b)}
    results: list[dict[str, None]] = [{} for _ in spans]
    for name in graph.outputs:  # an input or a constant that is an output leaves the last chunk
        results[chunk_of[graph.maker[name]] if name in graph.maker else -1][name] = None
    backwards: list[Stretch] = []
    for number in range(len(spans) - 1, -1, -1):  # a chunk must know what those after it read
        kept, entering = _needed_nodes(graph, spans[number], results[number])
        for name in entering:
            if name in graph.maker:
                results[chunk_of[graph.maker[name]]].setdefault(name)
        backwards.append(Stretch(tuple(kept), tuple(entering), tuple(results[number])))
    read = {name for stretch in backwards for name in stretch.inputs}
    unread = tuple(name for name in graph.inputs if name not in read)
    return [replace(backwards[-1], inputs=(*backwards[-1].inputs, *unread)), *backwards[-2::-1]]


def _needed_nodes(graph: Graph, span: tuple[int, int], wanted: Iterable[str]) -> tuple[list[int], list[str]]:
    """Return the nodes of a chunk that compute the wanted values, and what they read from elsewhere.

    These are nodes of the span, and earlier ones that it repeats. Nodes of the span that change a state are
    always kept.
    """
    kept: set[int] = set()
    pending = [graph.maker[name] for name in wanted if name in graph.maker]
    pending += [i for i in range(*span) if graph.nodes[i].op.type in WRITING]
    entering = {name for name in wanted if name in graph.inputs}
    while pending:
        number = pending.pop()
        if number in kept:
            continue
        kept.add(number)
        for name in graph.nodes[number].reads:
            maker = graph.maker.get(name)
            if maker is not None and (maker >= span[0] or name in graph.repeated):
                pending.append(maker)
            elif maker is not None or name in graph.inputs:
                entering.add(name)
    order = {name: i for i, name in enumerate((*graph.inputs, *graph.maker))}
    return sorted(kept), sorted(entering, key=order.__getitem__)


def carve(graph: Graph, stretch: Stretch, version: int, where: str) -> Program:
    """Return the program of a stretch; its weights are those of the whole model."""
    return carve_functions({"main": (graph, stretch)}, version, where)


def carve_functions(pieces: Mapping[str, tuple[Graph, Stretch]], version: int, where: str) -> Program:
    """Return a program with a function for each stretch."""
    whole = proto.MIL_pb2.Program(version=1)
    for name, (graph, stretch) in pieces.items():
        _fill_function(whole.functions[name], graph, stretch, version)
    held = next(graph.held for graph, _ in pieces.values())
    return from_proto(whole, version, held.read, where)


def _fill_function(function: Any, graph: Graph, stretch: Stretch, version: int) -> None:
    """Fill a function with the ops of a stretch."""
    function.opset = graph.function.opset
    block = function.block_specializations[function.opset]
    nodes = [graph.nodes[i] for i in stretch.nodes]
    widened = {n for n in (*stretch.inputs, *stretch.outputs) if passes_as_fp32(graph, n, version)}
    for name in stretch.inputs:
        kind = function.inputs.add(name=name).type
        kind.CopyFrom(graph.types[name])
        if name in widened:
            function.inputs[-1].name = f"{name}{WIDE}"
            block.operations.extend(_cast(f"{name}{WIDE}", name, kind, "fp16"))
            kind.tensorType.dataType = ELEMENTS["fp32"]
    read = [name for node in nodes for name in node.reads]
    block.operations.extend(_constants_read(graph, [*read, *stretch.outputs]))
    block.operations.extend(node.op for node in nodes)
    for name in stretch.outputs:
        if name in widened:
            block.operations.extend(_cast(name, f"{name}{WIDE}", graph.types[name], "fp32"))
        block.outputs.append(f"{name}{WIDE}" if name in widened else name)


def passes_as_fp32(graph: Graph, name: str, version: int) -> bool:
    """Return whether an fp16 value must be fp32 between two chunks, as old specifications need."""
    inner = name in graph.maker and name not in graph.outputs
    return inner and version < HALF and element_name(graph.types[name]) == "fp16"


def _cast(source: str, target: str, kind: Any, to: str) -> list[Any]:
    """Return the ops of a cast: the constant with the name of the dtype, and the cast."""
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


def _constants_read(graph: Graph, names: Sequence[str]) -> list[Any]:
    """Return the constants that are read, each after those from which it is decoded."""
    read = {id(op) for op in graph.constants_of(names)}
    unique = {id(op): op for op in graph.constants.values()}
    return [op for number, op in unique.items() if number in read]
