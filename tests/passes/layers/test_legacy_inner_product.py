"""`legacy_inner_product`: towers of products and functions between two reshapes, and what stops them."""

from __future__ import annotations

from typing import Any

import numpy as np
from pass_cases import refuses, rewrites, stays, table
from two_sided import with_reader

from anesurgery.neuralnetwork.making import make_layer, make_network, weights
from anesurgery.passes.layers.products import LegacyInnerProduct
from anesurgery.testing import assert_refuses

STEP = LegacyInnerProduct()
Shape = tuple[int, ...]
Row = list[tuple[str, dict[str, Any]]]


def numbers(*shape: int) -> dict[str, Any]:
    return weights(np.random.default_rng(0).standard_normal(shape))


def product(n: int, m: int, *, bias: bool = False) -> tuple[str, dict[str, Any]]:
    fields = {"inputChannels": n, "outputChannels": m, "weights": numbers(m, n)}
    return "innerProduct", fields | ({"hasBias": True, "bias": numbers(m)} if bias else {})


def matmul(n: int, m: int) -> tuple[str, dict[str, Any]]:
    return "batchedMatmul", {
        "weightMatrixFirstDimension": n,
        "weightMatrixSecondDimension": m,
        "weights": numbers(m, n),
        "hasBias": True,
        "bias": numbers(m),
    }


def to(*shape: int) -> tuple[str, dict[str, Any]]:
    return "reshapeStatic", {"targetShape": shape}


def bent(**fields: Any) -> tuple[str, dict[str, Any]]:
    return "activation", fields


def tower(shape: Shape, row: Row) -> Any:
    names = ["x", *(f"b{i}" for i in range(len(row) - 1)), "y"]
    layers = [make_layer(kind, [names[i]], [names[i + 1]], **fields) for i, (kind, fields) in enumerate(row)]
    return make_network({"x": shape}, layers, ["y"])


SQUEEZE: Row = [("squeeze", {"axes": [3]}), ("squeeze", {"axes": [-1]})]
EXPAND: Row = [("expandDims", {"axes": [2]}), ("expandDims", {"axes": [3]})]


def test_a_product_of_two_blobs() -> None:
    spec = tower((2, 6, 1, 1), [to(2, 6), ("batchedMatmul", {}), to(2, 6, 1, 1)])
    spec.neuralNetwork.layers[1].input.append("z")
    z = spec.description.input.add(name="z").type.multiArrayType
    z.dataType = 65568
    z.shape.extend([6, 6])
    assert_refuses(STEP, spec, "has 2 inputs, not 1")


BENT: Row = [bent(linear={"alpha": 2}), product(6, 4), bent(PReLU={"alpha": numbers(4)})]


test_cases, test_surroundings = table(
    STEP,
    *(
        refuses(words, tower, shape, row)
        for shape, row, words in [
            ((2, 6), [product(6, 4), to(2, 4, 1, 1)], "come from 'x' of shape (2, 6), not (2, C, H, W)"),
            ((1, 2, 6), [to(2, 6), product(6, 4), to(2, 4, 1, 1)], "come from 'x' of shape (1, 2, 6)"),
            ((1, 12, 1, 1), [to(2, 6), product(6, 4), to(2, 4, 1, 1)], "of shape (1, 12, 1, 1), not (2, C"),
            (
                (2, 6, 1, 1),
                [to(2, 6), ("softmaxND", {"axis": 1}), to(2, 6, 1, 1)],
                "softmaxND b1 is not a product",
            ),
            ((2, 6, 1, 1), [to(1, 2, 6), product(6, 4), to(2, 4, 1, 1)], "works on 3 axes, not on 2"),
            (
                (2, 3, 2, 1),
                [to(2, 6), bent(PReLU={"alpha": numbers(6)}), product(6, 4), to(2, 4, 1, 1)],
                "works on vectors of 3x2x1 numbers",
            ),
        ]
    ),
    stays(tower, (2, 6, 1, 1), [to(2, 6), to(2, 6, 1, 1)]),
    *(
        rewrites(tower, shape, row)
        for shape, row in [
            ((2, 6, 1, 1), [to(2, 6), product(6, 4), to(2, 4, 1, 1)]),
            ((2, 6, 1, 1), [*SQUEEZE, product(6, 4, bias=True), *EXPAND]),
            ((2, 6, 1, 1), [to(2, 6), matmul(6, 4), to(2, 4, 1, 1)]),
            ((2, 3, 2, 5), [to(2, 30), product(30, 4), to(2, 4, 1, 1)]),
            ((2, 3, 2, 5), [("flattenTo2D", {"axis": 1}), product(30, 4), bent(ReLU={}), to(2, 4, 1, 1)]),
            ((1, 6, 1, 1), [to(1, 6), *BENT, matmul(4, 6), ("unary", {"type": "ABS"}), to(1, 6, 1, 1)]),
        ]
    ),
    refuses(
        "'b1' is read by others too",
        with_reader,
        tower((2, 6, 1, 1), [to(2, 6), product(6, 4), to(2, 4, 1, 1)]),
        "b1",
    ),
)
