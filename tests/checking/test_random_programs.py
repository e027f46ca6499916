"""Random programs: a copy is the same bit for bit, one in other words is proved, their mutations are not."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
from both_sides import side_by_side
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from mutations import mutations

from anesurgery.checking.edit_sites import site_of
from anesurgery.checking.grades import Grade, SiteCheck
from anesurgery.checking.proofs import Proof, prove
from anesurgery.checking.site import check_site
from anesurgery.errors import Refusal, SurgeryError
from anesurgery.mil import Program, Var, mb, types

RNG = np.random.default_rng(3)
SQUARE = RNG.standard_normal((4, 4)).astype(np.float32)
NUMBERS = RNG.uniform(0.5, 2, (4,)).astype(np.float32)

STEPS: dict[str, Any] = {
    "add a vector": lambda x, y: mb.add(x=x, y=NUMBERS),
    "subtract": lambda x, y: mb.sub(x=x, y=y),
    "multiply": lambda x, y: mb.mul(x=x, y=NUMBERS),
    "matmul": lambda x, y: mb.matmul(x=x, y=SQUARE),
    "linear": lambda x, y: mb.linear(x=x, weight=SQUARE, bias=NUMBERS),
    "transpose": lambda x, y: mb.transpose(x=x, perm=[1, 0]),
    "softmax": lambda x, y: mb.softmax(x=x, axis=1),
    "sum": lambda x, y: mb.add(x=x, y=mb.reduce_sum(x=y, axes=[1], keep_dims=True)),
    "erf": lambda x, y: mb.erf(x=x),
    "tanh": lambda x, y: mb.tanh(x=x),
    "rotate": lambda x, y: mb.concat(values=[cut(x, 1, 4), cut(x, 0, 1)], axis=1),
    "choose": lambda x, y: mb.select(cond=mb.greater(x=x, y=y), a=x, b=np.float32(0.25)),
}
"""Steps from a current value and an input, both 4 by 4, to a value of that shape; none hides a difference."""

MINUS, ONES = np.float32(-1), np.ones((4, 4), np.float32)


def negated(function: Any, x: Var) -> Any:
    return mb.mul(x=function(x=mb.mul(x=x, y=MINUS)), y=MINUS)


def quotient(x: Var) -> Any:
    e = mb.exp(x=x)
    return mb.real_div(x=e, y=mb.reduce_sum(x=e, axes=[1], keep_dims=True))


def blended(x: Var, y: Var) -> Any:
    """A choice by 0 and 1."""
    hit = mb.cast(x=mb.less(x=y, y=x), dtype="fp32")
    quarter = np.float32(0.25)
    return mb.add(x=quarter, y=mb.mul(x=hit, y=mb.sub(x=x, y=quarter)))


RESPELLED: dict[str, Any] = {
    "add a vector": lambda x, y: mb.sub(x=x, y=-NUMBERS),
    "subtract": lambda x, y: mb.add(x=mb.mul(x=y, y=MINUS), y=x),
    "multiply": lambda x, y: mb.matmul(x=x, y=np.diag(NUMBERS)),
    "matmul": lambda x, y: mb.linear(x=x, weight=SQUARE.T.copy()),
    "linear": lambda x, y: mb.add(x=mb.matmul(x=x, y=SQUARE, transpose_y=True), y=NUMBERS),
    "transpose": lambda x, y: mb.matmul(x=x, y=np.eye(4, dtype=np.float32), transpose_x=True),
    "softmax": lambda x, y: quotient(x),
    "sum": lambda x, y: mb.add(x=x, y=mb.matmul(x=y, y=ONES)),
    "erf": lambda x, y: negated(mb.erf, x),
    "tanh": lambda x, y: negated(mb.tanh, x),
    "rotate": lambda x, y: mb.gather(x=x, indices=np.array([1, 2, 3, 0], np.int32), axis=1),
    "choose": lambda x, y: blended(x, y),
}
"""Each step in other words, equal as functions of real numbers."""

PROGRAMS = st.lists(st.sampled_from(sorted(STEPS)), min_size=1, max_size=4)
QUICK = settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)


def cut(x: Var, begin: int, end: int) -> Var:
    made: Var = mb.slice_by_index(x=x, begin=[0, begin], end=[4, end])
    return made


def copied(names: list[str], other: dict[str, Any] = STEPS) -> tuple[Any, Any]:
    """A program beside its copy, in other words on request: the pairs of values, the ops of the copy."""

    def body(steps: dict[str, Any], x: Var, y: Var) -> Var:
        for name in names:
            x = steps[name](x, y)
        return x

    shape = (types.fp32, (4, 4))
    bodies = [functools.partial(body, steps) for steps in (STEPS, other)]
    program, olds, news, made = side_by_side(bodies[0], bodies[1], shape, shape)
    HELD.append(program)
    return list(zip(olds, news, strict=True)), made


HELD: list[Program] = []
"""Programs that keep their values alive."""


def check(pairs: Any, made: Any) -> SiteCheck | Refusal:
    return check_site(pairs, made, lambda v, rng: None)


@QUICK
@given(PROGRAMS)
def test_a_copy_is_the_same_bit_for_bit(names: list[str]) -> None:
    found = check(*copied(names))
    assert isinstance(found, SiteCheck), found
    assert found.grade is Grade.BITS


@QUICK
@given(PROGRAMS, st.data())
def test_a_mutation_is_refused(names: list[str], data: st.DataObject) -> None:
    pairs, made = copied(names)
    every = list(mutations(made))
    if not every:
        return
    mutation = data.draw(st.sampled_from(every), label="mutation")
    with mutation.made():
        try:
            found = check(pairs, made)
        except SurgeryError:
            return  # the mutated op cannot be computed
    assert isinstance(found, SiteCheck), found
    assert found.max_abs > 0, f"{names}: {mutation} is not seen, {found}"
    assert found.counterexample


@QUICK
@given(PROGRAMS)
def test_other_words_are_proved_over_the_field(names: list[str]) -> None:
    found = prove(site_of(*copied(names, RESPELLED), ()))
    assert isinstance(found, Proof), found


@pytest.mark.slow
@QUICK
@given(PROGRAMS, st.data())
def test_a_mutation_of_other_words_is_not_proved(names: list[str], data: st.DataObject) -> None:
    pairs, made = copied(names, RESPELLED)
    mutation = data.draw(st.sampled_from(list(mutations(made))), label="mutation")
    with mutation.made():
        try:
            found = prove(site_of(pairs, made, ()))
        except SurgeryError:
            return  # the mutated op cannot be computed
    assert not isinstance(found, Proof), f"{names}: {mutation}"
