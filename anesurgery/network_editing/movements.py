"""Layers that only move elements: what a row of them does, and the first-release layers that do the same.

Each element of the input is given its index (0, 1, 2, ...), and the indices are moved as the layers move the
elements. The array that comes out is the whole meaning of the row, however it was written: `Movement`. Example:
`transpose` of shape (2, 3) with axes (1, 0) has the indices [[0, 3], [1, 4], [2, 5]].

`first_layers` looks for layers of iOS 11 and 12 with the same `Movement`. They keep the number of axes,
and Core ML's own check wants five axes for `reshape` and `permute`, four or more for `convolution`, and three
or more for `flatten` and `reorganizeData`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from anesurgery.errors import NO_MATCH, Refusal, Refused
from anesurgery.mil import Array
from anesurgery.network_editing.layer_pass import Site
from anesurgery.network_editing.network import Network, Node
from anesurgery.neuralnetwork import spec
from anesurgery.neuralnetwork.making import MOST_MIXED, Step, channel_picking, make_layer
from anesurgery.ops import names

CHANNEL_LAST = 1
"""The `mode` of `flatten` and `reshape` that reads (channel, height, width) as (height, width, channel)."""
PERMUTED = (0, 2, 3, 4)
"""The axes of (sequence, batch, channel, height, width) that `permute` can exchange."""


@dataclass(frozen=True)
class Movement:
    """Where each element of a result comes from."""

    source: tuple[int, ...]
    """The shape of the input."""
    indices: Array
    """Flat index into the input of each element, int64, in the shape of the result."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the result."""
        return tuple(self.indices.shape)

    @property
    def is_identity(self) -> bool:
        """Are the shape and the order of the elements those of the input?"""
        flat = self.indices.reshape(-1)
        return self.shape == self.source and bool((flat == np.arange(flat.size)).all())

    def inverse(self) -> Movement:
        """Return the movement from the result back to the input."""
        return Movement(self.shape, np.argsort(self.indices.reshape(-1)).reshape(self.source))


def flat_indices(shape: Sequence[int]) -> Array:
    """Return the flat index of each element of an array: [[0, 1, 2], [3, 4, 5]] for (2, 3)."""
    return np.arange(math.prod(shape), dtype=np.int64).reshape(tuple(shape))


def permute_last(x: Array, order: Sequence[int]) -> Array:
    """Permute the last axes: (-2, -1, -3) makes (..., H, W, C) of (..., C, H, W)."""
    lead = range(x.ndim - len(order))
    return np.transpose(x, [*lead, *(x.ndim + a for a in order)])


def _keep_order(params: Any, x: Array) -> Array:
    """A reshape keeps the order of the elements."""
    return x


def _transpose(params: Any, x: Array) -> Array:
    axes = [int(a) for a in params.axes]
    # A layer that lists fewer axes than the blob has works on the last ones; those in front have length 1.
    return np.transpose(x.reshape(x.shape[x.ndim - len(axes) :]), axes)


def _permute(params: Any, x: Array) -> Array:
    order = [PERMUTED[int(a)] for a in params.axis] or list(PERMUTED)
    five_axes = (1,) * (5 - x.ndim) + x.shape
    return np.transpose(x.reshape(five_axes), [order[0], 1, *order[1:]])


def channel_last(x: Array, target: Sequence[int]) -> Array:
    """Reshape in the order CHANNEL_LAST: from (..., C, H, W) to the last three sizes of `target`."""
    channel, height, width = target[-3:]
    flat = permute_last(x, (-2, -1, -3)).reshape(-1, height, width, channel)
    return permute_last(flat, (-1, -3, -2))


