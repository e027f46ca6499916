"""`legacy_subtract`: either side negated, computed or constant, and the broadcasting that `add` lacks."""

from __future__ import annotations

import numpy as np
from pass_cases import refuses, rewrites, table
from two_sided import two, with_constant

from anesurgery.neuralnetwork.making import make_layer, make_network
from anesurgery.passes.layers.broadcasting import LegacySubtract

KIND = "subtractBroadcastable"
STEP = LegacySubtract()


test_cases, test_surroundings = table(
    STEP,
    *(
        refuses("not among the shapes", two, KIND, x, z)
        for x, z in [
            ((1, 3, 4, 5), (1, 3, 4, 1)),
            ((2, 3, 4, 5), (1, 3, 4, 5)),
            ((1, 3, 4, 5), (3, 4, 5)),
            ((1, 3, 1, 1), (1, 1, 4, 5)),
        ]
    ),
    *(
        refuses(
            words,
            with_constant,
            KIND,
            x,
            np.random.default_rng(0).standard_normal(shape).astype(np.float32),
            first,
        )
        for x, shape, words in [
            ((1, 3, 4, 5), (1, 1, 5), "is not one of"),
            ((2, 3, 4, 5), (2, 3, 1, 1), "varies along the batch"),
            ((3, 1, 1), (3, 4, 5), "larger than its input"),
            ((4, 5), (5,), "take 3 axes"),
        ]
        for first in [False, True]
    ),
    *(rewrites(two, KIND, (3, 4, 5), z, rank5=True) for z in [(3, 4, 5), (3, 1, 1)]),
    rewrites(make_network, {"x": (1, 3, 4, 5)}, [make_layer(KIND, ["x", "x"], ["y"])], ["y"]),
    *(
        rewrites(
            with_constant,
            KIND,
            (3, 4, 5) if rank5 else (2, 3, 4, 5),
            np.random.default_rng(0).standard_normal(shape).astype(np.float32),
            first,
            rank5,
        )
        for shape, first in [
            ((1,), False),
            ((1,), True),
            ((3, 1, 1), False),
            ((3, 1, 1), True),
            ((1, 1, 4, 5), False),
            ((3, 4, 5), True),
        ]
        for rank5 in [False, True]
    ),
    *(
        rewrites(two, KIND, x, z)
        for x, z in [
            ((1, 3, 4, 5), (1, 3, 4, 5)),
            ((2, 3, 4, 5), (2, 3, 1, 1)),
            ((2, 3, 4, 5), (2, 1, 4, 5)),
            ((3, 4, 5), (1, 1, 1)),
            ((7,), (7,)),
            ((1, 3, 1, 1), (1, 3, 4, 5)),
            ((2, 1, 4, 5), (2, 3, 4, 5)),
        ]
    ),
    *(
        rewrites(with_constant, KIND, (1, 3, 4, 5), np.array([0.75], np.float32), first)
        for first in (False, True)
    ),
)
