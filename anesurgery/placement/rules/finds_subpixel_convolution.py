"""Transposed convolutions of which only the result is too long: `subpixel_convolution` mends them."""

from __future__ import annotations

from anesurgery.mil import Operation
from anesurgery.ops import names
from anesurgery.placement.evidence import Grade, Rule
from anesurgery.placement.target import Target
from anesurgery.semantics.byte_sizes import shape_of


def long_result(op: Operation, target: Target) -> str:
    """Only the result is longer than the target takes."""
    limit, chip = target.least("axis")
    before, after = (max(shape_of(v)[-2:], default=0) for v in (op.x, op.outputs[0]))
    return f"{before} elements become {after}; {chip} takes {limit}" if before <= limit < after else ""


KIND = names("conv_transpose")
RULES = (
    Rule(
        "deconv-result",
        KIND,
        "the products can be those of a convolution on the short axis",
        "by the definition of the ops; what it gains in time was not measured",
        test=long_result,
        kind="speed",
        grade=Grade.GUESS,
        remedy="subpixel_convolution",
    ),
)
