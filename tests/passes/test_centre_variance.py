"""A variance as a difference of means: spellings, numbers far from 0, refusals, a wrong version."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from pass_cases import refuses, rewrites, table

from anesurgery.interpret import run
from anesurgery.mil import Program, Var, mb
from anesurgery.passes.centre_variance import CentreVariance
from anesurgery.testing import apply_pass

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


def test_far_from_0_the_variance_is_right() -> None:
    program = built(SQUARES["square"])
    after, _ = apply_pass(CentreVariance(), program)
    x = (3000 + np.random.default_rng(0).standard_normal((2, 3, 16))).astype(np.float32)
    (old,), (new,) = (run(p, {"x": x}).values() for p in (program, after))
    wanted = x.astype(np.float64).var(-1, keepdims=True)
    assert np.allclose(new, wanted, rtol=1e-3)
    assert not np.allclose(old, wanted, rtol=1e-2)


test_cases, test_surroundings = table(
    CentreVariance(),
    *(
        rewrites(built, square, axes, keep, rtol=1e-05)
        for axes, keep in [((-1,), True), ((1, 2), False)]
        for square in SQUARES.values()
    ),
    refuses("the means are over", built, SQUARES["square"], (-1,), True, (1,)),
)
