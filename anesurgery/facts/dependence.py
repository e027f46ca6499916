"""What values depend on: upstream ops, parts that no input changes, rounds of loops, and row-wise tails.

Four subjects: `slice_back` and `fixed_ops` (which ops a value needs, and which need no input), `loop_rounds`
(how often a `while_loop` runs), `rows_read` and `row_tail` (row i of a result needs only row i of its operands,
so that a head can be computed for the last token alone), and `takes_last_position` (the op that picks that
row).
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
    """The ops that `targets` depend on, in an order in which they can run; values in `stop` end the search."""
    order: dict[Operation, None] = {}
    stack: list[tuple[Operation, bool]] = [(v.op, False) for v in targets if v.op is not None and v not in stop]
    while stack:
        op, operands_done = stack.pop()
        if op in order:
            continue
        if operands_done:
            order[op] = None
            continue
        stack.append((op, True))
        stack += [(v.op, False) for v in reads(op) if v.op is not None and v not in stop and v.op not in order]
    return list(order)


SHAPE_ONLY_OPERANDS = {"shape": "x", "fill_like": "ref_tensor"}
"""Op type -> the operand of which only the shape is read."""
ROW_LOOKUPS = names("gather gather_along_axis")
"""Ops that read rows along an axis."""

COMPRESSED = names("dequantize")
"""Ops that expand compressed numbers: they are never folded, since their result is larger."""


def fixed_ops(block: Block) -> dict[Operation, None]:
    """Return the ops of a block that depend on no input, in file order; neither constants nor nested ops.

    Ops with random numbers, states, lists, dynamic shapes or nested blocks do not count as fixed, nor do
    readers of compressed weights. A lookup in a table whose rows are all equal is fixed whatever its indices
    are.
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
    """Can the results of an op be computed from values that are known?"""
    if op.blocks or op.op_type in IMPURE | COMPRESSED or is_constexpr(op):
        return False
    if not all(is_tensor(v) and static_shape(v) is not None for v in op.outputs):
        return False
    unread = shape_only(op)
    return known.issuperset(v for v in reads(op) if v is not unread or static_shape(v) is None)


def shape_only(op: Operation) -> Var | None:
    """The operand whose numbers change nothing, such as indices into a table of equal rows; None without."""
    unread: Var | None = None
    if op.op_type in SHAPE_ONLY_OPERANDS:
        unread = op.inputs[SHAPE_ONLY_OPERANDS[op.op_type]]
    elif op.op_type in ROW_LOOKUPS and looks_up_equal_rows(op):
        unread = op.indices
    return unread


def never_equal(op: Operation, numbers: WholeNumbers) -> bool:
    """Does a test of equality compare integers whose ranges do not overlap?"""
    if op.op_type not in ("equal", "not_equal") or any(np_dtype(v).kind not in "iu" for v in (op.x, op.y)):
        return False
    if static_shape(op.outputs[0]) is None:
        return False
    (low, high), (least, most) = numbers.known(op.x), numbers.known(op.y)
    return high < least or most < low


def looks_up_equal_rows(op: Operation) -> bool:
    """Does an op look up a row in a stored table whose rows are all the same?"""
    table, axis = constant(op.x), number(op.inputs.get("axis"))
    if table is None or constant(op.indices) is not None or axis is None or not np.ndim(table):
        return False
    whole = np.ascontiguousarray(table)
    rows = np.moveaxis(whole.view(f"u{whole.itemsize}"), int(axis), 0)  # by their bits: -0 is not 0
    return len(rows) > 0 and np.array_equal(rows[0], rows[-1]) and bool((rows == rows[:1]).all())


MOST = 4096
"""The most rounds of a loop that are counted: longer loops are not unrolled, and a round takes 10 us per op."""


def loop_rounds(op: Operation) -> int | None:
    """Return the number of rounds of a `while_loop`; None where an input decides, or above `MOST`."""
    condition, body = op.blocks
    values = [_single_number(v, {}) for v in op.loop_vars]
    for count in range(MOST + 1):
        condition_holds = _single_number(condition.outputs[0], dict(zip(condition.inputs, values, strict=True)))
        if condition_holds is None or not condition_holds:
            return None if condition_holds is None else count
        known = dict(zip(body.inputs, values, strict=True))
        values = [_single_number(v, known) for v in body.outputs]
    return None


def ops_with_run_counts(block: Block) -> Iterator[tuple[Operation, int]]:
    """Yield every op, also of nested blocks, and how often a run computes it; 1 where an input decides."""
    pending = [(block, 1)]
    for inside, times in pending:
        for op in inside.operations:
            yield op, times
            inner = times * (loop_rounds(op) or 1) if op.op_type == "while_loop" else times
            pending += [(nested, inner) for nested in op.blocks]


def _single_number(var: Var, known: dict[Var, Any]) -> Any:
    """Return the single number of a value, computed from `known` ones; None where that is not possible."""
    pending = [var]
    while pending:
        value = pending[-1]
        reads = _numbers_read(value) if value not in known else {}
        missing = [v for v in reads.values() if v not in known]
        if value in known:
            pending.pop()
        elif missing:
            pending += missing
        elif reads and value.op is not None:
            numbers = {name: known[v] for name, v in reads.items()}
            known[value] = None if None in numbers.values() else _interpreted(value.op, numbers)
        else:
            known[value] = _stored_number(value)
    return known[var]


def _holds_one_number(var: Var) -> bool:
    """Does a value have one element?"""
    shape = None if types.is_list(var.sym_type) else static_shape(var)
    return shape is not None and math.prod(shape) == 1


def _stored_number(var: Var) -> Any:
    """Return the number of a constant of one element; None for other values."""
    value = constant(var) if _holds_one_number(var) else None
    return None if value is None else np.ravel(value)[0].item()


