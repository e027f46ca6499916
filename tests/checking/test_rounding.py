"""Where sums cancel, a difference that is rounding passes, and a wrong rewrite of the same size does not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from both_sides import checked

from anesurgery.checking.grades import REASSOCIATED, Grade, Promise, SiteCheck
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


def test_another_order_of_a_sum_that_cancels() -> None:
    check = found(cancelling_products, lambda x: cancelling_products(x, -1))
    assert check.within(REASSOCIATED)
    assert check.grade is Grade.PROVED


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
