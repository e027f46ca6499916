"""Heads with more outputs than an axis may hold: unknown where they were seen on the ANE."""

from __future__ import annotations

from anesurgery.mil import Operation
from anesurgery.ops import names
from anesurgery.placement.evidence import Grade, Rule, Scope
from anesurgery.placement.rules.slow import lut
from anesurgery.placement.target import Target
from anesurgery.semantics.byte_sizes import shape_of

HEADS = {"M1": (49152, False), "M4": (151936, True)}
"""Chip -> the longest output of a linear that was reported on its ANE, and was its weight palettized?"""


def long_head(op: Operation, target: Target) -> str:
    """A linear makes more than an axis may hold, and no more than was reported on every chip of the target."""
    limit, outputs = target.least("axis")[0], shape_of(op.outputs[0])[-1:]
    if op.op_type != "linear" or not outputs or outputs[0] <= limit or not set(target.chips) <= HEADS.keys():
        return ""
    seen = [HEADS[chip] for chip in target.chips]
    if any(outputs[0] > most or (palettized and lut(op) is None) for most, palettized in seen):
        return ""
    return f"{outputs[0]} outputs; the limit is {limit} by some reports, and others saw up to {seen[0][0]}"


RULE = Rule(
    "head-size",
    names("linear"),
    "reports conflict: longer outputs were seen on the ANE, while what reads them left it",
    "thisisthepy/torchnative: NPU2.md (M1); shipstuff/mlx-ane-sd (M4 Pro)",
    test=long_head,
    grade=Grade.REPORTED,
    scope=Scope(os="seen on M1, and on M4 Pro with a palette"),
    advice="split it where the compute plan of the device says CPU",
    remedy="split_head",
)
