"""Layers that only move numbers: what a row of them does altogether, as an array of places.

The places of the numbers (0, 1, 2, ...) are pushed through the layers. Where they land is all that such layers
do, however they are written.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from anesurgery.errors import Refused
from anesurgery.mil import Array
from anesurgery.network_editing.layer_pass import Site
from anesurgery.network_editing.network import Network, Node
from anesurgery.neuralnetwork.spec import is_legacy

CHANNEL_LAST = 1
FIRST_MOVERS = frozenset({"reshape", "permute", "flatten"})
"""Those of the first releases."""
PERMUTED = (0, 2, 3, 4)
"""The axes of (sequence, batch, channel, height, width) that `permute` speaks of."""


@dataclass(frozen=True)
class Movement:
    """Where numbers come from.

    Attributes:
        source: shape of what is read.
        places: flat place in the source of each number, int64, in the shape of the result.
    """

    source: tuple[int, ...]
    places: Array

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the result."""
        return tuple(self.places.shape)

    @property
    def keeps_order(self) -> bool:
        """Is it a reshape?"""
        flat = self.places.reshape(-1)
        return bool((flat == np.arange(flat.size)).all())

    @property
    def is_identity(self) -> bool:
        """Does nothing change?"""
        return self.shape == self.source and self.keeps_order

    def inverse(self) -> Movement:
        """The way back."""
        back = np.argsort(self.places.reshape(-1)).reshape(self.source)
        return Movement(self.shape, back)


def places(shape: Sequence[int]) -> Array:
    """The flat place of each number of an array."""
    return np.arange(math.prod(shape), dtype=np.int64).reshape(tuple(shape))


def five(shape: Sequence[int]) -> tuple[int, ...]:
    """A shape with leading axes of 1 up to five."""
    return (1,) * (5 - len(shape)) + tuple(shape)


def last_axes(x: Array, order: Sequence[int]) -> Array:
    """The last axes in another order, given from the end."""
    lead = range(x.ndim - len(order))
    return np.transpose(x, [*lead, *(x.ndim + a for a in order)])


# -- layers --------------------------------------------------------------------------------------------


def _order(params: Any, x: Array) -> Array:
    """What a reshape does before it states another shape: nothing."""
    return x


def _transpose(params: Any, x: Array) -> Array:
    axes = [int(a) for a in params.axes]
    # Leading axes of 1 are nothing to a layer that lists fewer.
    return np.transpose(x.reshape(x.shape[x.ndim - len(axes) :]), axes)


def _permute(params: Any, x: Array) -> Array:
    order = [PERMUTED[int(a)] for a in params.axis] or list(PERMUTED)
    return np.transpose(x.reshape(five(x.shape)), [order[0], 1, *order[1:]])


def channel_last(x: Array, target: Sequence[int]) -> Array:
    """What `reshape` does with the order CHANNEL_LAST: (..., C, H, W) to the last three sizes of `target`."""
    channel, height, width = target[-3:]
    flat = last_axes(x, (-2, -1, -3)).reshape(-1, height, width, channel)
    return last_axes(flat, (-1, -3, -2))


MOVERS: dict[str, Callable[[Any, Array], Array]] = {
    "reshapeStatic": _order,
    "reshapeLike": _order,
    "reshapeDynamic": _order,
    "rankPreservingReshape": _order,
    "squeeze": _order,
    "expandDims": _order,
    "flattenTo2D": _order,
    "transpose": _transpose,
    "permute": _permute,
    "flatten": lambda params, x: last_axes(x, (-2, -1, -3)) if params.mode == CHANNEL_LAST else x,
    "reshape": lambda params, x: channel_last(x, params.targetShape) if params.mode == CHANNEL_LAST else x,
}
"""Layer type -> the order in which it leaves the numbers. The shape is that of its blob."""
SHAPERS = frozenset(kind for kind, order in MOVERS.items() if order is _order)
"""Those that only state another shape."""


def movement(site: Site, nodes: Sequence[Node], source: tuple[int, ...] | None = None) -> Movement:
    """What layers do that follow one another.

    Args:
        site: where they are.
        nodes: the layers, each reading what the one before makes.
        source: the shape that is read, if it is another one of as many numbers than that of the blob.

    Raises:
        Refused: a shape is dynamic, or what is read is overwritten before the last layer.
    """
    stated = any(map(_states_sequence, nodes)) or not is_legacy(site.network.message)
    if not stated and any(map(_moves_sequence, nodes)):
        raise Refused("it moves the sequence or batch, whose size is dynamic")
    blob = nodes[0].inputs[0]
    if len(nodes) > 1 and not site.network.plain(blob):
        raise Refused(f"the blob {blob!r} is made more than once, or in a loop or branch")
    shape = site.sizes(blob)
    now = places(shape)
    for node in nodes:
        now = MOVERS[node.kind](node.params, now).reshape(site.sizes(node.outputs[0]))
    return Movement(source or shape, now)


def _moves_sequence(node: Node) -> bool:
    """Does a layer move axes in front of (C, H, W)?"""
    if node.kind == "permute":
        return list(node.params.axis)[:1] not in ([], [0])
    axes = list(node.params.axes) if node.kind == "transpose" else []
    return len(axes) == 5 and axes[:2] != [0, 1]


def _states_sequence(node: Node) -> bool:
    """Does a layer say how many numbers there are, so that sequence and batch cannot be other ones?"""
    if node.kind == "reshape":
        return len(node.params.targetShape) == 4
    return node.kind == "reshapeStatic" and -1 not in node.params.targetShape


def moving_row(network: Network, node: Node) -> list[Node]:
    """The longest row of moving layers with `node` in it, of which nobody reads the blobs between."""
    row = [node]
    while (first := _before(network, row[0])) is not None:
        row.insert(0, first)
    return [*row, *moving_after(network, node)]


def moving_after(network: Network, node: Node) -> list[Node]:
    """The moving layers after a layer of one output, each the only consumer of the one before."""
    row: list[Node] = []
    while (last := _after(network, row[-1] if row else node)) is not None:
        row.append(last)
    return row


def _before(network: Network, node: Node) -> Node | None:
    blob = node.inputs[0]
    maker = network.maker(blob, *MOVERS)
    return maker if maker is not None and _passes(network, blob, node) else None


def _after(network: Network, node: Node) -> Node | None:
    blob = node.outputs[0]
    reader = next(iter(network.readers(blob)), None)
    moves = reader is not None and reader.kind in MOVERS and _passes(network, blob, reader)
    return reader if moves and network.plain(blob) else None


def _passes(network: Network, blob: str, node: Node) -> bool:
    """Is a blob what a layer moves, and for nobody else?"""
    alone = network.only_reader(blob, node) and node.inputs.count(blob) == 1
    return alone and node.inputs[0] == blob
