"""Ops of which no placement was found, and which are others in disguise: `replace_rare_ops` writes them so."""

from __future__ import annotations

from anesurgery.mil import Operation
from anesurgery.ops import names
from anesurgery.placement.evidence import Grade, Rule
from anesurgery.placement.target import Target


def rare(op: Operation, target: Target) -> str:
    """The op."""
    return f"%{op.outputs[0].name} is a {op.op_type}"


RULES = (
    Rule(
        "rare-op",
        names("crop flatten2d reshape_like clamped_relu"),
        "nothing is known of where it runs, while the slices, reshapes or minima that do the same were placed",
        "751K: slices, reshapes, leaky_relu and minimum on the ANE (M4, macOS 27.0.1)",
        test=rare,
        kind="speed",
        grade=Grade.GUESS,
        remedy="replace_rare_ops",
    ),
)
