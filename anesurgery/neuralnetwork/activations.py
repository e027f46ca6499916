"""Activations: those of the activation layer, and the later ones that are layers of their own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from anesurgery.mil import Array, Var, mb
from anesurgery.neuralnetwork.context import Context
from anesurgery.neuralnetwork.layers import layer

F = np.float32

SIMPLE: dict[str, Callable[[Any, Var], Var]] = {
    "linear": lambda p, x: linear(x, p.alpha, p.beta),
    "ReLU": lambda p, x: mb.relu(x=x),
    "leakyReLU": lambda p, x: mb.leaky_relu(x=x, alpha=F(p.alpha)),
    "tanh": lambda p, x: mb.tanh(x=x),
    "scaledTanh": lambda p, x: mb.scaled_tanh(x=x, alpha=F(p.alpha), beta=F(p.beta)),
    "sigmoid": lambda p, x: mb.sigmoid(x=x),
    "sigmoidHard": lambda p, x: mb.sigmoid_hard(x=x, alpha=F(p.alpha), beta=F(p.beta)),
    "ELU": lambda p, x: mb.elu(x=x, alpha=F(p.alpha)),
    "softsign": lambda p, x: mb.softsign(x=x),
    "softplus": lambda p, x: mb.softplus(x=x),
    "thresholdedReLU": lambda p, x: mb.thresholded_relu(x=x, alpha=F(p.alpha)),
}
"""Activations without weights: kind -> builder."""

GELU = {0: "EXACT", 1: "TANH_APPROXIMATION", 2: "SIGMOID_APPROXIMATION"}


def linear(x: Var, alpha: float, beta: float) -> Var:
    """Alpha x + beta."""
    made: Var = mb.linear_activation(x=x, alpha=F(alpha), beta=F(beta))
    return made


def activate(ctx: Context, params: Any, x: Var) -> Var:
    """The activation that an `ActivationParams` message describes.

    Raises:
        LoadError: it describes none, or its weights do not fit the channels.
    """
    kind = params.WhichOneof("NonlinearityType")
    if kind in SIMPLE:
        return SIMPLE[kind](getattr(params, kind), x)
    if kind == "PReLU":
        alpha = _channels(ctx, params.PReLU.alpha, x, "alpha")
        return _prelu(ctx, x, alpha)
    if kind == "parametricSoftplus":
        soft = params.parametricSoftplus
        alpha, beta = (
            _channels(ctx, w, x, n) for w, n in ((soft.alpha, "alpha"), (soft.beta, "beta"))
        )
        inner = mb.softplus(x=mb.mul(x=x, y=beta.reshape(-1, 1, 1)))
        made: Var = mb.mul(x=inner, y=alpha.reshape(-1, 1, 1))
        return made
    raise ctx.error(
        "has no activation that is known; upgrade coremltools, or export the model again"
    )


def _channels(ctx: Context, params: Any, x: Var, name: str) -> Array:
    """A parameter for each channel (axis -3), of which the file may hold but one."""
    ctx.needs_rank(x, 3)
    if len(params.floatValue) == 1 or len(params.float16Value) == 2:
        count = 1
    else:
        (count,) = ctx.shape(x, [-3])
    found = ctx.weights(params, [count], name)
    return found if count > 1 else np.repeat(found, ctx.shape(x, [-3])[0])


def _prelu(ctx: Context, x: Var, alpha: Array) -> Var:
    """MIL's op takes rank 3 to 5 with the channel on axis 1."""
    image, back = ctx.images(x)
    return back(mb.prelu(x=image, alpha=alpha))


@layer("activation")
def activation(ctx: Context, params: Any, inputs: list[Var]) -> Var:
    """Any of the activations of the activation layer."""
    return activate(ctx, params, inputs[0])


@layer("clip")
def clip(ctx: Context, params: Any, inputs: list[Var]) -> Var:
    """min(max(x, minVal), maxVal)."""
    made: Var = mb.clip(x=inputs[0], alpha=F(params.minVal), beta=F(params.maxVal))
    return made


@layer("clampedReLU")
def clamped_relu(ctx: Context, params: Any, inputs: list[Var]) -> Var:
    """min(beta, x), with x times alpha where it is negative."""
    made: Var = mb.clamped_relu(x=inputs[0], alpha=F(params.alpha), beta=F(params.beta))
    return made


@layer("gelu")
def gelu(ctx: Context, params: Any, inputs: list[Var]) -> Var:
    """GELU, exact or in one of two approximations."""
    made: Var = mb.gelu(x=inputs[0], mode=GELU[params.mode])
    return made
