"""The rules for ops of a channels-first region: how each op is written on the twins of its operands.

A region is a part of a program that is rebuilt with channels first; the *twin* of a value holds the same
numbers in the order batch, channels, tokens (see `layouts`). The pass `channels_first` calls
`step_of(op, layouts)`, which looks up the rule of an op in `RULES` and returns a `Step`: the layouts of the
results, and a function that builds them. A rule may request a layout for an operand that has none yet; the
operand then enters the region with a transposition. Example: a sum over the last axis of (1, tokens, channels)
becomes a sum over axis 1 of the twin (1, channels, 1, tokens).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from anesurgery.mil import (
    Operation,
    Var,
    constant,
    consumers,
    fixed_shape,
    is_output,
    np_dtype,
    op_inputs,
    operands,
    static_shape,
)
from anesurgery.ops import BROADCASTING, REDUCTIONS, UNARY, VIEWS
from anesurgery.regions import channel_products
from anesurgery.regions.channel_products import sequence_layout
from anesurgery.regions.channel_steps import Layouts, Rule, Step, Twins
from anesurgery.regions.layouts import (
    BATCH,
    CHANNELS,
    Groups,
    Layout,
    broadcast,
    groups_for,
    groups_of,
    seen_shape,
)
from anesurgery.regions.rotary import exchange
from anesurgery.semantics.reading import axes_of, axis_of, axis_slice, flag, ints, permutation

WIDEST = 256
"""The most channels of a head whose parts are exchanged by a convolution: heads have 32 to 256, and a 256 x 256
matrix takes 65,536 products for each position.
"""
MOST_REPEATED_BYTES = 1 << 24
"""Constants are repeated up to this many bytes, 17 MB, so that a twin needs no other view. A choice: they are
read in each run.
"""


class _SplitTwin(NamedTuple):
    """A twin in which the atoms of some axes of the value are axes of their own."""

    shape: list[int]
    """The shape of the twin."""
    axes: list[int]
    """The positions of these axes in the twin."""


def _split_off(layout: Layout, axes: Sequence[int]) -> _SplitTwin | None:
    """Return the twin with some axes of the value split off from the others; None where they hold no atoms.

    For a norm over the last axis of (batch, tokens, 12 heads, 64), the twin (batch, 768, 1, tokens) becomes
    (batch, 12, 64, tokens), and the axes are [2]. An operand of length 1 along the axes would need the same
    split, so `groups_for` gives it.
    """
    chosen = {a for axis in axes for a in layout.axes[axis]}
    if not chosen:
        return None
    broadcast_operand = [1 if i in axes else n for i, n in enumerate(layout.shape)]
    groups = groups_for(layout, [broadcast_operand])
    positions = [i for i, group in enumerate(groups) if group and set(group) <= chosen]
    return _SplitTwin([layout.length(group) for group in groups], positions)


def layer_norm(op: Operation, layouts: Layouts) -> Step | None:
    """Build a norm over channels, or over those of each head."""
    shape, axes = static_shape(op.x), axes_of(op)
    if shape is None:
        return None
    if layouts.get(op.x) is None and not (
        axes == [len(shape) - 1] and layouts.request(op.x, sequence_layout(shape))
    ):
        return None
    layout = layouts.get(op.x)
    split_twin = None if layout is None else _split_off(layout, axes)
    if layout is None or split_twin is None or len(axes) != 1 or len(split_twin.axes) != 1:
        return None
    order = layout.column_order(axes[0])

    def build(twins: Twins) -> list[Var]:
        x = twins.in_shape(op.x, split_twin.shape)
        changed = {
            k: twins.derived_constant(
                op.inputs[k], f"norm_{layout.sizes + layout.axes[axes[0]]}", lambda v: v[order]
            )
            for k in ("gamma", "beta")
            if order is not None and op.inputs.get(k) is not None
        }
        return [twins.mb.layer_norm(**{**op_inputs(op), **changed, "x": x, "axes": split_twin.axes})]

    return Step((layout,), build)


def reduction(op: Operation, layouts: Layouts) -> Step | None:
    """Build a reduction over some of the atoms."""
    layout, axes = layouts.get(op.x), axes_of(op)
    split_twin = None if layout is None else _split_off(layout, axes)
    if layout is None or split_twin is None:
        return None
    result = layout.without(axes, flag(op, "keep_dims"))

    def build(twins: Twins) -> list[Var]:
        x = twins.in_shape(op.x, split_twin.shape)
        return [getattr(twins.mb, op.op_type)(x=x, axes=split_twin.axes, keep_dims=True)]

    return Step((result,), build) if result.sizes else None


def softmax(op: Operation, layouts: Layouts) -> Step | None:
    """Build a softmax over one axis of the twin."""
    layout = layouts.get(op.x)
    split_twin = None if layout is None else _split_off(layout, [axis_of(op)])
    if layout is None or split_twin is None or len(split_twin.axes) != 1:
        return None
    (axis,) = split_twin.axes

    def build(twins: Twins) -> list[Var]:
        return [twins.mb.softmax(x=twins.in_shape(op.x, split_twin.shape), axis=axis)]

    return Step((layout,), build)


@dataclass(frozen=True)
class AtomPlace:
    """Where an axis of the value that is a single atom stands in a twin."""

    groups: Groups
    axis: int
    unit: int
    """How many elements of the twin's axis belong to one element of the atom."""

    @classmethod
    def of(cls, layout: Layout, axis: int) -> AtomPlace | None:
        """Return the place of an axis; None where it is not a single atom.

        The twin's axis is cut before the atom: heads and their width, (batch, heads * width, 1, tokens), become
        (batch, heads, width, tokens) for a slice of the width. The empty axis goes, since a twin keeps four.
        """
        if len(layout.axes[axis]) != 1:
            return None
        (atom,) = layout.axes[axis]
        groups = list(layout.groups)
        at = next(i for i, group in enumerate(groups) if atom in group)
        before, rest = groups[at][: groups[at].index(atom)], groups[at][groups[at].index(atom) :]
        if before:
            groups[at : at + 1] = [before, rest]
            at += 1
            if len(groups) > 4 and () in groups:
                empty = groups.index(())
                del groups[empty]
                at -= empty < at
        return cls(tuple(groups), at, math.prod(layout.sizes[a] for a in rest[1:]))

    def shape(self, layout: Layout, size: int) -> list[int]:
        """Return the shape of the twin if the axis of the value has length `size`."""
        lengths = [layout.length(group) for group in self.groups]
        return [*lengths[: self.axis], size * self.unit, *lengths[self.axis + 1 :]]


