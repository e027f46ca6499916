"""`legacy_clip`: clips in both orders, bounds that stand alone, blobs, and what `max` and `min` lack."""

from __future__ import annotations

from typing import Any

import numpy as np
from pass_cases import refuses, rewrites, table
from two_sided import two, with_any_batch, with_constant, with_reader

from anesurgery.neuralnetwork.making import make_layer, make_network, weights
from anesurgery.passes.layers.broadcasting import MOST_NEGATIVE, LegacyClip

MAX, MIN = "maxBroadcastable", "minBroadcastable"
STEP = LegacyClip()
SHAPE = (1, 3, 4, 5)


def chain(*steps: tuple[str, float], outputs: tuple[str, ...] = (), rank5: bool = False) -> Any:
    """Layers with a number each, one after the other: b0, b1, ...; the last one leaves the network."""
    layers = []
    for i, (kind, number) in enumerate(steps):
        data = weights(np.array([number]))
        layers.append(make_layer("loadConstantND", [], [f"n{i}"], shape=[1], data=data))
        sides = [f"b{i - 1}" if i else "x", f"n{i}"]
        layers.append(make_layer(kind, sides[:: 1 - 2 * (i % 2)], [f"b{i}"]))
    shape = SHAPE[1:] if rank5 else SHAPE
    return make_network({"x": shape}, layers, [*outputs, f"b{len(steps) - 1}"], rank5=rank5)


CHANNELS = np.arange(3, dtype=np.float32).reshape(3, 1, 1)


test_cases, test_surroundings = table(
    STEP,
    *(
        refuses("not among the shapes", two, kind, SHAPE, z)
        for z in [(1, 1, 4, 5), (1, 1, 1, 1), (1, 3, 4, 1), (3, 4, 5)]
        for kind in [MAX, MIN]
    ),
    *(
        rewrites(chain, *steps)
        for steps in [
            [(MAX, 0.0)],
            [(MAX, 0.5)],
            [(MAX, -0.5)],
            [(MIN, 0.5)],
            [(MAX, 0.5), (MAX, 0.75)],
            [(MAX, 0.5), (MIN, -0.5)],
            [(MIN, -0.5), (MAX, 0.5)],
            [(MIN, 0.5), (MAX, 0.5)],
            [(MAX, -0.5), (MIN, 0.5), (MAX, 0.25)],
            [(MAX, -0.5), (MIN, 0.5), (MAX, -0.25), (MIN, 0.25)],
        ]
    ),
    rewrites(chain, (MAX, -0.5), (MIN, 0.5), outputs=("b0",)),
    *(
        rewrites(two, kind, x, z)
        for x, z in [
            ((1, 3, 4, 5), (1, 3, 4, 5)),
            ((2, 3, 4, 5), (2, 3, 1, 1)),
            ((2, 3, 1, 1), (2, 3, 4, 5)),
            ((3, 4, 5), (3, 1, 1)),
            ((7,), (7,)),
        ]
        for kind in [MAX, MIN]
    ),
    *(
        rewrites(
            with_constant,
            kind,
            SHAPE,
            np.random.default_rng(0).standard_normal((1, 3, 1, 1)).astype(np.float32),
            first=True,
        )
        for kind in [MAX, MIN]
    ),
    *(
        rewrites(chain, *[(MAX, low), (MIN, high)][::order], rank5=rank5)
        for low, high in [(-0.5, 0.75), (0.0, 6.0), (-3.0, -1.0)]
        for order in (1, -1)
        for rank5 in (False, True)
    ),
    *(
        rewrites(with_constant, kind, x, np.random.default_rng(0).standard_normal(c).astype(np.float32), first)
        for x, c in [
            ((1, 2, 4, 4), (2, 1, 1)),
            ((2, 3, 4, 5), (3, 1, 1)),
            ((2, 3, 4, 5), (1, 3, 1, 1)),
            ((2, 3, 4, 5), (3, 4, 5)),
            ((2, 1, 3, 4, 5), (3, 1, 1)),
            ((1, 3), (3,)),
        ]
        for kind in (MAX, MIN)
        for first in (False, True)
    ),
    rewrites(with_constant, MIN, SHAPE[1:], CHANNELS, rank5=True),
    *(refuses("bounds no finite numbers", chain, (MIN, number)) for number in (np.inf, -np.inf, MOST_NEGATIVE)),
    refuses(
        "1x3x4x5 and 4x1 are not among", with_constant, MAX, SHAPE, np.arange(4, dtype=np.float32).reshape(4, 1)
    ),
    refuses("4x3 and 3 are not among", with_constant, MAX, (4, 3), np.arange(3, dtype=np.float32)),
    refuses("may differ where a size is dynamic", with_any_batch, with_constant(MAX, SHAPE, CHANNELS)),
    refuses(
        "3x1x1 and 2x3x1x1 are not among", with_constant, MAX, (3, 1, 1), np.ones((2, 3, 1, 1), np.float32)
    ),
    rewrites(with_reader, chain((MAX, -0.5), (MIN, 0.5)), "b0"),
)