def _numbers_read(var: Var) -> dict[str, Var]:
    """Return the operands from which a single number that is not stored can be computed; else {}."""
    op = var.op
    if op is None or not _holds_one_number(var) or constant(var) is not None:
        return {}
    if op.op_type not in POINTWISE | VIEWS or len(op.outputs) != 1:
        return {}
    return {name: v for name, v in operands(op) if op.op_type not in VIEWS or name == "x"}


def _interpreted(op: Operation, numbers: dict[str, Any]) -> Any:
    """Return what the interpreter computes from single numbers, rounded and wrapped as in the program."""
    if op.op_type in VIEWS:
        return numbers["x"]
    (out,) = op.outputs
    given = {k: _as_operand(op.inputs[k], n) for k, n in numbers.items()}
    return finish(TABLE[op.op_type].function(**given), run_dtype(out), rounding(out, "fp16")).item()


def _as_operand(var: Var, number: Any) -> Any:
    """Return a number as a tensor of the value's dtype; strings stay as they are."""
    if types.is_str(var.dtype):
        return number
    return torch.tensor(number, dtype=run_dtype(var))


NORM = frozenset(
    {"abs", "add", "cast", "clip", "concat", "expand_dims", "identity", "layer_norm", "maximum", "minimum"}
    | {"mul", "pow", "real_div", "reshape", "rsqrt", "slice_by_index", "sqrt", "square", "squeeze", "sub"}
    | REDUCTIONS
)
"""Ops that layer norms and root mean square norms are written with."""

SIZED = names("one_hot slice_by_size slice_update split stack")
"""Ops that are not rebuilt on one row: they hold a length, give several values, or add an axis."""

WITH_KNOWN_AXES = frozenset(op_type for op_type, row in SPECS.items() if row.axes is not None) - SIZED
"""Ops whose axes `places_of` can follow."""

Rows = dict[Var, int]
"""Operand that must be restricted to one row -> its axis of rows."""


def rows_read(op: Operation, axis: int) -> Rows | None:
    """Return the operands of which an op reads one row for one row of its result; None if it mixes rows.

    A stored value with many rows gives None, too, and so does a product with a computed right-hand side.

    Args:
        op: the op, with one result.
        axis: the axis of the rows in its result.
    """
    axes = places_of(op) if op.op_type in WITH_KNOWN_AXES and len(op.outputs) == 1 else None
    rows = None if axes is None else slices_read(axes, axis)
    if axes is None or rows is None or any(is_stored(v) for v in rows):
        return None
    is_row_wise = op.op_type not in CONTRACTIONS or all(axis in o.places or is_stored(o.var) for o in axes)
    return rows if is_row_wise else None


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

    A head is a linear, or a matmul with a constant. Before it the tail has norms only or, with `deep`, all row-
    wise ops. It begins at the last value that alone carries everything that the rest reads, and behind any
    value that is read elsewhere.

    Args:
        result: the value of which only some rows are needed.
        axis: the axis of the rows.
        deep: go on through the body?
        head_follows: a head comes after `result`, so that none has to be passed (the tail may be empty)?
    """
    block = result.op.enclosing_block if result.op is not None else None
    order = {op: i for i, op in enumerate(block.operations if block is not None else ())}
    row_axes: dict[Var, int] = {result: axis}
    heads_passed: dict[Var, int] = {result: int(head_follows)}
    tail_ops: dict[Operation, int] = {}
    tail: Tail | None = None
    while True:
        var = max(row_axes, key=lambda v: order.get(v.op, -1) if v.op is not None else -1)
        if len(row_axes) == 1 and heads_passed[var]:
            tail = Tail(var, row_axes[var], tuple(reversed(tail_ops.items())))
        step = _rows_of_producer(var, result, row_axes[var], heads_passed[var], tail_ops, order, deep)
        if isinstance(step, Refusal) or any(row_axes.get(v, at) != at for v, at in step.items()):
            break
        op = var.op
        assert op is not None
        tail_ops[op] = row_axes.pop(var)
        for source, at in step.items():
            row_axes[source] = at
            heads_passed[source] = max(
                heads_passed.get(source, 0), heads_passed[var] + (op.op_type in WEIGHTED)
            )
    if tail is not None:
        return tail
    why = step.reason if isinstance(step, Refusal) else f"%{var.name} is read in two ways"
    return Refusal(f"no head leads to %{result.name}: {why}", result.op)


def _rows_of_producer(
    var: Var,
    result: Var,
    axis: int,
    heads_passed: int,
    tail_ops: Mapping[Operation, int],
    order: Mapping[Operation, int],
    deep: bool,
) -> Rows | Refusal:
    """Return the rows that the producer of `var` reads, or why the tail begins behind it."""
    op = producer(var)
    if op is None or op not in order:
        return Refusal(f"%{var.name} comes from outside")
    if var is not result and (is_output(var) or any(c not in tail_ops for c in consumers(var))):
        return Refusal(f"%{var.name} is read elsewhere")
    if heads_passed and not deep and op.op_type not in NORM:
        return Refusal(f"{op.name} ({op.op_type}) belongs to the body")
    rows = rows_read(op, axis)
    return rows if rows else Refusal(f"{op.name} ({op.op_type}) mixes positions")


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
    last = (-1,) if any_symbolic(x.shape) else (-1, x.shape[axis] - 1)
    if op.op_type == "gather":
        index = constant(op.indices)
        along = constant(op.axis) in (axis, axis - x.rank)
        return along and index is not None and np.size(index) == 1 and int(np.max(index)) in last
    parts = sliced(op)
    return parts[axis].begin in last and all(part.stride == 1 for part in parts)


def leads_to_weights(value: Var) -> bool:
    """Does a product with stored weights depend on a value?"""
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
