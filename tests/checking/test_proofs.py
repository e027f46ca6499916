"""Constants that meet a prime of the field are no zeros: no wrong edit is proved, and right ones still are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from both_sides import side_by_side

from anesurgery.checking.edit_sites import site_of
from anesurgery.checking.grades import Grade
from anesurgery.checking.proofs import NoProof, Proof, prove
from anesurgery.interpret.arithmetic import field
from anesurgery.mil import Var, mb, types

P = 1_048_573
"""The largest prime below 2^20."""
F = types.fp32
TWO = (F, (2, 4)), (F, (2, 4))
INTS = ((types.int32, (2, 4)),)
DRAWN = [np.float32(p) for draw in range(3) for p in field.draw_primes(draw)]
"""Primes of the first points of seed 0."""


def times(x: Var, *factors: Any) -> Var:
    for factor in factors:
        x = mb.mul(x=x, y=factor if isinstance(factor, (Var, np.ndarray)) else np.float32(factor))
    return x


def plus(x: Var, term: Any) -> Var:
    made: Var = mb.add(x=x, y=term if isinstance(term, Var) else np.float32(term))
    return made


def linear(weight: Any) -> Callable[[Var], Var]:
    return lambda x: mb.linear(x=x, weight=np.asarray(weight, np.float32), bias=np.ones(3, np.float32))


def added_at(*places: int, mode: str = "add") -> Callable[[Var, Var], Var]:
    """Rows of y are added to rows of x, or written over them."""
    return lambda x, y: mb.scatter(data=x, indices=np.array(places, np.int32), updates=y, axis=0, mode=mode)


WRONG: dict[str, tuple[Any, ...]] = {
    "a term": (lambda x, y: plus(x, times(y, P)), lambda x, y: plus(x, times(y, 0)), *TWO),
    "a sum of terms": (lambda x: plus(times(x, 1e6), times(x, 48573)), lambda x: times(x, 0)),
    "a difference": (lambda x: plus(times(x, 2**21), times(x, 2 * P - 2**21)), lambda x: times(x, 0)),
    "a negative term": (lambda x: plus(x, -P), lambda x: plus(x, 0)),
    "a term times 2^10": (lambda x: plus(x, P * 2**10), lambda x: plus(x, 0)),
    "a term over 2^30": (lambda x: plus(x, P * 2.0**-30), lambda x: plus(x, 0)),
    "a factor": (lambda x: times(x, P + 1), lambda x: times(x, 1)),
    "a bound": (lambda x: mb.minimum(x=x, y=np.float32(P)), lambda x: mb.minimum(x=x, y=np.float32(0))),
    "a slope": (lambda x: mb.leaky_relu(x=x, alpha=float(P)), lambda x: mb.leaky_relu(x=x, alpha=0.0)),
    "an integer": (lambda n: mb.add(x=n, y=np.int32(P)), lambda n: mb.add(x=n, y=np.int32(0)), *INTS),
    "a weight": (linear([[P, 0, -P, 2 * P]] * 3), linear(np.zeros((3, 4)))),
    "an argument": (lambda x: mb.exp(x=plus(x, P)), lambda x: mb.exp(x=x)),
    "factors": (lambda x: plus(x, times(x, *DRAWN)), lambda x: times(x, 1)),
    "rows added to the same row": (added_at(0, 0), lambda x, y: mb.add(x=x, y=y), *TWO),
    "rows added in another order": (added_at(1, 0), lambda x, y: mb.add(x=x, y=y), *TWO),
    "rows written": (added_at(0, 1, mode="update"), lambda x, y: mb.add(x=x, y=y), *TWO),
    "rows of factors": (
        lambda x: times(x, *(np.full((2, 4), p, np.float32) for p in DRAWN)),
        lambda x: times(x, 0),
    ),
}
RIGHT: dict[str, tuple[Any, ...]] = {
    "out of brackets": (lambda x, y: plus(times(x, P), times(y, P)), lambda x, y: times(plus(x, y), P), *TWO),
    "a quotient and back": (lambda x: times(mb.real_div(x=x, y=np.float32(P)), P), lambda x: times(x, 1)),
    "a sum": (lambda x: plus(times(x, 1e6), times(x, 48573)), lambda x: times(x, P)),
    "rows added to their own rows": (added_at(0, 1), lambda x, y: mb.add(x=x, y=y), *TWO),
    "drawn primes": (lambda x: times(x, *DRAWN[:2]), lambda x: times(x, *DRAWN[1::-1])),
}


def proof_of(old: Any, new: Any, *inputs: Any) -> Proof | NoProof:
    _, olds, news, made = side_by_side(old, new, *inputs)
    return prove(site_of(list(zip(olds, news, strict=True)), made, ()))


@pytest.mark.parametrize("name", WRONG)
def test_a_constant_that_meets_a_prime_is_no_zero(name: str) -> None:
    assert not proof_of(*WRONG[name])


@pytest.mark.parametrize("name", RIGHT)
def test_right_edits_with_such_constants_are_proved(name: str) -> None:
    proof = proof_of(*RIGHT[name])
    assert isinstance(proof, Proof), proof
    assert proof.grade >= Grade.PROVED
