"""Where integers must lie since they say which element, how many, or where.

Only the numbers that address something are bounded by it: where a slice of the ids is looked up, the others may
be anything. Numbers are followed through ops that move them; what is computed of them bounds nothing.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from anesurgery.checking.lengths import drawn_shape, length_of
from anesurgery.errors import InterpretError
from anesurgery.interpret import Evaluator
from anesurgery.interpret.sampling import LOOKUPS, is_guard
from anesurgery.mil import Operation, Var, constant, consumers, ct, is_symbolic, np_dtype, operands
from anesurgery.ops import JOINING, MOVING, PADDING, REARRANGING, names
from anesurgery.semantics.intervals import stored_interval
from anesurgery.semantics.reading import is_tensor, number

Bounds = dict[Var, tuple[Any, Any]]
"""Value -> the least and the largest number of all its elements, or of each."""

ADDRESSES = names(
    """
    shape begin end stride size reps pad axis axes k one_hot_vector_size start step lengths init_length index
    num_splits split_sizes begins ends pred elem_shape
    """
)
"""Parameters whose numbers say where or how many: any large number there is an error, not a test."""
WHOLE = REARRANGING | JOINING | PADDING | {"tile"}
"""Ops whose results hold every number that they read."""
MOST_FOLLOWED = 1 << 20
"""Elements of a value that are followed one by one: ids are fewer; of larger values only the whole is."""
AS_DRAWN = 1
"""The largest of numbers that say how many: drawn so, and tried further by the check of the site."""


class _Reached(NamedTuple):
    """A value that holds numbers of another one."""

    value: Var
    at: torch.Tensor | None
    """Which ones, in their places; -1 for numbers of no concern. None: all of them, in some order."""
    shift: int = 0
    """What was added to them."""
    guarded: bool = False
    """Were negative ones made to count from the end?"""


class _Asked(NamedTuple):
    """What an op asks of some numbers."""

    at: torch.Tensor | None
    least: int
    most: int


def address_bounds(
    inputs: Iterable[Var], ops: Sequence[Operation], new_ops: Collection[Operation] = ()
) -> Bounds:
    """Where integers must lie that say which element, or how many; old lookups count back from the end too.

    Args:
        inputs: what a site reads.
        ops: the old ops, and other ops that read the integers.
        new_ops: what these ask does not count: it has to hold for whatever the old ones take.
    """
    bounds: Bounds = {}
    for var in inputs:
        if not is_tensor(var) or np_dtype(var).kind not in "iu":
            continue
        asked = list(_asked(var, new_ops))
        if _says_how_many(var, ops):
            asked.append(_Asked(None, 0, AS_DRAWN))
        if asked:
            bounds[var] = _joint(var, asked)
    return bounds


def looked_up(var: Var, new_ops: Collection[Operation] = ()) -> bool:
    """Does a lookup bound some numbers of a value?"""
    return next(_asked(var, new_ops), None) is not None


def _joint(var: Var, asked: Sequence[_Asked]) -> tuple[Any, Any]:
    """The least and the largest number: of all elements where all are asked for, else of each."""
    info = np.iinfo(np_dtype(var))
    low, high = (float(min(max(end, info.min), info.max)) for end in stored_interval(var))
    least, most = np.full(drawn_shape(var), low), np.full(drawn_shape(var), high)
    for one in asked:
        at = slice(None) if one.at is None else one.at[one.at >= 0].long().numpy()
        least.reshape(-1)[at] = np.maximum(least.reshape(-1)[at], one.least)
        most.reshape(-1)[at] = np.minimum(most.reshape(-1)[at], one.most)
    most = np.maximum(most, least)
    if least.size and np.ptp(least) == 0 and np.ptp(most) == 0:
        return float(least.flat[0]), float(most.flat[0])
    return least, most


def _says_how_many(var: Var, ops: Sequence[Operation]) -> bool:
    """Do some ops compute places or lengths of a value?"""
    reached = {var}
    for op in ops:
        for name, value in op.inputs.items():
            if not among(value, reached):
                continue
            if name in ADDRESSES:
                return True
            if op.op_type not in LOOKUPS or name != LOOKUPS[op.op_type][0]:
                reached.update(v for v in op.outputs if np_dtype(v).kind in "iu")
    return False


def among(value: Any, reached: set[Var]) -> bool:
    """Is a parameter, or one value of several, among those reached?"""
    return any(v in reached for v in (value if isinstance(value, (list, tuple)) else (value,)) if v is not None)


def _asked(var: Var, without: Collection[Operation]) -> Iterator[_Asked]:
    """What the lookups of a program ask of the numbers of a value."""
    size = math.prod(drawn_shape(var))
    first = torch.arange(size).reshape(drawn_shape(var)) if 0 < size <= MOST_FOLLOWED else None
    seen, stack = {var}, [_Reached(var, first)]
    while stack:
        reached = stack.pop()
        for op in consumers(reached.value):
            if op in without or not _runs_with(op, var):
                continue
            yield from _bounds_of(op, reached)
            fresh = [further for further in _further(op, reached) if further.value not in seen]
            seen.update(further.value for further in fresh)
            stack += fresh


def _runs_with(op: Operation, var: Var) -> bool:
    """Does an op run whenever the value is there? A branch or a loop may not."""
    block = op.enclosing_block
    if var.op is not None:
        return block is var.op.enclosing_block
    return block is not None and (block.outer_op is None or var in block.inputs)


def _bounds_of(op: Operation, reached: _Reached) -> Iterator[_Asked]:
    """What an op asks of the numbers that it reads as indices."""
    scatters = op.op_type.startswith("scatter")
    index, table = ("indices", "data") if scatters else LOOKUPS.get(op.op_type, ("", ""))
    if not index or op.inputs.get(index) is not reached.value:
        return
    back = reached.guarded or (not scatters and op.opset_version < ct.target.iOS17)
    for at, rows in _indexed(op, op.inputs[table], reached):
        yield _Asked(at, (-rows if back else 0) - reached.shift, rows - 1 - reached.shift)


def _indexed(op: Operation, table: Var, reached: _Reached) -> list[tuple[torch.Tensor | None, int]]:
    """Which numbers index an axis of a table, and how long it is."""
    if not op.op_type.endswith("_nd"):
        axis = int(constant(op.inputs.get("axis")) or 0)
        return [(reached.at, length_of(table.shape[axis]))] if table.rank else []
    first = int(constant(op.inputs.get("batch_dims")) or 0)
    count = reached.value.shape[-1]
    lengths = [] if is_symbolic(count) else [length_of(n) for n in table.shape[first : first + int(count)]]
    if reached.at is None:  # each may be of the longest axis
        return [(None, max(lengths))] if lengths else []
    return [(reached.at[..., i], rows) for i, rows in enumerate(lengths)]


def _further(op: Operation, reached: _Reached) -> list[_Reached]:
    """The results of an op that hold the numbers."""
    if op.op_type in ("cast", "identity") or is_guard(op, reached.value):
        guarded = reached.guarded or op.op_type == "select"
        return [reached._replace(value=op.outputs[0], guarded=guarded)]
    if op.op_type == "add":
        added = number(op.y if op.x is reached.value else op.x)
        alike = op.outputs[0].shape == reached.value.shape and added is not None and added % 1 == 0
        return [reached._replace(value=op.outputs[0], shift=reached.shift + int(added or 0))] if alike else []
    if op.op_type not in MOVING | WHOLE or op.inputs.get("indices") is reached.value:
        return []
    moved = _moved(op, reached)
    whole = op.op_type in WHOLE and (reached.at is None or bool((reached.at >= 0).all()))
    places: Sequence[torch.Tensor | None] = moved if moved else [None] * len(op.outputs) if whole else []
    return [reached._replace(value=v, at=at) for v, at in zip(op.outputs, places, strict=False)]


def _moved(op: Operation, reached: _Reached) -> list[torch.Tensor]:
    """Which number is where in each result; nothing where that cannot be said."""
    others = [v for name, v in operands(op) if v is not reached.value and constant(v) is None]
    if reached.at is None or (others and op.op_type not in JOINING):
        return []
    numbers = {v: torch.full(drawn_shape(v), -1, dtype=torch.int32) for v in others}
    try:
        return list(Evaluator([op], op.outputs)(numbers | {reached.value: reached.at.int()}))
    except InterpretError:
        return []
