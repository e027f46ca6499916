"""Pooling over two and three spatial axes, by windows or over all of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from anesurgery.mil import Var, mb, np_dtype, static_shape
from anesurgery.neuralnetwork.context import Context
from anesurgery.neuralnetwork.layers import window_padding as padding
from anesurgery.neuralnetwork.layers.layer_table import layer, layer_nd

KINDS = ("max", "average", "l2")
"""By `type`."""
GLOBAL: dict[str, Callable[[Var, list[int]], Var]] = {
    "max": lambda x, axes: mb.reduce_max(x=x, axes=axes, keep_dims=True),
    "average": lambda x, axes: mb.reduce_mean(x=x, axes=axes, keep_dims=True),
    "l2": lambda x, axes: mb.reduce_l2_norm(x=x, axes=axes, keep_dims=True),
}


@layer("pooling")
def pooling(ctx: Context, params: Any, inputs: list[Var]) -> Var:
    """Pooling of (..., channel, height, width)."""
    kind = KINDS[params.type]
    padding.needs_type(ctx, params)
    if params.globalPooling:
        return GLOBAL[kind](inputs[0], [-2, -1])
    ctx.needs_rank(inputs[0], 3)
    x, back = ctx.images(inputs[0])
    form = padding.spatial(ctx, params)
    if params.HasField("includeLastPixel"):
        high, wide = padding.pairs(params.includeLastPixel.paddingAmounts, 0)
        form = {**padding.arguments([high, high, wide, wide]), "ceil_mode": True}
    kernel = padding.positive(ctx, params, "kernelSize", 3)
    strides = padding.positive(ctx, params, "stride", 1)
    y = _windows(kind, x, kernel, strides, form, params.avgPoolExcludePadding)
    last = kind == "average" and form.get("ceil_mode") and not params.avgPoolExcludePadding
    return back(_without_beyond(x, y, kernel, strides, list(form.get("pad", [0] * 4))) if last else y)


def _windows(
    kind: str, x: Var, kernel: list[int], strides: list[int], form: dict[str, Any], exclude: bool
) -> Var:
    if kind == "average":
        form = {**form, "exclude_padding_from_average": bool(exclude)}
    op = {"max": mb.max_pool, "average": mb.avg_pool, "l2": mb.l2_pool}[kind]
    return op(x=x, kernel_sizes=kernel, strides=strides, **form)


def _without_beyond(x: Var, y: Var, kernel: list[int], strides: list[int], pad: list[int]) -> Var:
    """Means whose last windows reach beyond the padding, which Caffe, whose mode this is, does not count."""
    if static_shape(x) is None or static_shape(y) is None:
        return y
    factor = np.ones((), np.float64)
    for axis, (size, step) in enumerate(zip(kernel, strides, strict=True)):
        before, after = pad[2 * axis : 2 * axis + 2]
        begin = np.arange(y.shape[2 + axis]) * step - before
        ends = np.minimum(begin + size, x.shape[2 + axis] + after)
        factor = factor[..., None] * (size / (ends - begin))
    return y if np.all(factor == 1) else mb.mul(x=y, y=factor.astype(np_dtype(y)))


@layer_nd("pooling3d")
def pooling3d(ctx: Context, params: Any, inputs: list[Var]) -> Var:
    """Pooling of (batch, channel, depth, height, width)."""
    kernel, strides = (
        [int(getattr(params, f"{word}{axis}")) for axis in ("Depth", "Height", "Width")]
        for word in ("kernel", "stride")
    )
    form = padding.volume(params)
    x = ctx.five(inputs[0])
    return _windows(KINDS[params.type], x, kernel, strides, form, params.countExcludePadding)


layer_nd("globalPooling3d")(
    lambda ctx, params, inputs: GLOBAL[KINDS[params.type]](ctx.five(inputs[0]), [-3, -2, -1])
)
