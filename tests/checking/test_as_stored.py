"""A model that is wrong in fp16 is no reference in fp16: what repairs it is compared in fp32."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import anesurgery as ane
from anesurgery.checking.comparison import compare, compare_as_stored
from anesurgery.loading import load
from anesurgery.mil import Program, Var, mb, types

HALF = np.float16
X = {"x": np.random.default_rng(0).standard_normal((4, 32)).astype(HALF)}


def built(body: Callable[[Any], Any]) -> Program:
    @mb.program(input_specs=[mb.TensorSpec((4, 32), dtype=types.fp16)])
    def program(x: Var) -> Var:
        return body(x)

    return program


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
