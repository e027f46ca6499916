"""Put a batch normalization into the weights and bias of the convolution or inner product before it.

Before::

    network(%x: 1x2x1x1) {
      %a: 1x1x1x1 = innerProduct(%x, inputChannels=2, outputChannels=1, weights=[3, 4])
      %y: 1x1x1x1 = batchnorm(%a, channels=1, epsilon=0.25, gamma=[4], beta=[1], mean=[5], variance=[3.75])
      return %y
    }

After::

    network(%x: 1x2x1x1) {
      %y: 1x1x1x1 = innerProduct(%x, inputChannels=2, outputChannels=1, hasBias=True, weights=[6, 8], bias=[-9])
      return %y
    }

Each channel of the weights is multiplied by gamma / sqrt(variance + epsilon), and so is the bias less the mean,
in fp64; the results are stored as fp32. Convolutions, grouped ones, deconvolutions and inner products; one
without a bias gets one.

Refuses when the layer before is another one, or somebody else reads what it makes; when its weights are
computed, quantized, trainable or of fp16, which new values would be rounded to; when the mean and variance are
computed; when a variance plus epsilon is not positive; when the inner product has its channels on
the last axis; when the new weights are too large for fp32. A normalization that stays is legal on the engine.

Why it helps: one layer in place of two; the gain was not measured. The sums are rounded otherwise, so that the
numbers are equal within 1e-5 of the largest one (fp32), not bit for bit.

Grade: checked: folded weights are rounded.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from anesurgery import authoring as an
from anesurgery.authoring import LayerRewrite, Refusal, Site

EPSILON = 1e-5
"""What stands for an epsilon of 0, by the definition of the format."""
CHANNELS = 3
"""Axis of the channels, from the end."""


@dataclass(frozen=True)
class FoldBatchnorm(LayerRewrite):
    """Batch normalizations become part of the weights before them."""

    name = "fold_batchnorm"
    # it may fold into their convolutions
    follows = ("split_upsampling", "undilate_convolution")
    tolerates_nonfinite = False
    """A factor of 0 meets an infinity in another place."""
    kinds = frozenset({"batchnorm"})
    tolerance = an.REASSOCIATED

    def rewrite(self, site: Site) -> Refusal | None:
        """New weights and bias in a copy of the layer before."""
        if site.params.computeMeanVar:
            return Refusal("its mean and variance are computed")
        before = site.network.maker(site.inputs[0])
        old = _weights(site, before)
        if before is None or isinstance(old, Refusal):
            return old if isinstance(old, Refusal) else None
        normal = _by_channel(site)
        if isinstance(normal, Refusal):
            return normal
        scale, offset = normal
        new = old.times(scale).plus(offset)
        if new.largest > float(np.finfo(np.float32).max):
            return Refusal(f"the new weights would be as large as {new.largest:.3g}, beyond fp32")
        message = site.copy(before, before.inputs, site.outputs)
        new.write(getattr(message, before.kind))
        return None


def _weights(site: Site, before: an.Node | None) -> an.affine.Affine | Refusal:
    """Those of the layer before, if they may change."""
    if before is None or before.kind not in an.affine.KINDS:
        source = "an input" if before is None else f"a layer {before.kind}"
        return Refusal(f"it comes after {source}, no convolution or inner product")
    if an.chains.sole_maker(site.network, site.node) is None:
        return Refusal(f"what the {before.kind} makes is read elsewhere too")
    if before.kind == "innerProduct" and len(site.shape(site.inputs[0])) <= CHANNELS:
        return Refusal("the channels of the inner product are the last axis, its own are axis -3")
    old = an.affine.read(before)
    if isinstance(old, an.affine.Affine) and old.dtype != an.affine.STORED["floatValue"]:
        return Refusal(f"the weights of the {before.kind} are of fp16; new ones would be rounded")
    return old


def _by_channel(site: Site) -> tuple[an.Array, an.Array] | Refusal:
    """What the channels are multiplied by, and what is added, in fp64."""
    params = site.params
    gamma, beta, mean, variance = (
        an.spec.weights(getattr(params, n), [int(params.channels)], n).astype(np.float64)
        for n in ("gamma", "beta", "mean", "variance")
    )
    below = variance + float(params.epsilon or np.float32(EPSILON))
    if not (below > 0).all():
        return Refusal(f"its variance plus epsilon is {below.min():g} somewhere, not positive")
    scale = gamma / np.sqrt(below)
    return scale, beta - mean * scale


def example() -> Any:
    """An inner product of two channels and the normalization of what it gives."""
    numbers = {"gamma": 4, "beta": 1, "mean": 5, "variance": 3.75}
    each: dict[str, Any] = {name: an.weights(np.array([value])) for name, value in numbers.items()}
    product: dict[str, Any] = {"inputChannels": 2, "outputChannels": 1, "weights": an.weights(np.array([3, 4]))}
    layers = [
        an.make_layer("innerProduct", ["x"], ["a"], **product),
        an.make_layer("batchnorm", ["a"], ["y"], channels=1, epsilon=0.25, **each),
    ]
    return an.make_network({"x": (1, 2, 1, 1)}, layers, ["y"])
