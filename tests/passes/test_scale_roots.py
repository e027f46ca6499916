"""Roots of sums of squares: of rows, of several values, with an epsilon; refusals, a wrong version."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from pass_cases import refuses, stays, table

from anesurgery import authoring as an
from anesurgery.interpret import run
from anesurgery.mil import Program, Var, mb, types
from anesurgery.passes.scale_roots import ScaleRoots
from anesurgery.rewriting.builder import Builder
from anesurgery.rewriting.pattern import Match
from anesurgery.testing import apply_pass

HALF = np.float16
Root = Callable[[Var], Var]


def parts(x: Var) -> list[Var]:
    found: list[Var] = mb.split(x=x, num_splits=3, axis=0)
    return found


def hypot(x: Var) -> Var:
    a, b, c = (mb.mul(x=v, y=v) for v in parts(x))
    return mb.sqrt(x=mb.add(x=mb.add(x=a, y=b), y=c), name="y")


def guarded(x: Var) -> Var:
    total = mb.reduce_sum(x=mb.square(x=x), axes=[1, 2], keep_dims=False)
    return mb.sqrt(x=mb.add(x=HALF(1e-4), y=total), name="y")


def mean_square(x: Var) -> Var:
    mean: Var = mb.reduce_mean(x=mb.square(x=x), axes=[-1], keep_dims=False)
    return mean


def clipped(x: Var, most: float) -> Var:
    capped: Var = mb.clip(x=mean_square(x), alpha=HALF(0.01), beta=HALF(most))
    return capped


ROOTS: dict[str, Root] = {
    "length": lambda x: mb.sqrt(x=mb.reduce_sum(x=mb.square(x=x), axes=[-1], keep_dims=True), name="y"),
    "mean": lambda x: mb.sqrt(x=mb.reduce_mean(x=mb.pow(x=x, y=HALF(2)), axes=[1], keep_dims=True), name="y"),
    "power": lambda x: mb.pow(x=mb.reduce_sum_square(x=x, axes=[2], keep_dims=True), y=HALF(0.5), name="y"),
    "magnitude": hypot,
    "guarded": guarded,
    "one square": lambda x: mb.sqrt(x=mb.add(x=mb.pow(x=x, y=HALF(2)), y=HALF(1)), name="y"),
    "reciprocal": lambda x: mb.rsqrt(x=mb.add(x=mean_square(x), y=HALF(0.1)), epsilon=HALF(0), name="y"),
    "unbiased": lambda x: mb.sqrt(x=mb.mul(x=mean_square(x), y=HALF(16 / 15)), name="y"),
}
LOGS: dict[str, Root] = {
    "of a power": lambda x: mb.log(x=mean_square(x), epsilon=HALF(0), name="y"),
    "of a power with a guard": lambda x: mb.log(
        x=mb.add(x=mean_square(x), y=HALF(0.1)), epsilon=HALF(0), name="y"
    ),
    "of no less than": lambda x: mb.log(
        x=mb.maximum(x=mean_square(x), y=HALF(0.01)), epsilon=HALF(0), name="y"
    ),
    "of a clipped power": lambda x: mb.log(x=clipped(x, np.inf), epsilon=HALF(0), name="y"),
}


def built(root: Root, known: bool = False) -> Program:
    return mb.program(input_specs=[mb.TensorSpec((3, 4, 16), dtype=types.fp16)])(
        lambda x: root(mb.tanh(x=x) if known else x)
    )


@pytest.mark.one_of(4)
@pytest.mark.parametrize("root", ROOTS.values(), ids=ROOTS)
@pytest.mark.parametrize("size", [0.0, 1e-2, 1.0, 3000.0])
def test_every_form_and_size(root: Root, size: float) -> None:
    program = built(root)
    after, session = apply_pass(ScaleRoots(), program)
    assert len(session.changes) == 1
    x = (np.random.default_rng(0).standard_normal((3, 4, 16)) * size).astype(HALF)
    (wanted,) = run(program, {"x": x}, precision="fp32").values()
    (found,) = run(after, {"x": x}, precision="fp16").values()
    assert np.allclose(found, wanted, rtol=3e-3, atol=1e-6)


@pytest.mark.one_of(2)
@pytest.mark.parametrize("root", LOGS.values(), ids=LOGS)
@pytest.mark.parametrize("size", [1e-2, 1.0, 3000.0])
def test_logarithms(root: Root, size: float) -> None:
    program = built(root)
    after, session = apply_pass(ScaleRoots(), program)
    assert len(session.changes) == 1
    x = (np.random.default_rng(0).standard_normal((3, 4, 16)) * size).astype(HALF)
    (wanted,) = run(program, {"x": x}, precision="fp32").values()
    (found,) = run(after, {"x": x}, precision="fp16").values()
    assert np.allclose(found, wanted, rtol=3e-3, atol=5e-3)


def lossless(step: ScaleRoots, root: Root, arithmetic: str) -> bool:
    """Are numbers whose squares fp16 holds left as they were, to the last bit?"""
    program = built(root)
    after, _ = apply_pass(step, program)
    x = np.random.default_rng(1).uniform(-1.5, 1.5, (3, 4, 16)).astype(HALF)
    old, new = (next(iter(run(p, {"x": x}, precision=arithmetic).values())) for p in (program, after))
    return bool(np.array_equal(old, new))


@pytest.mark.one_of(2)
@pytest.mark.parametrize("arithmetic", ["fp16", "ane"])
@pytest.mark.parametrize("name", ["length", "mean", "magnitude", "reciprocal", "unbiased"])
def test_nothing_is_lost_where_no_square_overflows(name: str, arithmetic: str) -> None:
    assert lossless(ScaleRoots(), ROOTS[name], arithmetic)


class _ByTheLargest(ScaleRoots):
    name = "by_the_largest"
    tolerance = an.Tolerance(1e-2)

    def rewrite(self, mb: Builder, m: Match) -> Var:
        """Right, but each number is rounded once more."""
        (x,), over = m.site.rows, {"axes": list(m.site.axes), "keep_dims": True}
        largest = mb.maximum(x=mb.reduce_max(x=mb.abs(x=x), **over), y=2.0**-12)
        squares = mb.square(x=mb.real_div(x=x, y=largest))
        root = mb.sqrt(x=mb.reduce_sum(x=squares, **over))
        product: Var = mb.mul(x=largest, y=root)
        return product


def test_a_division_by_the_largest_loses_digits() -> None:
    assert not lossless(_ByTheLargest(), ROOTS["length"], "fp16")


test_cases, test_surroundings = table(
    ScaleRoots(),
    stays(built, lambda x: mb.log(x=clipped(x, 9.0), epsilon=HALF(0))),
    *(refuses("do not overflow", built, root, known=True) for root in [ROOTS["length"], hypot]),
)
