"""Reshapes and transposes in a row: any of them, windows as coremltools writes them, and those that stay."""

from __future__ import annotations

import math

import coremltools as ct
import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pass_cases import ignores, table

import anesurgery as ane
from anesurgery.mil import Program, Var, mb, quiet_host, walk_ops
from anesurgery.passes.merge_moves import MergeMoves
from anesurgery.testing import apply_pass, assert_refuses, assert_same_numbers

LENGTHS = (2, 3, 2, 2, 5)
"""Their products in any grouping are the axes that are drawn."""


def transposes(program: Program) -> int:
    return sum(op.op_type == "transpose" for op in walk_ops(program))


@st.composite
def shapes(draw: st.DrawFn) -> list[int]:
    """A shape of at most five axes, some of length 1."""
    cuts = sorted(draw(st.sets(st.integers(1, 4), max_size=3)))
    parts = np.split(np.array(draw(st.permutations(LENGTHS))), cuts)
    return draw(st.permutations([*map(math.prod, parts), *[1] * draw(st.integers(0, 5 - len(parts)))]))


@given(st.lists(st.one_of(shapes(), st.integers(0, 119)), min_size=3, max_size=8), st.booleans())
@settings(max_examples=40, deadline=None)
def test_the_same_numbers_and_no_more_transposes(steps: list[list[int] | int], read: bool) -> None:
    """A number chooses one of the orders of the axes."""

    @mb.program(input_specs=[mb.TensorSpec((6, 20))])
    def program(x: Var) -> Var:
        for step in steps:
            if isinstance(step, list):
                x = mb.reshape(x=x, shape=step)
            else:
                x = mb.transpose(x=x, perm=[int(a) for a in np.random.default_rng(step).permutation(x.rank)])
        return mb.relu(x=x) if read else x

    after, session = apply_pass(MergeMoves(), program)
    assert (transposes(after) < transposes(program)) == bool(session.changes)
    assert_same_numbers(program, after, rtol=0)


def converted(shape: tuple[int, ...], split: list[int], order: list[int], last: list[int]) -> Program:
    """A module that splits, transposes and joins axes, converted by coremltools."""

    class Moves(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.relu(x).view(split).permute(order).reshape(last)

    with quiet_host():
        traced = torch.jit.trace(Moves(), torch.zeros(shape))
        model = ct.convert(traced, inputs=[ct.TensorType("x", shape)], skip_model_load=True)
    program: Program = ane.load(model).program
    return program


def test_windows_of_one_image_are_one_transpose() -> None:
    program = converted((1, 6, 8, 8), [1, 6, 4, 2, 4, 2], [0, 2, 4, 1, 3, 5], [16, 6, 2, 2])
    assert transposes(program) > 1, "coremltools writes fewer now: the pass, and its rule, may go"
    after, _ = apply_pass(MergeMoves(), program)
    assert transposes(after) == 1
    assert_same_numbers(program, after, rtol=0)
    found = [f.remedy for row in ane.inspect(program, target="M4").ops for f in row.findings]
    assert "merge_moves" in found


def test_windows_of_a_video_take_two() -> None:
    """Seven axes move: they cannot stand beside each other in a tensor of five."""
    program = converted((1, 4, 4, 4, 6), [1, 2, 2, 2, 2, 2, 2, 6], [0, 1, 3, 5, 2, 4, 6, 7], [8, 8, 6])
    after, _ = apply_pass(MergeMoves(), program)
    assert transposes(after) == 2
    assert_same_numbers(program, after, rtol=0)
    assert_refuses(MergeMoves(), after, "2 transposes would be needed, and 2 are there")


def read_twice() -> Program:
    @mb.program(input_specs=[mb.TensorSpec((2, 3, 4))])
    def program(x: Var) -> tuple[Var, Var]:
        once = mb.transpose(x=x, perm=[1, 0, 2])
        return mb.relu(x=once), mb.transpose(x=once, perm=[1, 0, 2])

    return program


def torn() -> Program:
    """Rows of 4 that are read as columns of 3."""

    @mb.program(input_specs=[mb.TensorSpec((3, 4))])
    def program(x: Var) -> Var:
        across = mb.reshape(x=mb.transpose(x=x, perm=[1, 0]), shape=[2, 6])
        back = mb.transpose(x=across, perm=[1, 0])
        return mb.transpose(x=mb.reshape(x=back, shape=[3, 4]), perm=[1, 0])

    return program


test_rows, _ = table(MergeMoves(), ignores(read_twice), ignores(torn))
