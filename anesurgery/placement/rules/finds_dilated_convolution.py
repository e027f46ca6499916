"""Convolutions between space_to_batch and batch_to_space: `dilated_convolution` takes the two away."""

from __future__ import annotations

from anesurgery.mil import Operation
from anesurgery.ops import POINTWISE, names
from anesurgery.placement.evidence import Grade, Rule
from anesurgery.placement.rules.slow import LARGE_DILATION
from anesurgery.placement.target import Target
from anesurgery.semantics.reading import ints, readers_after, shape_in_words

BETWEEN = POINTWISE | {"conv", "batch_norm"}
"""What may stand between the two ends."""


def dealt(op: Operation, target: Target) -> str:
    """The blocks of a space_to_batch that is undone after convolutions."""
    between = readers_after(op.outputs[0], BETWEEN)
    if not any(reader.op_type == "batch_to_space" for reader in between):
        return ""
    if max(ints(op, "block_shape")) >= LARGE_DILATION:
        return ""  # a dilation as large as that is slow itself
    return f"blocks of {shape_in_words(ints(op, 'block_shape'))} become images, and are put together again"


RULES = (
    Rule(
        "space-to-batch",
        names("space_to_batch"),
        "a dilated convolution does the same without moving each pixel twice",
        "by the definition of the ops; what it gains in time was not measured",
        test=dealt,
        kind="speed",
        grade=Grade.GUESS,
        remedy="dilated_convolution",
    ),
)
