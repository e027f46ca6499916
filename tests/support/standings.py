"""Where a program stands on a target, with its inspections."""

from __future__ import annotations

from anesurgery.mil import Program
from anesurgery.placement.inspection import Inspection
from anesurgery.placement.standing import Standing, placed
from anesurgery.placement.target import Target


def stand(program: Program, target: Target) -> tuple[Standing, list[Inspection]]:
    """The standing of a program, and the inspection of each of its functions."""
    inspections = placed(program, target, advice=True)
    return Standing.of(inspections), inspections
