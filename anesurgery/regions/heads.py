"""Recognise an attention with its inner ops, and return its queries, keys and values as heads of channels.

`core_of(product)` finds an attention by the matmul that sums the values; `operands_of(core)` gives its operands
with the layouts in which `split_heads` wants them: queries and values as (batch, heads * width, 1, tokens),
keys as (batch, tokens, 1, heads * width). Keys and values that are repeated for several heads of queries are
read before they are repeated.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from anesurgery.errors import NO_MATCH, Refusal
from anesurgery.interpret.attentions import recognise
from anesurgery.mil import (
    Maker,
    Operation,
    Var,
    constant,
    consumers,
    fixed_shape,
    is_output,
    operands,
    producer,
    static_shape,
)
from anesurgery.ops import POINTWISE
from anesurgery.regions.channel_steps import MOVES_NOTHING, build_twin, permutation_to_groups, upstream_views
from anesurgery.regions.layouts import BATCH, CHANNELS, TOKENS, Groups, Layout
from anesurgery.semantics.reading import axis_of, flag, ints, permutation


@dataclass(frozen=True)
class Core:
    """One attention none of whose inner values is read elsewhere."""

    product: Operation
    between: tuple[tuple[Operation, str], ...]
    """Elementwise ops from the scores to the softmax, each with the parameter that carries the scores."""
    softmax: Operation
    total: Operation
    """The product that sums the values."""

    @property
    def ops(self) -> list[Operation]:
        """All ops, the last one first."""
        return [self.total, self.softmax, *(op for op, _ in reversed(self.between)), self.product]

    def others(self, op: Operation, carried: str) -> dict[str, Var]:
        """Return the operands of an elementwise op that are not the scores."""
        names = ("x", "y", "cond", "a", "b")
        return {k: op.inputs[k] for k in names if k != carried and isinstance(op.inputs.get(k), Var)}


def core_of(total: Operation) -> Core | Refusal:
    """Return the attention that ends with a product.

    Returns:
        The attention; a refusal where it cannot be taken apart; `NO_MATCH` where the product ends none.
    """
    softmax = next((s for _, v in operands(total) if (s := producer(v, "softmax")) is not None), None)
    attention = recognise(softmax) if softmax is not None else None
    if softmax is None or attention is None or attention.product is None or total not in attention.sums:
        return NO_MATCH
    between, scores = list[tuple[Operation, str]](), attention.product.outputs[0]
    if static_shape(scores) is None:
        return Refusal(f"%{scores.name} has the shape {tuple(map(str, scores.shape))}", total)
    for op in (*attention.between, softmax):
        if is_output(scores) or len(consumers(scores)) != 1:
            return Refusal(f"%{scores.name} is read elsewhere", total)
        name = next((k for k, v in op.inputs.items() if v is scores), None)
        if op is softmax:
            break
        if name is None or op.op_type not in POINTWISE or fixed_shape(op.outputs[0]) != fixed_shape(scores):
            return Refusal(f"{op.op_type} stands between the scores and the softmax", total)
        between.append((op, name))
        scores = op.outputs[0]
    weights = softmax.outputs[0]
    if is_output(weights) or len(consumers(weights)) != 1:
        return Refusal(f"%{weights.name} is read elsewhere", total)
    if axis_of(softmax) != softmax.x.rank - 1 and attention.product.op_type == "matmul":
        return Refusal(f"the softmax is over axis {axis_of(softmax)}", total)
    return Core(attention.product, tuple(between), softmax, total)


SCORES, SUM = "bkhc,bchq->bkhq", "bchk,bkhq->bchq"
"""The equations of attention as einsums with one head each."""


@dataclass(frozen=True)
class Queries:
    """The queries of an attention, and the axes along which queries are counted."""

    var: Var
    axis: int
    """The axis of `var` with the queries."""
    scores: int
    """The axis of the scores with the queries."""
    result: int
    """The axis of the result with the queries."""


def queries_of(core: Core) -> Queries | Refusal:
    """Return the queries of an attention that consists of two matmuls or two einsums; else why not."""
    product, total, weights = core.product, core.total, core.softmax.outputs[0]
    rank = weights.rank
    if product.op_type == total.op_type == "einsum":
        if [constant(op.equation) for op in (product, total)] != [SCORES, SUM] or axis_of(core.softmax) != 1:
            return Refusal(f"einsums {constant(product.equation)} and {constant(total.equation)}", total)
        return Queries(product.values[1], 3, 3, 3)
    if product.op_type != "matmul" or total.op_type != "matmul":
        return Refusal(f"the products are {product.op_type} and {total.op_type}", total)
    values_first = total.y is weights
    if flag(total, "transpose_y") != values_first or flag(total, "transpose_x") or product.x.rank != rank:
        return Refusal("the weights of attention are transposed", total)
    axis = rank - 1 if flag(product, "transpose_x") else rank - 2
    return Queries(product.x, axis, rank - 2, rank - 1 if values_first else rank - 2)


@dataclass(frozen=True)
class HeadOperand:
    """Queries, keys or values, with the layout in which they are wanted."""

    var: Var
    layout: Layout
    heads: tuple[int, ...]
    """For each head of the result, the head of this operand."""

    def build(self, mb: Maker) -> Var:
        """Build (batch, channels, 1, tokens) of the layout: all heads side by side."""
        upstream = list(upstream_views(self.var, self.layout))
        views = [p for p in upstream if p[1].is_view]
        transposable = [p for p in upstream if permutation_to_groups(p[1], _flat_groups(p[1]))]
        # the nearest view; else as far upstream as one transposition goes
        var, layout = [*views[:1], *transposable[-1:], *upstream][0]
        return build_twin(mb, var, layout, _flat_groups(layout))


def _flat_groups(layout: Layout) -> Groups:
    """Return the axes (batch, channels, 1, tokens) of a twin."""
    return layout.having(BATCH), layout.having(CHANNELS), (), layout.having(TOKENS)


@dataclass(frozen=True)
class HeadOperands:
    """Queries, keys and values of an attention."""

    query: HeadOperand
    key: HeadOperand
    value: HeadOperand


def operands_of(core: Core) -> HeadOperands | Refusal:
    """Return queries, keys and values of an attention of rank 4 with heads on axis 1; else why not."""
    product, total = core.product, core.total
    out = static_shape(total.outputs[0])
    if out is None or len(out) != 4 or any(static_shape(v) is None for _, v in operands(product)):
        shape = tuple(map(str, total.outputs[0].shape))
        return Refusal(f"the result has the shape {shape}, not four known axes", total)
    if any(v.rank != 4 for op in (product, total) for k, v in operands(op) if k in ("x", "y")):
        return Refusal("the factors do not have four axes", total)
    values_first = total.y is core.softmax.outputs[0]
    if flag(total, "transpose_y") != values_first or flag(total, "transpose_x"):
        return Refusal("the weights of attention are transposed", total)
    query = "ct" if flag(product, "transpose_x") else "tc"
    key = "tc" if flag(product, "transpose_y") else "ct"
    value = "ct" if values_first else "tc"
    with_roles = [
        (product.x, "bc" + query),
        (product.y, "bt" + key.translate(str.maketrans("tc", "ct"))),
        (total.x if values_first else total.y, "bc" + value),
    ]
    head_operands = list[HeadOperand]()
    for var, roles in with_roles:
        operand = _head_operand(var, roles, out[1])
        if isinstance(operand, Refusal):
            return Refusal(operand.reason, total)
        head_operands.append(operand)
    if head_operands[0].heads != tuple(range(out[1])):
        return Refusal("several heads share their queries", total)
    return HeadOperands(*head_operands)


def _head_operand(var: Var, roles: str, heads: int) -> HeadOperand | Refusal:
    """Return one operand, from before it is repeated for several heads."""
    shape = fixed_shape(var)
    if shape[1] not in (1, heads):
        return Refusal(f"%{var.name} has {shape[1]} heads for {heads}")
    layout = Layout.of(shape, roles)
    if shape[1] == 1:
        return HeadOperand(var, layout, (0,) * heads)
    *_, (source, seen) = upstream_views(var, layout)
    if (tile := producer(source, "tile")) is not None and static_shape(tile.x) is not None:
        untiled = _untiled_operand(tile, seen, roles[1], heads)
        if untiled is not None:
            return untiled
    return HeadOperand(var, layout, tuple(range(heads)))


def _untiled_operand(tile: Operation, layout: Layout, role: str, heads: int) -> HeadOperand | None:
    """Return the operand of a tile if the tile repeats whole heads; else None."""
    repeated = [axis for axis, n in enumerate(ints(tile, "reps")) if n > 1]
    if len(repeated) != 1 or len(layout.axes[repeated[0]]) != 1 or tile.x.shape[repeated[0]] != 1:
        return None
    (atom,) = layout.axes[repeated[0]]
    leading: list[int] = []
    for a in layout.having(role):
        if layout.length(leading) < heads:
            leading.append(a)
    if layout.length(leading) != heads or atom not in leading:
        return None
    sizes = [layout.sizes[a] for a in leading]
    sizes_before = [1 if a == atom else layout.sizes[a] for a in leading]
    heads_before = np.broadcast_to(np.arange(np.prod(sizes_before)).reshape(sizes_before), sizes).reshape(-1)
    rest = layout.kept(set(range(len(layout.sizes))) - {atom}, layout.axes)
    return HeadOperand(tile.x, rest, tuple(heads_before.tolist()))


def mask_layout(shape: Sequence[int]) -> Layout:
    """Return the layout of a mask over (batch, heads, queries, keys), as (batch, heads * keys, 1, queries)."""
    whole = (1,) * (4 - len(shape)) + tuple(shape)
    return Layout.of(whole, "bctc")


def last_view_of_result(core: Core) -> tuple[Var, Layout]:
    """Return the last of the views of an attention's result, as far as each is read by the next only."""
    var = core.total.outputs[0]
    values_first = core.total.y is core.softmax.outputs[0]
    layout = Layout.of(fixed_shape(var), "bcct" if values_first else "bctc")
    while not is_output(var) and len(readers := consumers(var)) == 1 and readers[0].op_type in MOVES_NOTHING:
        (reader,) = readers
        after = reader.outputs[0]
        is_transpose = reader.op_type == "transpose"
        new = layout.transposed(permutation(reader)) if is_transpose else layout.reshaped(fixed_shape(after))
        if new is None:
            break
        var, layout = after, new
    return var, layout


def is_scalar(var: Var) -> bool:
    """Does a value hold a single number?"""
    return np.prod(fixed_shape(var)) == 1 and (constant(var) is not None or var.rank <= 4)
