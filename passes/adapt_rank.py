"""Run a linear or fused attention of more than four axes on merged axes, between two reshapes.

Before::

    main(%x: 1x2x1x2x3) {
      %y: 1x2x1x2x2 = linear(x=%x, weight=[[0, 1, 2], [3, 4, 5]])
      return %y
    }

After::

    main(%x: 1x2x1x2x3) {
      %y_adapt_rank_reshape: 4x3 = reshape(x=%x, shape=[4, 3])
      %y_adapt_rank_linear: 4x2 = linear(x=%y_adapt_rank_reshape, weight=[[0, 1, 2], [3, 4, 5]])
      %y: 1x2x1x2x2 = reshape(x=%y_adapt_rank_linear, shape=[1, 2, 1, 2, 2])
      return %y
    }

A linear merges all axes but the last; an attention merges all axes before the heads.

Refuses when a shape is symbolic, and when an attention mask is broadcast over the axes to merge.

Why it helps: strings of the compiler say that linear and fused attention take at most four axes (reported). A
reshape of static shape moves no data. What the pass gains was not measured.

Grade: bit for bit.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from anesurgery import authoring as an
from anesurgery.authoring import Builder, Match, Refusal, Rewrite, Var, mb
from anesurgery.regions.small_builds import again

MOST = 4
"""Axes that both take."""
ATTENTION = "scaled_dot_product_attention"

Shape = tuple[int, ...]


@dataclass(frozen=True)
class AdaptRank(Rewrite):
    """`linear` and fused attention between reshapes."""

    name = "adapt_rank"
    kinds = frozenset({"linear", ATTENTION})
    tolerance = an.REASSOCIATED
    tolerates_nonfinite = False
    """What an attention makes of scores that are all NaN or infinite depends on its kernel."""
    magnitude = an.fp16.LARGEST
    """Above the numbers of fp16, scores overflow in one order of the products and not in another."""

    def check(self, m: Match) -> Match | Refusal:
        """Match an op with too many axes, and find the shapes of its operands with merged axes."""
        op = m.root
        first = op.query if op.op_type == ATTENTION else op.x
        if first.rank <= MOST:
            return an.NO_MATCH
        names = ["query", "key", "value"] if op.op_type == ATTENTION else ["x"]
        for v in (op.inputs[name] for name in names):
            if an.static_shape(v) is None:
                return Refusal(f"%{v.name} has the symbolic shape {tuple(v.shape)}", op)
        if op.op_type != ATTENTION:
            return m.bind(seen={"x": _seen(op.op_type, an.static_shape(op.x) or ())})
        seen = {name: _seen(ATTENTION, an.static_shape(op.inputs[name]) or ()) for name in names}
        if (mask := op.inputs.get("attn_mask")) is None:
            return m.bind(seen=seen)
        mask_shape = _mask(an.static_shape(mask), an.static_shape(op.query) or ())
        if mask_shape is None:
            return Refusal(f"the mask {tuple(mask.shape)} is broadcast over the axes that are merged", op)
        return m.bind(seen={**seen, "attn_mask": mask_shape})

    def rewrite(self, mb: Builder, m: Match) -> Var:
        """Build the op between reshapes."""
        op = m.root
        seen = {name: mb.reshape(x=op.inputs[name], shape=list(shape)) for name, shape in m.seen.items()}
        return mb.reshape(x=again(mb, op, **seen), shape=[int(d) for d in op.outputs[0].shape])


def _seen(kind: str, shape: Shape) -> Shape:
    """Return the shape of an operand with its leading axes merged."""
    kept = 1 if kind == "linear" else 3
    return (int(np.prod(shape[:-kept])), *shape[-kept:])


def _mask(mask: Shape | None, query: Shape) -> Shape | None:
    """Return the shape of a mask that fits merged axes; None if there is none."""
    if mask is None:
        return None
    lead = mask[:-3]
    if all(d == 1 for d in lead):
        return (1, *mask[-3:]) if len(mask) > MOST else mask
    return _seen(ATTENTION, mask) if lead == query[:-3] else None


@an.example((1, 2, 1, 2, 3), opset="iOS16")
def example(x: Var) -> Any:
    """A product of five axes."""
    weight = np.arange(6, dtype=np.float32).reshape(2, 3)
    return mb.linear(x=x, weight=weight, name="y")
