"""Which layers of the first releases do what a row of moving layers does.

All of them keep the number of axes. Core ML's own check wants five axes for `reshape` and `permute`, four or
more for `convolution`, three or more for `flatten` and `reorganizeData`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from anesurgery.errors import NO_MATCH, Refusal
from anesurgery.mil import Array
from anesurgery.network_editing.channels import CHANNELS, picking
from anesurgery.network_editing.layer_pass import Site
from anesurgery.network_editing.movement import PERMUTED, Movement, channel_last, last_axes, places

T = TypeVar("T")

Step = tuple[str, dict[str, Any]]
"""A layer type and its fields."""
Layers = list[Step] | Refusal
"""Layers in a row, or why they cannot be written; of one form `NO_MATCH` where it is not about a movement."""

BLOCKS = (2, 3, 4, 8)
"""Block sizes of `reorganizeData` that a pass writes: the shuffle factors of the engine in
sbryngelson/ane-guide (M1, M2, M5 measured without Core ML; M3, M4 read from the compiler). Nobody measured the
layer."""
SHUFFLES = 5
"""The specification version that brought the order PIXEL_SHUFFLE (iOS 14, macOS 11)."""
IMAGE, FIVE = 4, 5
"""Axes that `convolution` takes at least, and that `reshape` and `permute` take, in Core ML's own check."""


@dataclass(frozen=True)
class Limits:
    """What may be written.

    Attributes:
        version: of the specification.
        channels: the most that a matrix may mix.
        blocks: sizes of blocks of pixels.
    """

    version: int
    channels: int = CHANNELS
    blocks: Sequence[int] = BLOCKS


def first_layers(move: Movement, limits: Limits) -> Layers:
    """The layers that do what a movement does, in a row; none where it does nothing.

    Refuses what they cannot express, with what was found.
    """
    if move.is_identity:
        return []
    before, after = len(move.source), len(move.shape)
    if before != after:
        return Refusal(
            f"it makes {after} axes of {before} ({_arrow(move)}); the layers of the first releases keep their "
            "number"
        )
    refused: list[Refusal] = []
    for least, most, form in FORMS:
        if least <= after <= most:
            layers = form(move, limits)
            if not isinstance(layers, Refusal):
                return layers
            if layers is not NO_MATCH:
                refused.append(layers)
    return refused[0] if refused else Refusal(_unlike(move))


def longest(row: Sequence[T], write: Callable[[Sequence[T]], Layers]) -> tuple[Layers, int]:
    """The longest beginning of a row that can be written otherwise.

    Args:
        row: one item or more.
        write: the layers that stand for a part of it, or why there are none.

    Returns:
        These layers, and the length of the beginning; or the reason for the whole row, and 1.
    """
    reasons: list[Refusal] = []
    for end in range(len(row), 0, -1):
        layers = write(row[:end])
        if not isinstance(layers, Refusal):
            return layers, end
        reasons.append(layers)
    return reasons[0], 1


def emit(site: Site, source: str, steps: Sequence[Step], outputs: Sequence[str]) -> None:
    """Put the layers there, from one blob to the outputs."""
    if not steps:
        site.forward(source)
    for i, (kind, fields) in enumerate(steps):
        source = site.emit(kind, [source], outputs if i == len(steps) - 1 else None, **fields)


def _arrow(move: Movement) -> str:
    return " to ".join("x".join(map(str, shape)) for shape in (move.source, move.shape))


def _unlike(move: Movement) -> str:
    if len(move.shape) < FIVE:
        return (
            f"{_arrow(move)} moves neither whole channels nor blocks of pixels; of {len(move.shape)} axes Core "
            f"ML's own check takes no reshape or permute, only of {FIVE}"
        )
    return f"{_arrow(move)} is neither a reshape that keeps the batch, nor a permutation around it"


# -- one layer -----------------------------------------------------------------------------------------


def _flattened(move: Movement, limits: Limits) -> Layers:
    """`flatten`: (..., C, H, W) to (..., C * H * W, 1, 1)."""
    lead, last = move.source[:-3], move.source[-3:]
    if move.shape != (*lead, math.prod(last), 1, 1):
        return NO_MATCH
    if move.keeps_order:
        return [("flatten", {})]
    by_pixel = last_axes(places(move.source), (-2, -1, -3)).reshape(-1)
    if (by_pixel == move.places.reshape(-1)).all():
        return [("flatten", {"mode": "CHANNEL_LAST"})]
    return NO_MATCH


def _target(move: Movement) -> list[int] | None:
    """What a `reshape` states: (C, H, W), or the sequence too where the batch is 1."""
    sequence, batch = move.source[:2]
    if move.shape[1] != batch or (move.shape[0] != sequence and batch != 1):
        return None
    return list(move.shape[2:] if move.shape[0] == sequence else (move.shape[0], *move.shape[2:]))


def _reshaped(move: Movement, limits: Limits) -> Layers:
    """`reshape` that moves nothing."""
    target = _target(move)
    return [("reshape", {"targetShape": target})] if target and move.keeps_order else NO_MATCH


