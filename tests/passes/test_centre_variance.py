"""A variance as a difference of means: spellings, numbers far from 0, refusals, a wrong version."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from anesurgery.errors import ProofError
from anesurgery.interpret import run
from anesurgery.mil import Program, Var, mb
from anesurgery.passes.centre_variance import CentreVariance
from anesurgery.rewriting.builder import Builder
from anesurgery.rewriting.pattern import Match
from anesurgery.testing import apply_pass, assert_refuses, assert_same_numbers

Square = Callable[[Var], Var]


def built(
    square: Square, axes: tuple[int, ...] = (-1,), keep: bool = True, other: tuple[int, ...] = ()
) -> Program:
    @mb.program(input_specs=[mb.TensorSpec((2, 3, 16))])
    def program(x: Var) -> Var:
        first = mb.reduce_mean(x=square(x), axes=list(axes), keep_dims=keep)
        mean = mb.reduce_mean(x=x, axes=list(other or axes), keep_dims=keep)
        return mb.add(x=mb.sub(x=first, y=square(mean)), y=np.float32(0), name="y")

    return program


SQUARES: dict[str, Square] = {
    "square": lambda x: mb.square(x=x),
    "product": lambda x: mb.mul(x=x, y=x),
    "power": lambda x: mb.pow(x=x, y=np.float32(2)),
}


@pytest.mark.one_of(5)
@pytest.mark.parametrize("square", SQUARES.values(), ids=SQUARES)
@pytest.mark.parametrize(("axes", "keep"), [((-1,), True), ((1, 2), False)])
def test_every_spelling(square: Square, axes: tuple[int, ...], keep: bool) -> None:
    program = built(square, axes, keep)
    after, session = apply_pass(CentreVariance(), program)
    assert len(session.changes) == 1
    assert_same_numbers(program, after, rtol=1e-5)


def test_far_from_0_the_variance_is_right() -> None:
    program = built(SQUARES["square"])
    after, _ = apply_pass(CentreVariance(), program)
    x = (3000 + np.random.default_rng(0).standard_normal((2, 3, 16))).astype(np.float32)
    (old,), (new,) = (run(p, {"x": x}).values() for p in (program, after))
    wanted = x.astype(np.float64).var(-1, keepdims=True)
    assert np.allclose(new, wanted, rtol=1e-3)
    assert not np.allclose(old, wanted, rtol=1e-2)


def test_refuses_means_over_other_axes() -> None:
    assert_refuses(CentreVariance(), built(SQUARES["square"], (-1,), True, (1,)), "the means are over")


class _Wrong(CentreVariance):
    name = "wrong_variance"

    def rewrite(self, mb: Builder, m: Match) -> Var:
        """Forgets to take the mean away."""
        return m.first.outputs[0]


def test_a_wrong_version_is_caught() -> None:
    with pytest.raises(ProofError):
        apply_pass(_Wrong(), built(SQUARES["square"]))
