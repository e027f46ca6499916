"""Means of very many values: axes kept or not, refusals, a wrong version."""

from __future__ import annotations

import pytest

from anesurgery.errors import PassError, ProofError
from anesurgery.mil import Program, Var, mb, types
from anesurgery.passes.mean_of_means import MeanOfMeans
from anesurgery.rewriting.builder import Builder
from anesurgery.rewriting.pattern import Match
from anesurgery.testing import apply_pass, assert_refuses, assert_same_numbers


def built(shape: tuple[int, ...] = (1, 512, 512), axes: tuple[int, ...] = (1, 2), keep: bool = True) -> Program:
    @mb.program(input_specs=[mb.TensorSpec(shape, dtype=types.fp16)])
    def program(x: Var) -> Var:
        return mb.reduce_mean(x=x, axes=list(axes), keep_dims=keep, name="y")

    return program


@pytest.mark.one_of(3)
@pytest.mark.parametrize(("axes", "keep"), [((1, 2), True), ((-2, -1), False), ((0, 1, 2), False)])
def test_axis_by_axis(axes: tuple[int, ...], keep: bool) -> None:
    program = built(axes=axes, keep=keep)
    after, session = apply_pass(MeanOfMeans(), program)
    assert len(session.changes) == 1
    assert_same_numbers(program, after, rtol=1e-4)


def test_refuses_one_axis() -> None:
    assert_refuses(MeanOfMeans(), built((1, 1, 1 << 18)), "lie along one axis")


def test_few_values_stay() -> None:
    _, session = apply_pass(MeanOfMeans(), built((1, 64, 64)))
    assert not session.changes


class _Wrong(MeanOfMeans):
    name = "wrong_means"

    def rewrite(self, mb: Builder, m: Match) -> Var:
        """Leaves the last axis alone."""
        made: Var = mb.reduce_mean(x=m.x, axes=m.axes[:-1], keep_dims=True)
        return made


def test_a_wrong_version_is_caught() -> None:
    with pytest.raises((ProofError, PassError)):
        apply_pass(_Wrong(), built())
