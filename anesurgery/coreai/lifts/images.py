"""Lift images at the interface: bytes of pixels in Core AI, arrays [1, channels, height, width] in MIL."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from anesurgery.coreai.lifts.graphs import composite
from anesurgery.coreai.lifts.table import (
    IMAGE,
    Described,
    LiftedOp,
    Unliftable,
    Value,
    as_var,
    cast,
    lift,
    static_sizes,
)
from anesurgery.coreai.table import FROM_IMAGE, TO_IMAGE
from anesurgery.mil import Var, mb, producer

CHANNELS = {"32BGRA": "BGRA", "32ARGB": "ARGB", "24RGB": "RGB"}
"""Format -> its channels in the order of the bytes, as the text of `coreai.image_to_tensor` states them."""
OPAQUE = 255.0
"""What stands in the channel A, which MIL's images have not."""
STEPS = ("pad", "gather", "transpose", "squeeze", "cast")
"""The ops that `_pixels` writes."""


def _channels(kind: Described) -> str:
    found = IMAGE.fullmatch(kind["type"])
    if found is None or found[1] not in CHANNELS:
        raise Unliftable(f"its pixels are {kind['type']}; of images {', '.join(CHANNELS)} are known")
    return CHANNELS[found[1]]


def _pixels(x: Value, channels: str, colors: str) -> Var:
    """Return the pixels [height, width, channels] of an image of MIL as int32; `colors` are its channels."""
    order = [3 if channel == "A" else colors.index(channel) for channel in channels]
    x = mb.pad(x=x, pad=[0, 0, 0, 1, 0, 0, 0, 0], mode="constant", constant_val=np.float32(OPAQUE))
    x = mb.transpose(x=mb.gather(x=x, indices=order, axis=1), perm=[0, 2, 3, 1])
    return mb.cast(x=mb.squeeze(x=x, axes=[0]), dtype="int32")


def _upstream_of(value: Value, *op_types: str) -> Var | None:
    """Return the operand of a chain of ops of these types, the last one first; None for other ops."""
    for op_type in op_types:
        op = producer(value, op_type) if isinstance(value, Var) else None
        if op is None:
            return None
        value = op.x
    return as_var(value)


@lift("image_to_tensor")
def image_to_tensor(o: LiftedOp) -> Value:
    """Build the bytes of an image."""
    return _pixels(o[0], _channels(o.scope.types[o.op["operands"][0]]), o.scope.colors(as_var(o[0])))


@lift("tensor_to_image")
def tensor_to_image(o: LiftedOp) -> Value:
    """Build an image from bytes; an image that `to_coreai` rounded to bytes is restored."""
    channels = _channels(o.result)
    if (image := _upstream_of(o[0], *reversed(STEPS), "clip", "round")) is not None:
        return image
    if len(static_sizes(o[0])) != len("HWC"):
        raise Unliftable(f"its pixels lie in planes, and MIL's images have the channels {channels}")
    x = mb.gather(x=cast(o[0], "fp32"), indices=[channels.index(c) for c in "RGB"], axis=2)
    return mb.expand_dims(x=mb.transpose(x=x, perm=[2, 0, 1]), axes=[0])


@composite(FROM_IMAGE)
def from_image(named: Mapping[str, Value], attributes: Mapping[str, Any]) -> Value:
    """Return the image itself as the numbers of its pixels."""
    if (image := _upstream_of(named["x"], *reversed(STEPS))) is None:
        raise Unliftable("its pixels are computed")
    return image


@composite(TO_IMAGE)
def to_image(named: Mapping[str, Value], attributes: Mapping[str, Any]) -> Value:
    """Round numbers to the bytes of an image."""
    x = cast(named["x"], "fp32")
    return _pixels(mb.clip(x=mb.round(x=x), alpha=0.0, beta=OPAQUE), "BGRA", attributes["colors"])
