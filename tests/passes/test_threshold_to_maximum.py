"""threshold as maximum: bit by bit, in fp16 too, and in a network that writes ReLU6 with it."""

from __future__ import annotations

from typing import Any

import numpy as np
from pass_cases import refuses, rewrites, table

from anesurgery.mil import Program, mb, types
from anesurgery.passes.threshold_to_maximum import ThresholdToMaximum


def threshold(alpha: Any, dtype: Any = types.fp32) -> Program:
    return mb.program(input_specs=[mb.TensorSpec((2, 3), dtype=dtype)])(
        lambda x: mb.threshold(x=x, alpha=alpha, name="y")
    )


test_cases, test_surroundings = table(
    ThresholdToMaximum(),
    *(
        rewrites(
            threshold,
            np.float32(alpha),
            inputs={"x": np.array([[-np.inf, -6, -0.0], [0, 7, np.inf]], np.float32)},
        )
        for alpha in [-6.0, 0.0, 1e30, -np.inf]
    ),
    refuses("alpha is nan", threshold, np.float32(np.nan)),
)
