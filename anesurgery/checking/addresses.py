"""Find where integer inputs must lie because they address something: a row, a position, or a count.

Used wherever inputs are drawn: an index beyond its table is an error of the test, not of the model. Only the
elements that address something are bounded: where a slice of the ids is looked up, the others may be anything.
They are followed through ops that move them; what is computed from them otherwise bounds nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from anesurgery.checking.lengths import drawn_shape, evaluator, length_of
from anesurgery.errors import InterpretError
from anesurgery.interpret.sampling import is_guard
from anesurgery.mil import Operation, Var, constant, consumers, ct, is_symbolic, np_dtype, operands
from anesurgery.ops import JOINING, LOOKUPS, MOVING, PADDING, REARRANGING, names
from anesurgery.semantics.intervals import stored_interval
from anesurgery.semantics.reading import is_tensor, number

Bounds = dict[Var, tuple[Any, Any]]
"""Value -> (least, largest) integer: numbers for all its elements, or arrays with one for each."""

ADDRESSES = names(
    """
    shape begin end stride size reps pad axis axes k one_hot_vector_size start step lengths init_length index
    num_splits split_sizes begins ends pred elem_shape
    """
)
"""Parameters that hold positions or counts: a large number there is an error, not a test."""
KEEPING_ALL = REARRANGING | JOINING | PADDING | {"tile"}
"""Ops whose result holds every element that they read."""
MOST_FOLLOWED = 1 << 20
"""The most elements of a value that are followed one by one: ids are fewer. Larger values are followed as a
whole."""
LARGEST_UNTESTED = 1
"""The largest count or position of which nothing is known; `largest_accepted` tests larger ones."""


class _Followed(NamedTuple):
    """A value that holds elements of the input."""

    value: Var
    at: torch.Tensor | None
    """Index of the input's element at each position; -1 elsewhere. None: all of them, in an unknown order."""
    shift: int = 0
    """What was added to them, before a guard."""
    guarded: bool = False
    """Whether negative ones were made to count from the end."""


class _Required(NamedTuple):
    """The range that an op requires of some elements."""

    at: torch.Tensor | None
    least: int
    most: int


def address_bounds(
    inputs: Iterable[Var], ops: Sequence[Operation], new_ops: Collection[Operation] = ()
) -> Bounds:
    """Return the ranges of integers that address something; lookups before iOS 17 count back too.

    Args:
        inputs: the inputs of a site.
        ops: the old ops, and other ops that read the integers.
        new_ops: ops whose requirements do not count: they must work for whatever the old ones accept.
    """
    bounds: Bounds = {}
    for var in inputs:
        if not is_tensor(var) or np_dtype(var).kind not in "iu":
            continue
        asked = list(_requirements(var, new_ops))
        if _is_position_or_count(var, ops):
            asked.append(_Required(None, 0, LARGEST_UNTESTED))
        if asked:
            bounds[var] = _intersection(var, asked)
    return bounds


def is_looked_up(var: Var, new_ops: Collection[Operation] = ()) -> bool:
    """Return whether a lookup bounds some elements of a value."""
    return next(_requirements(var, new_ops), None) is not None


def _intersection(var: Var, asked: Sequence[_Required]) -> tuple[Any, Any]:
    """Return the range that all requirements leave: for all elements if it is the same, else for each."""
    info = np.iinfo(np_dtype(var))
    low, high = (float(min(max(bound, info.min), info.max)) for bound in stored_interval(var))
    least, most = np.full(drawn_shape(var), low), np.full(drawn_shape(var), high)  # fp64 holds each int32
    for one in asked:
        at = slice(None) if one.at is None else one.at[one.at >= 0].long().numpy()
        least.reshape(-1)[at] = np.maximum(least.reshape(-1)[at], one.least)
        most.reshape(-1)[at] = np.minimum(most.reshape(-1)[at], one.most)
    most = np.maximum(most, least)
    if least.size and np.ptp(least) == 0 and np.ptp(most) == 0:
        return float(least.flat[0]), float(most.flat[0])
    return least, most


def _is_position_or_count(var: Var, ops: Sequence[Operation]) -> bool:
    """Return whether some ops use a value, or integers computed from it but by lookups, as `ADDRESSES`."""
    reached = {var}
    for op in ops:
        for name, value in op.inputs.items():
            if not is_among(value, reached):
                continue
            if name in ADDRESSES:
                return True
            if op.op_type not in LOOKUPS or name != "indices":
                reached.update(v for v in op.outputs if np_dtype(v).kind in "iu")
    return False


def is_among(value: Any, reached: set[Var]) -> bool:
    """Return whether a parameter, or one value of several, is in a set."""
    return any(v in reached for v in (value if isinstance(value, (list, tuple)) else (value,)))


def _requirements(var: Var, without: Collection[Operation]) -> Iterator[_Required]:
    """Yield what the lookups of a program require of a value's elements."""
    size = math.prod(drawn_shape(var))
    first = torch.arange(size).reshape(drawn_shape(var)) if 0 < size <= MOST_FOLLOWED else None
    seen, stack = {var}, [_Followed(var, first)]
    while stack:
        reached = stack.pop()
        for op in consumers(reached.value):
            if op in without or not _runs_with(op, var):
                continue
            yield from _requirements_of(op, reached)
            fresh = [further for further in _results_with_elements(op, reached) if further.value not in seen]
            seen.update(further.value for further in fresh)
            stack += fresh