def sliced_axes(op: Operation, layouts: Layouts) -> Step | None:
    """Build a slice of one axis that is a single atom."""
    layout, cut = layouts.get(op.x), axis_slice(op)
    place = None if layout is None or cut is None else AtomPlace.of(layout, cut.axis)
    if layout is None or cut is None or place is None or (cut.stride != 1 and place.unit != 1):
        return None
    result = layout.resized(cut.axis, cut.size)
    if cut.dropped:
        result = result.without([cut.axis], keep_dims=False)
    shape = place.shape(layout, layout.shape[cut.axis])

    def build(twins: Twins) -> list[Var]:
        begin, end, stride = [0] * len(shape), list(shape), [1] * len(shape)
        begin[place.axis], end[place.axis] = cut.begin * place.unit, cut.end * place.unit
        stride[place.axis] = cut.stride
        strides = {"stride": stride} if cut.stride != 1 else {}
        return [twins.mb.slice_by_index(x=twins.in_shape(op.x, shape), begin=begin, end=end, **strides)]

    return Step((result,), build) if result.sizes else None


def split(op: Operation, layouts: Layouts) -> Step | None:
    """Build a split of one axis that is a single atom."""
    layout, axis = layouts.get(op.x), axis_of(op)
    place = None if layout is None else AtomPlace.of(layout, axis)
    if layout is None or place is None:
        return None
    sizes = [int(v.shape[axis]) for v in op.outputs]
    outs = tuple(layout.resized(axis, size) for size in sizes)

    def build(twins: Twins) -> list[Var]:
        x = twins.in_shape(op.x, [layout.length(g) for g in place.groups])
        parts: Any = twins.mb.split(x=x, split_sizes=[n * place.unit for n in sizes], axis=place.axis)
        return list(parts)

    return Step(outs, build)


def concat(op: Operation, layouts: Layouts) -> Step | None:
    """Build a concat of parts of each head in another order, or of values side by side."""
    return _exchanged_parts(op, layouts) or _side_by_side(op, layouts)


