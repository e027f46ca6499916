"""Find the ops that treat every position of an axis alike, backward from a value, and rebuild them on one.

An op is row-wise along an axis when row i of its result depends on row i of its operands alone. From the rows
that are wanted of a result, each rule tells the rows that are wanted of the operands.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from anesurgery.errors import Refusal
from anesurgery.mil import (
    Maker,
    Operation,
    Var,
    any_symbolic,
    constant,
    consumers,
    is_output,
    operands,
    producer,
    static_shape,
)
from anesurgery.ops import POINTWISE, REDUCTIONS, WEIGHTED

NORM = frozenset(
    {"abs", "add", "cast", "clip", "concat", "expand_dims", "identity", "layer_norm", "maximum", "minimum"}
    | {"mul", "pow", "real_div", "reshape", "rsqrt", "slice_by_index", "sqrt", "square", "squeeze", "sub"}
    | REDUCTIONS
)
"""Ops that layer norms and root-mean-square norms are spelled with."""

Rows = dict[Var, int]
"""For each operand that must be restricted: the axis of the positions in it."""


def rows_read(op: Operation, axis: int) -> Rows | None:
    """What rows an op reads for one row, along `axis`, of its only output; None: it mixes rows."""
    rule = RULES.get(op.op_type)
    return rule(op, axis) if rule is not None and len(op.outputs) == 1 else None


def _elementwise(op: Operation, axis: int) -> Rows | None:
    """Operands that broadcast along the axis are read as they are; a constant of many rows ends the tail."""
    out, rows = op.outputs[0], {}
    for name, var in operands(op):
        at = axis - (out.rank - var.rank)
        if name not in ("x", "y", "a", "b", "cond") or at < 0 or var.shape[at] == 1:
            continue
        if var.val is not None or var.shape[at] != out.shape[axis]:
            return None
        rows[var] = at
    return rows


def _linear(op: Operation, axis: int) -> Rows | None:
    return {op.x: axis} if axis < op.x.rank - 1 and is_weight(op.weight) else None


def _matmul(op: Operation, axis: int) -> Rows | None:
    """A constant matrix on the right, the same for every batch."""
    x, y = op.x, op.y
    plain = not constant(op.transpose_x) and x.rank == op.outputs[0].rank
    alone = is_weight(y) and all(d == 1 for d in y.shape[:-2]) and y.rank >= 2
    return {x: axis} if plain and alone and axis < x.rank - 1 else None


def is_weight(var: Var) -> bool:
    """Is it known before the model runs, compressed or not?"""
    made_by = var.op.op_type if var.op is not None else ""
    return var.val is not None or made_by.startswith("constexpr_")


def _over_axes(op: Operation, axis: int) -> Rows | None:
    """Norms and reductions over other axes."""
    axes = constant(op.axes)
    if axes is None:
        return None
    reduced = {int(a) % op.x.rank for a in axes}
    if op.op_type in REDUCTIONS and not constant(op.keep_dims):
        kept = [a for a in range(op.x.rank) if a not in reduced]
        return {op.x: kept[axis]} if kept else None
    return {op.x: axis} if axis not in reduced else None


def _softmax(op: Operation, axis: int) -> Rows | None:
    return {op.x: axis} if int(constant(op.axis)) % op.x.rank != axis else None


def _concat(op: Operation, axis: int) -> Rows | None:
    other = int(constant(op.axis)) % op.values[0].rank != axis
    return dict.fromkeys(op.values, axis) if other and all(v.val is None for v in op.values) else None


def _expand_dims(op: Operation, axis: int) -> Rows | None:
    new = {int(a) % op.outputs[0].rank for a in constant(op.axes)}
    return {op.x: axis - sum(a < axis for a in new)} if axis not in new else None


def _squeeze(op: Operation, axis: int) -> Rows | None:
    gone = _squeezed(op)
    return {op.x: [a for a in range(op.x.rank) if a not in gone][axis]}


def _squeezed(op: Operation) -> list[int]:
    """The axes that a squeeze takes away: those it names, or all of length 1."""
    axes = constant(op.axes)
    if axes is None:
        return [a for a, d in enumerate(op.x.shape) if d == 1]
    return [int(a) % op.x.rank for a in axes]


def _transpose(op: Operation, axis: int) -> Rows | None:
    return {op.x: int(constant(op.perm)[axis]) % op.x.rank}


def _reshape(op: Operation, axis: int) -> Rows | None:
    """The same number of elements before the axis, and the same length: the rows are the same."""
    old, new = static_shape(op.x), static_shape(op.outputs[0])
    if old is None or new is None or constant(op.shape) is None:
        return None
    before = math.prod(new[:axis])
    fits = [a for a, d in enumerate(old) if d == new[axis] and math.prod(old[:a]) == before]
    return {op.x: fits[-1]} if fits else None


def _slice(op: Operation, axis: int) -> Rows | None:
    """A slice of other axes; all of this one."""
    rank = op.x.rank
    begin, end = constant(op.begin), constant(op.end)
    squeezed, stride = _per_axis(op, "squeeze_mask", False), _per_axis(op, "stride", 1)
    if begin is None or end is None or any(squeezed) or int(stride[axis]) != 1:
        return None
    from_start = _per_axis(op, "begin_mask", False)[axis] or int(begin[axis]) in (0, -op.x.shape[axis])
    to_end = _per_axis(op, "end_mask", False)[axis] or (
        static_shape(op.x) is not None and int(end[axis]) >= op.x.shape[axis]
    )
    return {op.x: axis} if from_start and to_end and axis < rank else None


def _per_axis(op: Operation, name: str, default: Any) -> list[Any]:
    given = constant(op.inputs.get(name))
    return [default] * op.x.rank if given is None else list(given)


RULES: dict[str, Callable[[Operation, int], Rows | None]] = {
    **dict.fromkeys(POINTWISE, _elementwise),
    **dict.fromkeys(REDUCTIONS | {"layer_norm"}, _over_axes),
    "concat": _concat,
    "expand_dims": _expand_dims,
    "linear": _linear,
    "matmul": _matmul,
    "reshape": _reshape,
    "slice_by_index": _slice,
    "softmax": _softmax,
    "squeeze": _squeeze,
    "transpose": _transpose,
}


@dataclass(frozen=True)
class Tail:
    """The row-wise ops that lead from one value to another."""

    source: Var
    axis: int
    """The axis of the positions in `source`."""
    ops: tuple[tuple[Operation, int], ...]
    """In the order in which they run, each with the axis of the positions in its result."""


def row_tail(result: Var, axis: int, *, deep: bool = False, head_follows: bool = False) -> Tail | Refusal:
    """The longest row-wise way from one value through a head (linear, matmul with a constant) to `result`.

    Before the head it goes through norms only, or (`deep`) through everything that is row-wise. It ends at the
    last value that alone carries all that the rest reads, and before a value that is read elsewhere.

    Args:
        result: a value whose rows are wanted.
        axis: the axis of the rows.
        deep: go on through the body.
        head_follows: a head comes after `result`, so there is none to pass (and the tail may be empty).
    """
    block = result.op.enclosing_block if result.op is not None else None
    place = {op: i for i, op in enumerate(block.operations if block is not None else ())}
    wanted: dict[Var, int] = {result: axis}
    heads: dict[Var, int] = {result: int(head_follows)}
    taken: dict[Operation, int] = {}
    best: Tail | None = None
    while True:
        var = max(wanted, key=lambda v: place.get(v.op, -1) if v.op is not None else -1)
        if len(wanted) == 1 and heads[var]:
            best = Tail(var, wanted[var], tuple(reversed(taken.items())))
        step = _step(var, result, wanted[var], heads[var], taken, place, deep)
        if isinstance(step, Refusal) or any(wanted.get(v, at) != at for v, at in step.items()):
            break
        op = var.op
        assert op is not None
        taken[op] = wanted.pop(var)
        for source, at in step.items():
            wanted[source] = at
            heads[source] = max(heads.get(source, 0), heads[var] + (op.op_type in WEIGHTED))
    if best is not None:
        return best
    why = step.reason if isinstance(step, Refusal) else f"%{var.name} is read in two ways"
    return Refusal(f"no head leads to %{result.name}: {why}", result.op)


def _step(
    var: Var,
    result: Var,
    axis: int,
    heads: int,
    taken: Mapping[Operation, int],
    place: Mapping[Operation, int],
    deep: bool,
) -> Rows | Refusal:
    """The rows that the producer of `var` reads, or why the way ends here."""
    op = producer(var)
    if op is None or op not in place:
        return Refusal(f"%{var.name} comes from outside")
    if var is not result and (is_output(var) or any(c not in taken for c in consumers(var))):
        return Refusal(f"%{var.name} is read elsewhere")
    if heads and not deep and op.op_type not in NORM:
        return Refusal(f"{op.name} ({op.op_type}) belongs to the body")
    rows = rows_read(op, axis)
    return rows if rows else Refusal(f"{op.name} ({op.op_type}) mixes positions")


def rebuild(mb: Maker, tail: Tail, row: Var) -> Var:
    """The ops of a tail again, with `row` (one position of its source) in the place of the source."""
    new: dict[Var, Var] = {tail.source: row}

    def swap(value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return [swap(v) for v in value]
        return new.get(value, value)

    for op, axis in tail.ops:
        inputs = {name: swap(v) for name, v in _given(op).items()}
        if op.op_type == "reshape":
            inputs["shape"] = [1 if a == axis else d for a, d in enumerate(op.outputs[0].shape)]
        if op.op_type == "squeeze":  # not the axis of the rows, which has become one long
            inputs["axes"] = _squeezed(op)
        if op.op_type == "slice_by_index":
            inputs |= _all_of(op, axis)
        new[op.outputs[0]] = getattr(mb, op.op_type)(**inputs, name=f"{op.name}_row")
    return new[tail.ops[-1][0].outputs[0]] if tail.ops else row


def _given(op: Operation) -> dict[str, Any]:
    """The inputs of an op without those that hold its defaults, whose dtype may not be the program's."""
    defaults = dict(op.default_inputs().items())
    return {
        name: v
        for name, v in op.inputs.items()
        if v is not None and not (name in defaults and _equal(constant(v), defaults[name]))
    }


