"""Norms by the root mean square: spellings, numbers that overflow without it, refusals, wrong versions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from closeness import assert_close
from pass_cases import refuses, rewrites, table

from anesurgery.errors import PassError
from anesurgery.interpret import run
from anesurgery.mil import Program, Var, ct, mb, types
from anesurgery.passes.rms_norm import RmsNorm
from anesurgery.testing import apply_pass

HALF = np.float16
Norm = Callable[[Var], Var]


def built(norm: Norm, shape: tuple[int, ...] = (1, 4, 16), dtype: Any = types.fp16) -> Program:
    return mb.program(input_specs=[mb.TensorSpec(shape, dtype=dtype)], opset_version=ct.target.iOS17)(
        lambda x: mb.mul(x=norm(x), y=HALF(0.5)) if dtype is types.fp16 else norm(x)
    )


def mean(x: Var, axes: tuple[int, ...] = (-1,)) -> Var:
    return mb.reduce_mean(x=x, axes=list(axes), keep_dims=True)


def by_rsqrt(x: Var) -> Var:
    return mb.mul(x=mb.rsqrt(x=mb.add(x=HALF(1e-5), y=mean(mb.square(x=x)))), y=x)


def by_sqrt(x: Var) -> Var:
    return mb.real_div(x=x, y=mb.sqrt(x=mb.add(x=mean(mb.mul(x=x, y=x), (1,)), y=HALF(1e-4))))


def by_power(x: Var) -> Var:
    squares = mb.pow(x=x, y=HALF(2))
    return mb.mul(x=x, y=mb.pow(x=mb.add(x=mean(squares, (-1, -2)), y=HALF(1e-5)), y=HALF(-0.5)))


@pytest.mark.one_of(3)
@pytest.mark.parametrize("norm", [by_rsqrt, by_sqrt, by_power])
@pytest.mark.parametrize("size", [1e-3, 1.0, 60000.0])
def test_every_spelling_and_size(norm: Norm, size: float) -> None:
    """Against fp64: the old form gives zeros where squares overflow, the new one does not."""
    program = built(norm)
    after, session = apply_pass(RmsNorm(), program)
    assert len(session.changes) == 1
    x = (np.random.default_rng(0).uniform(-size, size, (1, 4, 16))).astype(HALF)
    exact = run(program, {"x": x}, precision="fp32")
    (wanted,), (found,) = exact.values(), run(after, {"x": x}, precision="fp16").values()
    assert_close(found, wanted, rtol=2e-3)
    if size > 1e4:
        (old,) = run(program, {"x": x}, precision="fp16").values()
        assert not np.any(np.asarray(old))


@pytest.mark.parametrize("width", [8, 64, 128, 512])
def test_the_epsilon_of_a_root_of_a_guarded_sum(width: int) -> None:
    """A converted rsqrt has 1e-12, which is 0 in fp16 when a narrow row is divided; 1e-6 is added before."""

    def converted(x: Var) -> Var:
        total = mb.add(x=mean(mb.square(x=x)), y=HALF(1e-6))
        return mb.mul(x=x, y=mb.rsqrt(x=total, epsilon=np.float32(1e-12)))

    after, session = apply_pass(RmsNorm(), built(converted, (1, 4, width)))
    assert len(session.changes) == 1
    x = np.random.default_rng(0).uniform(-6e4, 6e4, (1, 4, width)).astype(HALF)
    (found,) = run(after, {"x": x}, precision="fp16").values()
    wide = x.astype(np.float64)
    assert_close(found, wide / np.sqrt(np.mean(wide * wide, -1, keepdims=True)) / 2, rtol=4e-3)


def plain(x: Var) -> Var:
    return mb.mul(x=x, y=mb.rsqrt(x=mb.add(x=mean(mb.square(x=x)), y=np.float32(1e-5))))


def without_epsilon(x: Var) -> Var:
    return mb.mul(x=x, y=mb.rsqrt(x=mb.add(x=mean(mb.square(x=x)), y=HALF(0)), epsilon=HALF(0)))


def test_what_looks_similar_is_no_norm() -> None:
    """The mean of another value's squares; a mean without its axis; a root that multiplies."""

    def other(x: Var) -> Var:
        return mb.mul(x=x, y=mb.rsqrt(x=mb.add(x=mean(mb.square(x=mb.abs(x=x))), y=HALF(1e-5))))

    def times(x: Var) -> Var:
        return mb.mul(x=x, y=mb.sqrt(x=mb.add(x=mean(mb.square(x=x)), y=HALF(1e-5))))

    for norm in (other, times):
        assert not apply_pass(RmsNorm(), built(norm))[1].changes
    with pytest.raises(PassError, match="form='lp'"):
        RmsNorm(form="lp")


test_cases, test_surroundings = table(
    RmsNorm(),
    refuses("%x holds float32", built, plain, dtype=types.fp32),
    refuses("is at most 1: its squares do not overflow", built, lambda x: by_rsqrt(mb.tanh(x=x))),
    refuses("the epsilon is 0 in fp16", built, without_epsilon),
    refuses("over the axes (1, 2), not over one", built, by_power, step=RmsNorm(form="layer_norm")),
    rewrites(built, by_sqrt, step=RmsNorm(form="layer_norm"), rtol=1e-5),
)