SHAPERS = names("reshapeStatic reshapeLike reshapeDynamic rankPreservingReshape squeeze expandDims flattenTo2D")
"""Layers that only state another shape."""
FIRST_MOVERS = frozenset({"reshape", "permute", "flatten"})
"""The layers of iOS 11 and 12 that move elements."""
MOVERS: dict[str, Callable[[Any, Array], Array]] = {
    **dict.fromkeys(SHAPERS, _keep_order),
    "transpose": _transpose,
    "permute": _permute,
    "flatten": lambda params, x: permute_last(x, (-2, -1, -3)) if params.mode == CHANNEL_LAST else x,
    "reshape": lambda params, x: channel_last(x, params.targetShape) if params.mode == CHANNEL_LAST else x,
}
"""Layer type -> function of (its message, indices) that returns the indices in their new order."""


def movement(site: Site, nodes: Sequence[Node], source: tuple[int, ...] | None = None) -> Movement:
    """Return the movement of layers in a row.

    Args:
        site: where the row is.
        nodes: the layers, each reading the one before.
        source: the shape of the input, if it is not that of the blob that the first layer reads.

    Raises:
        Refused: a size is dynamic, or the blob is overwritten.
    """
    is_fixed = any(map(_states_all_sizes, nodes)) or not spec.is_legacy(site.network.message)
    if not is_fixed and any(map(_moves_sequence, nodes)):
        raise Refused("it moves the sequence or batch, whose size is dynamic")
    blob = nodes[0].inputs[0]
    if len(nodes) > 1 and not site.network.plain(blob):
        raise Refused(f"the blob {blob!r} is made more than once, or in a loop or branch")
    shape = site.sizes(blob)
    indices = flat_indices(shape)
    for node in nodes:
        indices = MOVERS[node.kind](node.params, indices).reshape(site.sizes(node.outputs[0]))
    return Movement(source or shape, indices)


def _moves_sequence(node: Node) -> bool:
    """Does a layer move axes in front of (C, H, W)?"""
    if node.kind == "permute":
        return list(node.params.axis)[:1] not in ([], [0])
    axes = list(node.params.axes) if node.kind == "transpose" else []
    return len(axes) == 5 and axes[:2] != [0, 1]


def _states_all_sizes(node: Node) -> bool:
    """Does a layer state the number of elements, so that sequence and batch cannot have other sizes?"""
    if node.kind == "reshape":
        return len(node.params.targetShape) == 4
    return node.kind == "reshapeStatic" and -1 not in node.params.targetShape


def moving_row(network: Network, node: Node) -> list[Node]:
    """Return the longest row of moving layers that contains `node`; only the next layer reads each."""
    row = [node]
    while (first := _moving_before(network, row[0])) is not None:
        row.insert(0, first)
    return [*row, *moving_after(network, node)]


def moving_after(network: Network, node: Node) -> list[Node]:
    """Return the row of moving layers behind a layer of one output; only the next layer reads each."""
    row: list[Node] = []
    while (last := _moving_behind(network, row[-1] if row else node)) is not None:
        row.append(last)
    return row


def _moving_before(network: Network, node: Node) -> Node | None:
    blob = node.inputs[0]
    maker = network.maker(blob, *MOVERS)
    return maker if maker is not None and _is_only_moved(network, blob, node) else None


def _moving_behind(network: Network, node: Node) -> Node | None:
    blob = node.outputs[0]
    reader = next(iter(network.readers(blob)), None)
    moves = reader is not None and reader.kind in MOVERS and _is_only_moved(network, blob, reader)
    return reader if moves and network.plain(blob) else None


def _is_only_moved(network: Network, blob: str, node: Node) -> bool:
    """Is a blob read by this layer alone, as the input that it moves?"""
    alone = network.only_reader(blob, node) and node.inputs.count(blob) == 1
    return alone and node.inputs[0] == blob


Layers = list[Step] | Refusal
"""Layers in a row, or why there are none. A form that does not apply returns `NO_MATCH`."""

BLOCKS = (2, 3, 4, 8)
"""Block sizes of `reorganizeData` that a pass writes: the shuffle factors of the engine in
sbryngelson/ane-guide (M1, M2, M5 measured without Core ML; M3, M4 read from the compiler). Nobody measured the
layer."""
PIXEL_SHUFFLE_VERSION = 5
"""The specification version that brought the mode PIXEL_SHUFFLE (iOS 14, macOS 11)."""
IMAGE, FIVE = 4, 5
"""In Core ML's own check: the fewest axes of `convolution`, and the axes of `reshape` and `permute`."""


