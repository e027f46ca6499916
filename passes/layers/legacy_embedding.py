"""Look up rows of a table with `embedding`, whose vectors are channels.

Before::

    network(%x: 5x1x1x1) {
      %rows: 5x1x1x4 = embeddingND(%x, vocabSize=3, embeddingSize=4, weights=const<12>)
      %y: 5x4x1x1 = transpose(%rows, axes=[0, 3, 1, 2])
      return %y
    }

After::

    network(%x: 5x1x1x1) {
      %y: 5x4x1x1 = embedding(%x, inputDim=3, outputChannels=4, weights=const<12>)
      return %y
    }

The vectors of `embeddingND` lie along the last axis, those of `embedding` along the channels: what lies between
is a reshape. It is taken together with the layers after it that only move numbers, and the longest row of them
is written as `legacy_rearrange` writes it. Of five axes a `reshape` alone will do.

Refuses when the indices have other than four axes (n, 1, 1, 1) or five (s, n, 1, 1, 1), the only shapes that
`embedding` has in the definition of the format; when a size is dynamic; and when the layers of
the first releases cannot make of the channels what the layers after it make of the vectors.

Why it helps: layers of the ND kind were reported off the ANE (hollance/neural-engine, unsupported-layers;
through Core ML, iOS 11 to 15). Of `embedding` no report is known; lookups at run time in ML Programs ran on the
CPU (751K/Apple-Neural-Engine-Microarchitecture-Study-M6; M4, macOS 27.0.1). Not measured. Exact: the same rows
are copied.

Grade: bit for bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from anesurgery import authoring as an
from anesurgery.authoring import LayerRewrite, Refusal, Site, Var

KIND = "embeddingND"


@dataclass(frozen=True)
class LegacyEmbedding(LayerRewrite):
    """`embeddingND` of indices without channels, rows and columns becomes `embedding`."""

    name = "legacy_embedding"
    kinds = frozenset({KIND, *an.movement.MOVERS})

    def rewrite(self, site: Site) -> Refusal | None:
        """At the last layer that goes; at the table, if nothing can be done."""
        table = _table(site)
        if table is None:
            return None
        indices = site.sizes(table.inputs[0])
        if len(indices) not in (4, 5) or set(indices[-3:]) != {1}:
            words = f"its indices have the shape {indices}, not (n, 1, 1, 1) or (s, n, 1, 1, 1)"
            return Refusal(words) if site.node is table else None
        row = [table, *an.movement.moving_after(site.network, table)]
        steps, length = an.moving_forms.longest(row, lambda part: _steps(site, part))
        if isinstance(steps, Refusal):
            return steps if site.node is table else None
        if row[length - 1] is site.node:
            an.moving_forms.emit(site, table.inputs[0], steps, site.outputs)
        return None

    def sample(self, site: Site, var: Var, rng: np.random.Generator) -> an.Array | None:
        """Places in the table: nothing else is read."""
        table = _table(site)
        if table is None:
            return None
        return rng.integers(0, int(table.params.vocabSize), an.fixed_shape(var)).astype(an.np_dtype(var))


def _table(site: Site) -> an.Node | None:
    """The table of the site: itself, or what a row of moving layers reads alone."""
    if site.node.kind == KIND:
        return site.node
    first = an.movement.moving_row(site.network, site.node)[0]
    table = site.network.maker(first.inputs[0], KIND)
    return table if table is not None and first in an.movement.moving_after(site.network, table) else None


def _steps(site: Site, row: Sequence[an.Node]) -> an.moving_forms.Layers:
    """The layers in the place of a table and of some layers after it."""
    table, *after = row
    size = int(table.params.embeddingSize)
    looked_up = (*site.sizes(table.inputs[0])[:-3], size, 1, 1)
    alone = an.movement.Movement(looked_up, an.movement.places(site.sizes(table.outputs[0])))
    move = an.movement.movement(site, after, looked_up) if after else alone
    limits = an.moving_forms.Limits(int(site.network.spec.specificationVersion))
    layers = an.moving_forms.first_layers(move, limits)
    return layers if isinstance(layers, Refusal) else [("embedding", _fields(table.params)), *layers]


def _fields(params: Any) -> dict[str, Any]:
    """The table has the same form in both layers: [vector, index]."""
    sizes = {"inputDim": params.vocabSize, "outputChannels": params.embeddingSize}
    bias = {"hasBias": True, "bias": params.bias} if params.hasBias else {}
    return {**sizes, "weights": params.weights, **bias}


def example() -> Any:
    """Five rows as channels."""
    table = np.arange(12).reshape(4, 3)
    layers = [
        an.make_layer(KIND, ["x"], ["rows"], vocabSize=3, embeddingSize=4, weights=an.weights(table)),
        an.make_layer("transpose", ["rows"], ["y"], axes=[0, 3, 1, 2]),
    ]
    return an.make_network({"x": (5, 1, 1, 1)}, layers, ["y"], integers=["x"])
