"""Values behind norms are reckoned by their root mean square; others have no end."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import anesurgery as ane
from anesurgery.interpret import run
from anesurgery.mil import Program, Var, ct, mb, types
from anesurgery.placement.rules.behind_norms import FAR, far_end
from anesurgery.semantics.intervals import magnitude

HALF = np.float16
CHANNELS, FRAMES = 16, 512
RNG = np.random.default_rng(0)
WEIGHT = RNG.standard_normal((CHANNELS, CHANNELS, 1)).astype(HALF)
SLOPES = np.full(CHANNELS, 1.5, HALF)


def norm(x: Any, over: tuple[int, ...] = (1, 2)) -> Any:
    """Over everything, written out."""
    left = mb.sub(x=x, y=mb.reduce_mean(x=x, axes=over, keep_dims=True))
    mean = mb.reduce_mean(x=mb.square(x=left), axes=over, keep_dims=True)
    return mb.real_div(x=left, y=mb.sqrt(x=mb.add(x=mean, y=HALF(1e-5))))


def conv(x: Any, gain: float = 1.0) -> Any:
    return mb.conv(x=x, weight=WEIGHT * HALF(gain), bias=np.full(CHANNELS, 0.5, HALF))


def program(body: Callable[[Any], Any]) -> Program:
    specs = [mb.TensorSpec((1, CHANNELS, FRAMES), dtype=types.fp16)]
    built: Program = mb.program(input_specs=specs, opset_version=ct.target.iOS17)(lambda x: body(x))
    return built


def result(model: Program) -> Var:
    return model.functions["main"].outputs[0]


BODIES: dict[str, Callable[[Any], Any]] = {
    "a norm": norm,
    "its products": lambda x: conv(norm(x)),
    "an activation that grows": lambda x: mb.prelu(x=conv(norm(x)), alpha=SLOPES),
    "a residual": lambda x: (lambda y: mb.add(x=y, y=conv(mb.relu(x=y))))(conv(norm(x))),
    "a factor and an offset": lambda x: mb.add(x=mb.mul(x=norm(x), y=HALF(3)), y=HALF(-2)),
    "a factor below": lambda x: mb.real_div(x=norm(x), y=HALF(0.25)),
    "without its mean": lambda x: (lambda y: mb.sub(x=y, y=mb.reduce_mean(x=y, axes=[1], keep_dims=True)))(
        conv(norm(x))
    ),
    "moved": lambda x: mb.transpose(x=conv(norm(x)), perm=[0, 2, 1]),
    "a layer norm": lambda x: mb.layer_norm(
        x=x, axes=[1, 2], gamma=np.full((CHANNELS, FRAMES), 2, HALF), epsilon=HALF(1e-5)
    ),
}


@pytest.mark.parametrize("name", BODIES)
def test_no_root_mean_square_of_drawn_inputs_is_larger(name: str) -> None:
    model = program(BODIES[name])
    most = far_end(result(model)) / FAR
    assert math.isfinite(most)
    for scale in (1.0, 30.0):
        x = RNG.standard_normal((1, CHANNELS, FRAMES)).astype(HALF) * HALF(scale)
        (value,) = run(model, {"x": x}, precision="fp32").values()
        assert most / 8 < np.sqrt(np.mean(np.square(value, dtype=np.float64))) <= most * 1.001


@pytest.mark.parametrize(
    "body",
    [
        conv,
        lambda x: mb.mul(x=norm(x), y=x),
        lambda x: mb.sub(x=norm(x), y=mb.reduce_mean(x=x, axes=[1], keep_dims=True)),
        lambda x: mb.real_div(
            x=x, y=mb.sqrt(x=mb.reduce_mean(x=mb.square(x=norm(x)), axes=[1], keep_dims=True))
        ),
        lambda x: mb.square(x=norm(x)),
        lambda x: mb.clip(x=norm(x), alpha=HALF(900), beta=HALF(1000)),
    ],
)
def test_nothing_is_said_of_others(body: Callable[[Any], Any]) -> None:
    assert math.isinf(far_end(result(program(body))))


def test_a_mean_of_squares_that_is_made_small_divides_by_less() -> None:
    """The wrong version takes any root of squares for the length."""

    def body(x: Any) -> Any:
        mean = mb.mul(x=mb.reduce_mean(x=mb.square(x=x), axes=[1, 2], keep_dims=True), y=HALF(1e-3))
        return mb.real_div(x=x, y=mb.sqrt(x=mean), name="y")

    assert math.isinf(far_end(result(program(body))))


@pytest.mark.parametrize(("gain", "speaks"), [(0.2, 1), (30.0, 2)])
def test_a_norm_behind_a_norm_speaks_where_weights_are_large(gain: float, speaks: int) -> None:
    """The first norm reads an input; the second one what a product makes of its result."""
    model = program(lambda x: norm(conv(mb.transpose(x=norm(x), perm=[0, 1, 2]), gain)))
    rules = [f.rule for f in ane.inspect(model, target="M1/macOS 14").all_findings if f.kind == "numeric"]
    assert rules.count("num-root") == speaks


def test_a_bound_that_is_nearer_counts() -> None:
    model = program(lambda x: mb.tanh(x=norm(x)))
    assert magnitude(result(model)) == 1.0 < far_end(result(model))
