"""Predict where each op runs, say why, and name the pass that repairs it."""

from anesurgery.placement.evidence import Finding, Grade, Rule, Scope
from anesurgery.placement.inspection import Estimate, Inspection, Memory, OpRow, Segment
from anesurgery.placement.target import Target

__all__ = [
    "Estimate",
    "Finding",
    "Grade",
    "Inspection",
    "Memory",
    "OpRow",
    "Rule",
    "Scope",
    "Segment",
    "Target",
]
