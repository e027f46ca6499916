"""Casts of integers before a lookup, which `index_casts` takes away."""

from __future__ import annotations

from anesurgery.mil import Operation, np_dtype, producer
from anesurgery.ops import names
from anesurgery.placement.evidence import Grade, Rule
from anesurgery.placement.target import Target


def cast_indices(op: Operation, target: Target) -> str:
    """The cast that makes the indices, from which type to which."""
    cast = producer(op.indices, "cast")
    if cast is None or np_dtype(cast.x).kind not in "iu":
        return ""
    return f"%{op.indices.name} is {np_dtype(cast.outputs[0])}, made of {np_dtype(cast.x)}"


RULES = (
    Rule(
        "index-cast",
        names("gather"),
        "a cast of the indices is one more op on the CPU",
        "751K: integer arithmetic stays on the CPU (M4, macOS 27.0.1)",
        test=cast_indices,
        kind="speed",
        grade=Grade.MEASURED,
        remedy="index_casts",
    ),
)
