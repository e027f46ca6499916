"""Reshapes and transposes in a row: any of them, windows as coremltools writes them, and those that stay."""

from __future__ import annotations

import math

import coremltools as ct
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from pass_cases import ignores, table

import anesurgery as ane
from anesurgery.mil import Program, Var, mb, types, walk_ops
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


WINDOWS = ([1, 1, 1, 384], [1, 6, 4, 16], [4, 12, 4, 2], [16, 1, 6, 4], [96, 1, 2, 2], [16, 6, 2, 2])
"""The shapes through which coremltools brings an image of 6x8x8 to windows of 2x2."""


def swapped(shape: tuple[int, ...], *shapes: list[int]) -> Program:
    """Reshapes, each but the last with a swap of its two inner axes."""

    @mb.program(input_specs=[mb.TensorSpec(shape, dtype=types.fp16)], opset_version=ct.target.iOS17)
    def program(x: Var) -> Var:
        x = mb.relu(x=x)
        for inner in shapes[:-1]:
            x = mb.transpose(x=mb.reshape(x=x, shape=inner), perm=[0, 2, 1, 3])
        return mb.reshape(x=x, shape=shapes[-1])

    return program


def test_windows_of_one_image_are_one_transpose() -> None:
    """The wrong version: the digits of the axes are joined in the order of the result."""
    program = swapped((1, 6, 8, 8), *WINDOWS)
    after, _ = apply_pass(MergeMoves(), program)
    assert transposes(after) == 1
    assert_same_numbers(program, after, rtol=0)
    found = [(f.rule, f.remedy) for f in ane.inspect(program, target="M4").all_findings]
    assert ("moves-in-a-row", "merge_moves") in found


def test_a_long_row_between_names_the_pass() -> None:
    """An axis of 32768 is too long for an A15; the row is only a step of the moves."""
    row, rest = [1, 1, 1, 32768], [[1, 8, 64, 64], [16, 32, 2, 32], [4, 8, 8, 128]]
    found = ane.inspect(swapped((1, 8, 64, 64), row, *rest), target="iPhone 13").all_findings
    assert {f.remedy for f in found if f.rule == "axis"} == {"merge_moves"}


def test_seven_axes_that_all_move_take_two() -> None:
    """They cannot stand beside each other in a tensor of five axes."""
    shapes = [[1, 2, 2, 32], [1, 2, 4, 16], [4, 2, 2, 8], [4, 4, 2, 4], [2, 8, 4, 2], [64, 2, 1, 1]]
    program = swapped((2, 64), *shapes)
    after, _ = apply_pass(MergeMoves(), program)
    assert transposes(after) < transposes(program)
    assert_same_numbers(program, after, rtol=0)
    assert_refuses(MergeMoves(), after, f"{transposes(after)} transposes would be needed")


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
