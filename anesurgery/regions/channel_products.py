"""The rules for products in a channels-first region (see `channel_ops`).

* A product with a stored weight over all channels becomes a 1x1 convolution.
* Queries times keys are summed over channels; the scores (tokens, tokens) have no twin and keep their form.
* Values times attention weights give a twin (channels, tokens).
* Fused attention is written as these two products with a softmax between them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from anesurgery.facts.attention import in_factors
from anesurgery.mil import Operation, Var, fixed_shape, is_stored, np_dtype, static_shape
from anesurgery.regions.channel_steps import Layouts, Step, Twins
from anesurgery.regions.compressed_weights import edit_weight
from anesurgery.regions.layouts import CHANNELS, TOKENS, Layout
from anesurgery.regions.views import seen_as
from anesurgery.regions.weight_edits import Edit
from anesurgery.semantics.reading import flag


def weight_of(op: Operation) -> tuple[Var, bool] | None:
    """Return the stored weight of a product over the last axis, and whether it is (in, out); else None."""
    if op.op_type == "linear":
        return op.weight, False
    if flag(op, "transpose_x") or op.x.rank < 2 or is_stored(op.x) or op.y.rank != 2:
        return None
    is_constant_op = op.y.op is not None and op.y.op.op_type.startswith("const")
    return (op.y, not flag(op, "transpose_y")) if is_constant_op else None


def reason_outside_region(op: Operation) -> str:
    """Return why a product with a weight is not in a region, for reports; "" for other ops."""
    stored = weight_of(op) if op.op_type in ("linear", "matmul") else None
    if stored is None:
        return ""
    shape, weight = static_shape(op.x), stored[0]
    if shape is None:
        return f"%{op.x.name} has the dynamic shape {tuple(map(str, op.x.shape))}"
    if not is_stored(weight):
        return f"the weight %{weight.name} is dynamic"
    if sequence_layout(shape) is None:
        return f"%{op.x.name} of shape {shape} has no axis of several tokens beside its channels"
    return "channels first it would only add transpositions at its ends"


def sequence_layout(shape: Sequence[int]) -> Layout | None:
    """Return the layout of rows of channels: channels on the last axis, tokens on the one or two before it."""
    roles = {2: "tc", 3: "btc", 4: "bttc"}.get(len(shape))
    layout = None if roles is None else Layout.of(shape, roles)
    return layout if layout is not None and layout.having(TOKENS) and layout.having(CHANNELS) else None


def weighted_product(op: Operation, layouts: Layouts) -> Step | None:
    """Build a product over all channels as a 1x1 convolution."""
    stored, shape = weight_of(op), static_shape(op.x)
    if stored is None or shape is None or not is_stored(stored[0]):
        return None
    if layouts.get(op.x) is None and not layouts.request(op.x, sequence_layout(shape)):
        return None
    layout, (weight, is_transposed) = layouts.get(op.x), stored
    if layout is None or sorted(layout.axes[-1]) != list(layout.having(CHANNELS)):
        return None
    outputs = int(weight.shape[1 if is_transposed else 0])
    rest = layout.without([len(shape) - 1], keep_dims=True)
    out = _with_channels(rest, outputs)
    order = layout.column_order(len(shape) - 1)

    kernel = Edit.of(weight.shape).transposed([1, 0] if is_transposed else [0, 1])
    kernel = (kernel if order is None else kernel.taken(1, order)).expanded(2).expanded(3)

    def build(twins: Twins) -> list[Var]:
        x = twins.in_shape(op.x, [layout.length(g) for g in layout.groups])
        bias = {} if op.inputs.get("bias") is None else {"bias": op.bias}
        return [twins.mb.conv(x=x, weight=edit_weight(twins.mb, weight, kernel, weight.name), **bias)]

    return Step((out,), build, gaining_products=1)


def _with_channels(rest: Layout, size: int) -> Layout:
    """Return a layout without channels extended by `size` channels on its last axis."""
    if size == 1:
        return rest
    first = len(rest.having("b"))
    number = [a + (a >= first) for a in range(len(rest.sizes))]
    axes = tuple(tuple(number[a] for a in axis) for axis in rest.axes[:-1])
    sizes = (*rest.sizes[:first], size, *rest.sizes[first:])
    roles = rest.roles[:first] + CHANNELS + rest.roles[first:]
    return Layout(sizes, roles, (*axes, (first,))).normal()


def product(op: Operation, layouts: Layouts) -> Step | None:
    """Build a product with a stored weight, or one of the two products of attention."""
    if (step := weighted_product(op, layouts)) is not None:
        return step
    return _scores(op, layouts) or _weighted_sum(op, layouts)


def _is_channels_by_tokens(layout: Layout, contracted: int, free: int, role: str) -> bool:
    """Does a twin hold leading axes, then channels, then tokens, with the contracted axes of the given role?"""
    leading = [a for axis in layout.axes[:-2] for a in axis]
    last = (layout.axes[contracted], layout.axes[free])
    channels, tokens = last if role == CHANNELS else (last[1], last[0])
    kinds = {layout.roles[a] for a in channels} <= {CHANNELS} and {layout.roles[a] for a in tokens} <= {TOKENS}
    return kinds and [*leading, *channels, *tokens] == list(range(len(layout.sizes)))


def _matrix_shape(layout: Layout, channels: int, tokens: int) -> list[int]:
    """Return the shape of a twin as leading axes, channels, tokens."""
    shape = layout.shape
    return [*shape[:-2], shape[channels], shape[tokens]]


def _contracted_and_free_axes(op: Operation) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return (contracted, free) axes of both operands of a matmul, counted from the end."""
    x = (-2, -1) if flag(op, "transpose_x") else (-1, -2)
    y = (-1, -2) if flag(op, "transpose_y") else (-2, -1)
    return x, y


