"""Layers of random numbers. A seed below 0 asks for other numbers at each run, in both formats."""

from __future__ import annotations

from typing import Any

import numpy as np

from anesurgery.mil import Var, mb
from anesurgery.neuralnetwork.context import Context
from anesurgery.neuralnetwork.layers.blob_axes import ShapeOf, said_shapes
from anesurgery.neuralnetwork.layers.layer_table import Build, layer, layer_nd

F = np.float32

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
    """Indices drawn by probabilities (or their logarithms) along the last axis, after a temperature."""
    x = inputs[0]
    if not params.isLogits:
        x = mb.log(x=mb.add(x=x, y=F(params.eps)), epsilon=F(0))
    if params.temperature not in (0, 1):
        x = mb.mul(x=x, y=F(1 / params.temperature))
    return mb.random_categorical(x=x, mode="logits", size=int(params.numSamples), seed=np.int32(params.seed))
