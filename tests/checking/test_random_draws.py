"""Models that draw random numbers: two can be compared, and one draws anew when a user runs it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import anesurgery as ane
from anesurgery.mil import Program, Var, ct, mb, types

KINDS: dict[str, Any] = {
    "normal": lambda: mb.random_normal(shape=[4, 300], mean=np.float16(0), stddev=np.float16(1)),
    "uniform": lambda: mb.random_uniform(shape=[4, 300], low=np.float16(0), high=np.float16(1)),
    "flips": lambda: mb.cast(x=mb.random_bernoulli(shape=[4, 300], prob=np.float16(0.5)), dtype="fp16"),
}


def noisy(kind: str, seed: int = -1, factor: float = 1.0) -> Program:
    @mb.program(input_specs=[mb.TensorSpec((4, 300), dtype=types.fp16)], opset_version=ct.target.iOS17)
    def program(x: Var) -> Any:
        noise = KINDS[kind]() if seed == -1 else mb.random_normal(shape=[4, 300], seed=seed)
        noise = noise if seed == -1 else mb.cast(x=noise, dtype="fp16")
        return mb.sub(x=mb.mul(x=noise, y=np.float16(factor)), y=x, name="y")

    return program


INPUTS = {"x": np.ones((4, 300), np.float16)}


@pytest.mark.parametrize("kind", KINDS)
def test_an_edit_of_a_model_with_noise_is_proved(kind: str) -> None:
    surgery = ane.apply(noisy(kind), "negate_subtract", prove="both", quiet=True)
    assert surgery.changes
    assert surgery.proof is not None
    assert surgery.proof.ok


@pytest.mark.parametrize("kind", KINDS)
def test_another_model_is_told_apart(kind: str) -> None:
    assert ane.compare(noisy(kind), noisy(kind), INPUTS).ok
    assert not ane.compare(noisy(kind), noisy(kind, factor=1.1), INPUTS).ok


def test_noise_is_no_error_of_fp16() -> None:
    """Each arithmetic draws the same numbers; with others the op that draws would be blamed."""
    assert ane.certify(noisy("normal"), [INPUTS], target="M1/macOS 14").ok


def test_a_run_draws_anew_without_a_seed_and_the_same_with_one() -> None:
    first, second = (ane.run(noisy("normal"), INPUTS)["y"] for _ in range(2))
    assert not np.array_equal(first, second)
    first, second = (ane.run(noisy("normal", seed=7), INPUTS)["y"] for _ in range(2))
    assert np.array_equal(first, second)
