"""Transposes that the op after them can absorb: `absorb_transpose` takes them away."""

from __future__ import annotations

from anesurgery.mil import Operation, static_shape
from anesurgery.ops import REDUCTIONS, UNARY, VIEWS, names
from anesurgery.placement.evidence import Grade, Rule, Scope
from anesurgery.placement.target import Target
from anesurgery.semantics.reading import readers_after, shape_in_words, weight


def absorbed(op: Operation, target: Target) -> str:
    """A product with a weight, or a reduction, that alone reads what was transposed."""
    shape = static_shape(op.outputs[0])
    readers = list(readers_after(op.outputs[0], UNARY | VIEWS)) if shape is not None else []
    if len(readers) != 1 or not (readers[0].op_type in REDUCTIONS or weight(readers[0]) is not None):
        return ""
    if readers[0].op_type not in REDUCTIONS | {"linear", "matmul"}:
        return ""
    if readers[0].op_type not in REDUCTIONS and readers[0].x.rank >= len(shape or ()):
        return ""
    return f"{shape_in_words(shape)} is read by {readers[0].op_type} %{readers[0].outputs[0].name} alone"


RULES = (
    Rule(
        "transpose-absorbed",
        names("transpose"),
        "moving the last axis writes the whole value anew; what reads it can name other axes, or have its "
        "weights in another order",
        "smpanaro/more-ane-transformers: NOTES.md",
        test=absorbed,
        kind="speed",
        grade=Grade.REPORTED,
        scope=Scope(os="seen on M1 Max, macOS 13 to 14"),
        remedy="absorb_transpose",
    ),
)
