"""`legacy_embedding`: vectors as channels, whatever moves them on, and the shapes that it has not."""

from __future__ import annotations

from typing import Any

import numpy as np
from pass_cases import refuses, rewrites, stays, table
from two_sided import with_reader

from anesurgery.neuralnetwork.making import make_layer, make_network, weights
from anesurgery.passes.layers.moving import LegacyEmbedding

STEP = LegacyEmbedding()
ROWS, SIZE = 7, 4
Shape = tuple[int, ...]
Row = list[tuple[str, dict[str, Any]]]


def looked_up(indices: Shape, row: Row, *, bias: bool = False, rank5: bool = False) -> Any:
    rng = np.random.default_rng(0)
    fields: dict[str, Any] = {
        "vocabSize": ROWS,
        "embeddingSize": SIZE,
        "weights": weights(rng.standard_normal((SIZE, ROWS))),
    }
    if bias:
        fields |= {"hasBias": True, "bias": weights(rng.standard_normal(SIZE))}
    names = ["rows", *(f"b{i}" for i in range(len(row)))]
    layers = [make_layer("embeddingND", ["x"], names[:1], **fields)]
    layers += [make_layer(kind, [names[i]], [names[i + 1]], **given) for i, (kind, given) in enumerate(row)]
    layers.append(make_layer("activation", [names[-1]], ["y"], linear={"alpha": -1}))
    return make_network({"x": indices}, layers, ["y"], rank5=rank5)


def moved(*order: int) -> tuple[str, dict[str, Any]]:
    return "transpose", {"axes": order}


def to(*shape: int) -> tuple[str, dict[str, Any]]:
    return "reshapeStatic", {"targetShape": shape}


test_cases, test_surroundings = table(
    STEP,
    *(
        refuses(words, looked_up, indices, row)
        for indices, row, words in [
            ((5, 1), [], "shape (5, 1), not (n, 1, 1, 1)"),
            ((1, 5, 1), [], "shape (1, 5, 1)"),
            ((1, 5, 1, 1), [], "shape (1, 5, 1, 1)"),
            ((5, 1, 1, 1), [], "5x4x1x1 to 5x1x1x4"),
            ((5, 1, 1, 1), [to(5, 4)], "makes 2 axes of 4"),
        ]
    ),
    stays(make_network, {"x": (1, 2, 3)}, [make_layer("transpose", ["x"], ["y"], axes=[0, 2, 1])], ["y"]),
    *(
        rewrites(looked_up, indices, row, bias=bias)
        for indices, row in [
            ((5, 1, 1, 1), [moved(0, 3, 1, 2)]),
            ((5, 1, 1, 1), [to(5, 4, 1, 1)]),
            ((1, 1, 1, 1), [to(1, 2, 2), to(1, 4, 1, 1)]),
            ((5, 1, 1, 1), [moved(0, 3, 1, 2), to(5, 4)]),
            ((5, 1, 1, 1), [to(5, 1, 2, 2)]),
            ((3, 5, 1, 1, 1), []),
            ((3, 5, 1, 1, 1), [moved(0, 1, 4, 3, 2)]),
            ((5, 1, 1, 1, 1), [moved(3, 1, 4, 2, 0)]),
            ((3, 5, 1, 1, 1), [moved(1, 0, 2, 3, 4)]),
        ]
        for bias in [False, True]
    ),
    rewrites(looked_up, (1, 1, 1), [("permute", {"axis": [0, 3, 1, 2]})], rank5=True),
    refuses("5x4x1x1 to 5x1x1x4", with_reader, looked_up((5, 1, 1, 1), [moved(0, 3, 1, 2)]), "rows"),
)
