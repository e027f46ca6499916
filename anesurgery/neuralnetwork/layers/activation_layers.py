"""Activations: those of the activation layer, and the later ones that are layers of their own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from anesurgery.mil import Array, Var, mb
from anesurgery.neuralnetwork.context import Context, layer

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
    return mb.linear_activation(x=x, alpha=F(alpha), beta=F(beta))


def activate(ctx: Context, params: Any, x: Var) -> Var:
    """The activation that an `ActivationParams` message describes.

    Raises:
        LoadError: it describes none, or its weights do not fit the channels.
    """
    kind = params.WhichOneof("NonlinearityType")
    if kind in SIMPLE:
        return SIMPLE[kind](getattr(params, kind), x)
    if kind == "PReLU":
        image, back = _with_channels(ctx, x)
        return back(mb.prelu(x=image, alpha=_each(ctx, params.PReLU.alpha, image, "alpha")))
    if kind == "parametricSoftplus":
        image, back = _with_channels(ctx, x)
        soft = params.parametricSoftplus
        alpha, beta = (_each(ctx, w, image, n) for w, n in ((soft.alpha, "alpha"), (soft.beta, "beta")))
        return back(mb.softplus_parametric(x=image, alpha=alpha, beta=beta))
    raise ctx.error("has no activation that is known; upgrade coremltools, or export the model again")


def _with_channels(ctx: Context, x: Var) -> tuple[Var, Callable[[Var], Var]]:
    """A value as (batch, channel, height, width), and the way back; of two axes, the last is the channel.

    The specification asks for three axes, but converters write such layers after matrix products.
    """
    if x.rank > 2:
        return ctx.images(x)
    axes = [2, 3] if x.rank == 2 else [0, 2, 3]
    return mb.expand_dims(x=x, axes=axes), lambda y: mb.squeeze(x=y, axes=axes)


def _each(ctx: Context, params: Any, image: Var, name: str) -> Array:
    """A parameter for each channel; the file may hold a single one for all."""
    (channels,) = ctx.shape(image, [1])
    bits = 8 * len(params.rawValue)
    single = (
        len(params.floatValue) == 1
        or len(params.float16Value) == 2
        or 0 < bits < channels * params.quantization.numberOfBits
    )
    return np.broadcast_to(ctx.weights(params, [1 if single else channels], name), channels).copy()


layer("activation")(lambda ctx, params, inputs: activate(ctx, params, inputs[0]))
layer("clip")(lambda ctx, params, inputs: mb.clip(x=inputs[0], alpha=F(params.minVal), beta=F(params.maxVal)))
layer("clampedReLU")(
    lambda ctx, params, inputs: mb.clamped_relu(x=inputs[0], alpha=F(params.alpha), beta=F(params.beta))
)
layer("gelu")(lambda ctx, params, inputs: mb.gelu(x=inputs[0], mode=GELU[params.mode]))
