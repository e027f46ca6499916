"""Rows of layers that only move elements, and lookups in a table before them, in layers of iOS 11 and 12.

`network_editing.movements` computes where a row puts each element, and finds layers that do the same.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from anesurgery import authoring as an
from anesurgery.authoring import Array, Refusal, Var
from anesurgery.mil import fixed_shape
from anesurgery.network_editing.layer_pass import LayerRewrite, Site
from anesurgery.network_editing.movements import (
    BLOCKS,
    FIRST_MOVERS,
    MOVERS,
    Layers,
    Limits,
    Movement,
    first_layers,
    flat_indices,
    longest_written,
    movement,
    moving_after,
    moving_row,
)
from anesurgery.network_editing.network import Node
from anesurgery.neuralnetwork.making import MOST_MIXED, Step


@dataclass(frozen=True)
class LegacyRearrange(LayerRewrite):
    """Write rows of layers that only move elements with the layers of iOS 11 and 12, or without any.

    Where the elements land decides, not how the row is written:

    * all at their place: the row goes;
    * whole channels in another order: a 1x1 `convolution` with one 1 in each kernel, C x C products for each
      pixel (option `channels`: the most);
    * blocks of pixels to channels or back: `reorganizeData` (option `blocks`: their sizes), with such a
      convolution where the channels come in another order;
    * all elements of an image as channels: `flatten`;
    * five axes: `reshape`, which keeps the batch, or `permute`.

    If the whole row is none of these, its longest parts that are one of them are written so.

    Refuses when the row changes the number of axes, when it does something else, when a size is dynamic, and
    beyond the two options. Blobs inside a row that others read end it.

    Why it helps: layers of iOS 11 and 12 mostly run on the ANE (hollance/neural-engine,
    unsupported-layers; through Core ML, iOS 11 to 15), and of the others no report is known. Five axes were off
    it in some cases, and reshapes and transposes are copies (sbryngelson/ane-guide; Apple, Deploying
    Transformers). The layers were not measured. Exact for finite numbers: each is moved, or multiplied by 1 and
    added to zeros. An infinity in a pixel makes the other results of a convolution NaN.

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
        """Rewrite the part of the row that ends at this layer; a part that goes on waits for its last layer."""
        row = moving_row(site.network, site.node)
        here, start = row.index(site.node), 0
        while start <= here:
            steps, length = longest_written(row[start:], functools.partial(self._first_layers, site))
            if isinstance(steps, list) and start + length == here + 1:
                site.chain(steps, row[start].inputs[0])
                return None
            if isinstance(steps, Refusal) and start == here:
                return None if site.node.kind in FIRST_MOVERS else steps
            start += length
        return None

    def _first_layers(self, site: Site, part: Sequence[Node]) -> Layers:
        """Return the new layers for a part of a row."""
        limits = Limits(int(site.network.spec.specificationVersion), self.channels, self.blocks)
        steps = first_layers(movement(site, part), limits)
        if isinstance(steps, Refusal) or _is_gain(steps, part):
            return steps
        return Refusal("nothing is gained")


def _is_gain(steps: Sequence[Step], part: Sequence[Node]) -> bool:
    """Are the new layers fewer, or does the part hold a layer that iOS 11 and 12 did not have?"""
    return len(steps) < len(part) or any(node.kind not in FIRST_MOVERS for node in part)


TABLE = "embeddingND"


@dataclass(frozen=True)
class LegacyEmbedding(LayerRewrite):
    """Look up rows of a table with `embedding`, whose vectors are channels.

    The vectors of `embeddingND` lie along the last axis, those of `embedding` along the channels; a reshape
    makes one of the other. The layers behind the table that only move elements are taken together with this
    reshape, and the longest row of them is written as `legacy_rearrange` writes it. With five axes a `reshape`
    alone is enough.

    Refuses when the indices have other than four axes (n, 1, 1, 1) or five (s, n, 1, 1, 1), the only shapes
    that `embedding` has in the definition of the format; when a size is dynamic; and when the layers of
    iOS 11 and 12 cannot do to channels what the layers after the table do to the vectors.

    Why it helps: layers of the ND kind were reported off the ANE (hollance/neural-engine, unsupported-layers;
    through Core ML, iOS 11 to 15). Of `embedding` no report is known; lookups at run time in ML Programs ran on
    the CPU (751K/Apple-Neural-Engine-Microarchitecture-Study-M6; M4, macOS 27.0.1). Not measured. Exact: the
    same rows are copied.

    Grade: bit for bit.
    """

    name = "legacy_embedding"
    kinds = frozenset({TABLE, *MOVERS})

    def rewrite(self, site: Site) -> Refusal | None:
        """Rewrite at the last layer that is replaced; at the table, if nothing can be done."""
        table = _table_of(site)
        if table is None:
            return None
        indices = site.sizes(table.inputs[0])
        if len(indices) not in (4, 5) or set(indices[-3:]) != {1}:
            words = f"its indices have the shape {indices}, not (n, 1, 1, 1) or (s, n, 1, 1, 1)"
            return Refusal(words) if site.node is table else None
        row = [table, *moving_after(site.network, table)]
        steps, length = longest_written(row, functools.partial(_table_and_movement, site))
        if isinstance(steps, Refusal):
            return steps if site.node is table else None
        if row[length - 1] is site.node:
            site.chain(steps, table.inputs[0])
        return None

    def sample(self, site: Site, var: Var, rng: np.random.Generator) -> Array | None:
        """Draw indices inside the table: the layer reads nothing else."""
        table = _table_of(site)
        if table is None:
            return None
        return rng.integers(0, int(table.params.vocabSize), fixed_shape(var)).astype(an.np_dtype(var))


def _table_of(site: Site) -> Node | None:
    """Return the table at the site: its layer, or the one in front of the row of moving layers."""
    if site.node.kind == TABLE:
        return site.node
    first = moving_row(site.network, site.node)[0]
    table = site.network.maker(first.inputs[0], TABLE)
    return table if table is not None and first in moving_after(site.network, table) else None


def _table_and_movement(site: Site, row: Sequence[Node]) -> Layers:
    """Return the layers that replace a table and some moving layers behind it."""
    table, *after = row
    size = int(table.params.embeddingSize)
    looked_up = (*site.sizes(table.inputs[0])[:-3], size, 1, 1)  # the shape that `embedding` gives
    if after:
        move = movement(site, after, looked_up)
    else:
        move = Movement(looked_up, flat_indices(site.sizes(table.outputs[0])))
    layers = first_layers(move, Limits(int(site.network.spec.specificationVersion)))
    return layers if isinstance(layers, Refusal) else [("embedding", _embedding_fields(table.params)), *layers]


def _embedding_fields(params: Any) -> dict[str, Any]:
    """Return the fields of `embedding`; both layers store the table as (vector, index)."""
    fields = {"inputDim": params.vocabSize, "outputChannels": params.embeddingSize, "weights": params.weights}
    return fields | ({"hasBias": True, "bias": params.bias} if params.hasBias else {})
