"""Write broadcasting differences as sums with the negated second side.

A computed second side is negated by a linear activation and added; where it is the larger one, it comes first.
A constant second side is negated in the file and added by `bias`, or by a linear activation where it is one
number. From a constant first side, the other is negated first.

Refuses when the broadcasting is not one that the definition of the format lists for `add` and `bias`: of
(B, C, H, W), the other side may be (B, C, H, W), (B, C, 1, 1), (B, 1, H, W) or (B, 1, 1, 1), with as many axes;
a constant may have the sizes [1], [C], [1, H, W] or [C, H, W], and the result must be as large as the other
side. Refuses too when a shape that matters is dynamic.

Why it helps: layers of the Broadcastable kind were reported off the ANE, `add` and linear activations on it;
the first releases have no layer that subtracts, and the same report names this way around it
(hollance/neural-engine, unsupported-layers; through Core ML, iOS 11 to 15). Not measured on later systems.
Exact: x - y and x + (-y) are the same number in floating point.

Grade: bit for bit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from anesurgery import authoring as an
from anesurgery.authoring import Refusal, Site


@dataclass(frozen=True)
class LegacySubtract(an.two_sides.TwoSided):
    """Broadcasting differences become `add`, `bias` or a linear activation, one side negated."""

    name = "legacy_subtract"
    plain: ClassVar[Mapping[str, str]] = {"subtractBroadcastable": "add"}

    def turned(self, site: Site, y: str, outputs: Sequence[str] | None = None) -> str:
        """The negated blob."""
        return site.linear(y, -1.0, 0.0, outputs)

    def turned_numbers(self, value: an.Array) -> an.Array | Refusal:
        """The negated numbers."""
        return -value

    def by_constant(self, site: Site, sides: an.two_sides.Constant) -> Refusal | None:
        """One number less a blob is one layer, which negates and adds."""
        if not sides.first or sides.number is None:
            return super().by_constant(site, sides)
        site.linear(sides.x, -1.0, sides.number, site.outputs)
        return None


def example() -> Any:
    """A difference of two images, centred by channel and taken from one."""
    layers = [
        an.make_constant("mean", [[[2]], [[3]]]),
        an.make_constant("one", 1),
        an.make_layer("subtractBroadcastable", ["x", "z"], ["difference"]),
        an.make_layer("subtractBroadcastable", ["difference", "mean"], ["centred"]),
        an.make_layer("subtractBroadcastable", ["one", "centred"], ["y"]),
    ]
    return an.make_network({"x": (1, 2, 4, 4), "z": (1, 2, 4, 4)}, layers, ["y"])
