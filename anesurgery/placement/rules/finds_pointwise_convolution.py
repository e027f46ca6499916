"""Products of a single row where they were seen on the CPU: `pointwise_convolution` rewrites them."""

from __future__ import annotations

import math

from anesurgery.mil import Operation, is_stored
from anesurgery.ops import names
from anesurgery.placement.cost import UP_TO
from anesurgery.placement.evidence import Grade, Rule, Scope
from anesurgery.placement.target import CHIPS, Target
from anesurgery.regions.channel_products import weight_of
from anesurgery.semantics.byte_sizes import shape_of


def single_row(op: Operation, target: Target) -> str:
    """A product of one row with a stored weight."""
    stored, shape = weight_of(op), shape_of(op.x)
    if stored is None or not is_stored(stored[0]) or math.prod(shape[:-1]) != 1:
        return ""
    return f"one row of {shape[-1]} gives {shape_of(op.outputs[0])[-1]}"


RULES = (
    Rule(
        "single-row",
        names("linear matmul"),
        "a linear of one row stayed on the CPU at each width, while 1x1 convolutions of one pixel went to the "
        "ANE from 4.7 million weights on",
        "thisisthepy/torchnative: ANEDECODE.md",
        test=single_row,
        kind="speed",
        grade=Grade.REPORTED,
        scope=Scope(frozenset(c.family for c in CHIPS.values() if c.family <= UP_TO), "seen on M1"),
        remedy="pointwise_convolution",
    ),
)
