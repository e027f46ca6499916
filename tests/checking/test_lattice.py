"""Maximum, minimum, clips and pooling are one operation on sets: the same is so bit for bit, and no more."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from both_sides import checked, side_by_side
from small_rewrites import small_rewrite

from anesurgery.checking.edit_sites import site_of
from anesurgery.checking.grades import Grade, SiteCheck, summary
from anesurgery.checking.proofs import prove
from anesurgery.errors import ProofError
from anesurgery.interpret.arithmetic import field
from anesurgery.interpret.arithmetic.extremes import Lattice
from anesurgery.interpret.arithmetic.field import PRIMES
from anesurgery.mil import Var, mb, types
from anesurgery.rewriting.pattern import var
from anesurgery.semantics import bounds
from anesurgery.surgery import apply

f = np.float32
TWO = ((types.fp32, (2, 4)), (types.fp32, (2, 4)))
IMAGE = ((types.fp32, (1, 2, 6, 6)),)
UP = float(np.nextafter(f(6), f(7)))
INFINITE = f(-np.inf)
Both = tuple[Callable[..., Any], Callable[..., Any], tuple[Any, ...]]


def clip(x: Var, low: float, high: float) -> Var:
    made: Var = mb.clip(x=x, alpha=f(low), beta=f(high))
    return made


def pool(x: Var, size: int = 3, step: int = 1, pad: Any = (0, 0, 0, 0), **how: Any) -> Var:
    made: Var = mb.max_pool(
        x=x, kernel_sizes=[size] * 2, strides=[step] * 2, pad_type="custom", pad=list(pad), **how
    )
    return made


def padded(x: Var, value: float, pad: Any = (1, 1, 1, 1)) -> Var:
    made: Var = mb.pad(x=x, pad=list(pad), mode="constant", constant_val=f(value))
    return made


def rows_then_columns(x: Var) -> Var:
    rows = mb.max_pool(x=x, kernel_sizes=[1, 3], strides=[1, 1], pad_type="valid")
    made: Var = mb.max_pool(x=rows, kernel_sizes=[3, 1], strides=[1, 1], pad_type="valid")
    return made


SAME: dict[str, Both] = {
    "relu": (lambda x: mb.relu(x=x), lambda x: mb.maximum(x=x, y=f(0)), ()),
    "relu6": (lambda x: mb.relu6(x=x), lambda x: mb.minimum(x=mb.relu(x=x), y=f(6)), ()),
    "threshold": (lambda x: mb.threshold(x=x, alpha=f(0.3)), lambda x: mb.maximum(x=f(0.3), y=x), ()),
    "clip of a clip": (lambda x: clip(clip(x, 0, 6), -1, 7), lambda x: mb.relu6(x=x), ()),
    "clips that overlap": (lambda x: clip(clip(x, -2, 3), 0, 6), lambda x: clip(x, 0, 3), ()),
    "clips apart": (lambda x: clip(clip(x, 0, 1), 2, 3), lambda x: clip(clip(x, -1, 0), 2, 5), ()),
    "minimum as a maximum": (
        lambda x, y: mb.minimum(x=x, y=y),
        lambda x, y: mb.mul(x=mb.maximum(x=mb.mul(x=x, y=f(-1)), y=mb.mul(x=y, y=f(-1))), y=f(-1)),
        TWO,
    ),
    "clip of the negative": (
        lambda x: mb.mul(x=clip(x, -1, 2), y=f(-1)),
        lambda x: clip(mb.mul(x=x, y=f(-1)), -2, 1),
        (),
    ),
    "order and repetition": (
        lambda x, y: mb.maximum(x=mb.maximum(x=x, y=y), y=x),
        lambda x, y: mb.maximum(x=y, y=x),
        TWO,
    ),
    "clip of a maximum": (
        lambda x, y: clip(mb.maximum(x=x, y=y), 0, 6),
        lambda x, y: mb.maximum(x=clip(x, 0, 6), y=mb.relu6(x=y)),
        TWO,
    ),
    "reduction": (
        lambda x: mb.reduce_max(x=x, axes=[0, 1]),
        lambda x: mb.reduce_max(x=mb.reduce_max(x=x, axes=[1]), axes=[0]),
        (),
    ),
    "pooling, then pooling": (lambda x: pool(pool(x, 2), 2), lambda x: pool(x, 3), IMAGE),
    "pooling by rows": (rows_then_columns, lambda x: pool(x, 3), IMAGE),
    "pooling as a reduction": (
        lambda x: pool(x, 6),
        lambda x: mb.reduce_max(x=x, axes=[2, 3], keep_dims=True),
        IMAGE,
    ),
    "padding with -inf": (lambda x: pool(x, 3, pad=[1] * 4), lambda x: pool(padded(x, -np.inf), 3), IMAGE),
    "relu6 after pooling": (lambda x: mb.relu6(x=pool(x)), lambda x: pool(mb.relu6(x=x)), IMAGE),
    "zeros for padding after relu": (
        lambda x: pool(mb.relu(x=x), 3, pad=[1] * 4),
        lambda x: mb.relu(x=pool(padded(x, 0), 3)),
        IMAGE,
    ),
}


@pytest.mark.parametrize("name", SAME)
def test_the_same_extreme_is_the_same_bit_for_bit(name: str) -> None:
    old, new, inputs = SAME[name]
    found = checked(old, new, *inputs)
    assert isinstance(found, SiteCheck), found
    assert found.grade is Grade.BITS, found


I32 = ((types.int32, (2, 4)),) * 2


def minus(x: Var) -> Any:
    """The negative, which of the least integer is itself."""
    return mb.mul(x=x, y=np.int32(-1))


WHOLE: dict[str, Both] = {
    "order and repetition": SAME["order and repetition"],
    "largest of three": (
        lambda x, y: mb.maximum(x=mb.maximum(x=x, y=np.int32(3)), y=y),
        lambda x, y: mb.maximum(x=mb.maximum(x=y, y=x), y=np.int32(3)),
        I32,
    ),
    "between two bounds, twice": (
        lambda x: mb.minimum(
            x=mb.maximum(x=mb.minimum(x=mb.maximum(x=x, y=np.int32(0)), y=np.int32(6)), y=np.int32(-1)),
            y=np.int32(7),
        ),
        lambda x: mb.minimum(x=mb.maximum(x=x, y=np.int32(0)), y=np.int32(6)),
        I32[:1],
    ),
    "the least in two steps": (
        lambda x: mb.reduce_min(x=x, axes=[0, 1]),
        lambda x: mb.reduce_min(x=mb.reduce_min(x=x, axes=[1]), axes=[0]),
        I32[:1],
    ),
    "the negative of an extreme": (
        lambda x, y: minus(mb.maximum(x=x, y=y)),
        lambda x, y: minus(mb.maximum(x=y, y=x)),
        I32,
    ),
    "an extreme of a sum that may wrap": (
        lambda x, y: mb.maximum(x=mb.add(x=x, y=y), y=x),
        lambda x, y: mb.maximum(x=x, y=mb.add(x=y, y=x)),
        I32,
    ),
}


@pytest.mark.parametrize("name", WHOLE)
def test_extremes_of_integers_are_the_same_bit_for_bit(name: str) -> None:
    old, new, inputs = WHOLE[name]
    found = checked(old, new, *I32[: len(inputs)])
    assert isinstance(found, SiteCheck), found
    assert found.grade is Grade.BITS, found


WRAPPED: dict[str, Both] = {
    "largest of the negatives": (
        lambda x, y: mb.maximum(x=minus(x), y=minus(y)),
        lambda x, y: minus(mb.minimum(x=x, y=y)),
        I32,
    ),
    "least of the negatives": (
        lambda x, y: mb.minimum(x=mb.sub(x=np.int32(0), y=x), y=minus(y)),
        lambda x, y: minus(mb.maximum(x=x, y=y)),
        I32,
    ),
    "reduction of the negatives": (
        lambda x: mb.reduce_max(x=minus(x), axes=[1]),
        lambda x: minus(mb.reduce_min(x=x, axes=[1])),
        I32[:1],
    ),
    "a bound of the negative": (
        lambda x: mb.maximum(x=minus(x), y=np.int32(-5)),
        lambda x: minus(mb.minimum(x=x, y=np.int32(5))),
        I32[:1],
    ),
    "negatives that are chosen": (
        lambda x, y: mb.maximum(x=mb.select(cond=mb.equal(x=x, y=y), a=minus(x), b=y), y=np.int32(0)),
        lambda x, y: minus(mb.minimum(x=mb.select(cond=mb.equal(x=x, y=y), a=x, b=minus(y)), y=np.int32(0))),
        I32,
    ),
    "negatives side by side": (
        lambda x, y: mb.maximum(x=mb.concat(values=[minus(x), y], axis=0), y=np.int32(0)),
        lambda x, y: minus(mb.minimum(x=mb.concat(values=[x, minus(y)], axis=0), y=np.int32(0))),
        I32,
    ),
    "quotient of a negative": (
        lambda x: mb.real_div(x=minus(x), y=np.int32(2)),
        lambda x: minus(mb.real_div(x=x, y=np.int32(2))),
        I32[:1],
    ),
    "difference below zero": (
        lambda x, y: mb.less(x=mb.sub(x=x, y=y), y=np.int32(0)),
        lambda x, y: mb.less(x=x, y=y),
        I32,
    ),
    "order of the negatives": (
        lambda x, y: mb.greater(x=minus(x), y=minus(y)),
        lambda x, y: mb.less(x=x, y=y),
        I32,
    ),
    "a maximum by an absolute value": (
        lambda x, y: mb.mul(x=mb.maximum(x=x, y=y), y=np.int32(2)),
        lambda x, y: mb.add(x=mb.add(x=x, y=y), y=mb.abs(x=mb.sub(x=x, y=y))),
        I32,
    ),
    "an absolute value is not negative": (
        lambda x: mb.maximum(x=mb.abs(x=minus(x)), y=np.int32(0)),
        lambda x: mb.abs(x=x),
        I32[:1],
    ),
}


@pytest.mark.parametrize("shape", [(2, 4), (1, 2)])
@pytest.mark.parametrize("name", WRAPPED)
def test_order_is_lost_where_integers_wrap(name: str, shape: tuple[int, ...]) -> None:
    old, new, inputs = WRAPPED[name]
    found = checked(old, new, *((types.int32, shape),) * len(inputs))
    assert isinstance(found, SiteCheck), found
    assert found.grade is Grade.NUMBERS, found
    assert found.max_abs > 0, found


def test_the_field_knows_no_order_of_integers_that_wrap() -> None:
    """Numbers catch these too; no proof may say that they are the same."""
    for name, (old, new, inputs) in WRAPPED.items():
        _, olds, news, made = side_by_side(old, new, *inputs)
        site = site_of(list(zip(olds, news, strict=True)), made, ())
        assert not prove(site), name


WRONG: dict[str, Both] = {
    "relu6 to relu": (lambda x: mb.relu6(x=x), lambda x: mb.relu(x=x), ()),
    "upper bound one ulp off": (lambda x: mb.relu6(x=x), lambda x: clip(x, 0, UP), ()),
    "lower bound one ulp off": (
        lambda x: clip(x, 1, 6),
        lambda x: clip(x, float(np.nextafter(f(1), f(2))), 6),
        (),
    ),
    "clips in the other order": (lambda x: clip(clip(x, 0, 1), 2, 3), lambda x: clip(clip(x, 2, 3), 0, 1), ()),
    "clips apart, another constant": (
        lambda x: clip(clip(x, 0, 1), 2, 3),
        lambda x: clip(clip(x, 0, 1), UP - 4, 3),
        (),
    ),
    "bounds of the negative": (
        lambda x: mb.mul(x=clip(x, -1, 2), y=f(-1)),
        lambda x: clip(mb.mul(x=x, y=f(-1)), -1, 2),
        (),
    ),
    "minimum inside a maximum": (
        lambda x, y: mb.maximum(x=mb.minimum(x=x, y=y), y=x),
        lambda x, y: mb.maximum(x=x, y=y),
        TWO,
    ),
    "upper bound of one member": (
        lambda x, y: mb.maximum(x=clip(x, -8, 6), y=y),
        lambda x, y: clip(mb.maximum(x=x, y=y), -8, 6),
        TWO,
    ),
    "member lost": (lambda x, y: mb.maximum(x=x, y=y), lambda x, y: mb.identity(x=x), TWO),
    "window shifted": (lambda x: pool(x, 3, pad=[1, 1, 1, 1]), lambda x: pool(x, 3, pad=[2, 0, 1, 1]), IMAGE),
    "zeros for padding": (lambda x: pool(x, 3, pad=[1] * 4), lambda x: pool(padded(x, 0), 3), IMAGE),
    "window too small": (
        lambda x: pool(x, 3, 2),
        lambda x: pool(x, 2, 2, pad=[0, 0, 0, 0]),
        ((types.fp32, (1, 2, 5, 5)),),
    ),
    "stride lost": (lambda x: pool(pool(x, 2, 2), 2), lambda x: pool(x, 3, 2), IMAGE),
    "minimum for maximum": (lambda x: mb.reduce_max(x=x, axes=[1]), lambda x: mb.reduce_min(x=x, axes=[1]), ()),
    "large padding instead of -inf": (
        lambda x: pool(x, 3, pad=[1] * 4),
        lambda x: pool(padded(x, -65504), 3),
        IMAGE,
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_another_extreme_is_caught(name: str) -> None:
    old, new, inputs = WRONG[name]
    found = checked(old, new, *inputs)
    assert isinstance(found, SiteCheck), found
    assert found.grade is Grade.NUMBERS, found
    assert found.max_abs > 0, found


def test_an_average_knows_its_window_and_its_count() -> None:
    def average(x: Var, pad: Any, exclude: bool) -> Var:
        made: Var = mb.avg_pool(
            x=x,
            kernel_sizes=[3, 3],
            strides=[1, 1],
            pad_type="custom",
            pad=pad,
            exclude_padding_from_average=exclude,
        )
        return made

    def grade(old: Callable[..., Any], new: Callable[..., Any]) -> Grade:
        found = checked(old, new, *IMAGE)
        assert isinstance(found, SiteCheck), found
        return found.grade

    ones = [1] * 4
    assert (
        grade(lambda x: average(x, ones, False), lambda x: average(padded(x, 0), [0] * 4, False)) is Grade.BITS
    )
    assert grade(lambda x: average(x, ones, True), lambda x: average(x, ones, False)) is Grade.NUMBERS
    assert grade(lambda x: average(x, ones, True), lambda x: average(x, [2, 0, 1, 1], True)) is Grade.NUMBERS


def bounded(x: Var, low: float, high: float) -> Any:
    """A clip of what cannot leave [-3, 3]."""
    return clip(mb.mul(x=mb.tanh(x=x), y=f(3)), low, high)


DropClip = small_rewrite("drop_clip", lambda op: op.clip(x=var("x")), lambda mb, m: mb.identity(x=m.x))
"""A clip becomes what it reads, which is right only where nothing leaves its bounds."""


@pytest.mark.parametrize(("low", "high"), [(-8, 8), (-3, 8)])
def test_a_clip_that_does_nothing_is_dropped_and_the_report_says_why(low: float, high: float) -> None:
    program = mb.program(input_specs=[mb.TensorSpec((2, 4))])(lambda x: bounded(x, low, high))
    done = apply(program, [DropClip()], prove="sites", quiet=True)
    (change,) = done.changes
    assert change.proof is not None
    assert (change.proof.grade, change.proof.ranged) == (Grade.BITS, True)
    assert "1 rests on ranges that the interval analysis shows" in done.details
    assert "interval analysis" not in str(done)


@pytest.mark.parametrize(("low", "high"), [(-2.9, 8), (-8, 2.9)])
def test_a_clip_that_does_something_stays(low: float, high: float) -> None:
    program = mb.program(input_specs=[mb.TensorSpec((2, 4))])(lambda x: bounded(x, low, high))
    with pytest.raises(ProofError):
        apply(program, [DropClip()], prove="sites", quiet=True)


def rms_norm(x: Var, epsilon: float, dtype: Any = np.float16) -> Any:
    """The root mean square norm of rows, written out."""
    mean = mb.reduce_mean(x=mb.mul(x=x, y=x), axes=[-1], keep_dims=True)
    return mb.mul(x=x, y=mb.rsqrt(x=mb.add(x=mean, y=dtype(epsilon)), epsilon=dtype(0)))


def layer_norm(x: Var, epsilon: float, dtype: Any) -> Any:
    return mb.layer_norm(x=x, axes=[-1], epsilon=dtype(epsilon))


HALF, SINGLE = (np.float16, types.fp16), (np.float32, types.fp32)
GUARDED: dict[str, tuple[Callable[[Var], Any], float, Any]] = {
    "a layer norm": (lambda x: layer_norm(x, 1e-5, f), 100, SINGLE),
    "a layer norm of fp16": (lambda x: layer_norm(x, 1e-5, np.float16), 8.2, HALF),
    "a root mean square norm": (lambda x: rms_norm(x, 1e-12, f), 8.1, SINGLE),
    "a root mean square norm of fp16": (lambda x: rms_norm(x, 1e-5), 100, HALF),
    "exponentials that fp16 holds": (lambda x: mb.exp(x=mb.minimum(x=x, y=np.float16(11))), 6.1e4, HALF),
    "a share": (lambda x: mb.softmax(x=x, axis=-1), 1, HALF),
    "a mean of sigmoids": (lambda x: mb.reduce_mean(x=mb.sigmoid(x=x), axes=[-1]), 1.1, HALF),
}
UNGUARDED: dict[str, tuple[Callable[[Var], Any], float, Any]] = {
    "an epsilon that fp16 does not hold": (lambda x: rms_norm(x, 1e-12), 100, HALF),
    "no epsilon": (lambda x: rms_norm(x, 0.0, f), 100, SINGLE),
    "a negative epsilon": (lambda x: layer_norm(x, -1e-5, f), 100, SINGLE),
    "a layer norm of fp16 without an epsilon": (lambda x: layer_norm(x, 1e-9, np.float16), 100, HALF),
    "a norm by its real bound": (lambda x: rms_norm(x, 1e-5, f), 8, SINGLE),
    "an exponential that overflows": (lambda x: mb.exp(x=mb.minimum(x=x, y=np.float16(11.5))), 6.55e4, HALF),
    "a square that overflows": (lambda x: mb.square(x=clip16(x, 300)), 6.5e4, HALF),
    "a mean whose sum overflows": (lambda x: mb.reduce_mean(x=clip16(x, 2000), axes=[-1]), 2000, HALF),
    "a sum of many": (lambda x: mb.reduce_sum(x=clip16(x, 1), axes=[-1]), 64, HALF),
    "a third, rounded up": (
        lambda x: mb.cast(x=mb.minimum(x=mb.cast(x=x, dtype="fp32"), y=f(1 / 3 + 1e-4)), dtype="fp16"),
        1 / 3 + 5e-5,
        HALF,
    ),
}


def clip16(x: Var, most: float) -> Any:
    return mb.clip(x=x, alpha=np.float16(-most), beta=np.float16(most))


def dropped(body: Callable[[Var], Any], most: float, dtypes: Any) -> Any:
    """The check of an edit that drops a clip to +- most."""
    dtype, of_type = dtypes
    clipped: list[Var] = []

    def guard(x: Var) -> Any:
        clipped.append(body(x))
        return mb.clip(x=clipped[0], alpha=dtype(-most), beta=dtype(most))

    return checked(guard, lambda x: mb.identity(x=clipped[0]), (of_type, (2, 64)))


@pytest.mark.parametrize("name", GUARDED)
def test_a_clip_goes_where_rounded_numbers_keep_it(name: str) -> None:
    check = dropped(*GUARDED[name])
    assert isinstance(check, SiteCheck)
    assert (check.grade, check.ranged, check.max_abs) == (Grade.BITS, True, 0), check


@pytest.mark.parametrize("name", UNGUARDED)
def test_a_clip_stays_where_rounding_may_leave_it(name: str) -> None:
    check = dropped(*UNGUARDED[name])
    assert isinstance(check, SiteCheck)
    assert check.max_abs > 0, check


def test_a_range_that_numbers_leave_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """The wrong version knows no rounding: it takes the bound of real numbers for that of fp16."""
    monkeypatch.setattr(bounds, "norm_growth", lambda epsilon, dtype: 1.0)
    check = dropped(*UNGUARDED["an epsilon that fp16 does not hold"])
    assert np.isinf(check.max_abs)
    assert "is inf, outside of -8 to 8" in check.counterexample


def test_the_report_says_why_there_is_no_proof() -> None:
    found = checked(lambda x: mb.abs(x=mb.mul(x=x, y=f(2))), lambda x: mb.mul(x=mb.abs(x=x), y=f(2)))
    assert isinstance(found, SiteCheck)
    assert found.no_proof == "not equal over the field"
    assert "1 not proved: not equal over the field" in summary([found])
    infinite = checked(lambda x: mb.add(x=x, y=INFINITE), lambda x: mb.add(x=mb.mul(x=x, y=f(2)), y=INFINITE))
    assert isinstance(infinite, SiteCheck)
    assert "not finite" in infinite.no_proof
    assert infinite.to_json()["no_proof"] == infinite.no_proof


def test_many_extremes_are_all_remembered() -> None:
    lattice, generator = Lattice(seed=3), torch.Generator().manual_seed(3)
    members = [field.random_image(PRIMES, (6, width), generator) for width in [2, 3, 2, 4, 3] * 8]
    extremes = [lattice.largest(image) for image in members]
    for i in range(len(members) - 7):
        all_members = field.joined(members[i : i + 8 : 7], lambda images: torch.cat(images, 1))
        two_extremes = field.joined(extremes[i : i + 8 : 7], lambda images: torch.stack(images, 1))
        assert lattice.largest(all_members).same(lattice.largest(two_extremes))


def test_a_wide_extreme_does_not_widen_the_sets_of_others() -> None:
    lattice, generator = Lattice(seed=3), torch.Generator().manual_seed(3)
    lattice.largest(field.random_image(PRIMES, (4, 512), generator))
    one, two = (field.packed(field.random_image(PRIMES, (50,), generator)) for _ in range(2))
    assert lattice._lookup(one).members.shape == (50, 1)
    pair = lattice.largest(field.Image.of(torch.stack([one, two], 1), PRIMES))
    assert lattice._lookup(field.packed(pair)).members.shape == (50, 2)


def test_an_extreme_without_elements_is_forgotten() -> None:
    lattice, generator = Lattice(seed=3), torch.Generator().manual_seed(3)
    members = field.random_image(PRIMES, (6, 2), generator)
    extreme = lattice.largest(members)
    nothing = members.map(lambda v: v[:0])
    assert lattice.largest(nothing).shape == (0,)
    lattice.within(nothing, -1.0, 1.0)
    assert lattice.largest(members).same(extreme)
