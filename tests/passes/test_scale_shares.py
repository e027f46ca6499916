"""Shares of many keys: their product with values is made of larger numbers; refusals, a wrong version."""

from __future__ import annotations

import pytest

from anesurgery.errors import ProofError
from anesurgery.mil import Program, Var, mb, types
from anesurgery.passes.scale_shares import ScaleShares
from anesurgery.rewriting.builder import Builder
from anesurgery.rewriting.pattern import Match
from anesurgery.testing import apply_pass, assert_refuses, assert_same_numbers


def built(keys: int = 2048, axis: int = -1, turned: bool = False) -> Program:
    values = (1, 4, keys) if turned else (1, keys, 4)
    specs = [mb.TensorSpec(shape, dtype=types.fp16) for shape in ((1, 2, keys), values)]

    @mb.program(input_specs=specs)
    def program(p: Var, v: Var) -> Var:
        return mb.matmul(x=mb.softmax(x=p, axis=axis), y=v, transpose_y=turned, name="y")

    return program


@pytest.mark.parametrize("turned", [False, True])
def test_the_numbers_stay(turned: bool) -> None:
    program = built(turned=turned)
    after, session = apply_pass(ScaleShares(), program)
    assert len(session.changes) == 1
    assert_same_numbers(program, after)


def test_refuses_few_keys_and_another_axis() -> None:
    assert_refuses(ScaleShares(), built(512), "512 keys, below 2048")
    assert_refuses(ScaleShares(), built(axis=1), "not over the axis that is summed")


class _Wrong(ScaleShares):
    name = "wrong_shares"

    def rewrite(self, mb: Builder, m: Match) -> Var:
        """Forgets to divide."""
        made: Var = mb.matmul(x=mb.mul(x=m.shares.outputs[0], y=64.0), y=m.v)
        return made


def test_a_wrong_version_is_caught() -> None:
    with pytest.raises(ProofError):
        apply_pass(_Wrong(), built())
