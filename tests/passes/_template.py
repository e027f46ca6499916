"""What the sketch in the pass does not show: variants, refusals, a real model.

(A template: copy it to tests/passes/test_<pass>.py.)
"""

from __future__ import annotations

import pytest

from anesurgery.mil import Program, Var, mb
from anesurgery.passes._template import Template
from anesurgery.testing import apply_pass, assert_refuses, assert_same_numbers


def twice(*shape: int) -> Program:
    @mb.program(input_specs=[mb.TensorSpec(shape)])
    def program(x: Var) -> Var:
        return mb.relu(x=mb.relu(x=x, name="r"), name="y")

    return program


@pytest.mark.parametrize("shape", [(2,), (2, 3), (1, 2, 3, 4)])
def test_the_numbers_stay(shape: tuple[int, ...]) -> None:
    program = twice(*shape)
    after, session = apply_pass(Template(), program)
    assert session.changes
    assert_same_numbers(program, after)


def test_refuses_too_many_axes() -> None:
    assert_refuses(Template(most_axes=1), twice(2, 3), "%x has 2 axes, above 1")
