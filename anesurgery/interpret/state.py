"""States: tensors that a function reads and writes, and that live on between calls, such as a cache of keys.

A decoder writes its caches at a `position`. This file makes and checks states, implements the ops that read and
write them, and decides which slice_update may write into the memory of its state, without a copy.
"""

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
"""The name of a decoder's input with the number of tokens that were read before."""


class Box:
    """The tensor of one state, and whether it was ever written."""

    def __init__(self, value: torch.Tensor) -> None:
        self._value, self.written = value, False

    @property
    def value(self) -> torch.Tensor:
        """The tensor."""
        return self._value

    @value.setter
    def value(self, value: torch.Tensor) -> None:
        self._value, self.written = value, True


States = dict[str, Box]
"""Name of a state -> its tensor."""
PLACED = ("slice_update", "slice_by_size", "slice_by_index")
"""Ops that write or read from a given place on."""


def make(function: Function) -> States:
    """Return new states of a function, all zero."""
    return {name: Box(torch.zeros(shape)) for name, shape in shapes(function).items()}


def shapes(function: Function) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the states of a function, by name."""
    states = {name: var.sym_type for name, var in function.inputs.items() if types.is_state(var.sym_type)}
    return {name: tuple(int(d) for d in kind.wrapped_type().get_shape()) for name, kind in states.items()}


def check(wanted: Mapping[str, tuple[int, ...]], states: Any) -> None:
    """Raise `InterpretError` if states do not have the shapes that a function needs."""
    if not isinstance(states, dict) or not all(isinstance(b, Box) for b in states.values()):
        raise InterpretError(f"a state holds {wanted}, and is made with make_state()")
    given = {name: tuple(box.value.shape) for name, box in states.items()}
    if given != wanted:
        raise InterpretError(
            f"the state is of another model: {given}, expected {wanted}; make it with make_state()"
        )


def reached(position: Var) -> Iterator[tuple[int, int]]:
    """Find what is written or read at a position: caches, masks and tables with a row for each token.

    These are the graphs that `add_cache` makes:

        begin = concat(0, 0, position, 0); slice_update(cache, begin=begin)     a cache or table of one axis
        equal(numbers[1, 1, rows, tokens], position)                            a cache that is blended in
        sub(last, position) -> concat -> slice_by_size(diagonals)               a mask by distance

    Yields:
        (all rows, rows of one call).
    """
    for op in consumers(position):
        if op.op_type == "equal" and op.x.rank == 4:
            yield int(op.x.shape[2]), int(op.x.shape[3])
        if op.op_type == "sub" and op.y is position and op.x.val is not None:
            last = int(op.x.val[0])
            for count in _rows_of_masks(op.outputs[0]):
                yield last + 1, count
        if op.op_type == "concat":
            yield from _rows_sliced_at(op, _index_of(position, op))


def _rows_sliced_at(begin: Operation, axis: int) -> Iterator[tuple[int, int]]:
    """Yield (all rows, rows of one call) along an axis for each op that slices at the result of a concat."""
    for placed in consumers(begin.outputs[0]):
        if placed.op_type in PLACED and placed.begin is begin.outputs[0]:
            part = placed.update if placed.op_type == "slice_update" else placed.outputs[0]
            yield int(placed.x.shape[axis]), int(part.shape[axis])


def _index_of(var: Var, concat: Operation) -> int:
    """Return at which index a value stands in a concat of vectors: 2 for `position` in (0, 0), position, 0."""
    index = 0
    for value in concat.inputs["values"]:
        if value is var:
            break
        index += int(value.shape[0])
    return index


def _rows_of_masks(diagonal: Var) -> Iterator[int]:
    """Return the numbers of rows of the masks that are sliced from diagonals."""
    begins = (op.outputs[0] for op in consumers(diagonal) if op.op_type == "concat")
    return (int(op.outputs[0].shape[-2]) for at in begins for op in consumers(at) if op.op_type in PLACED)


def context_limit(position: Var) -> tuple[int, int]:
    """Return (all rows, rows of one call) of what allows the fewest tokens before: see `reached`."""
    return min(reached(position), key=lambda pair: pair[0] - pair[1], default=(sys.maxsize, 1))


def check_position(position: Any, limit: tuple[int, int], states: States) -> None:
    """Check that a call of a decoder stays within the context, and that the tokens before were read.

    Args:
        position: the array of the input.
        limit: of `context_limit`.
        states: of the decoder.

    Raises:
        InterpretError: the position is below 0, or leaves no room for the tokens of the call; or it says that
            tokens came before, and nothing was written yet.
    """
    rows, count = limit
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
    """Return the value that a state holds now."""
    return input.value


@impl("coreml_update_state")
def coreml_update_state(state: Box, value: Any) -> torch.Tensor:
    """Write a state, and return the value written."""
    state.value = value if value is state.value else value.clone()  # the same where it was updated in place
    return state.value


HOLDERS = ("read_state", "coreml_update_state")
"""Ops that give the value of a state."""


# Writing into the memory of a state, without a copy: `updates` says which ops may, `write_in_place` does it.


def updates(ops: Sequence[Operation]) -> set[Operation]:
    """Return the slice_updates that may write into a state's memory.

    Each updates the value of a state and becomes its next value, and nothing reads the state between.
    """
    in_place: set[Operation] = set()
    unread: dict[Var, Operation] = {}  # state -> its latest slice_update, as long as nothing has read the state
    for op in ops:
        if op.blocks:  # a nested block may read any state
            unread.clear()
        elif op.op_type in HOLDERS:
            latest = unread.pop(_state_of(op), None)
            if latest is not None and op.inputs.get("value") is latest.outputs[0]:
                in_place.add(latest)
        elif op.op_type == "slice_update" and op.x.op is not None and op.x.op.op_type in HOLDERS:
            stride = op.inputs.get("stride")
            if stride is None or (stride.val is not None and min(ints(stride.val)) > 0):  # torch has no other
                unread[_state_of(op.x.op)] = op
    return in_place


def _state_of(op: Operation) -> Var:
    """Return the state that an op reads or writes."""
    return op.inputs["state" if op.op_type == "coreml_update_state" else "input"]


FRESH = names(
    """
    add sub mul real_div maximum minimum pow concat gather rsqrt linear matmul softmax silu gelu sigmoid tanh
    reduce_mean reduce_sum layer_norm
    """
)
"""Ops whose result has new memory; that of others may be shared with an operand. A missing op costs
a copy; one that stands here wrongly lets a value be overwritten."""


def possible_aliases(
    ops: Iterable[tuple[Operation, Sequence[Var]]], inputs: Iterable[Var]
) -> dict[Operation, list[Var]]:
    """Return for each slice_update the values alive before it that are not known to own their memory.

    The ops are in order, each with the values that are dead after it; `inputs` exist before the first.
    """
    alive, aliases = dict.fromkeys(inputs), dict[Operation, list[Var]]()
    for op, dead in ops:
        if op.op_type == "slice_update":
            aliases[op] = list(alive)
        if op.op_type not in FRESH:
            alive |= dict.fromkeys(op.outputs)
        for var in dead:
            alive.pop(var, None)
    return aliases


def write_in_place(
    op: Operation, env: Mapping[Var, Any], arguments: Mapping[str, Any], *, spent: bool, others: Iterable[Var]
) -> torch.Tensor:
    """Compute one of `updates` in the memory of its state, unless another value needs what is overwritten.

    Args:
        op: the slice_update.
        env: all values that are alive.
        arguments: of the op.
        spent: is the op the last one that reads the value which it updates?
        others: the values that may share memory with another one (`possible_aliases`).
    """
    x, where = arguments["x"], [arguments.get(name) for name in tensor.SLICE]
    state = _state_of(op.x.op)
    may_change = (state, op.x) if spent else (state,)  # nobody needs their old value
    part = tensor.block(x, *where)
    if env[state].value is not x or _overlaps(part, [env.get(var) for var in others if var not in may_change]):
        return tensor.overwrite(x.clone(), arguments["update"], *where)
    part.copy_(arguments["update"])
    return x


def _overlaps(part: torch.Tensor, others: Iterable[Any]) -> bool:
    """Does another value, or one in a list or a state, share memory with a tensor?"""
    address = part.untyped_storage().data_ptr()
    same_memory = [x for x in _tensors_in(others) if x.untyped_storage().data_ptr() == address]
    first, last = _extent(part) if same_memory else (0, 0)
    return any(begin < last and first < end for begin, end in map(_extent, same_memory))


def _tensors_in(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    """Yield the tensors among values, those in lists and states too."""
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, Box):
            yield value.value
        elif isinstance(value, (list, tuple)):
            yield from _tensors_in(value)


def _extent(x: torch.Tensor) -> tuple[int, int]:
    """Return the range of elements of its memory within which a tensor lies: (first, last + 1)."""
    first = int(x.storage_offset())
    reach = sum((n - 1) * step for n, step in zip(x.shape, x.stride(), strict=True)) if x.numel() else -1
    return first, first + reach + 1
