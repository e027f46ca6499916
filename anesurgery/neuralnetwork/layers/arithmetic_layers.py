"""Arithmetic of the first specification: sums, products, unary functions, reductions, scale and bias."""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce as fold
from typing import Any

import numpy as np

from anesurgery.mil import Array, Var, mb
from anesurgery.neuralnetwork.context import Context
from anesurgery.neuralnetwork.layers.layer_table import Build, layer

F = np.float32
MANY = (1, None)


def _folded(op: str, alpha: bool = False) -> Build:
    """An op over all inputs; with `alpha`, the parameter is the other side of a single one."""

    def build(ctx: Context, params: Any, inputs: list[Any]) -> Var:
        values = [*inputs, F(params.alpha)] if alpha and len(inputs) == 1 else inputs
        return fold(lambda a, b: getattr(mb, op)(x=a, y=b), values)

    return build


layer("add", inputs=MANY)(_folded("add", alpha=True))
layer("multiply", inputs=MANY)(_folded("mul", alpha=True))
layer("max", inputs=MANY)(_folded("maximum"))
layer("min", inputs=MANY)(_folded("minimum"))


@layer("softmax")
def softmax(ctx: Context, params: Any, inputs: list[Var]) -> Var:
    """Softmax over the channels."""
    ctx.needs_rank(inputs[0], 3)
    return mb.softmax(x=inputs[0], axis=-3)


@layer("average", inputs=MANY)
def average(ctx: Context, params: Any, inputs: list[Var]) -> Var:
    """The mean of the inputs."""
    return mb.mul(x=fold(lambda a, b: mb.add(x=a, y=b), inputs), y=F(1 / len(inputs)))


@layer("dot", inputs=2)
def dot(ctx: Context, params: Any, inputs: list[Var]) -> Var:
    """The dot product over the channels, or the cosine of the angle."""
    x, y = inputs
    product = _sum(mb.mul(x=x, y=y))
    if not params.cosineSimilarity:
        return product
    lengths = [mb.reduce_l2_norm(x=v, axes=[-3], keep_dims=True) for v in inputs]
    return mb.real_div(x=product, y=mb.mul(x=lengths[0], y=lengths[1]))


def _sum(x: Var) -> Var:
    return mb.reduce_sum(x=x, axes=[-3], keep_dims=True)


def _spread(ctx: Context, params: Any, shape: Any, name: str) -> Array:
    """A constant of shape [1], [C], [1, H, W] or [C, H, W], such that it broadcasts."""
    sizes = [int(n) for n in shape] or [1]
    if len(sizes) not in (1, 3):
        raise ctx.error(f"has a {name} of {len(sizes)} axes, expected 1 or 3; export it again")
    constant = ctx.weights(params, sizes, name)
    return constant if len(sizes) == 3 else constant.reshape(-1, 1, 1)


@layer("scale")
def scale(ctx: Context, params: Any, inputs: list[Var]) -> Var:
    """X times a constant, plus another one if wanted."""
    ctx.needs_rank(inputs[0], 3)
    x = mb.mul(x=inputs[0], y=_spread(ctx, params.scale, params.shapeScale, "scale"))
    return mb.add(x=x, y=_spread(ctx, params.bias, params.shapeBias, "bias")) if params.hasBias else x


@layer("bias")
def bias(ctx: Context, params: Any, inputs: list[Var]) -> Var:
    """X plus a constant."""
    ctx.needs_rank(inputs[0], 3)
    return mb.add(x=inputs[0], y=_spread(ctx, params.bias, params.shape, "bias"))


UNARY: tuple[Callable[[Var, Any], Var], ...] = (
    lambda x, p: mb.sqrt(x=x),
    lambda x, p: mb.rsqrt(x=x, epsilon=F(p.epsilon or 1e-6)),
    lambda x, p: mb.inverse(x=x, epsilon=F(p.epsilon or 1e-6)),
    lambda x, p: mb.pow(x=x, y=F(p.alpha)),
    lambda x, p: mb.exp(x=x),
    lambda x, p: mb.log(x=x, epsilon=F(p.epsilon)) if p.epsilon else mb.log(x=x),
    lambda x, p: mb.abs(x=x),
    lambda x, p: mb.maximum(x=x, y=F(p.alpha)),
)
"""By `type`: SQRT, RSQRT, INVERSE, POWER, EXP, LOG, ABS, THRESHOLD."""


@layer("unary")
def unary(ctx: Context, params: Any, inputs: list[Var]) -> Var:
    """A function of scale x + shift."""
    x, factor = inputs[0], params.scale or 1
    if factor != 1 or params.shift:
        x = mb.linear_activation(x=x, alpha=F(factor), beta=F(params.shift))
    return UNARY[params.type](x, params)


REDUCE = ("sum", "mean", "prod", "sum", "sum_square", "l1_norm", "l2_norm", "max", "min")
"""By `mode`: SUM, AVG, PROD, LOGSUM (a sum of logarithms), SUMSQUARE, L1, L2, MAX, MIN; then comes ARGMAX."""
LOGSUM, ARGMAX = 3, 9
AXES = ([-3, -2, -1], [-2, -1], [-3], [-2], [-1])
"""By `axis`: CHW, HW, C, H, W."""


@layer("reduce")
def reduce(ctx: Context, params: Any, inputs: list[Var]) -> Var:
    """A reduction over channel, height and width, or some of them, which stay as axes of 1."""
    x, axes = inputs[0], AXES[params.axis]
    if params.mode == ARGMAX and len(axes) > 1:
        raise ctx.limit("takes the place of a maximum over more than one axis; choose C, H or W")
    ctx.needs_rank(x, -axes[0])
    if params.mode == LOGSUM:
        x = mb.log(x=x, epsilon=F(params.epsilon or 1e-6))
    if params.mode == ARGMAX:
        return mb.reduce_argmax(x=x, axis=axes[0], keep_dims=True)
    return getattr(mb, f"reduce_{REDUCE[params.mode]}")(x=x, axes=axes, keep_dims=True)
