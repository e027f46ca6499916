"""What values depend on: the ops upstream, what no input changes, how often a loop runs, the rows of an axis.

An op is row-wise along an axis when row i of its result depends on row i of its operands alone. From the rows
that are wanted of a result, each rule tells the rows that are wanted of the operands.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from anesurgery.errors import Refusal
from anesurgery.facts.whole_numbers import WholeNumbers
from anesurgery.interpret.arithmetic.precision import finish, rounding, run_dtype
from anesurgery.interpret.table import TABLE
from anesurgery.mil import (
    Block,
    Operation,
    Var,
    any_symbolic,
    constant,
    consumers,
    is_constexpr,
    is_output,
    is_stored,
    np_dtype,
    operands,
    producer,
    reads,
    static_shape,
    types,
)
from anesurgery.ops import CONTRACTIONS, IMPURE, POINTWISE, REDUCTIONS, VIEWS, WEIGHTED, names
from anesurgery.semantics.reading import is_tensor, number, sliced
from anesurgery.semantics.rows import SPECS, places_of, slices_read


def slice_back(targets: Iterable[Var], stop: set[Var]) -> list[Operation]:
    """The ops that `targets` depend on, in an order in which they can run, not going beyond `stop`."""
    order: dict[Operation, None] = {}
    stack: list[tuple[Operation, bool]] = [(v.op, False) for v in targets if v.op is not None and v not in stop]
    while stack:
        op, ready = stack.pop()
        if op in order:
            continue
        if ready:
            order[op] = None
            continue
        stack.append((op, True))
        stack += [(v.op, False) for v in reads(op) if v.op is not None and v not in stop and v.op not in order]
    return list(order)


OF_SHAPES = {"shape": "x", "fill_like": "ref_tensor"}
"""Op type -> the operand of which only the shape is read."""
ROW_LOOKUPS = names("gather gather_along_axis")
"""Ops that read rows along an axis."""

COMPRESSED = names("dequantize")
"""What it makes of stored numbers is larger than they are: it stays as it is."""


def fixed_ops(block: Block) -> dict[Operation, None]:
    """The ops of a block, nested ones not included, that depend on no input, in file order.

    Constants are none of them. Ops with random numbers, states, lists, dynamic shapes or nested blocks do not
    count as fixed, nor does what reads compressed weights. A lookup in a table whose rows are all the
    same does, whatever its indices.
    """
    found: dict[Operation, None] = {}
    known: set[Var] = set()
    for op in block.operations:
        if op.op_type == "const":
            known.update(op.outputs)
        elif _is_fixed(op, known):
            found[op] = None
            known.update(op.outputs)
    return found


def _is_fixed(op: Operation, known: set[Var]) -> bool:
    if op.blocks or op.op_type in IMPURE | COMPRESSED or is_constexpr(op):
        return False
    if not all(is_tensor(v) and static_shape(v) is not None for v in op.outputs):
        return False
    unread = shape_only(op)
    return known.issuperset(v for v in reads(op) if v is not unread or static_shape(v) is None)


def shape_only(op: Operation) -> Var | None:
    """The operand whose numbers change nothing, as the indices of a table whose rows are all the same."""
    operand: Var | None = None
    if op.op_type in OF_SHAPES:
        operand = op.inputs[OF_SHAPES[op.op_type]]
    elif op.op_type in ROW_LOOKUPS and same_rows(op):
        operand = op.indices
    return operand


def differ(op: Operation, numbers: WholeNumbers) -> bool:
    """Does a test of equality compare integers whose ranges have nothing in common?"""
    if op.op_type not in ("equal", "not_equal") or any(np_dtype(v).kind not in "iu" for v in (op.x, op.y)):
        return False
    if static_shape(op.outputs[0]) is None:
        return False
    (low, high), (least, most) = numbers.known(op.x), numbers.known(op.y)
    return high < least or most < low


def same_rows(op: Operation) -> bool:
    """Does an op look a row up in a stored table whose rows are all the same?"""
    table, axis = constant(op.x), number(op.inputs.get("axis"))
    if table is None or constant(op.indices) is not None or axis is None or not np.ndim(table):
        return False
    whole = np.ascontiguousarray(table)
    rows = np.moveaxis(whole.view(f"u{whole.itemsize}"), int(axis), 0)  # by their bits: -0 is not 0
    return len(rows) > 0 and np.array_equal(rows[0], rows[-1]) and bool((rows == rows[:1]).all())


MOST = 4096
"""Rounds that are counted: more are not unrolled, and each takes some ten microseconds for each op."""


def rounds(op: Operation) -> int | None:
    """The number of rounds; None where an input decides, or after `MOST`."""
    condition, body = op.blocks
    values = [_number(v, {}) for v in op.loop_vars]
    for count in range(MOST + 1):
        more = _number(condition.outputs[0], dict(zip(condition.inputs, values, strict=True)))
        if more is None or not more:
            return None if more is None else count
        known = dict(zip(body.inputs, values, strict=True))
        values = [_number(v, known) for v in body.outputs]
    return None


def times_run(block: Block) -> Iterator[tuple[Operation, int]]:
    """Every op, nested blocks included, and how often a run computes it; once where an input decides."""
    pending = [(block, 1)]
    for inside, times in pending:
        for op in inside.operations:
            yield op, times
            inner = times * (rounds(op) or 1) if op.op_type == "while_loop" else times
            pending += [(nested, inner) for nested in op.blocks]


def _number(var: Var, known: dict[Var, Any]) -> Any:
    """A single number, computed of those that are known; None where that is not possible."""
    if var in known:
        return known[var]
    shape = None if types.is_list(var.sym_type) else static_shape(var)
    if shape is None or math.prod(shape) != 1:
        return None
    value, op = constant(var), var.op
    if value is not None:
        known[var] = np.ravel(value)[0].item()
    elif op is None or op.op_type not in POINTWISE | VIEWS or len(op.outputs) != 1:
        known[var] = None
    else:
        numbers = {k: _number(v, known) for k, v in operands(op) if not (op.op_type in VIEWS and k != "x")}
        known[var] = None if None in numbers.values() else _computed(op, numbers)
    return known[var]


def _computed(op: Operation, numbers: dict[str, Any]) -> Any:
    """What the interpreter makes of single numbers, rounded and wrapped around as in the program."""
    if op.op_type in VIEWS:
        return numbers["x"]
    (out,) = op.outputs
    given = {k: _tensor(op.inputs[k], n) for k, n in numbers.items()}
    return finish(TABLE[op.op_type].function(**given), run_dtype(out), rounding(out, "fp16")).item()


def _tensor(var: Var, number: Any) -> Any:
    """A number as ops compute with it; names, and parameters that are constants, as they are."""
    if types.is_str(var.dtype):
        return number
    return torch.tensor(number, dtype=run_dtype(var))


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