@dataclass(frozen=True)
class Limits:
    """What may be written."""

    version: int
    """The specification version of the model."""
    channels: int = MOST_MIXED
    """The most channels that a convolution may put in another order."""
    blocks: Sequence[int] = BLOCKS
    """The block sizes that `reorganizeData` may have."""


def first_layers(move: Movement, limits: Limits) -> Layers:
    """Return the layers that do a movement: [] for the identity, a refusal if there are none."""
    if move.is_identity:
        return []
    before, after = len(move.source), len(move.shape)
    if before != after:
        return Refusal(
            f"it makes {after} axes of {before} ({_shape_change(move)}); the layers of iOS 11 and 12 keep "
            "their number"
        )
    refused: list[Refusal] = []
    for fewest_axes, form in FORMS:
        if fewest_axes <= after:
            layers = form(move, limits)
            if not isinstance(layers, Refusal):
                return layers
            if layers is not NO_MATCH:
                refused.append(layers)
    return refused[0] if refused else Refusal(_no_form_reason(move))


def longest_written(row: Sequence[Node], write: Callable[[Sequence[Node]], Layers]) -> tuple[Layers, int]:
    """Find the longest beginning of a row that `write` can write with other layers.

    Returns:
        (its new layers, its length); (the refusal for the whole row, 1) if there is none.
    """
    reasons: list[Refusal] = []
    for end in range(len(row), 0, -1):
        layers = write(row[:end])
        if not isinstance(layers, Refusal):
            return layers, end
        reasons.append(layers)
    return reasons[0], 1


def _shape_change(move: Movement) -> str:
    return " to ".join("x".join(map(str, shape)) for shape in (move.source, move.shape))


def _no_form_reason(move: Movement) -> str:
    if len(move.shape) < FIVE:
        return (
            f"{_shape_change(move)} moves neither whole channels nor blocks of pixels; of {len(move.shape)} "
            f"axes Core ML's own check takes no reshape or permute, only of {FIVE}"
        )
    return f"{_shape_change(move)} is neither a reshape that keeps the batch, nor a permutation around it"


def _single_layer(move: Movement, limits: Limits) -> Layers:
    """Return the one layer that moves indices as the movement does; each candidate is tried."""
    for kind, fields in _candidates(move):
        message = Node(make_layer(kind, ["x"], ["y"], **fields)).params
        moved = MOVERS[kind](message, flat_indices(move.source))
        fits = kind != "permute" or moved.shape == move.shape
        if fits and np.array_equal(moved.reshape(move.shape), move.indices):
            return [(kind, fields)]
    return NO_MATCH


def _candidates(move: Movement) -> Iterator[Step]:
    """Yield the layers that may give the shape, the cheapest first."""
    if move.shape == (*move.source[:-3], math.prod(move.source[-3:]), 1, 1):
        yield from (("flatten", {}), ("flatten", {"mode": "CHANNEL_LAST"}))
    if len(move.shape) != FIVE:
        return
    target, (sequence, batch) = list(move.shape[2:]), move.source[:2]
    if move.shape[0] != sequence:  # a `reshape` states the sequence too where the batch is 1
        target = [move.shape[0], *target]
    can_reshape = move.shape[1] == batch and (move.shape[0] == sequence or batch == 1)
    if can_reshape:
        yield "reshape", {"targetShape": target}
    yield from (("permute", {"axis": list(order)}) for order in itertools.permutations(range(4)))
    if can_reshape:
        yield "reshape", {"targetShape": target, "mode": "CHANNEL_LAST"}


def _as_images(x: Array) -> Array:
    """Reshape (..., C, H, W) to (N, C, H, W)."""
    return x.reshape(-1, *x.shape[-3:])


