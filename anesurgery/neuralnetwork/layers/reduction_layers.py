"""Layers that take axes together: sums, means and the like, and softmax over any axis."""

from __future__ import annotations

from typing import Any, cast

from anesurgery.mil import Var, mb
from anesurgery.neuralnetwork.context import Context
from anesurgery.neuralnetwork.layers.blob_axes import each_within, within
from anesurgery.neuralnetwork.layers.layer_table import Build, layer_nd

REDUCTIONS = {
    "reduceSum": "reduce_sum",
    "reduceMean": "reduce_mean",
    "reduceProd": "reduce_prod",
    "reduceMax": "reduce_max",
    "reduceMin": "reduce_min",
    "reduceL1": "reduce_l1_norm",
    "reduceL2": "reduce_l2_norm",
    "reduceSumSquare": "reduce_sum_square",
    "reduceLogSum": "reduce_log_sum",
    "reduceLogSumExp": "reduce_log_sum_exp",
}
"""Layer type -> op."""


def _reduction(op: str) -> Build:
    def build(ctx: Context, params: Any, inputs: list[Var]) -> Var:
        if not params.reduceAll and not params.axes:
            raise ctx.error("names no axes; list some, or set reduceAll")
        x = inputs[0]
        if not x.rank:  # converters write the product of a list of sizes, which may be one size
            x = mb.expand_dims(x=x, axes=[0])
            return cast(Var, getattr(mb, op)(x=x, axes=[0], keep_dims=False))
        stated = range(x.rank) if params.reduceAll else params.axes
        axes = each_within(ctx, stated, x.rank)
        return getattr(mb, op)(x=x, axes=axes, keep_dims=params.keepDims)

    return build


for _kind, _op in REDUCTIONS.items():
    layer_nd(_kind)(_reduction(_op))


@layer_nd("softmaxND")
def softmax_nd(ctx: Context, params: Any, inputs: list[Var]) -> Var:
    """Softmax over one axis."""
    axis = within(ctx, params.axis, inputs[0].rank)
    return mb.softmax(x=inputs[0], axis=axis)
