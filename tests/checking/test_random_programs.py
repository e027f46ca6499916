"""Random programs: a copy of the ops is the same bit for bit, and a mutation of the copy is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
from both_sides import side_by_side
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from mutations import mutations

from anesurgery.checking.grades import Grade, SiteCheck
from anesurgery.checking.site import check_site
from anesurgery.errors import SurgeryError
from anesurgery.mil import Var, mb, types

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

PROGRAMS = st.lists(st.sampled_from(sorted(STEPS)), min_size=1, max_size=4)
QUICK = settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)


def cut(x: Var, begin: int, end: int) -> Var:
    made: Var = mb.slice_by_index(x=x, begin=[0, begin], end=[4, end])
    return made


def copied(names: list[str]) -> tuple[Any, Any]:
    """A program beside its copy: the pairs of values, the ops of the copy."""

    def body(x: Var, y: Var) -> Var:
        for name in names:
            x = STEPS[name](x, y)
        return x

    shape = (types.fp32, (4, 4))
    _, olds, news, made = side_by_side(body, body, shape, shape)
    return list(zip(olds, news, strict=True)), made


def check(pairs: Any, made: Any) -> SiteCheck | str:
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
