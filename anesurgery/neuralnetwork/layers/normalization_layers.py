"""Normalizations: by stored or computed statistics, over channels, samples or chosen axes."""

from __future__ import annotations

from typing import Any

import numpy as np

from anesurgery.mil import Var, is_symbolic, mb
from anesurgery.neuralnetwork.context import Context, layer
from anesurgery.neuralnetwork.spec import DAMAGED

F = np.float32


@layer("batchnorm")
def batchnorm(ctx: Context, params: Any, inputs: list[Var]) -> Var:
    """Normalize each channel (axis -3) by a mean and variance: stored, of each sample, or of the batch."""
    ctx.needs_rank(inputs[0], 3)
    x, back = ctx.images(inputs[0])
    if not is_symbolic(x.shape[1]) and x.shape[1] != params.channels:
        raise ctx.error(f"normalizes {params.channels} channels, but its input has {x.shape[1]}; {DAMAGED}")
    names = ("gamma", "beta") if params.computeMeanVar else ("gamma", "beta", "mean", "variance")
    stored = {n: ctx.weights(getattr(params, n), [params.channels], n) for n in names}
    epsilon = F(params.epsilon or 1e-5)
    if not params.computeMeanVar:
        return back(mb.batch_norm(x=x, epsilon=epsilon, **stored))
    if params.instanceNormalization:
        return back(mb.instance_norm(x=x, epsilon=epsilon, **stored))
    gamma, beta = (stored[n].reshape(1, -1, 1, 1) for n in names)
    return back(mb.add(x=mb.mul(x=_standard(x, [0, 2, 3], epsilon), y=gamma), y=beta))


def _standard(x: Var, axes: list[int], epsilon: Any) -> Var:
    """Zero mean and unit variance over some axes."""
    centered = mb.sub(x=x, y=mb.reduce_mean(x=x, axes=axes, keep_dims=True))
    variance = mb.reduce_mean(x=mb.square(x=centered), axes=axes, keep_dims=True)
    return mb.mul(x=centered, y=mb.rsqrt(x=variance, epsilon=epsilon))


@layer("mvn")
def mvn(ctx: Context, params: Any, inputs: list[Var]) -> Var:
    """Zero mean, and unit variance if wanted, of each channel or of all channels together."""
    x = inputs[0]
    ctx.needs_rank(x, 3)
    axes = [-3, -2, -1] if params.acrossChannels else [-2, -1]
    if params.normalizeVariance:
        return mb.layer_norm(x=x, axes=axes, epsilon=F(params.epsilon or 1e-6))
    return mb.sub(x=x, y=mb.reduce_mean(x=x, axes=axes, keep_dims=True))


@layer("l2normalize")
def l2normalize(ctx: Context, params: Any, inputs: list[Var]) -> Var:
    """X over the root of its sum of squares over the last three axes."""
    ctx.needs_rank(inputs[0], 3)
    return mb.l2_norm(x=inputs[0], epsilon=F(params.epsilon or 1e-6))


@layer("lrn")
def lrn(ctx: Context, params: Any, inputs: list[Var]) -> Var:
    """X over a power of the sum of squares of neighbouring channels."""
    ctx.needs_rank(inputs[0], 3)
    return mb.local_response_norm(
        x=inputs[0], size=int(params.localSize), alpha=F(params.alpha), beta=F(params.beta), k=F(params.k or 1)
    )


@layer("layerNormalization")
def layer_normalization(ctx: Context, params: Any, inputs: list[Var]) -> Var:
    """Zero mean and unit variance over the last axes, times gamma plus beta."""
    shape = [int(n) for n in params.normalizedShape]
    gamma, beta = (ctx.weights(getattr(params, n), shape, n) for n in ("gamma", "beta"))
    axes = list(range(-len(shape), 0))
    return mb.layer_norm(x=inputs[0], axes=axes, gamma=gamma, beta=beta, epsilon=F(params.eps))
