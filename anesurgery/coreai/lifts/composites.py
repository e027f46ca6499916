"""Composites: graphs that say by their name what they mean, and that MIL has an op for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from anesurgery.coreai.lifts.table import Value, as_var, kind_of, like, numbers_of, shape_of
from anesurgery.mil import mb

Composite = Callable[[Mapping[str, Value], Mapping[str, Any]], "Value | None"]
COMPOSITES: dict[str, Composite] = {}
"""Name -> what makes it in MIL of its operands by name and its attributes; None where it is not that op."""


def composite(name: str) -> Callable[[Composite], Composite]:
    """Enter a function into the table."""

    def entered(function: Composite) -> Composite:
        COMPOSITES[name] = function
        return function

    return entered


def _parameters(x: Value, **given: Value | None) -> dict[str, Value] | None:
    """Parameters that MIL takes as constants of the type of x; None where one is none."""
    found = {name: numbers_of(value) for name, value in given.items() if value is not None}
    if any(held is None or held.dtype != kind_of(x) for held in found.values()):
        return None
    return {name: held for name, held in found.items() if held is not None}


@composite("scaled_dot_product_attention")
def attention(named: Mapping[str, Value], attributes: Mapping[str, Any]) -> Value | None:
    """Attention without a causal rule, a window, or heads that several queries share."""
    plain = {"is_causal": False, "window_size": 0, "enable_gqa": False}
    if any(attributes.get(k, v) != v for k, v in plain.items()) or attributes.get("scale") is not None:
        return None
    q, k, v = (as_var(named[n]) for n in ("query", "key", "value"))
    if "scale" in named or len(shape_of(q)) < 3 or shape_of(q)[:-2] != shape_of(k)[:-2]:
        return None
    mask = {"attn_mask": named["attn_mask"]} if "attn_mask" in named else {}
    return mb.scaled_dot_product_attention(query=q, key=k, value=v, **mask)


@composite("layer_norm")
def layer_norm(named: Mapping[str, Value], attributes: Mapping[str, Any]) -> Value | None:
    """Over axes, with a scale and a shift."""
    x, axes = named["input"], [int(a) for a in attributes["axes"]]
    given = _parameters(x, gamma=named.get("gamma"), beta=named.get("beta"))
    if given is None or any(list(np.shape(p)) != [shape_of(x)[a] for a in axes] for p in given.values()):
        return None
    return mb.layer_norm(x=x, axes=axes, epsilon=like(x, attributes["eps"]), **given)


@composite("batch_norm")
def batch_norm(named: Mapping[str, Value], attributes: Mapping[str, Any]) -> Value | None:
    """With means and variances that are known."""
    x = named["input"]
    given = _parameters(x, **{k: named.get(k) for k in ("gamma", "beta", "mean", "variance")})
    if given is None or not 3 <= len(shape_of(x)) <= 5:
        return None
    return mb.batch_norm(x=x, epsilon=like(x, attributes["eps"]), **given)


@composite("instance_norm")
def instance_norm(named: Mapping[str, Value], attributes: Mapping[str, Any]) -> Value | None:
    """Over the spatial axes of each channel."""
    x = named["input"]
    given = _parameters(x, gamma=named.get("gamma"), beta=named.get("beta"))
    if given is None or len(shape_of(x)) not in (3, 4):
        return None
    return mb.instance_norm(x=x, epsilon=like(x, attributes["eps"]), **given)


@composite("pixel_shuffle")
def pixel_shuffle(named: Mapping[str, Value], attributes: Mapping[str, Any]) -> Value | None:
    """Channels become pixels."""
    if len(shape_of(named["input"])) != 4:
        return None
    return mb.pixel_shuffle(x=named["input"], upscale_factor=int(attributes["upscale_factor"]))


@composite("hard_sigmoid")
def hard_sigmoid(named: Mapping[str, Value], attributes: Mapping[str, Any]) -> Value | None:
    """X / 6 + 1/2, between 0 and 1."""
    x = named["input"]
    return mb.sigmoid_hard(x=x, alpha=like(x, 1 / 6), beta=like(x, 0.5))


def _average(named: Mapping[str, Value], attributes: Mapping[str, Any]) -> Value | None:
    """The mean of each window, of which the padding may be left out."""
    names = ("kernel_size", "stride", "padding", "ceil_mode", "count_include_pad")
    held = [numbers_of(named[n]) for n in names]
    override = numbers_of(named["divisor_override"]) if "divisor_override" in named else None
    if any(h is None for h in held) or (override is not None and override.size and override.reshape(-1)[0] > 0):
        return None
    kernel, strides, padding, ceil, counted = ([int(n) for n in np.ravel(h)] for h in held if h is not None)
    how: dict[str, Any] = {"kernel_sizes": kernel, "strides": strides}
    how |= {"exclude_padding_from_average": not counted[0]} | ({"ceil_mode": True} if ceil[0] else {})
    sides = [n for n in padding for _ in range(2)]
    form = {"pad_type": "custom", "pad": sides} if any(sides) else {"pad_type": "valid"}
    return mb.avg_pool(x=named["input"], **how, **form)


COMPOSITES |= {"avg_pool_2d": _average, "avg_pool_3d": _average}