def _exchanged_parts(op: Operation, layouts: Layouts) -> Step | None:
    """Exchange parts of each head's channels, with signs, by a grouped convolution with ones and minus ones."""
    exchanged, axis = exchange(op), axis_of(op)
    layout = None if exchanged is None else layouts.get(exchanged[0])
    if exchanged is None or layout is None:
        return None
    (source, rows), size = exchanged, int(op.outputs[0].shape[axis])
    heads, width = layout.having(CHANNELS)[:-1], layout.having(CHANNELS)[-1:]
    if layout.axes[axis] != width or layout.length(width) != size or size > WIDEST:
        return None
    count = layout.length(heads)

    def build(twins: Twins) -> list[Var]:
        kernel = np.tile(rows, (count, 1))[:, :, None, None].astype(np_dtype(source))
        key = ("exchange", rows.tobytes(), count, kernel.dtype)
        weight = twins.mb.shared(key, lambda: kernel, f"{op.outputs[0].name}_signs")
        x = twins.in_shape(source, [layout.length(g) for g in layout.groups])
        return [twins.mb.conv(x=x, weight=weight, groups=count)]

    inner = {op for v in op.values for op in _slice_and_signs(v)}
    return Step((layout,), build, replaced_upstream=tuple(inner))


def _slice_and_signs(var: Var) -> Iterator[Operation]:
    """Yield a slice and the multiplications after it, as far as nothing else reads them."""
    while var.op is not None and len(consumers(var)) == 1 and not is_output(var):
        yield var.op
        if var.op.op_type != "mul":
            return
        var = var.op.x if constant(var.op.x) is None else var.op.y


def _side_by_side(op: Operation, table: Layouts) -> Step | None:
    """Concatenate values along one atom; those without a layout enter with that of the others."""
    axis, values = axis_of(op), list(op.values)
    layouts = [table.get(v) for v in values]
    reference = next((x for x in layouts if x is not None and len(x.axes[axis]) == 1), None)
    place = None if reference is None else AtomPlace.of(reference, axis)
    if reference is None or place is None or flag(op, "interleave"):
        return None
    sizes = [int(v.shape[axis]) for v in values]
    wanted_layouts = [reference.resized(axis, n) for n in sizes]
    for var, layout, wanted_layout in zip(values, layouts, wanted_layouts, strict=True):
        if constant(var) is None and (layout or wanted_layout) != wanted_layout:
            return None
        if constant(var) is None and layout is None and not table.request(var, wanted_layout):
            return None

    def build(twins: Twins) -> list[Var]:
        parts = []
        for var, size, wanted_layout in zip(values, sizes, wanted_layouts, strict=True):
            if constant(var) is None:
                parts.append(twins.in_shape(var, place.shape(reference, size)))
            else:
                moved = twins.constant(var, wanted_layout, wanted_layout.groups)
                parts.append(twins.mb.reshape(x=moved, shape=place.shape(reference, size)))
        return [twins.mb.concat(values=parts, axis=place.axis)]

    return Step((reference.resized(axis, sum(sizes)),), build)


def tile(op: Operation, layouts: Layouts) -> Step | None:
    """Repeat an axis of length 1, as keys and values for several heads of queries.

    A value (1, 2, 1, 64, tokens) that is tiled 4 times along axis 2 gets a new atom of size 4 between the atoms
    2 and 64 of its channels. Its twin is tiled as (1, 2, 1, 64 * tokens), along axis 2.
    """
    layout, reps = layouts.get(op.x), ints(op, "reps")
    grown = [axis for axis, n in enumerate(reps) if n > 1]
    if layout is None or len(grown) != 1 or layout.axes[grown[0]]:
        return None
    axis, times = grown[0], reps[grown[0]]
    channels = layout.having(CHANNELS)
    before = [a for other in layout.axes[:axis] for a in other if a in channels]
    at = max(before) + 1 if before else len(layout.having(BATCH))  # the number of the new atom
    sizes, roles = layout.sizes, layout.roles
    axes = [tuple(a + (a >= at) for a in other) for other in layout.axes]
    axes[axis] = (at,)
    tiled = Layout((*sizes[:at], times, *sizes[at:]), roles[:at] + CHANNELS + roles[at:], tuple(axes)).normal()
    shape = [1, math.prod(sizes[:at]), 1, math.prod(sizes[at:])]

    def build(twins: Twins) -> list[Var]:
        return [twins.mb.tile(x=twins.in_shape(op.x, shape), reps=[1, 1, times, 1])]

    return Step((tiled,), build)


def step_of(op: Operation, layouts: Layouts) -> Step | None:
    """Return how an op is built on twins; None where it does not belong to the region."""
    rule = RULES.get(op.op_type)
    values = (*op.outputs, *(v for _, v in operands(op)))
    if rule is None or any(static_shape(v) is None for v in values):
        return None
    if any(np_dtype(v).kind != "f" for v in op.outputs):
        return None
    step = rule(op, layouts)
    return None if step is None or any(x is not None and not x.sizes for x in step.layouts) else step


