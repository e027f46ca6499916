"""Values behind norms are reckoned by what a click in silence makes of them; others have no end."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import anesurgery as ane
from anesurgery.interpret import run
from anesurgery.mil import Program, Var, ct, mb, types
from anesurgery.placement.rules.numeric import magnitude_behind_norms
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


def program(body: Callable[[Any], Any], frames: int = FRAMES) -> Program:
    specs = [mb.TensorSpec((1, CHANNELS, frames), dtype=types.fp16)]
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
    "by its length, made a mean": lambda x: mb.real_div(
        x=x,
        y=mb.mul(x=mb.reduce_l2_norm(x=x, axes=[1, 2], keep_dims=True), y=HALF((CHANNELS * FRAMES) ** -0.5)),
    ),
    "moved": lambda x: mb.transpose(x=conv(norm(x)), perm=[0, 2, 1]),
    "a layer norm": lambda x: mb.layer_norm(
        x=x, axes=[1, 2], gamma=np.full((CHANNELS, FRAMES), 2, HALF), epsilon=HALF(1e-5)
    ),
}


def click(frames: int) -> Any:
    """Noise in one place, and next to nothing elsewhere."""
    x = RNG.standard_normal((1, CHANNELS, frames)) * 1e-4
    x[..., frames // 3] = RNG.standard_normal(CHANNELS) * 30
    return x.astype(HALF)


@pytest.mark.parametrize("name", BODIES)
def test_no_click_goes_further_and_some_come_near(name: str) -> None:
    model = program(BODIES[name])
    most = magnitude_behind_norms(result(model))
    for x in (click(FRAMES), RNG.standard_normal((1, CHANNELS, FRAMES)).astype(HALF)):
        (value,) = run(model, {"x": x}, precision="fp32").values()
        assert np.abs(value).max() <= most
    assert np.abs(run(model, {"x": click(FRAMES)}, precision="fp32")[result(model).name]).max() > most / 16


LONG = 16384


def grouped(x: Any) -> Any:
    """The norm as a converter writes that of one group, with the channels beside the frames."""
    parts = mb.reshape(x=x, shape=(1, 1, CHANNELS, LONG))
    return mb.reshape(x=norm(parts, (2, 3)), shape=(1, CHANNELS, LONG))


@pytest.mark.parametrize("form", [norm, grouped])
def test_a_click_in_a_long_silence_goes_beyond_64_root_mean_squares(form: Callable[[Any], Any]) -> None:
    """The wrong version takes 64 for the end of all norms."""
    model = program(form, LONG)
    (value,) = run(model, {"x": click(LONG)}, precision="fp32").values()
    assert 64 < np.abs(value).max() <= magnitude_behind_norms(result(model)) == 4 * math.sqrt(LONG)


@pytest.mark.parametrize("body", [norm, lambda x: norm(x, (2,))])
def test_a_short_norm_says_what_is_exact(body: Callable[[Any], Any]) -> None:
    """Of up to 4,096 numbers none is further out than 64, whatever comes in."""
    assert magnitude_behind_norms(result(program(body, 256))) == 64.0


def test_what_stands_beside_is_not_multiplied() -> None:
    """A bias adds to the end of a product as it is: the wrong version takes it for a root mean square."""
    shifted = program(lambda x: mb.add(x=norm(x), y=HALF(7)))
    assert magnitude_behind_norms(result(shifted)) == magnitude_behind_norms(result(program(norm))) + 7


@pytest.mark.parametrize(
    "body",
    [
        conv,
        lambda x: mb.mul(x=norm(x), y=x),
        lambda x: mb.sub(x=norm(x), y=mb.reduce_mean(x=x, axes=[1], keep_dims=True)),
        lambda x: mb.real_div(
            x=x, y=mb.sqrt(x=mb.reduce_mean(x=mb.square(x=norm(x)), axes=[1], keep_dims=True))
        ),
    ],
)
def test_nothing_is_said_of_others(body: Callable[[Any], Any]) -> None:
    assert math.isinf(magnitude_behind_norms(result(program(body))))


def test_a_mean_of_squares_that_is_made_small_divides_by_less() -> None:
    """The wrong version takes any root of squares for the length."""

    def body(x: Any) -> Any:
        mean = mb.mul(x=mb.reduce_mean(x=mb.square(x=x), axes=[1, 2], keep_dims=True), y=HALF(1e-3))
        return mb.real_div(x=x, y=mb.sqrt(x=mean), name="y")

    assert math.isinf(magnitude_behind_norms(result(program(body))))


@pytest.mark.parametrize(("gain", "speaks"), [(0.2, 1), (30.0, 2)])
def test_a_norm_behind_a_norm_speaks_where_weights_are_large(gain: float, speaks: int) -> None:
    """The first norm reads an input; the second one what a product makes of its result."""
    model = program(lambda x: norm(conv(mb.transpose(x=norm(x), perm=[0, 1, 2]), gain)))
    rules = [f.rule for f in ane.inspect(model, target="M1/macOS 14").all_findings if f.kind == "numeric"]
    assert rules.count("num-root") == speaks


def test_powers_and_clips_of_norms_have_an_end_too() -> None:
    end = magnitude_behind_norms(result(program(norm)))
    assert math.isclose(magnitude_behind_norms(result(program(lambda x: mb.square(x=norm(x))))), end**2)
    assert (
        magnitude_behind_norms(result(program(lambda x: mb.clip(x=norm(x), alpha=HALF(900), beta=HALF(1000)))))
        == 900
    )


def test_what_is_bounded_has_that_end() -> None:
    model = program(lambda x: mb.tanh(x=norm(x)))
    assert magnitude(result(model)) == magnitude_behind_norms(result(model)) == 1.0
