"""Products of rows that are longer than an axis may be: `split_inner_axis` cuts them."""

from __future__ import annotations

from anesurgery.mil import Operation
from anesurgery.ops import WEIGHTED
from anesurgery.placement.evidence import Grade, Rule, Scope
from anesurgery.placement.target import SOURCES, Target
from anesurgery.semantics.byte_sizes import shape_of


def long_rows(op: Operation, target: Target) -> str:
    """Rows beyond the limit of an axis."""
    limit, chip = target.least("axis")
    length = (shape_of(op.x) or (0,))[-1]
    return f"rows of {length}; {chip} takes {limit}" if length > limit else ""


RULES = (
    Rule(
        "long-rows",
        WEIGHTED,
        "rows that are cut in parts, of which the products are added, are within the limit of an axis",
        SOURCES["axis"],
        test=long_rows,
        kind="speed",
        grade=Grade.REPORTED,
        scope=Scope(os="seen on M1 Max, M4"),
        remedy="split_inner_axis",
    ),
)
