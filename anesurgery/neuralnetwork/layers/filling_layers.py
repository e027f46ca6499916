"""Layers that make numbers: constants, fills, ranges, and copies that broadcasting asks for."""

from __future__ import annotations

from typing import Any

import numpy as np

from anesurgery.mil import Var, mb
from anesurgery.neuralnetwork.context import Context
from anesurgery.neuralnetwork.layers.blob_axes import Numbers, broadcast, scalar, shape_value, sizes
from anesurgery.neuralnetwork.layers.layer_table import layer_nd

F = np.float32


@layer_nd("loadConstantND", inputs=0)
def load_constant_nd(ctx: Context, params: Any, inputs: list[Var]) -> Var:
    """The array that the layer holds."""
    return mb.const(val=ctx.weights(params.data, list(params.shape), "data"))


def _fill(shape: Numbers, value: float) -> Var:
    return mb.fill(shape=shape, value=F(value))


@layer_nd("fillLike")
def fill_like(ctx: Context, params: Any, inputs: list[Var]) -> Var:
    """One number in the shape of the input."""
    return _fill(shape_value(inputs[0]), params.value)


@layer_nd("fillStatic", inputs=0)
def fill_static(ctx: Context, params: Any, inputs: list[Var]) -> Var:
    """One number in a stated shape."""
    return _fill(np.array(params.targetShape, np.int32), params.value)


@layer_nd("fillDynamic")
def fill_dynamic(ctx: Context, params: Any, inputs: list[Var]) -> Var:
    """One number in the shape that the input lists."""
    return _fill(sizes(ctx, inputs[0]), params.value)


@layer_nd("broadcastToLike", inputs=2)
def broadcast_to_like(ctx: Context, params: Any, inputs: list[Var]) -> Var:
    """Repeated to the shape of the second input."""
    return broadcast(ctx, inputs[0], shape_value(inputs[1]))


@layer_nd("broadcastToStatic")
def broadcast_to_static(ctx: Context, params: Any, inputs: list[Var]) -> Var:
    """Repeated to a stated shape."""
    return broadcast(ctx, inputs[0], np.array(params.targetShape, np.int32))


@layer_nd("broadcastToDynamic", inputs=2)
def broadcast_to_dynamic(ctx: Context, params: Any, inputs: list[Var]) -> Var:
    """Repeated to the shape that the second input lists."""
    return broadcast(ctx, inputs[0], sizes(ctx, inputs[1]))


@layer_nd("rangeStatic", inputs=0)
def range_static(ctx: Context, params: Any, inputs: list[Var]) -> Var:
    """Numbers from start (included) to end (excluded) in steps."""
    return _range(ctx, F(params.startValue), F(params.endValue), F(params.stepSizeValue))


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
