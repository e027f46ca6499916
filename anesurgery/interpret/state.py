"""States: tensors that a function reads and writes, and that live on between calls."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from anesurgery.errors import InterpretError
from anesurgery.interpret.ops import tensor
from anesurgery.interpret.table import impl, ints
from anesurgery.mil import Function, Operation, Var, consumers, types
from anesurgery.ops import names

POSITION = "position"
"""The input of a decoder with the number of tokens that were read before."""


class Box:
    """One state."""

    def __init__(self, value: torch.Tensor) -> None:
        self._value, self.written = value, False

    @property
    def value(self) -> torch.Tensor:
        """What it holds."""
        return self._value

    @value.setter
    def value(self, value: torch.Tensor) -> None:
        self._value, self.written = value, True


States = dict[str, Box]
PLACED = ("slice_update", "slice_by_size", "slice_by_index")
"""Ops that write or read from a place on."""


def make(function: Function) -> States:
    """The states of a function, all zero."""
    return {name: Box(torch.zeros(shape)) for name, shape in shapes(function).items()}


def shapes(function: Function) -> dict[str, tuple[int, ...]]:
    """The shapes of its states by name."""
    states = {name: var.sym_type for name, var in function.inputs.items() if types.is_state(var.sym_type)}
    return {name: tuple(int(d) for d in held.wrapped_type().get_shape()) for name, held in states.items()}


def check(wanted: Mapping[str, tuple[int, ...]], states: Any) -> None:
    """See that states have the wanted shapes.

    Raises:
        InterpretError: they are those of another function.
    """
    if not isinstance(states, dict) or not all(isinstance(b, Box) for b in states.values()):
        raise InterpretError(f"a state holds {wanted}, and is made with make_state()")
    held = {name: tuple(box.value.shape) for name, box in states.items()}
    if held != wanted:
        raise InterpretError(
            f"the state is of another model: {held}, expected {wanted}; make it with make_state()"
        )


def reached(position: Var) -> Iterator[tuple[int, int]]:
    """Rows, and rows a call, of what is written or read at a position: caches, tables of the tokens."""
    for place in consumers(position):
        if place.op_type == "equal" and place.x.rank == 4:  # what add_cache blends in
            yield int(place.x.shape[2]), int(place.x.shape[3])
        if place.op_type == "sub" and place.y is position and place.x.val is not None:  # a mask by distance
            for count in _rows_from(place.outputs[0]):
                yield int(place.x.val[0]) + 1, count
        if place.op_type != "concat":
            continue
        at = [v is position for v in place.inputs["values"] for _ in range(int(v.shape[0]))].index(True)
        for op in consumers(place.outputs[0]):
            if op.op_type in PLACED and op.begin is place.outputs[0]:
                part = op.update if op.op_type == "slice_update" else op.outputs[0]
                yield int(op.x.shape[at]), int(part.shape[at])


def _rows_from(diagonal: Var) -> Iterator[int]:
    """The rows of the masks that begin at a diagonal."""
    places = (op.outputs[0] for op in consumers(diagonal) if op.op_type == "concat")
    return (int(op.outputs[0].shape[-2]) for at in places for op in consumers(at) if op.op_type in PLACED)


def room(position: Var) -> tuple[int, int]:
    """The rows that are written or read at a position, and those of one call, where least is left."""
    return min(reached(position), key=lambda pair: pair[0] - pair[1], default=(sys.maxsize, 1))


def check_position(position: Any, room: tuple[int, int], states: States) -> None:
    """See that a call of a decoder stays within the context, and that what it looks back at was read.

    Raises:
        InterpretError: the position is below 0, or leaves no room for the tokens of the call; or it says that
            tokens came before, and nothing was written yet.
    """
    rows, count = room
    if int(position.min()) < 0 or int(position.max()) > rows - count:
        raise InterpretError(
            f"position is {int(position.min())}, the number of tokens before; with the {count} of this call it "
            f"is from 0 to {rows - count}, as the context holds {rows}"
        )
    if states and int(position.max()) > 0 and not any(box.written for box in states.values()):
        raise InterpretError(
            f"position is {int(position.max())}, but the state holds no tokens yet: first read those before "
            "by prefill, from position 0 on and with this state"
        )


@impl("read_state")
def read_state(input: Box) -> torch.Tensor:
    """The value that a state holds now."""
    return input.value


@impl("coreml_update_state")
def coreml_update_state(state: Box, value: Any) -> torch.Tensor:
    """Write a state; the result is the value written."""
    state.value = value if value is state.value else value.clone()  # the same where it was updated in place
    return state.value


HOLDERS = ("read_state", "coreml_update_state")
"""Ops that give the value of a state."""


def updates(ops: Sequence[Operation]) -> set[Operation]:
    """The slice_updates of a state's value that become its next value, with no look at the state between."""
    in_place: set[Operation] = set()
    waiting: dict[Var, Operation] = {}
    for op in ops:
        if op.blocks:
            waiting.clear()
        elif op.op_type in HOLDERS:
            update = waiting.pop(_state_of(op), None)
            if update is not None and op.inputs.get("value") is update.outputs[0]:
                in_place.add(update)
        elif op.op_type == "slice_update" and op.x.op is not None and op.x.op.op_type in HOLDERS:
            stride = op.inputs.get("stride")
            if stride is None or (stride.val is not None and min(ints(stride.val)) > 0):
                waiting[_state_of(op.x.op)] = op
    return in_place