def _elementwise(op: Operation, layouts: Layouts) -> Step | None:
    """Broadcast all operands to the result; those without a layout enter with the result's.

    For x of (1, tokens, 768) plus a constant of (768,) the twin of the constant is (1, 768, 1, 1). An operand
    that is broadcast along a part of the channels only, such as one number for each head, needs heads and their
    width as axes of their own; a small constant is repeated instead.
    """
    operands = {k: op.inputs[k] for k in ("x", "y", "cond", "a", "b") if isinstance(op.inputs.get(k), Var)}
    run_time = {k: v for k, v in operands.items() if constant(v) is None and np.prod(v.shape) > 1}
    layout = _broadcast_to(op.outputs[0], [layouts.get(v) for v in run_time.values()])
    if layout is None or not all(layouts.get(v) or _can_enter(layouts, v, layout) for v in run_time.values()):
        return None
    shapes = {k: fixed_shape(v) for k, v in operands.items()}
    not_repeated = [
        s
        for k, s in shapes.items()
        if k in run_time or np.prod(s) * _bytes_per_element(layout, s) > MOST_REPEATED_BYTES
    ]
    groups = groups_for(layout, not_repeated)
    constants = {
        k: operands[k] for k in shapes if k not in run_time and shapes[k] and constant(operands[k]) is not None
    }

    def build(twins: Twins) -> list[Var]:
        axes = groups
        full_size = [twins.get(v) for v in run_time.values() if fixed_shape(v) == fixed_shape(op.outputs[0])]
        if groups == layout.groups and full_size:  # the axes of a twin that is there save a reshape
            axes = groups_of(layout, fixed_shape(full_size[0])) or groups
        changed = {k: twins.in_shape(v, seen_shape(layout, axes, shapes[k])) for k, v in run_time.items()}
        changed |= {k: twins.constant(v, layout, axes) for k, v in constants.items()}
        return [getattr(twins.mb, op.op_type)(**{**op_inputs(op), **changed})]

    return Step((layout,), build)


def _broadcast_to(out: Var, layouts: Sequence[Layout | None]) -> Layout | None:
    """Return the layout of a value to which operands are broadcast, as far as theirs are known; else None."""
    known = [layout for layout in layouts if layout is not None]
    if not known:
        return None
    layout: Layout | None = known[0]
    for other in known[1:]:
        layout = None if layout is None else broadcast(layout, other)
    raised = None if layout is None else layout.raised(out.rank)
    return raised if raised is not None and raised.shape == fixed_shape(out) else None


def _can_enter(layouts: Layouts, var: Var, layout: Layout) -> bool:
    """Can a value without a layout enter the region?"""
    return np_dtype(var).kind == "f" and layouts.request(var, layout.restricted(fixed_shape(var)))


def _bytes_per_element(layout: Layout, shape: Sequence[int]) -> int:
    """Return the bytes of each element of a constant, repeated until channels and tokens are an axis each."""
    seen = seen_shape(layout, layout.groups, shape)
    full = [math.prod(layout.sizes[a] for a in group) for group in layout.groups]
    partial = [f // s for f, s in zip(full, seen, strict=True) if s > 1]
    return 4 * math.prod(partial) if any(p > 1 for p in partial) else 0


def _view(op: Operation, layouts: Layouts) -> Step | None:
    layout = layouts.get(op.x)
    seen = layout.reshaped(fixed_shape(op.outputs[0])) if layout is not None else None
    return Step((seen,), lambda twins: [None]) if seen is not None else None


def _transpose(op: Operation, layouts: Layouts) -> Step | None:
    layout = layouts.get(op.x)
    return None if layout is None else Step((layout.transposed(permutation(op)),), lambda twins: [None])


RULES: dict[str, Rule] = {
    **dict.fromkeys((*BROADCASTING, *UNARY), _elementwise),
    **dict.fromkeys(VIEWS, _view),
    **dict.fromkeys(REDUCTIONS, reduction),
    "concat": concat,
    "layer_norm": layer_norm,
    "linear": channel_products.weighted_product,
    "matmul": channel_products.product,
    "scaled_dot_product_attention": channel_products.fused,
    "slice_by_index": sliced_axes,
    "softmax": softmax,
    "split": split,
    "tile": tile,
    "transpose": _transpose,
}
"""Op type -> the rule that builds it on twins.

The table of `semantics.rows` cannot replace these: it says where an axis goes, but not in which order channels
stand that were folded into one axis, which of them an op needs apart, or how the op is written on a twin.
"""
