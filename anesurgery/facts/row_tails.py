"""Row-wise tails: the ops behind which row i of a result needs only row i of what they read.

With such a tail a head can be computed for the last token alone. `rows_read` follows one op, `row_tail` all ops
from the last value that the rest depends on; `takes_last_position` finds the op that picks the last token.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from anesurgery.errors import Refusal
from anesurgery.mil import Operation, Var, constant, consumers, is_output, is_stored, is_symbolic
from anesurgery.ops import CONTRACTIONS, REDUCTIONS, WEIGHTED, names
from anesurgery.semantics.reading import sliced
from anesurgery.semantics.rows import SPECS, places_of, slices_read

NORM = frozenset(
    {"abs", "add", "cast", "clip", "concat", "expand_dims", "identity", "layer_norm", "maximum", "minimum"}
    | {"mul", "pow", "real_div", "reshape", "rsqrt", "slice_by_index", "sqrt", "square", "squeeze", "sub"}
    | REDUCTIONS
)
"""Ops that layer norms and root mean square norms are written with."""

NOT_REBUILT = names("one_hot slice_by_size slice_update split stack")
"""Ops that are not rebuilt on one row: they hold a length, give several values, or add an axis."""

WITH_KNOWN_AXES = frozenset(op_type for op_type, row in SPECS.items() if row.axes is not None) - NOT_REBUILT
"""Ops whose axes `places_of` can follow."""

RowAxes = dict[Var, int]
"""Value that must be restricted to one row -> its axis of rows."""


def rows_read(op: Operation, axis: int) -> RowAxes | None:
    """Return the operands of which an op reads one row for one row of its result; None if it mixes rows.

    A stored value with many rows gives None, too, and so does a product with a computed right-hand side. The
    axis is that of the rows in the one result of the op.
    """
    placed = places_of(op) if op.op_type in WITH_KNOWN_AXES and len(op.outputs) == 1 else None
    if placed is None or (row_axes := slices_read(placed, axis)) is None or any(map(is_stored, row_axes)):
        return None
    has_rows = (axis in operand.places or is_stored(operand.var) for operand in placed)
    return row_axes if op.op_type not in CONTRACTIONS or all(has_rows) else None


@dataclass(frozen=True)
class Tail:
    """The row-wise ops that lead from one value to another."""

    source: Var
    axis: int
    """The row axis of `source`."""
    ops: tuple[tuple[Operation, int], ...]
    """The ops in the order in which they run, each with the row axis of its result."""


def row_tail(result: Var, axis: int, *, deep: bool = False, head_follows: bool = False) -> Tail | Refusal:
    """Return the longest row-wise tail that ends at `result` and passes a head; else why there is none.

    A head is a linear, or a matmul with a constant. Before it the tail has norms only or, with `deep`, any
    row-wise ops. It begins at the last value that alone carries everything that the rest reads, and behind any
    value that is read elsewhere.

    Args:
        result: the value of which only some rows are needed.
        axis: the axis of the rows.
        deep: pass any row-wise op before the head, not norms only?
        head_follows: a head comes after `result`, so that none has to be passed (the tail may be empty)?
    """
    walk = _Walk(result, axis, deep=deep, head_follows=head_follows)
    tail: Tail | None = None
    while True:
        var = walk.latest_value()
        if len(walk.row_axes) == 1 and walk.heads_passed[var]:
            tail = Tail(var, walk.row_axes[var], tuple(reversed(walk.ops.items())))
        if (refusal := walk.pass_producer(var)) is not None:
            return tail or Refusal(f"no head leads to %{result.name}: {refusal.reason}", result.op)


class _Walk:
    """A walk upstream from a result over row-wise ops."""

    def __init__(self, result: Var, axis: int, *, deep: bool, head_follows: bool) -> None:
        block = result.op.enclosing_block if result.op is not None else None
        self.result, self.deep = result, deep
        self.order = {op: i for i, op in enumerate(block.operations if block is not None else ())}
        self.row_axes: RowAxes = {result: axis}
        """Value of which one row is needed, and whose producer was not passed yet -> its axis of rows."""
        self.heads_passed: dict[Var, int] = {result: int(head_follows)}
        """Value -> the most heads on a path from it to the result."""
        self.ops: dict[Operation, int] = {}
        """The ops that were passed, the last one first -> the axis of rows in their result."""

    def latest_value(self) -> Var:
        """Return the value in `row_axes` that is computed last."""
        return max(self.row_axes, key=lambda v: self.order.get(v.op, -1) if v.op is not None else -1)

    def pass_producer(self, var: Var) -> Refusal | None:
        """Replace a value by those that its producer reads; return why that is not possible."""
        op = var.op
        if op is None or op not in self.order:
            return Refusal(f"%{var.name} comes from outside")
        if var is not self.result and (is_output(var) or any(c not in self.ops for c in consumers(var))):
            return Refusal(f"%{var.name} is read elsewhere")
        if self.heads_passed[var] and not self.deep and op.op_type not in NORM:
            return Refusal(f"{op.name} ({op.op_type}) belongs to the body")
        rows = rows_read(op, self.row_axes[var])
        if not rows:
            return Refusal(f"{op.name} ({op.op_type}) mixes positions")
        if any(self.row_axes.get(v, axis) != axis for v, axis in rows.items()):
            return Refusal(f"%{var.name} is read in two ways")
        self.ops[op] = self.row_axes.pop(var)
        self.row_axes |= rows
        heads = self.heads_passed[var] + (op.op_type in WEIGHTED)
        self.heads_passed |= {v: max(self.heads_passed.get(v, 0), heads) for v in rows}
        return None


def takes_last_position(op: Operation, axis: int) -> bool:
    """Is an op a gather or slice that takes exactly the last position of an axis?"""
    if op.op_type not in ("gather", "slice_by_index") or op.x.val is not None:
        return False
    x, shape = op.x, list(op.outputs[0].shape)
    if x.rank <= axis or x.shape[axis] == 1:
        return False
    rest = [d for a, d in enumerate(x.shape) if a != axis]
    if shape not in (rest, [*rest[:axis], 1, *rest[axis:]]):
        return False
    last = (-1,) if is_symbolic(x.shape[axis]) else (-1, x.shape[axis] - 1)
    if op.op_type == "gather":
        index = constant(op.indices)
        along = constant(op.axis) in (axis, axis - x.rank)
        return along and index is not None and np.size(index) == 1 and int(np.max(index)) in last
    parts = sliced(op)
    return parts[axis].begin in last and all(part.stride == 1 for part in parts)
