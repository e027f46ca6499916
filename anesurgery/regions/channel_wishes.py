"""The layouts that an op's operands need so that its result gets a wished one: how regions grow upstream."""

from __future__ import annotations

import numpy as np

from anesurgery.mil import Operation, Var, constant, fixed_shape, operands, static_shape
from anesurgery.ops import BROADCASTING, UNARY, VIEWS
from anesurgery.regions.layouts import Layout
from anesurgery.semantics.reading import axis_of, permutation


def wishes(op: Operation, layout: Layout) -> dict[Var, Layout] | None:
    """For each operand that needs one, its layout; None where there is none, or the op has no such form."""
    if any(static_shape(v) is None for _, v in operands(op)):
        return None
    wished: dict[Var, Layout | None] = {}
    if op.op_type in VIEWS:
        wished = {op.x: layout.reshaped(fixed_shape(op.x))}
    elif op.op_type == "transpose":
        perm = permutation(op)
        wished = {op.x: layout.transposed([perm.index(i) for i in range(len(perm))])}
    elif op.op_type in (UNARY | BROADCASTING):
        named = [op.inputs[k] for k in ("x", "y", "cond", "a", "b") if isinstance(op.inputs.get(k), Var)]
        moving = [v for v in named if constant(v) is None and np.prod(v.shape) > 1]
        wished = {v: layout.restricted(fixed_shape(v)) for v in moving}
    elif op.op_type == "concat" and len(layout.axes[axis := axis_of(op)]) == 1:
        moving = [v for v in op.values if constant(v) is None]
        wished = {v: layout.resized(axis, int(v.shape[axis])) for v in moving}
    if not wished or any(x is None or not x.sizes for x in wished.values()):
        return None
    return {v: x for v, x in wished.items() if x is not None}