def _scores(op: Operation, layouts: Layouts) -> Step | None:
    """Build queries times keys, summed over channels; the scores (tokens, tokens) need no twin."""
    x, y = layouts.get(op.x), layouts.get(op.y)
    at_x, at_y = _contracted_and_free_axes(op)
    if x is None or min(op.x.rank, op.y.rank) < 2 or not _is_channels_by_tokens(x, *at_x, CHANNELS):
        return None
    if y is not None and not _is_channels_by_tokens(y, *at_y, CHANNELS):
        return None
    if y is None and is_stored(op.y):
        return None

    def build(twins: Twins) -> list[Var]:
        left = twins.in_shape(op.x, _matrix_shape(x, *at_x))
        right = twins.old_value(op.y) if y is None else twins.in_shape(op.y, _matrix_shape(y, *at_y))
        transpose_keys = y is None and flag(op, "transpose_y")
        return [twins.mb.matmul(x=left, y=right, transpose_x=True, transpose_y=transpose_keys)]

    return Step((None,), build, gaining_products=at_x == (-1, -2))


def _weighted_sum(op: Operation, layouts: Layouts) -> Step | None:
    """Build values times attention weights, which have no twin: (channels, tokens) times transposed weights."""
    x, y = layouts.get(op.x), layouts.get(op.y)
    if (x is None) == (y is None) or min(op.x.rank, op.y.rank) < 2:
        return None
    (weights_side, weights, var), layout = ((1, op.x, op.y), y) if x is None else ((0, op.y, op.x), x)
    contracted, free = _contracted_and_free_axes(op)[weights_side]
    if layout is None or is_stored(weights) or not _is_channels_by_tokens(layout, contracted, free, TOKENS):
        return None
    out = _weighted_sum_layout(layout, fixed_shape(op.outputs[0]), turned=weights_side == 0)
    if out is None:
        return None
    # the product is (channels, tokens): weights as (tokens summed over, tokens)
    transpose_weights = not flag(op, "transpose_x") if weights_side == 1 else flag(op, "transpose_y")

    def build(twins: Twins) -> list[Var]:
        values = twins.in_shape(var, _matrix_shape(layout, free, contracted))
        return [twins.mb.matmul(x=values, y=twins.old_value(weights), transpose_y=transpose_weights)]

    return Step((out,), build, gaining_products=weights_side)


def _weighted_sum_layout(layout: Layout, out: Sequence[int], turned: bool) -> Layout | None:
    """Return the layout of weighted values: their channels, and the tokens of the weights."""
    rank = len(layout.axes)
    tokens = out[-1] if turned else out[-2]
    roles = [layout.roles[axis[0]] if axis else CHANNELS for axis in layout.axes]
    if len(out) != rank or any(out[i] != layout.shape[i] and layout.axes[i] for i in range(rank - 2)):
        return None
    if any(len(axis) != 1 for axis in layout.axes if axis):
        return None
    roles[-2:] = [CHANNELS, TOKENS] if turned else [TOKENS, CHANNELS]
    summed = Layout.of(out, "".join(roles))
    return summed if tokens > 1 else None


def fused(op: Operation, table: Layouts) -> Step | None:
    """Build fused attention as its parts: scaled queries times keys, the softmax, and the sum of values."""
    layouts = [table.get(v) for v in (op.query, op.key, op.value)]
    if any(x is None or not _is_channels_by_tokens(x, -1, -2, CHANNELS) for x in layouts):
        return None
    mask, out = op.inputs.get("attn_mask"), op.outputs[0]
    result = (
        _weighted_sum_layout(layouts[2], fixed_shape(out), turned=False) if layouts[2] is not None else None
    )
    if result is None or (mask is not None and np_dtype(mask) != np_dtype(op.query)):
        return None

    def build(twins: Twins) -> list[Var]:
        shapes = [_matrix_shape(layout, -1, -2) for layout in layouts if layout is not None]
        scale, *rest = in_factors(1 / math.sqrt(int(op.query.shape[-1])), np_dtype(op.query))
        scaled = seen_as(twins.mb, twins.mb.mul(x=twins.get(op.query), y=scale), shapes[0])
        keys, values = twins.in_shape(op.key, shapes[1]), twins.in_shape(op.value, shapes[2])
        scores = twins.mb.matmul(x=scaled, y=keys, transpose_x=True)
        scores = twins.mb.mul(x=scores, y=rest[0]) if rest else scores
        scores = scores if mask is None else twins.mb.add(x=scores, y=twins.old_value(mask))
        return [twins.mb.matmul(x=values, y=twins.mb.softmax(x=scores, axis=-1), transpose_y=True)]

    return Step((result,), build, gaining_products=2)