def _reshaped_by_pixel(move: Movement, limits: Limits) -> Layers:
    """`reshape` in the order CHANNEL_LAST."""
    target = _target(move)
    if not target:
        return NO_MATCH
    by_pixel = channel_last(places(move.source), target).reshape(move.shape)
    same = bool((by_pixel == move.places).all())
    return [("reshape", {"targetShape": target, "mode": "CHANNEL_LAST"})] if same else NO_MATCH


def _permuted(move: Movement, limits: Limits) -> Layers:
    """`permute`: the axes in another order, the batch at its place."""
    all_places = places(move.source)
    for order in itertools.permutations(range(4)):
        axes = [PERMUTED[a] for a in order]
        permuted = np.transpose(all_places, [axes[0], 1, *axes[1:]])
        if permuted.shape == move.shape and (permuted == move.places).all():
            return [("permute", {"axis": list(order)})]
    return NO_MATCH


# -- channels and pixels -------------------------------------------------------------------------------


def _picks(source: Array, result: Array) -> list[int] | None:
    """Which channels of (N, C, H, W) make another array of as many pixels, if whole ones do."""
    where = {int(place): i for i, place in enumerate(source[0, :, 0, 0])}
    picks = [where.get(int(place)) for place in result[0, :, 0, 0]]
    channels = [p for p in picks if p is not None]
    same = len(channels) == len(picks) and np.array_equal(source[:, channels], result)
    return channels if same else None


def _images(x: Array) -> Array:
    """(..., C, H, W) as (N, C, H, W)."""
    return x.reshape(-1, *x.shape[-3:])


def _mixed(picks: Sequence[int], limits: Limits) -> Layers:
    count = len(picks)
    if count > limits.channels:
        return Refusal(
            f"it moves {count} channels, more than {limits.channels}; raise `channels` to spend {count} x "
            f"{count} products on each pixel"
        )
    return [("convolution", picking(picks, count))]


def _shuffled(move: Movement, limits: Limits) -> Layers:
    """`convolution`: whole channels in another order."""
    if move.shape != move.source:
        return NO_MATCH
    picks = _picks(_images(places(move.source)), _images(move.places))
    return NO_MATCH if picks is None else _mixed(picks, limits)


def _gathered(move: Movement, block: int) -> list[int] | None:
    """The order of the channels after SPACE_TO_DEPTH that makes a movement of it, if one does."""
    high, wide = move.source[-2:]
    if high % block or wide % block:
        return None
    x = _images(places(move.source))
    n, c = x.shape[:2]
    parts = x.reshape(n, c, high // block, block, wide // block, block)
    blocks = parts.transpose(0, 3, 5, 1, 2, 4).reshape(n, -1, high // block, wide // block)
    result = _images(move.places)
    return _picks(blocks, result) if blocks.shape == result.shape else None


def _reorganized(move: Movement, limits: Limits) -> Layers:
    """`reorganizeData`: blocks of pixels to channels or back, with a convolution for another order."""
    wider = move.shape[-1] > move.source[-1]
    narrow, wide = sorted((move.shape[-1], move.source[-1]))
    block = wide // narrow if narrow else 0
    if block < 2 or move.source[:-3] != move.shape[:-3]:
        return NO_MATCH
    picks = _gathered(move.inverse() if wider else move, block)
    if picks is None:
        return NO_MATCH
    if block not in limits.blocks:
        listed = ", ".join(map(str, limits.blocks))
        return Refusal(f"it moves blocks of {block}x{block} pixels; `blocks` lists {listed}")
    order = np.argsort(picks).tolist() if wider else picks
    if order == list(range(len(order))):
        return [_blocks("DEPTH_TO_SPACE" if wider else "SPACE_TO_DEPTH", block)]
    shuffle = np.arange(len(order)).reshape(-1, block * block).T.reshape(-1).tolist()
    if wider and order == shuffle and limits.version >= SHUFFLES:
        return [_blocks("PIXEL_SHUFFLE", block)]
    if len(move.shape) < IMAGE:
        return Refusal(
            f"it orders channels too; Core ML's own check wants {IMAGE} axes for convolution, and there are "
            f"{len(move.shape)}"
        )
    mixed = _mixed(order, limits)
    if not isinstance(mixed, list):
        return mixed
    if wider:
        return [*mixed, _blocks("DEPTH_TO_SPACE", block)]
    return [_blocks("SPACE_TO_DEPTH", block), *mixed]


def _blocks(mode: str, block: int) -> Step:
    return "reorganizeData", {"mode": mode, "blockSize": block}


FORMS: tuple[tuple[int, float, Callable[[Movement, Limits], Layers]], ...] = (
    (3, math.inf, _flattened),
    (FIVE, FIVE, _reshaped),
    (FIVE, FIVE, _permuted),
    (FIVE, FIVE, _reshaped_by_pixel),
    (IMAGE, math.inf, _shuffled),
    (3, math.inf, _reorganized),
)
"""(Fewest axes, most axes, form), those that cost least first."""
