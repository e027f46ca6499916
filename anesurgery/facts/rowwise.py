"""Find the ops that treat every position of an axis alike, backward from a value.

An op is row-wise along an axis when row i of its result depends on row i of its operands alone. From the rows
that are wanted of a result, each rule tells the rows that are wanted of the operands.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from anesurgery.errors import Refusal
from anesurgery.mil import Operation, Var, any_symbolic, constant, consumers, is_output, is_stored, producer
from anesurgery.ops import CONTRACTIONS, REDUCTIONS, WEIGHTED, names
from anesurgery.semantics.reading import sliced
from anesurgery.semantics.rows import SPECS, places_of, slices_read

NORM = frozenset(
    {"abs", "add", "cast", "clip", "concat", "expand_dims", "identity", "layer_norm", "maximum", "minimum"}
    | {"mul", "pow", "real_div", "reshape", "rsqrt", "slice_by_index", "sqrt", "square", "squeeze", "sub"}
    | REDUCTIONS
)
"""Ops that layer norms and root-mean-square norms are spelled with."""

SIZED = names("one_hot slice_by_size slice_update split stack")
"""Ops that are not rebuilt on a row: they hold a length, or make several values or a new axis."""

CARRYING = frozenset(op_type for op_type, row in SPECS.items() if row.axes is not None) - SIZED
"""Ops of which it is known where the axes go."""

Rows = dict[Var, int]
"""For each operand that must be restricted: the axis of the positions in it."""


def rows_read(op: Operation, axis: int) -> Rows | None:
    """What rows an op reads for one row, along `axis`, of its only output; None: it mixes rows.

    A stored value of many rows ends the tail, and so does a product with what is no weight of all rows.
    """
    axes = places_of(op) if op.op_type in CARRYING and len(op.outputs) == 1 else None
    rows = None if axes is None else slices_read(axes, axis)
    if axes is None or rows is None or any(is_stored(v) for v in rows):
        return None
    weighed = op.op_type not in CONTRACTIONS or all(axis in o.places or is_stored(o.var) for o in axes)
    return rows if weighed else None


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
    parts = sliced(op)
    return parts[axis].begin in last and all(part.stride == 1 for part in parts)


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
