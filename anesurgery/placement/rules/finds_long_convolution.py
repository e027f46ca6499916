"""Convolutions of which only the input is too long: `long_convolution` works on frames of it."""

from __future__ import annotations

from anesurgery.mil import Operation, is_stored
from anesurgery.ops import names
from anesurgery.placement.evidence import Grade, Rule, Scope
from anesurgery.placement.target import SOURCES, Target
from anesurgery.semantics.byte_sizes import shape_of
from anesurgery.semantics.reading import ints


def long_input(op: Operation, target: Target) -> str:
    """Only the input is longer than the target takes, and the convolution steps along it."""
    limit, chip = target.least("axis")
    before, after = (shape_of(v)[2:] for v in (op.x, op.outputs[0]))
    steps = ints(op, "strides") or [1] * len(before)
    for length, result, step in zip(before, after, steps, strict=True):
        if length > limit >= result and step > 1 and is_stored(op.weight):
            return f"{length} elements become {result}; {chip} takes {limit}"
    return ""


RULES = (
    Rule(
        "conv-input",
        names("conv"),
        "the products can be those of frames, of which there are as few as results",
        SOURCES["axis"],
        test=long_input,
        kind="speed",
        grade=Grade.REPORTED,
        scope=Scope(os="seen on M1 Max, M4"),
        remedy="long_convolution",
    ),
)