def _state_of(op: Operation) -> Var:
    return op.inputs["state" if op.op_type == "coreml_update_state" else "input"]


FRESH = names(
    """
    add sub mul real_div maximum minimum pow concat gather rsqrt linear matmul softmax silu gelu sigmoid tanh
    reduce_mean reduce_sum layer_norm
    """
)
"""Ops whose result has memory of its own."""


def beside(ops: Iterable[tuple[Operation, Sequence[Var]]], inputs: Iterable[Var]) -> dict[Operation, list[Var]]:
    """slice_update -> the values alive before it that may share memory with another value.

    Args:
        ops: in order, each with the values that are dead after it.
        inputs: the values that are there before the first.
    """
    alive, besides = dict.fromkeys(inputs), dict[Operation, list[Var]]()
    for op, dead in ops:
        if op.op_type == "slice_update":
            besides[op] = list(alive)
        if op.op_type not in FRESH:
            alive |= dict.fromkeys(op.outputs)
        for var in dead:
            alive.pop(var, None)
    return besides


def update(
    op: Operation, env: Mapping[Var, Any], arguments: Mapping[str, Any], *, spent: bool, others: Iterable[Var]
) -> torch.Tensor:
    """One of `updates`: in the memory of the state, unless another value holds what is overwritten.

    Args:
        op: the slice_update.
        env: all values that are alive.
        arguments: what the op reads.
        spent: does nothing read what is updated after it?
        others: of these values, those that may share memory with another one (`beside`).
    """
    x, where = arguments["x"], [arguments.get(name) for name in tensor.SLICE]
    state = _state_of(op.x.op)
    own = (state, op.x) if spent else (state,)
    part = tensor.block(x, *where)
    if env[state].value is not x or _overlaps(part, [env.get(var) for var in others if var not in own]):
        return tensor.overwrite(x.clone(), arguments["update"], *where)
    part.copy_(arguments["update"])
    return x


def _overlaps(part: torch.Tensor, others: Iterable[Any]) -> bool:
    """Does another value hold some of the memory of a tensor?"""
    place, same = part.untyped_storage().data_ptr(), list[torch.Tensor]()
    waiting = list(others)
    for value in waiting:
        if isinstance(value, torch.Tensor):
            if value.untyped_storage().data_ptr() == place:
                same.append(value)
        elif isinstance(value, Box):
            waiting.append(value.value)
        elif isinstance(value, (list, tuple)):
            waiting += value
    first, last = _extent(part) if same else (0, 0)
    return any(begin < last and first < end for begin, end in map(_extent, same))


def _extent(x: torch.Tensor) -> tuple[int, int]:
    """The elements of its memory between which all of a tensor lies."""
    first = int(x.storage_offset())
    reach = sum((n - 1) * step for n, step in zip(x.shape, x.stride(), strict=True)) if x.numel() else -1
    return first, first + reach + 1
