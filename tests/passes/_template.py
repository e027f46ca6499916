"""What the sketch in the pass does not show: its forms, its refusals.

(A template: copy it to tests/passes/test_<pass>.py. `pytest --write-results` stores what the rows become.)
"""

from __future__ import annotations

from pass_cases import refuses, rewrites, table

from anesurgery.mil import Program, mb
from anesurgery.passes._template import Template


def twice(*shape: int) -> Program:
    return mb.program(input_specs=[mb.TensorSpec(shape)])(lambda x: mb.relu(x=mb.relu(x=x, name="r"), name="y"))


test_cases, test_surroundings = table(
    Template(),
    rewrites(twice, 2),
    rewrites(twice, 1, 2, 3, 4),
    refuses("%x has 2 axes, above 1", twice, 2, 3, step=Template(most_axes=1)),
)
