"""Rows of layers that only move numbers, tables and products of vectors, in layers of the first releases.

The places of the numbers (0, 1, 2, ...) are pushed through a row. Where they land is all that such layers do,
however they are written. The layers that come keep the number of axes: Core ML's own check wants five for
`reshape` and `permute`, four or more for `convolution`, three or more for `flatten` and `reorganizeData`.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from anesurgery import authoring as an
from anesurgery.authoring import Array, Refusal, Refused, Var
from anesurgery.errors import NO_MATCH
from anesurgery.mil import fixed_shape
from anesurgery.network_editing.layer_pass import MOST_MIXED, LayerRewrite, Site, Step, picking
from anesurgery.network_editing.network import Network, Node
from anesurgery.neuralnetwork import spec
from anesurgery.neuralnetwork.making import make_layer

CHANNEL_LAST = 1
FIRST_MOVERS = frozenset({"reshape", "permute", "flatten"})
"""The layers that move elements in the first releases."""
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
        """Return the movement back."""
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


SHAPERS = an.ops.names(
    "reshapeStatic reshapeLike reshapeDynamic rankPreservingReshape squeeze expandDims flattenTo2D"
)
"""Layers that only state another shape."""
MOVERS: dict[str, Callable[[Any, Array], Array]] = {
    **dict.fromkeys(SHAPERS, _order),
    "transpose": _transpose,
    "permute": _permute,
    "flatten": lambda params, x: last_axes(x, (-2, -1, -3)) if params.mode == CHANNEL_LAST else x,
    "reshape": lambda params, x: channel_last(x, params.targetShape) if params.mode == CHANNEL_LAST else x,
}
"""Layer type -> the order in which it leaves the numbers. The shape is that of its blob."""


def movement(site: Site, nodes: Sequence[Node], source: tuple[int, ...] | None = None) -> Movement:
    """What layers do that follow one another; `source`: another shape than that of what they read."""
    stated = any(map(_states_sequence, nodes)) or not spec.is_legacy(site.network.message)
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
    channels: int = MOST_MIXED
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
    for least, form in FORMS:
        if least <= after:
            layers = form(move, limits)
            if not isinstance(layers, Refusal):
                return layers
            if layers is not NO_MATCH:
                refused.append(layers)
    return refused[0] if refused else Refusal(_unlike(move))


def _longest(row: Sequence[Node], write: Callable[[Sequence[Node]], Layers]) -> tuple[Layers, int]:
    """The layers of the longest beginning of a row that can be written otherwise, and its length.

    Else the reason for the whole row, and 1.
    """
    reasons: list[Refusal] = []
    for end in range(len(row), 0, -1):
        layers = write(row[:end])
        if not isinstance(layers, Refusal):
            return layers, end
        reasons.append(layers)
    return reasons[0], 1


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


def _single(move: Movement, limits: Limits) -> Layers:
    """The layer that leaves the numbers where the movement does: each is tried on their places."""
    for kind, fields in _candidates(move):
        moved = MOVERS[kind](Node(make_layer(kind, ["x"], ["y"], **fields)).params, places(move.source))
        fits = kind != "permute" or moved.shape == move.shape
        if fits and np.array_equal(moved.reshape(move.shape), move.places):
            return [(kind, fields)]
    return NO_MATCH


def _candidates(move: Movement) -> Iterator[Step]:
    """The layers that may make the shape, those that cost least first."""
    if move.shape == (*move.source[:-3], math.prod(move.source[-3:]), 1, 1):
        yield from (("flatten", {}), ("flatten", {"mode": "CHANNEL_LAST"}))
    if len(move.shape) != FIVE:
        return
    target, (sequence, batch) = list(move.shape[2:]), move.source[:2]
    if move.shape[0] != sequence:  # a `reshape` states the sequence too where the batch is 1
        target = [move.shape[0], *target]
    reshapes = move.shape[1] == batch and (move.shape[0] == sequence or batch == 1)
    if reshapes:
        yield "reshape", {"targetShape": target}
    yield from (("permute", {"axis": list(order)}) for order in itertools.permutations(range(4)))
    if reshapes:
        yield "reshape", {"targetShape": target, "mode": "CHANNEL_LAST"}


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
    return [picking(picks, count)]


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


FORMS: tuple[tuple[int, Callable[[Movement, Limits], Layers]], ...] = (
    (3, _single),
    (IMAGE, _shuffled),
    (3, _reorganized),
)
"""(Fewest axes, form), those that cost least first."""


@dataclass(frozen=True)
class LegacyRearrange(LayerRewrite):
    """Write rows of layers that only move numbers with the layers of the first releases, or without any.

    Where the numbers land decides, not how the row is written:

    * all at their place: the row goes;
    * whole channels in another order: a 1x1 `convolution` with one 1 in each kernel, C x C products for each
      pixel (option `channels`: the most);
    * blocks of pixels to channels or back: `reorganizeData` (option `blocks`: their sizes), with such a
      convolution where the channels come in another order;
    * all numbers of an image as channels: `flatten`;
    * five axes: `reshape`, which keeps the batch, or `permute`.

    Of a row that is none of these, the longest parts that are one are written so.

    Refuses when the row changes the number of axes, when it does something else, when a size is dynamic, and
    beyond the two options. Blobs inside a row that others read end it.

    Why it helps: layers of the first releases mostly run on the ANE (hollance/neural-engine,
    unsupported-layers; through Core ML, iOS 11 to 15), and of the others no report is known. Five axes were off
    it in some cases, and reshapes and transposes are copies (sbryngelson/ane-guide; Apple, Deploying
    Transformers). The layers were not measured. Exact for finite numbers: each is moved, or taken 1 time beside
    zeros; an infinite one in a pixel makes the others of a convolution NaN.

    Grade: proved.
    """

    name = "legacy_rearrange"
    tolerates_nonfinite = False
    """A movement that is a product with zeros makes NaN of an infinity."""
    kinds = frozenset(MOVERS)
    channels: int = MOST_MIXED
    """The most channels that a convolution may put in another order."""
    blocks: tuple[int, ...] = BLOCKS
    """The sizes of blocks of pixels that `reorganizeData` may have."""

    def rewrite(self, site: Site) -> Refusal | None:
        """What ends at this layer is written otherwise; what goes on waits for its end."""
        row = moving_row(site.network, site.node)
        at = row.index(site.node)
        begin = 0
        while begin <= at:
            steps, length = _longest(row[begin:], functools.partial(self._written, site))
            if isinstance(steps, list) and begin + length == at + 1:
                site.chain(steps, row[begin].inputs[0])
                return None
            if isinstance(steps, Refusal) and begin == at:
                return None if site.node.kind in FIRST_MOVERS else steps
            begin += length
        return None

    def _written(self, site: Site, part: Sequence[Node]) -> Layers:
        """A part of a row in layers of the first releases."""
        version = int(site.network.spec.specificationVersion)
        limits = Limits(version, self.channels, self.blocks)
        steps = first_layers(movement(site, part), limits)
        if isinstance(steps, Refusal) or _better(steps, part):
            return steps
        return Refusal("nothing is gained")


def _better(steps: Sequence[Step], part: Sequence[Node]) -> bool:
    """Is it more than the exchange of layers of the first releases for as many?"""
    return len(steps) < len(part) or any(node.kind not in FIRST_MOVERS for node in part)


TABLE = "embeddingND"


@dataclass(frozen=True)
class LegacyEmbedding(LayerRewrite):
    """Look up rows of a table with `embedding`, whose vectors are channels.

    The vectors of `embeddingND` lie along the last axis, those of `embedding` along the channels: what lies
    between is a reshape. It is taken together with the layers after it that only move numbers, and the longest
    row of them is written as `legacy_rearrange` writes it. Of five axes a `reshape` alone will do.

    Refuses when the indices have other than four axes (n, 1, 1, 1) or five (s, n, 1, 1, 1), the only shapes
    that `embedding` has in the definition of the format; when a size is dynamic; and when the layers of the
    first releases cannot make of the channels what the layers after it make of the vectors.

    Why it helps: layers of the ND kind were reported off the ANE (hollance/neural-engine, unsupported-layers;
    through Core ML, iOS 11 to 15). Of `embedding` no report is known; lookups at run time in ML Programs ran on
    the CPU (751K/Apple-Neural-Engine-Microarchitecture-Study-M6; M4, macOS 27.0.1). Not measured. Exact: the
    same rows are copied.

    Grade: bit for bit.
    """

    name = "legacy_embedding"
    kinds = frozenset({TABLE, *MOVERS})

    def rewrite(self, site: Site) -> Refusal | None:
        """Rewrite at the last layer that goes; at the table, if nothing can be done."""
        table = _table(site)
        if table is None:
            return None
        indices = site.sizes(table.inputs[0])
        if len(indices) not in (4, 5) or set(indices[-3:]) != {1}:
            words = f"its indices have the shape {indices}, not (n, 1, 1, 1) or (s, n, 1, 1, 1)"
            return Refusal(words) if site.node is table else None
        row = [table, *moving_after(site.network, table)]
        steps, length = _longest(row, lambda part: _steps(site, part))
        if isinstance(steps, Refusal):
            return steps if site.node is table else None
        if row[length - 1] is site.node:
            site.chain(steps, table.inputs[0])
        return None

    def sample(self, site: Site, var: Var, rng: np.random.Generator) -> Array | None:
        """Places in the table: nothing else is read."""
        table = _table(site)
        if table is None:
            return None
        return rng.integers(0, int(table.params.vocabSize), fixed_shape(var)).astype(an.np_dtype(var))


def _table(site: Site) -> Node | None:
    """The table of the site: itself, or what a row of moving layers reads alone."""
    if site.node.kind == TABLE:
        return site.node
    first = moving_row(site.network, site.node)[0]
    table = site.network.maker(first.inputs[0], TABLE)
    return table if table is not None and first in moving_after(site.network, table) else None


def _steps(site: Site, row: Sequence[Node]) -> Layers:
    """The layers in the place of a table and of some layers after it."""
    table, *after = row
    size = int(table.params.embeddingSize)
    looked_up = (*site.sizes(table.inputs[0])[:-3], size, 1, 1)
    alone = Movement(looked_up, places(site.sizes(table.outputs[0])))
    move = movement(site, after, looked_up) if after else alone
    limits = Limits(int(site.network.spec.specificationVersion))
    layers = first_layers(move, limits)
    return layers if isinstance(layers, Refusal) else [("embedding", _fields(table.params)), *layers]


def _fields(params: Any) -> dict[str, Any]:
    """The table has the same form in both layers: [vector, index]."""
    sizes = {"inputDim": params.vocabSize, "outputChannels": params.embeddingSize}
    bias = {"hasBias": True, "bias": params.bias} if params.hasBias else {}
    return {**sizes, "weights": params.weights, **bias}


PRODUCTS = frozenset({"innerProduct", "batchedMatmul"})
POINTWISE = frozenset({"unary", "clip", "gelu"})
BENDING = an.ops.names(
    """
    linear ReLU leakyReLU thresholdedReLU tanh scaledTanh sigmoid sigmoidHard ELU softsign softplus
    """
)
"""Activations of each number by itself."""
BY_CHANNEL = frozenset({"PReLU", "parametricSoftplus"})
"""Activations of each channel, which is the last of two axes and the second of four."""


@dataclass(frozen=True)
class LegacyInnerProduct(LayerRewrite):
    """Multiply vectors by a matrix in four axes, without the reshapes around it.

    So networks squeeze and excite: vectors are taken out of images, multiplied, bent, and put back as channels.
    `innerProduct` takes (N, C, H, W) as N vectors by itself, and gives (N, C', 1, 1). A product with one stored
    matrix, `batchedMatmul` of one input, becomes an `innerProduct`.

    Refuses when the vectors do not come from four axes with the same N, by layers that only state other shapes;
    when another layer reads one of the blobs between; when a layer between is not a product and no function of
    each number or channel, or bends whole images; and when a size is dynamic.

    Why it helps: products and functions of four axes were seen on the ANE (fredyshox/ANECompat, macOS 12 or
    later), and of the reshapes no report is known. Not measured. Exact: the same products are summed in the
    same order.

    Grade: bit for bit.
    """

    name = "legacy_inner_product"
    precedes = ("legacy_rearrange",)  # it would change the reshapes around a product
    kinds = SHAPERS

    def rewrite(self, site: Site) -> None:
        """Where vectors become (N, C, 1, 1): all layers back to four axes."""
        before, after = site.sizes(site.inputs[0]), site.sizes(site.outputs[0])
        if len(before) >= IMAGE or len(after) != IMAGE or after[2:] != (1, 1):
            return
        tower: list[Node] = []
        source = _back(site, after[0], tower)
        if not any(node.kind in PRODUCTS for node in tower):
            return
        image = site.sizes(source)
        if image[2:] != (1, 1) and tower[0].kind not in PRODUCTS:
            raise Refused(f"{tower[0]} bends vectors of {image[1]}x{image[2]}x{image[3]} numbers")
        for node in tower:
            source = _put(site, node, source, site.outputs if node is tower[-1] else None)


def _back(site: Site, count: int, tower: list[Node]) -> str:
    """The blob of four axes that the vectors come from; the layers between, in their order, into `tower`."""
    network, blob, reader = site.network, site.inputs[0], site.node
    while True:
        shape = site.sizes(blob)
        if len(shape) == IMAGE and shape[0] == count:
            if not network.plain(blob):
                raise Refused(f"the blob {blob!r} is made more than once")
            return blob
        maker = network.maker(blob)
        if maker is None:
            raise Refused(f"its vectors come from {blob!r} of shape {shape}, not ({count}, C, H, W)")
        if not network.only_reader(blob, reader):
            raise Refused(f"the blob {blob!r} is read by others too")
        if maker.kind not in SHAPERS:
            _check_between(site, maker)
            tower.insert(0, maker)
        blob, reader = maker.inputs[0], maker


def _check_between(site: Site, node: Node) -> None:
    """Refuse a layer that is none of those that may stand between."""
    bend = node.params.WhichOneof("NonlinearityType") if node.kind == "activation" else ""
    if bend not in BENDING | BY_CHANNEL and node.kind not in PRODUCTS | POINTWISE:
        raise Refused(f"{node} is not a product, and no function of each number or channel")
    if len(node.inputs) > 1:
        raise Refused(f"{node} has {len(node.inputs)} inputs, not 1")
    shape = site.sizes(node.inputs[0])
    if len(shape) != 2:
        raise Refused(f"{node} works on {len(shape)} axes, not on 2")


def _put(site: Site, node: Node, x: str, outputs: tuple[str, ...] | None) -> str:
    """A layer on four axes; what it makes."""
    p = node.params
    outputs = outputs or (site.network.fresh(node.outputs[0]),)
    if node.kind != "batchedMatmul":
        site.copy(node, [x], outputs)
        return outputs[0]
    # Both layers store the matrix as [out, in].
    fields: dict[str, Any] = {
        "inputChannels": p.weightMatrixFirstDimension,
        "outputChannels": p.weightMatrixSecondDimension,
        "weights": p.weights,
        "int8DynamicQuantize": p.int8DynamicQuantize,
    }
    fields |= {"hasBias": True, "bias": p.bias} if p.hasBias else {}
    return site.emit("innerProduct", [x], outputs, **fields)