def _picked_channels(source: Array, result: Array) -> list[int] | None:
    """Return which channel of the source each channel of the result is; None if some are no whole channels.

    Both are indices of shape (N, C, H, W), with equal N, H and W.
    """
    channel_at = {int(index): channel for channel, index in enumerate(source[0, :, 0, 0])}
    picks = [channel_at.get(int(index)) for index in result[0, :, 0, 0]]
    channels = [p for p in picks if p is not None]
    same = len(channels) == len(picks) and np.array_equal(source[:, channels], result)
    return channels if same else None


def _channel_convolution(picks: Sequence[int], limits: Limits) -> Layers:
    count = len(picks)
    if count > limits.channels:
        return Refusal(
            f"it moves {count} channels, more than {limits.channels}; raise `channels` to spend {count} x "
            f"{count} products on each pixel"
        )
    return [channel_picking(picks, count)]


def _reordered_channels(move: Movement, limits: Limits) -> Layers:
    """Return a 1x1 `convolution` for whole channels in another order."""
    if move.shape != move.source:
        return NO_MATCH
    picks = _picked_channels(_as_images(flat_indices(move.source)), _as_images(move.indices))
    return NO_MATCH if picks is None else _channel_convolution(picks, limits)


def _order_behind_blocks(move: Movement, block: int) -> list[int] | None:
    """Return the order of channels with which SPACE_TO_DEPTH is the movement; None if it is not.

    SPACE_TO_DEPTH with blocks of 2x2 makes (N, 4 C, H / 2, W / 2) of (N, C, H, W): all channels of the first
    pixel of each block come first.
    """
    high, wide = move.source[-2:]
    if high % block or wide % block:
        return None
    x = _as_images(flat_indices(move.source))
    n, c = x.shape[:2]
    in_blocks = x.reshape(n, c, high // block, block, wide // block, block)
    blocks = in_blocks.transpose(0, 3, 5, 1, 2, 4).reshape(n, -1, high // block, wide // block)
    result = _as_images(move.indices)
    return _picked_channels(blocks, result) if blocks.shape == result.shape else None


def _reorganized_blocks(move: Movement, limits: Limits) -> Layers:
    """Return `reorganizeData` for blocks of pixels, with a convolution if the channels have another order."""
    to_pixels = move.shape[-1] > move.source[-1]
    narrow, wide = sorted((move.shape[-1], move.source[-1]))
    block = wide // narrow if narrow else 0
    if block < 2 or move.source[:-3] != move.shape[:-3]:
        return NO_MATCH
    picks = _order_behind_blocks(move.inverse() if to_pixels else move, block)
    if picks is None:
        return NO_MATCH
    if block not in limits.blocks:
        listed = ", ".join(map(str, limits.blocks))
        return Refusal(f"it moves blocks of {block}x{block} pixels; `blocks` lists {listed}")
    order = np.argsort(picks).tolist() if to_pixels else picks
    if order == list(range(len(order))):
        return [_block_layer("DEPTH_TO_SPACE" if to_pixels else "SPACE_TO_DEPTH", block)]
    pixel_shuffle = np.arange(len(order)).reshape(-1, block * block).T.reshape(-1).tolist()
    if to_pixels and order == pixel_shuffle and limits.version >= PIXEL_SHUFFLE_VERSION:
        return [_block_layer("PIXEL_SHUFFLE", block)]
    if len(move.shape) < IMAGE:
        return Refusal(
            f"it orders channels too; Core ML's own check wants {IMAGE} axes for convolution, and there are "
            f"{len(move.shape)}"
        )
    reordered = _channel_convolution(order, limits)
    if not isinstance(reordered, list):
        return reordered
    if to_pixels:
        return [*reordered, _block_layer("DEPTH_TO_SPACE", block)]
    return [_block_layer("SPACE_TO_DEPTH", block), *reordered]


def _block_layer(mode: str, block: int) -> Step:
    return "reorganizeData", {"mode": mode, "blockSize": block}


FORMS: tuple[tuple[int, Callable[[Movement, Limits], Layers]], ...] = (
    (3, _single_layer),
    (IMAGE, _reordered_channels),
    (3, _reorganized_blocks),
)
"""(the fewest axes, form), the cheapest first."""