def _equal(value: Any, default: Any) -> bool:
    """Coremltools keeps the defaults of float inputs as fp32."""
    kept = np.float32(default) if isinstance(default, float) else default
    return value is not None and np.array_equal(value, kept)


def _all_of(op: Operation, axis: int) -> dict[str, list[bool]]:
    """Masks that make a slice take all of an axis, whatever its length has become."""
    return {
        name: [bool(m) or a == axis for a, m in enumerate(_per_axis(op, name, False))]
        for name in ("begin_mask", "end_mask")
    }


def last_row(mb: Maker, value: Var, axis: int) -> Var:
    """The last position of an axis, by a slice whose bounds are known before the model runs."""
    shape = list(value.shape)
    here = [a == axis for a in range(len(shape))]
    if any_symbolic(shape):
        begin, others = [-1 if h else 0 for h in here], [not h for h in here]
        ends = {"end": [0] * len(shape), "begin_mask": others, "end_mask": [True] * len(shape)}
    else:
        begin, ends = [shape[axis] - 1 if h else 0 for h in here], {"end": shape}
    row: Var = mb.slice_by_index(x=value, begin=begin, name=f"{value.name}_last", **ends)
    return row


def takes_last(op: Operation, axis: int) -> bool:
    """Is this a gather or a slice that takes all of the last position of an axis, and nothing else?"""
    if op.op_type not in ("gather", "slice_by_index") or op.x.val is not None:
        return False
    x, shape = op.x, list(op.outputs[0].shape)
    if x.rank <= axis or x.shape[axis] == 1:
        return False
    rest = [d for a, d in enumerate(x.shape) if a != axis]
    if shape not in (rest, [*rest[:axis], 1, *rest[axis:]]):
        return False
    last = (-1,) if any_symbolic(x.shape) else (-1, x.shape[axis] - 1)
    if op.op_type == "gather":
        index = constant(op.indices)
        along = constant(op.axis) in (axis, axis - x.rank)
        return along and index is not None and np.size(index) == 1 and int(np.max(index)) in last
    begin, masked = constant(op.begin), _per_axis(op, "begin_mask", False)
    straight = all(int(s) == 1 for s in _per_axis(op, "stride", 1))
    return straight and begin is not None and not masked[axis] and int(begin[axis]) in last


def leads_to_weights(value: Var) -> bool:
    """Is there a linear, or another product with a constant, among the ops that depend on a value?"""
    seen: set[Operation] = set()
    queue = consumers(value)
    while queue:
        op = queue.pop()
        if op.op_type in WEIGHTED:
            return True
        if op not in seen:
            seen.add(op)
            queue += [reader for v in op.outputs for reader in consumers(v)]
    return False
