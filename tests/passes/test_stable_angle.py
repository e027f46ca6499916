"""Angles of quotients: torch's and other forms, points on the axes, what is left alone, a wrong version."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
from pass_cases import rewrites, table

import anesurgery as ane
from anesurgery.interpret import run
from anesurgery.mil import Array, Program, Var, mb, types
from anesurgery.passes.stable_angle import StableAngle
from anesurgery.testing import apply_pass


def cast(v: Var) -> Var:
    return mb.cast(x=v, dtype="fp32")


def torch_form(y: Var, x: Var) -> Var:
    """As coremltools 9 converts `torch.atan2`, constants folded."""
    both = mb.logical_and
    above, below = mb.greater(x=y, y=0.0), mb.less(x=y, y=0.0)
    left, middle = mb.less(x=x, y=0.0), mb.equal(x=x, y=0.0)
    upper, lower = cast(both(x=above, y=middle)), cast(both(x=below, y=middle))
    near = cast(both(x=mb.greater(x=x, y=-1e-8), y=mb.less(x=x, y=1e-8)))
    value = mb.atan(x=mb.real_div(x=y, y=mb.add(x=x, y=mb.mul(x=near, y=2e-8))))
    value = mb.add(x=value, y=mb.mul(x=cast(both(x=above, y=left)), y=math.pi))
    value = mb.sub(x=value, y=mb.mul(x=cast(both(x=below, y=left)), y=math.pi))
    value = mb.add(x=mb.mul(x=value, y=mb.sub(x=1.0, y=upper)), y=mb.mul(x=upper, y=math.pi / 2))
    return mb.add(x=mb.mul(x=value, y=mb.sub(x=1.0, y=lower)), y=mb.mul(x=lower, y=-math.pi / 2), name="t")


def by_select(y: Var, x: Var) -> Var:
    """By conditions."""
    turned = mb.select(cond=mb.less(x=y, y=0.0), a=-math.pi, b=math.pi)
    return mb.add(x=mb.atan(x=mb.real_div(x=y, y=x)), y=mb.select(cond=mb.less(x=x, y=0.0), a=turned, b=0.0))


def with_numbers_first(y: Var, x: Var) -> Var:
    """As Core AI writes it: a comparison and a difference may begin with the number."""
    behind = mb.mul(x=cast(mb.greater(x=0.0, y=x)), y=math.pi)
    turned = mb.sub(x=0.0, y=behind)
    above = mb.less_equal(x=0.0, y=y)
    return mb.add(x=mb.atan(x=mb.real_div(x=y, y=x)), y=mb.select(cond=above, a=behind, b=turned))


def bare(y: Var, x: Var) -> Var:
    """Two quadrants."""
    return mb.atan(x=mb.real_div(x=y, y=x))


def built(form: Callable[[Var, Var], Var], after: float = 1.0) -> Program:
    return mb.program(input_specs=[mb.TensorSpec((2, 8)), mb.TensorSpec((2, 8))])(
        lambda y, x: mb.mul(x=form(y, x), y=np.float32(after), name="out")
    )


def test_points_on_the_axes_are_those_of_atan2() -> None:
    after, _ = apply_pass(StableAngle(), built(torch_form))
    points = [(0, 0), (0, 2), (0, -2), (3, 0), (-3, 0), (1e-12, -1), (2, 2), (-2, -2)] * 2
    y, x = np.array(points, np.float32).T.reshape(2, 2, 8)
    for arithmetic in ("fp32", "fp16"):
        (value,) = run(after, {"y": y, "x": x}, precision=arithmetic).values()
        assert np.abs(value - np.arctan2(y, x)).max() < 2e-3


SIGNS = (1.0, 1e-5, 0.0, -0.0, -1e-5, -1.0, 6e4, -6e4)
"""Of fp16, 1e-5 is a subnormal; 6e4 has a subnormal as its reciprocal."""


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize(
    ("form", "exact"),
    [
        (bare, lambda y, x: np.arctan(y / x)),
        (torch_form, lambda y, x: np.arctan2(y, x)),
        (by_select, lambda y, x: np.arctan2(y, x)),
        (with_numbers_first, lambda y, x: np.arctan2(y, x)),
    ],
)
def test_signs_of_zeros_are_kept(form: Callable[..., Var], exact: Callable[..., Array], precision: str) -> None:
    """A small negative number that fp16 rounds to -0 keeps its quadrant; 0 over 0 is any angle."""
    grid = np.array([(y, x) for y in SIGNS for x in SIGNS], np.float32)
    after, _ = apply_pass(StableAngle(), built(form))
    for points in grid.reshape(-1, 16, 2):
        y, x = points.T.reshape(2, 2, 8)
        (value,) = run(after, {"y": y, "x": x}, precision=precision).values()
        with np.errstate(divide="ignore", invalid="ignore"):
            apart = np.abs(value - exact(y.astype(np.float64), x.astype(np.float64)))
        assert apart[(y != 0) | (x != 0)].max(initial=0) < 2e-3


def test_an_angle_with_numbers_first_is_inspected() -> None:
    """The wrong version compares a number with a tensor, and ends the inspection in a TypeError."""
    rules = {finding.rule for finding in ane.inspect(built(with_numbers_first)).all_findings}
    assert "fp32" in rules
    assert "lost-branch" not in rules  # at y = 0 and x < 0 it gives pi


def test_a_divisor_that_is_never_0_and_another_function_stay() -> None:
    safe = built(lambda y, x: bare(y, mb.add(x=mb.exp(x=x), y=np.float32(1))))
    other = built(lambda y, x: mb.add(x=bare(y, x), y=mb.sign(x=x)))
    assert not apply_pass(StableAngle(), safe)[1].changes
    after, session = apply_pass(StableAngle(), other)
    assert len(session.changes) == 1  # the arc tangent alone
    assert "sign" in [op.op_type for op in after.functions["main"].operations]


@pytest.mark.parametrize("limit", [0.02, 5.3, 50.0, 2e4])
def test_what_is_an_angle_up_to_a_constant_stays(limit: float) -> None:
    """Beyond it the result is another number, whatever the constant is."""

    def limited(y: Var, x: Var) -> Var:
        beyond = mb.greater(x=mb.abs(x=y), y=np.float32(limit))
        return mb.select(cond=beyond, a=mb.mul(x=x, y=np.float32(0)), b=bare(y, x))

    after, _ = apply_pass(StableAngle(), built(limited))
    y, x = np.full((2, 8), 1.5 * limit, np.float32), np.ones((2, 8), np.float32)
    (value,) = run(after, {"y": y, "x": x}).values()
    assert not value.any()


def test_halves_keep_the_sign_of_a_small_angle() -> None:
    program = mb.program(
        input_specs=[mb.TensorSpec((1, 2), dtype=types.fp16), mb.TensorSpec((1, 2), dtype=types.fp16)]
    )(lambda y, x: mb.atan(x=mb.real_div(x=y, y=x), name="out"))

    after, _ = apply_pass(StableAngle(), program)
    y, x = np.array([[-1e-4, 0]], np.float16), np.array([[8, 0]], np.float16)
    (value,) = run(after, {"y": y, "x": x}, precision="fp16").values()
    assert value[0, 0] < 0
    assert value[0, 1] == 0


def test_what_four_quadrants_are_not_compared_on_is_said() -> None:
    _, session = apply_pass(StableAngle(), built(torch_form))
    proof = session.changes[0].proof
    assert proof is not None
    assert proof.untried == ("zeros",)


test_cases, test_surroundings = table(
    StableAngle(), *(rewrites(built, form, 1 / math.pi, rtol=1e-05) for form in [torch_form, by_select, bare])
)
