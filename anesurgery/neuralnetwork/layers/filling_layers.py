"""Layers that make numbers: constants, fills, ranges, and copies that broadcasting asks for."""

from __future__ import annotations

from typing import Any

import numpy as np

from anesurgery.mil import Var, mb
from anesurgery.neuralnetwork.context import Context
from anesurgery.neuralnetwork.layers.blob_axes import ShapeOf, broadcast, said_shapes, scalar
from anesurgery.neuralnetwork.layers.layer_table import Build, layer_nd

F = np.float32


layer_nd("loadConstantND", inputs=0)(
    lambda ctx, params, inputs: mb.const(val=ctx.weights(params.data, list(params.shape), "data"))
)


def _filled(shape: ShapeOf) -> Build:
    """One number in a shape."""
    return lambda ctx, params, inputs: mb.fill(shape=shape(ctx, params, inputs), value=F(params.value))


def _repeated(shape: ShapeOf) -> Build:
    """The first input, repeated to a shape."""
    return lambda ctx, params, inputs: broadcast(ctx, inputs[0], shape(ctx, params, inputs[1:]))


for _how, (_count, _shape) in said_shapes("targetShape").items():
    layer_nd(f"fill{_how}", inputs=_count)(_filled(_shape))
    layer_nd(f"broadcastTo{_how}", inputs=_count + 1)(_repeated(_shape))
layer_nd("rangeStatic", inputs=0)(
    lambda ctx, params, inputs: _range(ctx, F(params.startValue), F(params.endValue), F(params.stepSizeValue))
)


@layer_nd("rangeDynamic", inputs=(1, 3))
def range_dynamic(ctx: Context, params: Any, inputs: list[Var]) -> Var:
    """As `range_static`; the inputs are end, start and step, the last two optional."""
    ends = [scalar(ctx, x) for x in inputs]
    start = ends[1] if len(ends) > 1 else F(params.startValue)
    step = ends[2] if len(ends) > 2 else F(params.stepSizeValue)
    return _range(ctx, start, ends[0], step)


def _range(ctx: Context, start: Any, end: Any, step: Any) -> Var:
    if not isinstance(step, Var) and step == 0:
        raise ctx.error("counts in steps of 0; state a step")
    return mb.range_1d(start=start, end=end, step=step)
