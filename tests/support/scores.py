"""Where a program stands on a target, with its inspections."""

from __future__ import annotations

from anesurgery.mil import Program
from anesurgery.placement.inspection import Inspection
from anesurgery.placement.score import Score, placed
from anesurgery.placement.target import Target


def scored(program: Program, target: Target) -> tuple[Score, list[Inspection]]:
    """The standing of a program, and the inspection of each of its functions."""
    inspections = placed(program, target, advice=True)
    return Score.of(inspections), inspections
