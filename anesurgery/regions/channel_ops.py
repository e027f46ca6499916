"""What each op does to channels-first twins: the table, elementwise ops and views.

A rule is asked with the layouts that are known. It may ask for the layout of an operand that has none, which
then enters the region with a transposition.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from anesurgery.mil import Operation, Var, constant, fixed_shape, np_dtype, op_inputs, static_shape
from anesurgery.ops import BROADCASTING, REDUCTIONS, UNARY, VIEWS
from anesurgery.regions import channel_axes, channel_products
from anesurgery.regions.channel_steps import Layouts, Rule, Step, Twins
from anesurgery.regions.layouts import Layout, broadcast, groups_for, groups_of, seen_shape
from anesurgery.semantics.reading import permutation

TILED = 1 << 24
"""Bytes up to which a constant is repeated so that a twin needs no other view: 16 MiB. A choice, as they are
read each time."""


def step_of(op: Operation, layouts: Layouts) -> Step | None:
    """The op on twins; None where it is none of the region's."""
    rule = RULES.get(op.op_type)
    if rule is None or any(static_shape(v) is None or np_dtype(v).kind != "f" for v in op.outputs):
        return None
    step = rule(op, layouts)
    return None if step is None or any(x is not None and not x.sizes for x in step.outs) else step


def _elementwise(op: Operation, layouts: Layouts) -> Step | None:
    """All operands are broadcast to the result; those without a layout enter with theirs."""
    operands = {k: op.inputs[k] for k in ("x", "y", "cond", "a", "b") if isinstance(op.inputs.get(k), Var)}
    moving = {k: v for k, v in operands.items() if constant(v) is None and np.prod(v.shape) > 1}
    layout = _broadcast_to(op.outputs[0], [layouts.get(v) for v in moving.values()])
    if layout is None or not all(layouts.get(v) or _enters(layouts, v, layout) for v in moving.values()):
        return None
    shapes = {k: fixed_shape(v) for k, v in operands.items()}
    free = [s for k, s in shapes.items() if k in moving or np.prod(s) * _copies(layout, s) > TILED]
    groups = groups_for(layout, free)
    repeated = {
        k: operands[k] for k in shapes if k not in moving and shapes[k] and constant(operands[k]) is not None
    }

    def build(t: Twins) -> list[Var]:
        used = groups
        whole = [t.now(v) for v in moving.values() if fixed_shape(v) == fixed_shape(op.outputs[0])]
        if groups == layout.groups and whole:
            used = groups_of(layout, fixed_shape(whole[0])) or groups
        changed = {k: t.seen(v, seen_shape(layout, used, shapes[k])) for k, v in moving.items()}
        changed |= {k: t.constant(v, layout, used) for k, v in repeated.items()}
        return [getattr(t.mb, op.op_type)(**{**op_inputs(op), **changed})]

    return Step((layout,), build)


def _broadcast_to(out: Var, layouts: Sequence[Layout | None]) -> Layout | None:
    """The layout of a value to which others are broadcast, as far as theirs are known."""
    told = [layout for layout in layouts if layout is not None]
    if not told:
        return None
    layout: Layout | None = told[0]
    for other in told[1:]:
        layout = None if layout is None else broadcast(layout, other)
    raised = None if layout is None else layout.raised(out.rank)
    return raised if raised is not None and raised.shape == fixed_shape(out) else None


def _enters(layouts: Layouts, var: Var, layout: Layout) -> bool:
    """Can a value without a layout enter the region?"""
    return np_dtype(var).kind == "f" and layouts.ask(var, layout.restricted(fixed_shape(var)))


def _copies(layout: Layout, shape: Sequence[int]) -> int:
    """How often a constant is repeated where its channels and tokens are one axis each; times four bytes."""
    seen = seen_shape(layout, layout.groups, shape)
    full = [math.prod(layout.sizes[a] for a in group) for group in layout.groups]
    partial = [f // s for f, s in zip(full, seen, strict=True) if s > 1]
    return 4 * math.prod(partial) if any(p > 1 for p in partial) else 0


def _view(op: Operation, layouts: Layouts) -> Step | None:
    layout = layouts.get(op.x)
    seen = layout.reshaped(fixed_shape(op.outputs[0])) if layout is not None else None
    return Step((seen,), lambda t: [None]) if seen is not None else None


def _transpose(op: Operation, layouts: Layouts) -> Step | None:
    layout = layouts.get(op.x)
    return None if layout is None else Step((layout.transposed(permutation(op)),), lambda t: [None])


RULES: dict[str, Rule] = {
    **dict.fromkeys((*BROADCASTING, *UNARY), _elementwise),
    **dict.fromkeys(VIEWS, _view),
    **dict.fromkeys(REDUCTIONS, channel_axes.reduction),
    "concat": channel_axes.concat,
    "layer_norm": channel_axes.layer_norm,
    "linear": channel_products.weighted,
    "matmul": channel_products.product,
    "scaled_dot_product_attention": channel_products.fused,
    "slice_by_index": channel_axes.slice,
    "softmax": channel_axes.softmax,
    "split": channel_axes.split,
    "tile": channel_axes.tile,
    "transpose": _transpose,
}
"""Op type -> what it does to twins.

No query over rows: these say where an axis goes, not in which order the numbers of channels that were folded
into one axis stand there, which of them an op needs apart, nor how the op is written on a twin.
"""
