"""`legacy_add_multiply`: every broadcasting that the plain layers have, and those that they lack."""

from __future__ import annotations

import numpy as np
from pass_cases import ignores, refuses, rewrites, table
from two_sided import kinds_after, two, with_any_batch, with_constant, with_sizes

from anesurgery.mil import Array
from anesurgery.neuralnetwork.making import make_layer, make_network
from anesurgery.passes.layers.broadcasting import LegacyAddMultiply

KINDS = ("addBroadcastable", "multiplyBroadcastable")
STEP = LegacyAddMultiply()


def test_a_constant_that_others_read_stays() -> None:
    value = np.arange(3, dtype=np.float32).reshape(3, 1, 1)
    spec = with_constant("addBroadcastable", (1, 3, 4, 5), value)
    spec.neuralNetwork.layers.append(make_layer("subtractBroadcastable", ["y", "c"], ["d"]))
    spec.description.output.add(name="d").type.multiArrayType.dataType = 65568
    assert kinds_after(STEP, spec) == ["loadConstantND", "bias", "subtractBroadcastable"]


def numbers(*shape: int) -> Array:
    return np.random.default_rng(0).standard_normal(shape or (1,)).astype(np.float32)


test_cases, test_surroundings = table(
    STEP,
    *(
        refuses(words, two, kind, x, z)
        for x, z, words in [
            ((1, 3, 4, 5), (1, 3, 4, 1), "not among the shapes"),
            ((1, 3, 4, 5), (1, 1, 1, 5), "not among the shapes"),
            ((2, 3, 4, 5), (1, 3, 4, 5), "not among the shapes"),
            ((1, 3, 4, 5), (3, 4, 5), "not among the shapes"),
            ((1, 3, 1, 1), (1, 1, 4, 5), "not among the shapes"),
            ((1, 5), (4, 1), "not among the shapes"),
        ]
        for kind in KINDS
    ),
    *(
        refuses("may differ where a size is dynamic", with_any_batch, two(kind, (1, 3, 4, 5), (1, 3, 4, 5)))
        for kind in KINDS
    ),
    *(
        refuses(
            words,
            with_constant,
            "addBroadcastable",
            x,
            np.random.default_rng(0).standard_normal(shape).astype(np.float32),
        )
        for x, shape, words in [
            ((1, 3, 4, 5), (1, 1, 5), "is not one of"),
            ((2, 3, 4, 5), (2, 3, 1, 1), "varies along the batch"),
            ((3, 1, 1), (3, 4, 5), "larger than its input"),
            ((4, 5), (5,), "take 3 axes"),
        ]
    ),
    *(
        rewrites(two, kind, x, z)
        for x, z in [
            ((1, 3, 4, 5), (1, 3, 4, 5)),
            ((2, 3, 4, 5), (2, 3, 1, 1)),
            ((2, 3, 4, 5), (2, 1, 4, 5)),
            ((2, 3, 4, 5), (2, 1, 1, 1)),
            ((3, 4, 5), (3, 1, 1)),
            ((7,), (7,)),
            ((1, 3, 1, 1), (1, 3, 4, 5)),  # the larger side comes first afterwards
        ]
        for kind in KINDS
    ),
    *(
        rewrites(with_constant, kind, (1, 3, 4, 5), numbers(*shape), first)
        for kind, shape in [
            ("addBroadcastable", ()),
            ("addBroadcastable", (3, 1, 1)),
            ("addBroadcastable", (1, 3, 1, 1)),
            ("addBroadcastable", (4, 5)),
            ("addBroadcastable", (3, 4, 5)),
            ("multiplyBroadcastable", (1,)),
            ("multiplyBroadcastable", (3, 1, 1)),
            ("multiplyBroadcastable", (1, 1, 4, 5)),
            ("multiplyBroadcastable", (1, 3, 4, 5)),
        ]
        for first in (False, True)
    ),
    rewrites(with_constant, "multiplyBroadcastable", (1, 2, 2, 2), np.full((2, 1, 1), 3, np.float32)),
    rewrites(
        with_sizes,
        make_network({"x": (1, 3, 4, 5)}, [make_layer("addBroadcastable", ["x", "x"], ["y"])], ["y"]),
        *[(1, 1), (3, 3), (2, 9), (2, 9)],
        id="a blob with itself, whatever its size",
    ),
    rewrites(with_constant, "add", (1, 3, 4, 5), numbers(3, 1, 1)),
    rewrites(with_constant, "multiply", (1, 3, 4, 5), numbers(3, 1, 1)),
    rewrites(with_constant, "multiply", (7,), numbers(1)),
    refuses("take 3 axes", with_constant, "multiply", (7,), np.arange(7.0)),
    ignores(two, "add", (1, 3, 4, 5), (1, 3, 4, 5)),
)
