"""The ops of a function in order, with the values that they read and the bytes of weights that they need."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from anesurgery.files.compiled import values_of
from anesurgery.files.mil_types import element_name, sizes_of_type
from anesurgery.files.protobuf import HeldWeights, to_proto
from anesurgery.mil import Program
from anesurgery.ops import IMPURE
from anesurgery.ops import names as words

WRITING = words("coreml_update_state write_state")
"""Ops that change a state; `coreml_update_state` is written as `write_state` and `read_state`."""
STATEFUL = WRITING | words("read_state")
HEAVY = words(
    "conv conv_transpose linear matmul einsum scaled_dot_product_attention lstm gru rnn while_loop cond"
)
"""Ops that are computed once, however few bytes they need."""
FEW = 4
"""Terms up to which the sums of a product cost no more than other ops."""
PASSED = ("fp16", "fp32", "int32")
"""Element types that an input and an output of a model may have."""
MOST_AGAIN = 1 << 20
"""Bytes of weights that each chunk may hold to compute a value that cannot be passed: 1 MB, small beside a
chunk."""
CONE = 48
"""Ops that a chunk may compute again in place of a value that another chunk has: a choice: masks and rotary
tables have fewer."""


@dataclass(frozen=True)
class Node:
    """An op that computes, in the order of the program."""

    op: Any
    """MIL_pb2.Operation."""
    reads: tuple[str, ...]
    """Values of the function that it reads, those in nested blocks included; constants too."""
    makes: tuple[str, ...]


@dataclass
class Graph:
    """One function, its weights held apart by number."""

    function: Any
    """MIL_pb2.Function; its weights are offsets into `held`."""
    held: HeldWeights
    nodes: tuple[Node, ...]
    constants: Mapping[str, Any]
    """Name -> op that holds or decodes a constant."""
    _types: dict[str, Any] = field(default_factory=dict)

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
        """Value -> number of the node that makes it."""
        return {name: i for i, node in enumerate(self.nodes) for name in node.makes}

    @cached_property
    def outputs(self) -> tuple[str, ...]:
        """Outputs of the function, in order."""
        return tuple(self.block.outputs)

    def type_of(self, name: str) -> Any:
        """The ValueType of an input or of a value that a node makes."""
        if not self._types:
            self._types |= self.inputs | {o.name: o.type for n in self.nodes for o in n.op.outputs}
        return self._types[name]

    def passes(self, name: str) -> bool:
        """Can a value be an output of one model and an input of another?"""
        kind = self.type_of(name)
        if kind.WhichOneof("type") != "tensorType" or dtype(kind) not in PASSED:
            return False
        return 1 <= kind.tensorType.rank <= 5 and sizes_of_type(kind) is not None

    def size(self, name: str) -> int:
        """Bytes of a value; flexible axes count as 1, and what is no tensor as nothing: it is never passed."""
        kind = self.type_of(name)
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
        return {name: list(dict.fromkeys(users)) for name, users in by_state.items()}

    @cached_property
    def weights(self) -> tuple[Mapping[int, int], ...]:
        """For each node, the weights that it reads: where one is in memory -> its bytes."""
        return tuple(self.weights_of(node.reads) for node in self.nodes)

    def weights_of(self, names: Sequence[str]) -> dict[int, int]:
        """The weights behind constants, read through those that decode them."""
        sizes: dict[int, int] = {}
        for op in self.constants_of(names):
            for value in values_of(op):
                if value.WhichOneof("value") == "blobFileValue":
                    array = self.held[value.blobFileValue.offset]
                    sizes[array.ctypes.data] = array.nbytes
        return sizes

    def constants_of(self, names: Sequence[str]) -> list[Any]:
        """The constants among some values, with those that they are decoded from, in order of need."""
        needed: dict[str, Any] = {}
        pending = [n for n in names if n in self.constants]
        while pending:
            name = pending.pop()
            if name not in needed:
                needed[name] = self.constants[name]
                pending += [n for n in reads_of(self.constants[name]) if n in self.constants]
        return list(needed.values())

    @cached_property
    def again(self) -> Mapping[str, frozenset[int]]:
        """Value -> the nodes that compute it from the inputs, where that is cheaper than passing it on.

        They are few, compute nothing heavy, touch no state, and need no more bytes of weights than the value; a
        value that cannot be passed, as a mask of booleans, may need more.
        """
        cones: dict[str, frozenset[int]] = {name: frozenset() for name in self.inputs}
        for number, node in enumerate(self.nodes):
            before = [cones.get(name) for name in node.reads if name not in self.constants]
            if self._is_heavy(node) or node.op.blocks or any(b is None for b in before):
                continue
            cone = frozenset().union({number}, *(b for b in before if b is not None))
            if len(cone) > CONE:
                continue
            needed: dict[int, int] = {}
            for at in cone:
                needed |= self.weights[at]
            for name in node.makes:
                passed = self.passes(name) or self.type_of(name).WhichOneof("type") != "tensorType"
                if sum(needed.values()) <= (self.size(name) if passed else MOST_AGAIN):
                    cones[name] = cone
        return {name: cone for name, cone in cones.items() if name not in self.inputs}

    def _is_heavy(self, node: Node) -> bool:
        """Is an op better computed once? Not a product of a few terms, as angles of positions are."""
        if node.op.type != "matmul":
            return node.op.type in HEAVY | STATEFUL | IMPURE
        x, out = (sizes_of_type(kind) for kind in (self._operand(node, "x"), node.op.outputs[0].type))
        if x is None or out is None or min(len(x), len(out)) < 2:
            return True
        return x[-1] * x[-2] > FEW * out[-2]

    def _operand(self, node: Node, name: str) -> Any:
        """The ValueType of an operand, a constant too."""
        read = node.op.inputs[name].arguments[0].name
        if read in self.constants:
            return next(o.type for o in self.constants[read].outputs if o.name == read)
        return self.type_of(read)


def dtype(kind: Any) -> str:
    """The element type of a ValueType of a tensor, as MIL prints it: "fp16", "int32", "bool"."""
    return element_name(kind)


def bits(kind: Any) -> int:
    """Bits of an element of a tensor."""
    digits = "".join(c for c in dtype(kind) if c.isdigit())
    return int(digits) if digits else 8


def reads_of(op: Any) -> list[str]:
    """The names that an op reads, nested blocks included, as far as they do not make them."""
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
    """The graphs of some functions of a program; weights stay where they are, and are held together."""
    held = HeldWeights()
    whole = to_proto(program, version, held.store)
    return {name: _read(whole.functions[name], held) for name in names}


def read_graph(program: Program, version: int, name: str) -> Graph:
    """The graph of one function of a program; weights stay where they are."""
    return read_graphs(program, version, [name])[name]


def _read(function: Any, held: HeldWeights) -> Graph:
    constants: dict[str, Any] = {}
    nodes = []
    for op in function.block_specializations[function.opset].operations:
        reads = reads_of(op)
        if op.type == "const" or op.type.startswith("constexpr_"):
            constants |= {o.name: op for o in op.outputs}
        else:
            nodes.append(Node(op, tuple(reads), tuple(o.name for o in op.outputs)))
    return Graph(function, held, tuple(nodes), constants)
