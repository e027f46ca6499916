"""Where sums cancel, a difference that is rounding passes, and a wrong rewrite of the same size does not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from both_sides import checked

from anesurgery.checking.grades import REASSOCIATED, Grade, Promise, SiteCheck, Tolerance
from anesurgery.mil import Var, mb, types

NEAR = Promise(REASSOCIATED, tolerates_nonfinite=False, magnitude=8.0)
LARGE = np.float32(4096)
F16 = ((types.fp32, (2, 16)),)


def cancelling(x: Var) -> Any:
    """X, rounded as a number near 4096 is: to about 2e-4."""
    return mb.sub(x=mb.add(x=x, y=LARGE), y=LARGE)


def cancelling_products(x: Var, order: int = 1) -> Any:
    """Two products whose terms cancel nearly, the terms in one order or the other."""
    weight = np.random.default_rng(0).standard_normal((16, 16)).astype(np.float32)
    terms = [mb.mul(x=x, y=row * 1000) for row in weight][::order]
    total = terms[0]
    for term in terms[1:]:
        total = mb.add(x=total, y=term)
    whole = np.float64(weight).sum(0).astype(np.float32)
    return mb.sub(x=total, y=mb.mul(x=x, y=whole * 1000))


def found(old: Callable[..., Any], new: Callable[..., Any], promise: Promise = NEAR) -> SiteCheck:
    check = checked(old, new, *F16, promise=promise)
    assert isinstance(check, SiteCheck)
    return check


def test_rounding_of_sums_that_cancel_is_no_difference() -> None:
    check = found(cancelling, lambda x: mb.mul(x=x, y=np.float32(1)))
    assert check.max_abs > 1e-5 * 8  # beyond the tolerance, relative to the result
    assert check.within(REASSOCIATED)
    assert check.grade is Grade.PROVED


@pytest.mark.slow
def test_another_order_of_a_sum_that_cancels() -> None:
    check = found(cancelling_products, lambda x: cancelling_products(x, -1))
    assert check.within(REASSOCIATED)
    assert check.grade is Grade.PROVED


@pytest.mark.slow
@pytest.mark.parametrize(
    "behind",
    [lambda v: mb.pow(x=v, y=np.float32(3)), lambda v: mb.acos(x=mb.clip(x=v, alpha=-1.0, beta=1.0))],
    ids=["a power", "an arccosine"],
)
def test_numbers_that_have_no_neighbours_excuse_rounding_all_the_same(behind: Callable[[Var], Var]) -> None:
    """A power of -2 is a number for whole exponents only, and 1 is the last number that has an arccosine."""

    def both(order: int) -> Callable[[Var], Any]:
        return lambda x: mb.add(x=cancelling_products(x, order), y=behind(mb.mul(x=x, y=np.float32(1))))

    assert found(both(1), both(-1)).within(REASSOCIATED)


@pytest.mark.parametrize("off", [1e-4, 1e-5, 1e-6])
def test_a_wrong_rewrite_smaller_than_the_rounding_is_caught(off: float) -> None:
    """In fp32 nobody could tell it from rounding; in fp64 it is as large as before."""
    check = found(cancelling, lambda x: mb.add(x=mb.mul(x=x, y=np.float32(1)), y=np.float32(off)))
    assert not check.within(REASSOCIATED)
    assert check.grade is Grade.NUMBERS
    assert check.counterexample


def test_a_new_side_that_cancels_where_the_old_does_not_is_caught() -> None:
    """The same function of real numbers, with digits lost: only the old side may excuse rounding."""
    check = found(lambda x: mb.mul(x=x, y=np.float32(1)), cancelling)
    assert not check.within(REASSOCIATED)
    assert check.counterexample


def test_a_bit_exact_promise_excuses_nothing() -> None:
    check = found(cancelling, lambda x: mb.mul(x=x, y=np.float32(1)), Promise())
    assert not check.within(Promise().tolerance)


def variance(x: Var) -> Any:
    """The mean of the squares of what is left when the mean is taken away."""
    z = mb.sub(x=x, y=mb.reduce_mean(x=x, axes=[-1], keep_dims=True))
    return mb.reduce_mean(x=mb.square(x=z), axes=[-1], keep_dims=True)


def variance_of_squares(x: Var) -> Any:
    """The mean of the squares less the square of the mean."""
    mean = mb.reduce_mean(x=x, axes=[-1], keep_dims=True)
    return mb.sub(x=mb.reduce_mean(x=mb.square(x=x), axes=[-1], keep_dims=True), y=mb.square(x=mean))


@pytest.mark.one_of(6)
@pytest.mark.parametrize(
    ("rtol", "dtype", "shape"),
    [
        (1e-6, types.fp32, (2, 16)),
        (1e-3, types.fp32, (2, 16)),
        (1e-3, types.fp16, (2, 16)),
        (1e-5, types.fp16, (40, 50)),
        (1e-4, types.fp32, (3, 70, 90)),
    ],
)
def test_a_variance_of_squares_loses_digits(rtol: float, dtype: Any, shape: tuple[int, ...]) -> None:
    promise = Promise(Tolerance(rtol))
    check = checked(variance, variance_of_squares, (dtype, shape), promise=promise)
    assert isinstance(check, SiteCheck)
    assert not check.within(promise.tolerance)
    assert check.grade is Grade.NUMBERS


@pytest.mark.parametrize("axes", [[0], [1], [0, 1]])
def test_a_variance_in_another_order_passes(axes: list[int]) -> None:
    """What the old side loses of such rows too is no difference."""

    def old(x: Var) -> Any:
        z = mb.sub(x=x, y=mb.reduce_mean(x=x, axes=axes, keep_dims=True))
        return mb.reduce_mean(x=mb.square(x=z), axes=axes, keep_dims=True)

    def new(x: Var) -> Any:
        count = np.float32(np.prod([(16, 16)[a] for a in axes]))
        mean = mb.mul(x=mb.reduce_sum(x=x, axes=axes, keep_dims=True), y=1 / count)
        z = mb.sub(x=mean, y=x)
        return mb.mul(x=mb.reduce_sum(x=mb.mul(x=z, y=z), axes=axes, keep_dims=True), y=1 / count)

    check = checked(old, new, (types.fp32, (16, 16)), promise=Promise(REASSOCIATED))
    assert isinstance(check, SiteCheck)
    assert check.within(REASSOCIATED)
    assert check.grade is Grade.PROVED


def square_apart(x: Var, y: Var) -> Any:
    """The square of a difference."""
    return mb.square(x=mb.sub(x=x, y=y))


def squares_apart(x: Var, y: Var) -> Any:
    """The squares of both, less twice their product."""
    both = mb.add(x=mb.square(x=x), y=mb.square(x=y))
    return mb.sub(x=both, y=mb.mul(x=mb.mul(x=x, y=y), y=np.float32(2)))


def products_apart(x: Var, y: Var) -> Any:
    """A difference times a sum."""
    return mb.mul(x=mb.sub(x=x, y=y), y=mb.add(x=x, y=y))


def of_difference(x: Var, y: Var) -> Any:
    """A product with a weight, of a difference."""
    return mb.linear(x=mb.sub(x=x, y=y), weight=WEIGHT)


def difference_of(x: Var, y: Var) -> Any:
    """A difference of products with a weight."""
    return mb.sub(x=mb.linear(x=x, weight=WEIGHT), y=mb.linear(x=y, weight=WEIGHT))


WEIGHT = np.random.default_rng(0).standard_normal((16, 16)).astype(np.float32)
LOSING = {
    "a square of a difference": (square_apart, squares_apart),
    "a difference of squares": (products_apart, lambda x, y: mb.sub(x=mb.square(x=x), y=mb.square(x=y))),
    "a product with a difference": (of_difference, difference_of),
}


@pytest.mark.one_of(8)
@pytest.mark.parametrize("name", LOSING)
def test_what_is_alike_is_subtracted_first(name: str) -> None:
    """A new side that makes large terms of two values that are alike loses what the old side keeps."""
    keeping, losing = LOSING[name]
    two = [(types.fp32, (3, 16))] * 2
    promise = Promise(REASSOCIATED, tolerates_nonfinite=False)
    check = checked(keeping, losing, *two, promise=promise)
    assert isinstance(check, SiteCheck)
    assert not check.within(REASSOCIATED)
    back = checked(losing, keeping, *two, promise=promise)
    assert isinstance(back, SiteCheck)
    assert back.within(REASSOCIATED)
    assert back.grade is Grade.PROVED


def beside(x: Var, other: Any) -> Any:
    """A sum of large terms that cancel, times 1e10, beside something small."""
    return mb.concat(values=[mb.mul(x=other, y=np.float32(1e10)), x], axis=1)


@pytest.mark.slow
@pytest.mark.parametrize("number", [0.001, 5.0, 7.7])
def test_no_element_excuses_another_one(number: float) -> None:
    """What rounding may do to a large element says nothing about a small one."""

    def aimed(x: Var, off: float) -> Any:
        there = mb.equal(x=x, y=np.float32(number))
        return mb.select(cond=there, a=mb.add(x=x, y=np.float32(off)), b=x)

    wrong, right = (
        found(
            lambda x: beside(aimed(x, 0), cancelling(x)),
            lambda x, off=off: beside(aimed(x, off), mb.mul(x=x, y=np.float32(1))),
        )
        for off in (0.1, 0.0)
    )
    assert not wrong.within(REASSOCIATED)
    assert wrong.counterexample
    assert right.within(REASSOCIATED)


@pytest.mark.parametrize("rtol", [1e-5, 1e-3])
def test_integers_are_equal_or_not(rtol: float) -> None:
    """One id beside 1e6 is another id, however small its share is."""

    def plus(number: int) -> Callable[..., Any]:
        return lambda x: mb.add(x=x, y=np.int32(number))

    promise = Promise(Tolerance(rtol))
    wrong, right = (
        checked(plus(1_000_000), plus(n), (types.int32, (3, 4)), promise=promise)
        for n in (1_000_001, 1_000_000)
    )
    assert isinstance(wrong, SiteCheck)
    assert isinstance(right, SiteCheck)
    assert not wrong.within(promise.tolerance)
    assert right.grade is Grade.BITS


@pytest.mark.slow
def test_an_integer_may_follow_what_is_rounded() -> None:
    """A floor of a sum in another order: equal in fp64, one apart where fp32 rounds."""

    def floored(x: Var, order: int) -> Any:
        return mb.cast(x=mb.floor(x=cancelling_products(x, order)), dtype="int32")

    check = found(lambda x: floored(x, 1), lambda x: floored(x, -1))
    assert check.within(REASSOCIATED)


LAST = np.r_[np.full(7, 1e4), 1].astype(np.float32)
"""Seven channels that are 10,000 times larger than the last one."""
ROWS, IMAGES = (
    np.random.default_rng(1).standard_normal((8, 16)),
    np.random.default_rng(2).standard_normal((8, 3, 3, 3)),
)


def channel(off: float) -> np.ndarray[Any, Any]:
    """LAST with the last channel off by a share."""
    return np.r_[LAST[:7], LAST[7] * np.float32(1 + off)].astype(np.float32)


def in_sums(x: Var, bias: Any) -> Any:
    return mb.linear(x=x, weight=(ROWS * LAST[:, None]).astype(np.float32), bias=bias)


def of_linear(x: Var, last: Any) -> Any:
    return mb.linear(x=x, weight=(ROWS * last[:, None]).astype(np.float32))


def of_conv(x: Var, last: Any) -> Any:
    return mb.conv(x=x, weight=(IMAGES * last[:, None, None, None]).astype(np.float32))


def of_matmul(x: Var, last: Any) -> Any:
    return mb.matmul(x=x, y=(ROWS.T * last).astype(np.float32))


def behind_function(x: Var, last: Any) -> Any:
    return mb.mul(x=mb.tanh(x=x), y=last)


SMALL_ROWS: dict[str, tuple[Callable[[Var, Any], Any], tuple[int, ...]]] = {
    "a row of weights": (of_linear, (2, 16)),
    "a row of weights of a large site": (of_linear, (2000, 16)),
    "a channel of a convolution": (of_conv, (1, 3, 8, 8)),
    "a column of a matmul": (of_matmul, (3, 16)),
    "an element of a bias": (in_sums, (2, 16)),
    "an element of a sum": (lambda x, last: mb.add(x=x, y=last), (1, 8)),
    "a factor behind a function": (behind_function, (16, 8)),
}


@pytest.mark.parametrize("rtol", [1e-5, 1e-3, 1e-2])
@pytest.mark.parametrize("dtype", [types.fp32, types.fp16])
@pytest.mark.parametrize("name", SMALL_ROWS)
def test_a_wrong_row_beside_much_larger_ones_is_caught(name: str, dtype: Any, rtol: float) -> None:
    """What counts is the row by itself, whatever the tolerance is; a row off by rounding alone is right."""
    if dtype == types.fp16 and rtol < 1e-3:
        return
    form, shape = SMALL_ROWS[name]
    half = np.float16 if dtype == types.fp16 else np.float32

    def scaled(off: float) -> Callable[[Var], Any]:
        last = (channel(off) / (100 if half is np.float16 else 1)).astype(np.float32)
        return lambda x: form(mb.cast(x=x, dtype="fp32"), last)

    promise = Promise(Tolerance(rtol), tolerates_nonfinite=False)
    for off, right in ((0.5, False), (-0.3, False), (rtol / 10, True)):
        check = checked(scaled(0), scaled(off), (dtype, shape), promise=promise)
        assert isinstance(check, SiteCheck)
        assert check.within(promise.tolerance) == right
        assert right or check.counterexample


@pytest.mark.parametrize("rtol", [1e-3, 1e-2])
def test_an_approximation_keeps_its_tolerance(rtol: float) -> None:
    """Where a function is nearly 0 by itself, no error of an operand explains the difference; its row does."""
    promise = Promise(Tolerance(rtol), tolerates_nonfinite=False)

    def gelu(mode: str) -> Callable[[Var], Any]:
        return lambda x: mb.gelu(x=mb.clip(x=x, alpha=-8.0, beta=8.0), mode=mode)

    for shape in ((16, 16), (40, 500)):
        check = checked(gelu("EXACT"), gelu("TANH_APPROXIMATION"), (types.fp32, shape), promise=promise)
        assert isinstance(check, SiteCheck)
        assert check.within(promise.tolerance)
