"""Which broadcasting the layers of the first releases can do, as the definition of the format lists it."""

from __future__ import annotations

from collections.abc import Sequence

from anesurgery.errors import Refusal
from anesurgery.mil import Array

Sizes = Sequence[int | None]
"""A shape; None for a dynamic size."""

SPATIAL = 3
"""Axes that a layer broadcasts by itself: channel, height, width. Those in front count as batch."""

BY_CHANNEL = frozenset({"max", "min"})
"""The layers of which the format names no other second shape than (B, C, H, W) and (B, C, 1, 1)."""


def same_result(first: Sizes, second: Sizes, kind: str = "add") -> bool:
    """Does a plain layer give the first shape, the second broadcast to it as numpy does?

    The comments of the format name (B, C, H, W), (B, C, 1, 1), (B, 1, H, W), (B, 1, 1, 1) as the second shape
    of `add`, `multiply` and `average`, and the first two of them as that of `max` and `min`.
    Equal shapes of any rank pass; whether dynamic sizes are the same is for the caller to know.
    """
    if tuple(first) == tuple(second):
        return True
    if len(first) != len(second) or None in (*first, *second):
        return False
    if len(first) < SPATIAL or first[:-SPATIAL] != second[:-SPATIAL]:
        return False
    channel, height, width = first[-SPATIAL:]
    others = {(channel, 1, 1), (1, 1, 1), (1, height, width)}
    if kind in BY_CHANNEL:
        others = {(channel, 1, 1)}
    return tuple(second[-SPATIAL:]) in others


def constant_form(shape: Sizes, value: Array, result: Sizes) -> list[int] | Refusal:
    """The sizes that `bias` and `scale` give a constant: [C], [1, H, W] or [C, H, W]; [] for a single number.

    Args:
        shape: of the other side.
        value: the constant, in the shape that numpy broadcasts.
        result: shape of the result.
    """
    if tuple(result) != tuple(shape):
        return Refusal(f"the constant of shape {value.shape} makes the result larger than its input")
    if value.size and (value == value.flat[0]).all():
        return []
    if len(shape) < SPATIAL:
        return Refusal(f"scale and bias take 3 axes or more, but the blob has {len(shape)}")
    if any(d != 1 for d in value.shape[:-SPATIAL]):
        return Refusal(f"the constant of shape {value.shape} varies along the batch")
    last = (1,) * (SPATIAL - value.ndim) + tuple(value.shape[-SPATIAL:])
    channel, height, width = shape[-SPATIAL:]
    if last[1:] == (1, 1):
        return [last[0]]
    if last[1:] == (height, width) and last[0] in (1, channel):
        return list(last)
    return Refusal(f"a constant of shape {value.shape} is not one of [1], [C], [1, H, W], [C, H, W]")
