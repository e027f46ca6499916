"""Padding of convolutions and poolings, from the messages of the specification to what MIL ops take."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from anesurgery.neuralnetwork.context import Context
from anesurgery.neuralnetwork.spec import DAMAGED

SAME = ("same", "same_lower")
"""By `asymmetryMode`: what is over goes to the bottom and right, or to the top and left."""
SIDES = ("Front", "Back", "Top", "Bottom", "Left", "Right")
KINDS = ("custom", "valid", "same")
"""By `paddingType` of layers over three spatial axes."""


def pairs(values: Any, default: int, length: int = 2) -> list[int]:
    """A repeated field of one number for each spatial axis, which may be left out."""
    return [int(v) for v in values] or [default] * length


def positive(ctx: Context, params: Any, field: str, default: int) -> list[int]:
    """Like `pairs`, for a field of numbers of at least 1.

    Raises:
        LoadError: one is less, or there is not one for each spatial axis.
    """
    sizes = pairs(getattr(params, field), default)
    if len(sizes) != 2 or min(sizes) < 1:
        raise ctx.error(f"has the {field} {sizes}, expected 2 numbers from 1 up; {DAMAGED}")
    return sizes


def borders(ctx: Context, amounts: Any) -> list[int]:
    """A `BorderAmounts` message as [top, bottom, left, right]; 0 where it is absent.

    Raises:
        LoadError: it has not two axes.
    """
    edges = list(amounts.borderAmounts)
    if len(edges) not in (0, 2):
        raise ctx.error(f"has borders of {len(edges)} axes, expected 2 (height, width); export it again")
    sizes = [int(n) for e in edges for n in (e.startEdgeSize, e.endEdgeSize)]
    return sizes or [0, 0, 0, 0]


def by_side(params: Any) -> list[int]:
    """The custom padding of a layer over three spatial axes, begin and end of each."""
    return [int(getattr(params, f"customPadding{side}")) for side in SIDES]


def arguments(pads: Sequence[int]) -> dict[str, Any]:
    """The padding arguments of an op for [begin, end, ...]."""
    return {"pad_type": "custom", "pad": list(pads)} if any(pads) else {"pad_type": "valid"}


def needs_type(ctx: Context, params: Any) -> None:
    """Refuse a convolution or pooling that does not say how it pads; Core ML does too.

    Raises:
        LoadError: it does not.
    """
    (kinds,) = params.DESCRIPTOR.oneofs
    if params.WhichOneof(kinds.name) is None:
        choices = ", ".join(field.name for field in kinds.fields)
        raise ctx.error(f"has no padding type, expected one of {choices}; {DAMAGED}")


def spatial(ctx: Context, params: Any) -> dict[str, Any]:
    """The padding arguments of an op for a layer with "valid" or "same" padding over height and width."""
    needs_type(ctx, params)
    if params.HasField("same"):
        return {"pad_type": SAME[params.same.asymmetryMode]}
    return arguments(borders(ctx, params.valid.paddingAmounts))


def volume(params: Any) -> dict[str, Any]:
    """The padding arguments of an op for a layer over depth, height and width."""
    kind = KINDS[params.paddingType]
    return arguments(by_side(params)) if kind == "custom" else {"pad_type": kind}
