"""What numbers do not cover is said: kinds of numbers that were not tried, elements that were left out."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from both_sides import checked, side_by_side

from anesurgery.checking import adversarial
from anesurgery.checking.adversarial import Drawing
from anesurgery.checking.grades import PLAIN, REASSOCIATED, Grade, Promise, SiteCheck, combined_check, summary
from anesurgery.checking.numbers import difference
from anesurgery.mil import Var, mb, types

FINITE = Promise(tolerates_nonfinite=False)


def opaque_pair(x: Var) -> Var:
    """What no arithmetic proves equal to the relu of 2 x."""
    made: Var = mb.mul(x=mb.relu(x=x), y=np.float32(2))
    return made


def found(promise: Promise = PLAIN) -> SiteCheck:
    check = checked(lambda x: mb.relu(x=mb.mul(x=x, y=np.float32(2))), opaque_pair, promise=promise)
    assert isinstance(check, SiteCheck)
    assert check.within(promise.tolerance)
    return check


def test_a_small_site_has_no_gaps() -> None:
    assert found().untried == ()
    assert "not tried" not in summary([found()])


@pytest.mark.parametrize("limit", ["MANY", "HUGE"])
def test_a_large_site_names_what_was_not_tried(limit: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adversarial, limit, 1)
    check = found()
    assert ("infinities and NaN" in check.untried) == (limit == "HUGE")
    assert "ties" in check.untried
    assert f"1 not tried on {' or '.join(check.untried)}" in summary([check])
    assert check.to_json()["untried"] == list(check.untried)


def test_what_a_pass_declares_is_no_gap(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adversarial, "HUGE", 1)
    assert "infinities and NaN" not in found(FINITE).untried


def test_integers_have_no_infinities(monkeypatch: pytest.MonkeyPatch) -> None:
    def twice(x: Var) -> Var:
        return mb.add(x=x, y=x)

    shape = (types.int32, (2, 4))
    monkeypatch.setattr(adversarial, "HUGE", 1)
    check = checked(twice, lambda x: mb.mul(x=x, y=np.int32(2)), shape)
    assert isinstance(check, SiteCheck)
    assert check.untried == ("large numbers",)


def test_rounds_that_overflow_are_named() -> None:
    def product(x: Var) -> Var:
        return mb.mul(x=mb.exp(x=x), y=np.float32(3))

    def shifted(x: Var) -> Var:
        return mb.exp(x=mb.add(x=x, y=np.float32(np.log(3))))

    check = checked(product, lambda x: mb.mul(x=np.float32(3), y=mb.exp(x=x)), promise=Promise(REASSOCIATED))
    assert isinstance(check, SiteCheck)
    other = checked(
        lambda x: mb.reduce_sum(x=product(x), axes=[1]),
        lambda x: mb.reduce_sum(x=shifted(x), axes=[1]),
        promise=Promise(REASSOCIATED),
    )
    assert isinstance(other, SiteCheck)
    assert "the largest numbers" in other.untried


def test_of_numbers_that_overflow_the_others_are_tried() -> None:
    """A quotient of two small numbers may be wrong where others are infinite."""
    pair = ((types.fp32, (2, 4)), (types.fp32, (2, 4)))
    check = checked(
        lambda x, y: mb.real_div(x=x, y=y),
        lambda x, y: mb.mul(x=x, y=mb.inverse(x=y, epsilon=np.float32(0))),
        *pair,
        promise=Promise(REASSOCIATED, tolerates_nonfinite=False),
    )
    assert isinstance(check, SiteCheck)
    assert not check.within(REASSOCIATED)


def test_elements_that_the_old_side_does_not_define_are_counted() -> None:
    check = checked(
        lambda x: mb.real_div(x=x, y=x), lambda x: mb.add(x=mb.mul(x=x, y=np.float32(0)), y=np.float32(1))
    )
    assert isinstance(check, SiteCheck)
    assert check.left_out > 0
    assert f"{check.left_out} elements that differ left out" in summary([check])


def test_a_new_side_that_is_not_defined_is_refused() -> None:
    check = checked(lambda x: mb.mul(x=x, y=np.float32(1)), lambda x: mb.real_div(x=mb.mul(x=x, y=x), y=x))
    assert isinstance(check, SiteCheck)
    assert not check.within(FINITE.tolerance)


def test_left_out_counts_only_what_differs() -> None:
    old, nan = torch.tensor([1.0, torch.nan, torch.nan]), torch.tensor([False, True, True])
    apart = difference(old, torch.tensor([1.0, torch.nan, 5.0]), nan)
    assert (apart.max_abs, apart.values, apart.left_out) == (0, 1, 1)
    assert difference(old, torch.tensor([torch.nan, 0.0, 5.0]), nan).max_abs == float("inf")


def test_integers_of_a_pass_meet_the_constants() -> None:
    """A pass draws its integers from a wide range; the constants of both sides are still among them."""
    program, _, _, _ = side_by_side(
        lambda x: mb.identity(x=x), lambda x: mb.identity(x=x), (types.int32, (1, 4))
    )
    (x,) = program.functions["main"].inputs.values()
    wide = Drawing(lambda v, rng: rng.integers(-5000, 5000, v.shape), (77.0,))
    rng = np.random.default_rng(0)
    found = {int(n) for _ in range(20) for n in wide.draw(x, "special", rng).ravel()}
    assert {0, 1, 76, 77, 78} <= found
    fixed = Drawing(lambda v, rng: np.full(v.shape, 3), (1.0,))
    assert set(fixed.draw(x, "special", rng).ravel()) == {3}


def test_a_shape_that_differs_is_a_counterexample() -> None:
    check = checked(lambda x: mb.transpose(x=x, perm=[1, 0]), lambda x: mb.identity(x=x))
    assert isinstance(check, SiteCheck)
    assert "the shapes differ: old (4, 2), new (2, 4)" in check.counterexample


def test_an_edit_that_was_compared_on_no_number_is_not_called_checked() -> None:
    nothing, some, more = (SiteCheck(0.0, 0.0, values) for values in (0, 64, 4096))
    assert summary([nothing], details=False).startswith("1 not checked: ")
    assert summary([some, nothing, more], details=False) == (
        "2 checked on at least 64 numbers each, "
        "1 not checked: the ops before it give NaN on all inputs that were tried"
    )


@pytest.mark.parametrize(("other", "bound"), [(Grade.BITS, 1e-9), (Grade.PROVED, 2e-9), (Grade.NUMBERS, None)])
def test_two_checks_together_keep_the_bound_of_a_proof(other: Grade, bound: float | None) -> None:
    proved = SiteCheck(0, 0, 1, grade=Grade.PROVED, bound=1e-9)
    second = SiteCheck(0, 0, 1, grade=other, bound=1e-9 if other is Grade.PROVED else None)
    both = combined_check(proved, second)
    assert (both.grade, both.bound) == (min(Grade.PROVED, other), bound)
