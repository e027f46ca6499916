"""Layers that make numbers: constants, fills, ranges, copies that broadcasting asks for, and random numbers.

A seed below 0 asks for other random numbers at each run, in both formats.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from anesurgery.mil import Var, mb
from anesurgery.neuralnetwork.context import Build, Context, layer, layer_nd
from anesurgery.neuralnetwork.layers.blob_axes import ShapeOf, broadcast, said_shapes, scalar

F = np.float32


layer_nd("loadConstantND", inputs=0)(
    lambda ctx, params, inputs: mb.const(val=ctx.weights(params.data, list(params.shape), "data"))
)


def _filled(shape: ShapeOf) -> Build:
    """Return one number in a shape."""
    return lambda ctx, params, inputs: mb.fill(shape=shape(ctx, params, inputs), value=F(params.value))


def _repeated(shape: ShapeOf) -> Build:
    """Return the first input, repeated to a shape."""
    return lambda ctx, params, inputs: broadcast(ctx, inputs[0], shape(ctx, params, inputs[1:]))


for _how, (_count, _shape) in said_shapes("targetShape").items():
    layer_nd(f"fill{_how}", inputs=_count)(_filled(_shape))
    layer_nd(f"broadcastTo{_how}", inputs=_count + 1)(_repeated(_shape))
layer_nd("rangeStatic", inputs=0)(
    lambda ctx, params, inputs: _range(ctx, F(params.startValue), F(params.endValue), F(params.stepSizeValue))
)


@layer_nd("rangeDynamic", inputs=(1, 3))
def range_dynamic(ctx: Context, params: Any, inputs: list[Var]) -> Var:
    """Build `range_static` of inputs: end, start and step, the last two optional."""
    ends = [scalar(ctx, x) for x in inputs]
    start = ends[1] if len(ends) > 1 else F(params.startValue)
    step = ends[2] if len(ends) > 2 else F(params.stepSizeValue)
    return _range(ctx, start, ends[0], step)


def _range(ctx: Context, start: Any, end: Any, step: Any) -> Var:
    if not isinstance(step, Var) and step == 0:
        raise ctx.error("counts in steps of 0; state a step")
    return mb.range_1d(start=start, end=end, step=step)


FIELDS = {
    "Normal": ("random_normal", {"mean": "mean", "stddev": "stdDev"}),
    "Uniform": ("random_uniform", {"low": "minVal", "high": "maxVal"}),
    "Bernoulli": ("random_bernoulli", {"prob": "prob"}),
}
"""Kind -> op, and its parameters by field of the layer."""


def _random(op: str, fields: dict[str, str], shape: ShapeOf) -> Build:
    def build(ctx: Context, params: Any, inputs: list[Var]) -> Var:
        numbers = {name: F(getattr(params, field)) for name, field in fields.items()}
        return getattr(mb, op)(shape=shape(ctx, params, inputs), seed=np.int32(params.seed), **numbers)

    return build


for _kind, (_op, _fields) in FIELDS.items():
    for _how, (_count, _shape) in said_shapes("outputShape").items():
        layer_nd(f"random{_kind}{_how}", inputs=_count)(_random(_op, _fields, _shape))


@layer("categoricalDistribution")
def categorical(ctx: Context, params: Any, inputs: list[Var]) -> Var:
    """Build indices drawn by probabilities (or their logarithms) along the last axis, after a temperature."""
    x = inputs[0]
    if not params.isLogits:
        x = mb.log(x=mb.add(x=x, y=F(params.eps)), epsilon=F(0))
    if params.temperature not in (0, 1):
        x = mb.mul(x=x, y=F(1 / params.temperature))
    return mb.random_categorical(x=x, mode="logits", size=int(params.numSamples), seed=np.int32(params.seed))