def _runs_with(op: Operation, var: Var) -> bool:
    """Return whether an op runs whenever the value exists: one in a branch or loop may not."""
    block = op.enclosing_block
    if var.op is not None:
        return block is var.op.enclosing_block
    return block is not None and (block.outer_op is None or var in block.inputs)


def _requirements_of(op: Operation, reached: _Followed) -> Iterator[_Required]:
    """Yield the ranges that an op requires of the elements it reads as indices."""
    scatters = op.op_type.startswith("scatter")
    if not (scatters or op.op_type in LOOKUPS) or op.inputs.get("indices") is not reached.value:
        return
    table = op.data if scatters else op.x
    back = reached.guarded or (not scatters and op.opset_version < ct.target.iOS17)
    for at, rows in _indices_by_axis(op, table, reached):
        yield _Required(at, (-rows if back else 0) - reached.shift, rows - 1 - reached.shift)


def _indices_by_axis(op: Operation, table: Var, reached: _Followed) -> list[tuple[torch.Tensor | None, int]]:
    """Return (elements that index an axis of a table, length of that axis)."""
    if not op.op_type.endswith("_nd"):
        axis = int(constant(op.inputs.get("axis")) or 0)
        return [(reached.at, length_of(table.shape[axis]))] if table.rank else []
    first = int(constant(op.inputs.get("batch_dims")) or 0)
    count = reached.value.shape[-1]
    lengths = [] if is_symbolic(count) else [length_of(n) for n in table.shape[first : first + int(count)]]
    if reached.at is None:  # each may index any axis: too wide a range for some is better than one too narrow
        return [(None, max(lengths))] if lengths else []
    return [(reached.at[..., i], rows) for i, rows in enumerate(lengths)]


def _results_with_elements(op: Operation, reached: _Followed) -> list[_Followed]:
    """Return the results of an op that hold elements of the input."""
    if op.op_type in ("cast", "identity") or is_guard(op):
        guarded = reached.guarded or op.op_type == "select"
        return [reached._replace(value=op.outputs[0], guarded=guarded)]
    if op.op_type == "add":
        added = number(op.y if op.x is reached.value else op.x)
        if added is None or added % 1 or op.outputs[0].shape != reached.value.shape or reached.guarded:
            return []  # the shift is what was added before a guard
        return [reached._replace(value=op.outputs[0], shift=reached.shift + int(added))]
    if op.op_type not in MOVING | KEEPING_ALL or op.inputs.get("indices") is reached.value:
        return []
    moved = _moved_elements(op, reached)
    whole = op.op_type in KEEPING_ALL and (reached.at is None or bool((reached.at >= 0).all()))
    if not (moved or whole):
        return []
    places: Sequence[torch.Tensor | None] = moved or [None] * len(op.outputs)
    return [reached._replace(value=v, at=at) for v, at in zip(op.outputs, places, strict=True)]


def _moved_elements(op: Operation, reached: _Followed) -> list[torch.Tensor]:
    """Return which element is where in each result; [] where that is unknown."""
    others = {v for _, v in operands(op)} - {reached.value}
    joined = others.intersection(op.inputs.get("values", ()))
    if reached.at is None or any(constant(v) is None for v in others - joined):
        return []
    numbers = {v: torch.zeros(drawn_shape(v), dtype=torch.int32) for v in joined}
    try:  # counted from 1, since ops fill up with 0
        found = evaluator([op], op.outputs)(numbers | {reached.value: reached.at.int() + 1})
    except InterpretError:
        return []
    return [] if any(at.dtype == torch.bool for at in found) else [at - 1 for at in found]


FEW_PLACES = 8
"""Integers of a vector of up to this many elements may have a range each: begins and ends of slices have one
for each axis, of which there are five at most."""
FARTHEST = 1 << 10
"""The largest position that is tried. A choice: caches are longer, but nothing changes beyond."""


def largest_accepted(values: Iterable[Var], accepts: Callable[[Bounds], bool]) -> Bounds:
    """Return the largest position that is accepted for each element of some values, beside zeros elsewhere.

    Args:
        values: integers that are positions or counts.
        accepts: whether the old side can be computed within these bounds; if for a position, for smaller too.
    """
    zeros: Bounds = {var: (np.zeros(drawn_shape(var)),) * 2 for var in values}
    accepted: Bounds = {}
    for var in zeros:
        most = np.zeros(drawn_shape(var))
        for at in np.ndindex(most.shape) if most.size <= FEW_PLACES else ():
            least, beyond = 0, FARTHEST
            while beyond - least > 1:  # doubles until a position is refused, then bisects
                position, tried = min(2 * least + 1, (least + beyond) // 2), np.zeros(drawn_shape(var))
                tried[at] = position
                fits = accepts(zeros | {var: (tried, tried)})
                least, beyond = (position, beyond) if fits else (least, position)
            most[at] = least
        accepted[var] = 0, most
    return accepted
