"""Transposed convolutions with long results or large kernels: `subpixel_convolution` mends them."""

from __future__ import annotations

from anesurgery.facts.reading import ints, shape_in_words
from anesurgery.facts.work import shape_of
from anesurgery.mil import Operation
from anesurgery.ops import names
from anesurgery.placement.evidence import Grade, Rule, Scope
from anesurgery.placement.target import Target


def long_result(op: Operation, target: Target) -> str:
    """Only the result is longer than the target takes."""
    limit, chip = target.least("axis")
    given, made = (max(shape_of(v)[-2:], default=0) for v in (op.x, op.outputs[0]))
    return f"{given} elements become {made}; {chip} takes {limit}" if given <= limit < made else ""


def large_kernel(op: Operation, target: Target) -> str:
    """The kernel is wider or higher than that of a convolution may be, and the stride shortens it."""
    kernel = shape_of(op.weight)[2:]
    height, width = (1, *kernel)[-2:]
    (most_w, chip), (most_h, _) = target.least("kernel_w"), target.least("kernel_h")
    if (width <= most_w and height <= most_h) or max(ints(op, "strides"), default=1) < 2:
        return ""
    return f"kernel {shape_in_words(kernel)}; {chip} takes {most_h}x{most_w} (height x width) in convolutions"


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
    Rule(
        "deconv-kernel",
        KIND,
        "where an axis is strided, the limits are those of small kernels",
        "sbryngelson/ane-guide, ANEForge (tables of the compiler)",
        test=large_kernel,
        kind="speed",
        grade=Grade.REPORTED,
        scope=Scope(via="compiler"),
        remedy="subpixel_convolution",
    ),
)
