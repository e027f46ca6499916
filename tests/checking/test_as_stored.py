"""A model that is wrong in fp16 is no reference in fp16: what repairs it is compared in fp32."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from closeness import assert_close

import anesurgery as ane
from anesurgery.checking.comparison import compare, compare_as_stored
from anesurgery.loading import load
from anesurgery.mil import Program, Var, mb, types

HALF = np.float16
X = {"x": np.random.default_rng(0).standard_normal((4, 32)).astype(HALF)}


def built(body: Callable[[Any], Any]) -> Program:
    return mb.program(input_specs=[mb.TensorSpec((4, 32), dtype=types.fp16)])(lambda x: body(x))


def sharp_log_softmax(x: Var) -> Var:
    """Shares that vanish in fp16, as those of a loss with a small temperature."""
    shares = mb.softmax(x=mb.mul(x=x, y=HALF(16)), axis=-1)
    return mb.log(x=mb.add(x=shares, y=HALF(6e-8)), epsilon=HALF(0), name="y")


def large_length(x: Var) -> Var:
    """Squares that overflow."""
    large = mb.mul(x=x, y=HALF(1000))
    return mb.sqrt(x=mb.reduce_sum(x=mb.square(x=large), axes=[-1]), name="y")


def length(x: Var) -> Var:
    return mb.sqrt(x=mb.reduce_sum(x=mb.square(x=x), axes=[-1]), name="y")


def length_by_large_squares(x: Var) -> Var:
    """The wrong version: the same in fp32, an infinity in fp16."""
    large = mb.mul(x=x, y=HALF(1024))
    total = mb.reduce_sum(x=mb.square(x=large), axes=[-1])
    return mb.mul(x=mb.sqrt(x=total), y=HALF(2.0**-10), name="y")


@pytest.mark.parametrize("body", [sharp_log_softmax, large_length])
def test_a_repair_is_compared_in_fp32_and_says_so(body: Callable[[Any], Any]) -> None:
    program = built(body)
    surgery = ane.apply(program, "safe_numbers", target="M1/macOS 14", prove="model", quiet=True)
    assert surgery.changes
    assert surgery.proof is not None
    assert surgery.proof.ok
    said = [
        note for note in surgery.notes if note.startswith("compared in fp32, since the model as given is wrong")
    ]
    assert len(said) == (0 if compare(program, surgery.program, precision="fp16").ok else 1)


def test_what_overflows_only_after_the_change_fails() -> None:
    given, changed = (load(built(body)) for body in (length, length_by_large_squares))
    assert compare(given, changed, X, precision="fp32").ok
    result = compare_as_stored(given, changed, X)
    assert not result.ok
    assert result.precision == "fp16"


def test_what_is_further_from_the_meaning_fails_though_the_given_is_not_exact() -> None:
    """Both are wrong in fp16, the changed one more."""

    def coarse(steps: int) -> Callable[[Any], Any]:
        def body(x: Any) -> Any:
            return mb.sub(x=mb.add(x=x, y=HALF(steps)), y=HALF(steps), name="y")

        return body

    given, better, worse = (load(built(coarse(steps))) for steps in (256, 64, 2048))
    assert not compare_as_stored(given, worse, X).ok
    result = compare_as_stored(given, better, X)
    assert result.ok
    assert "wrong in fp16" in result.instead


def test_another_function_fails_whatever_fp16_makes_of_it() -> None:
    given = load(built(large_length))
    other = load(
        built(lambda x: mb.mul(x=mb.sqrt(x=mb.reduce_sum(x=mb.square(x=x), axes=[-1])), y=HALF(990), name="y"))
    )
    assert not compare_as_stored(given, other, X).ok


def masked_rows(shift: float, name: str = "y") -> Callable[[Any], Any]:
    """A softmax whose first row is masked whole by a number of fp32 that fp16 takes for minus infinity."""
    keep = np.arange(4)[:, None] > np.zeros((1, 32))

    def body(x: Any) -> Any:
        wide = mb.select(cond=keep, a=mb.cast(x=x, dtype="fp32"), b=np.float32(-9e15))
        shares = mb.softmax(x=mb.cast(x=wide, dtype="fp16"), axis=-1)
        return mb.add(x=shares, y=HALF(shift), name=name)

    return body


def test_what_is_not_finite_on_both_sides_is_compared_in_fp32() -> None:
    """The wrong versions differ in the finite rows, and in a row that only fp32 has."""
    given, same, other = (load(built(masked_rows(shift))) for shift in (0.5, 0.5, 0.75))
    result = compare_as_stored(given, same, X)
    assert result.ok
    assert "not finite in fp16, in the same places" in result.instead
    assert not compare_as_stored(given, other, X).ok

    def first_row_of_ones(x: Any) -> Any:
        first = np.arange(4)[:, None] == np.zeros((4, 32))
        return mb.select(cond=first, a=np.full((4, 32), np.nan, HALF), b=masked_rows(0.5, "all")(x), name="y")

    assert not compare_as_stored(given, load(built(first_row_of_ones)), X).ok


@pytest.mark.parametrize(("kept", "named"), [(0, True), (-1, False)])
def test_a_mask_of_fp32_that_leaves_a_row_nothing_is_named_and_repaired(kept: int, named: bool) -> None:
    @mb.program(input_specs=[mb.TensorSpec((4, 32), dtype=types.fp16)])
    def program(x: Var) -> Var:
        keep = np.arange(4)[:, None] > np.full((1, 32), kept)
        wide = mb.select(cond=keep, a=mb.cast(x=x, dtype="fp32"), b=np.float32(-9e15))
        return mb.softmax(x=mb.cast(x=wide, dtype="fp16"), axis=-1, name="y")

    findings = ane.inspect(program, target="M1/macOS 14").all_findings
    assert ("num-mask-rows" in {finding.rule for finding in findings}) == named
    surgery = ane.apply(program, "auto", target="M1/macOS 14", prove="both", quiet=True)
    assert ("padding_mask_tensor" in {change.pass_name for change in surgery.changes}) == named
    (wanted,), (value,) = (
        ane.run(p, X, precision=a).values() for p, a in ((program, "fp32"), (surgery.program, "fp16"))
    )
    assert_close(value, wanted, rtol=2e-3)
