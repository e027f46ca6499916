"""Write broadcasting minima and maxima as clips, thresholds, or the minimum and maximum of the first releases.

A minimum of a maximum, or a maximum of a minimum, of one blob and two numbers, the lower one below the
upper, becomes one `clip` where nobody else reads what is between. A maximum with a number alone becomes a ReLU
(with 0) or a threshold, a minimum a clip that starts at the most negative finite fp32 number. Any other two
sides become `max` or `min`. A constant of several numbers stays a blob; one with fewer axes than the other
side, or with a batch of 1 beside a larger one, is loaded anew with the batch of the other side.

Refuses when a number is infinite or the most negative one, or when the broadcasting is not one that the
definition of the format lists for `max` and `min`: of (B, C, H, W), the other side may be (B, C, H, W) or
(B, C, 1, 1), with as many axes if it is computed.

Why it helps: layers of the Broadcastable kind were reported off the ANE, the first layers, `max`, `min` and
`unary` among them, mostly on it (hollance/neural-engine, unsupported-layers; through Core ML, iOS 11 to 15).
`clip` is newer: its op in ML Programs ran there (M4, macOS 27.0.1), the layer was not measured. Exact for
finite numbers; -inf under a minimum alone becomes -3.4e38, which is -inf again in fp16.

Grade: bit for bit.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from anesurgery import authoring as an
from anesurgery.authoring import Refusal, Site

MOST_NEGATIVE = float(np.finfo(np.float32).min)


@dataclass(frozen=True)
class LegacyClip(an.two_sides.TwoSided):
    """Broadcasting minima and maxima become `clip`, a threshold, a ReLU, `min` or `max`."""

    name = "legacy_clip"
    tolerates_nonfinite = False
    """A side without a bound is clipped at the largest finite number."""
    plain: ClassVar[Mapping[str, str]] = {"maxBroadcastable": "max", "minBroadcastable": "min"}

    def by_constant(self, site: Site, sides: an.two_sides.Constant) -> Refusal | None:
        """By a number if the constant is one, else by a blob of the constant, with the axes that it needs."""
        if sides.number is not None:
            return _by_number(site, sides.x, sides.number)
        if (value := _with_batch(site, sides)) is None:
            return self.by_blobs(site, *site.inputs)
        constant = site.emit("loadConstantND", [], shape=value.shape, data=an.weights(value))
        site.emit(self.plain[site.node.kind], [sides.x, constant], site.outputs)
        return None


def _with_batch(site: Site, sides: an.two_sides.Constant) -> an.Array | None:
    """The constant with the axes and the batch of the other side; None if it has them, or it is no help."""
    shape, value = site.shape(sides.x), sides.value
    if None in shape or site.shape(site.outputs[0]) != shape:
        return None
    value = value.reshape((1,) * (len(shape) - value.ndim) + value.shape)
    value = np.broadcast_to(
        value,
        (*site.sizes(sides.x)[: -an.broadcast_forms.SPATIAL], *value.shape[-an.broadcast_forms.SPATIAL :]),
    )
    if value.shape == sides.value.shape or not an.broadcast_forms.same_result(shape, value.shape, "max"):
        return None
    return value


def _by_number(site: Site, x: str, number: float) -> Refusal | None:
    network, node = site.network, site.node
    if not MOST_NEGATIVE < number < math.inf:
        return Refusal(f"the number {number:g} bounds no finite numbers")
    inner = network.maker(x, *LegacyClip.plain)
    if inner is not None and (pair := _pair(network, inner, node)):
        blob, least, most = pair
        site.emit("clip", [blob], site.outputs, minVal=least, maxVal=most)
    elif any(_pair(network, node, reader) for reader in network.readers(site.outputs[0])):
        pass  # the reader becomes the clip of both
    elif node.kind == "minBroadcastable":
        site.emit("clip", [x], site.outputs, minVal=MOST_NEGATIVE, maxVal=number)
    elif number == 0:
        site.emit("activation", [x], site.outputs, ReLU={})
    else:
        site.emit("unary", [x], site.outputs, type="THRESHOLD", alpha=number)
    return None


def _pair(network: an.Network, inner: an.Node, outer: an.Node) -> tuple[str, float, float] | None:
    """The blob that two layers clip, and the bounds."""
    if {inner.kind, outer.kind} != LegacyClip.kinds or not network.only_reader(inner.outputs[0], outer):
        return None
    both = {n.kind: an.two_sides.two_sides(Site(network, n)) for n in (inner, outer)}
    bounds = {k: s.number for k, s in both.items() if isinstance(s, an.two_sides.Constant)}
    least, most = bounds.get("maxBroadcastable"), bounds.get("minBroadcastable")
    if least is None or most is None or not MOST_NEGATIVE < least < most < math.inf:
        return None
    sides = both[inner.kind]
    return (sides.x, least, most) if isinstance(sides, an.two_sides.Constant) else None


def example() -> Any:
    """A clip, a larger one of two blobs under a bound, a threshold, a ReLU."""
    layers = [
        an.make_constant("zero", 0),
        an.make_constant("six", 6),
        an.make_layer("maxBroadcastable", ["x", "zero"], ["positive"]),
        an.make_layer("minBroadcastable", ["positive", "six"], ["bounded"]),
        an.make_layer("maxBroadcastable", ["bounded", "z"], ["larger"]),
        an.make_layer("minBroadcastable", ["six", "larger"], ["a"]),
        an.make_layer("maxBroadcastable", ["x", "six"], ["b"]),
        an.make_layer("maxBroadcastable", ["x", "zero"], ["c"]),
    ]
    return an.make_network({"x": (1, 2, 4, 4), "z": (1, 2, 1, 1)}, layers, ["a", "b", "c"])
