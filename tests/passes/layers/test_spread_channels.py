"""`spread_channels`: gates of one pixel, on either side, in both mappings; nothing else is touched."""

from __future__ import annotations

import numpy as np
from pass_cases import ignores, refuses, rewrites, stays, table
from two_sided import two, with_any_batch, with_constant

from anesurgery.passes.layers.broadcasting import SpreadChannels

STEP = SpreadChannels()


test_cases, test_surroundings = table(
    STEP,
    refuses("dynamic", with_any_batch, two("multiply", (1, 3, 4, 5), (1, 3, 1, 1))),
    refuses("1x1x1x1 is not one number for each channel", two, "multiply", (1, 3, 4, 5), (1, 1, 1, 1)),
    refuses("1x1 is not one number for each channel of 4x5", two, "multiply", (4, 5), (1, 1)),
    *(
        rewrites(two, "multiply", x, z, rank5)
        for x, z, rank5 in [
            ((1, 3, 4, 5), (1, 3, 1, 1), False),
            ((1, 3, 1, 1), (1, 3, 4, 5), False),
            ((2, 3, 4, 1), (2, 3, 1, 1), False),
            ((3, 4, 5), (3, 1, 1), False),
            ((3, 4, 5), (3, 1, 1), True),
        ]
    ),
    *(
        ignores(two, "multiply", x, z)
        for x, z in [((1, 3, 4, 5), (1, 3, 4, 5)), ((1, 3, 1, 1), (1, 3, 1, 1)), ((1, 3, 4, 5), (1, 1, 4, 5))]
    ),
    stays(with_constant, "multiply", (3, 4, 5), np.arange(3, dtype=np.float32).reshape(3, 1, 1)),
)
