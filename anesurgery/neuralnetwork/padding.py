"""Padding of convolutions and poolings, from the messages of the specification to what MIL ops take."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from anesurgery.neuralnetwork.context import Context

SAME = ("same", "same_lower")
"""By `asymmetryMode`: what is over goes to the bottom and right, or to the top and left."""
SIDES = ("Front", "Back", "Top", "Bottom", "Left", "Right")
KINDS = ("custom", "valid", "same")
"""By `paddingType` of layers over three spatial axes."""


def pairs(values: Any, default: int, length: int = 2) -> list[int]:
    """A repeated field of one number for each spatial axis, which may be left out."""
    return [int(v) for v in values] or [default] * length


def borders(ctx: Context, amounts: Any) -> list[int]:
    """A `BorderAmounts` message as [top, bottom, left, right]; 0 where it is absent.

    Raises:
        LoadError: it has not two axes.
    """
    edges = list(amounts.borderAmounts)
    if len(edges) not in (0, 2):
        raise ctx.error(
            f"has borders of {len(edges)} axes, expected 2 (height, width); export it again"
        )
    found = [int(n) for e in edges for n in (e.startEdgeSize, e.endEdgeSize)]
    return found or [0, 0, 0, 0]


def by_side(params: Any) -> list[int]:
    """The custom padding of a layer over three spatial axes, begin and end of each."""
    return [int(getattr(params, f"customPadding{side}")) for side in SIDES]


def arguments(pads: Sequence[int]) -> dict[str, Any]:
    """The padding arguments of an op for [begin, end, ...]."""
    return {"pad_type": "custom", "pad": list(pads)} if any(pads) else {"pad_type": "valid"}


def spatial(ctx: Context, params: Any) -> dict[str, Any]:
    """The padding arguments of an op for a layer with "valid" or "same" padding over height and width."""
    if params.HasField("same"):
        return {"pad_type": SAME[params.same.asymmetryMode]}
    return arguments(borders(ctx, params.valid.paddingAmounts))


def volume(params: Any) -> dict[str, Any]:
    """The padding arguments of an op for a layer over depth, height and width."""
    kind = KINDS[params.paddingType]
    return arguments(by_side(params)) if kind == "custom" else {"pad_type": kind}
