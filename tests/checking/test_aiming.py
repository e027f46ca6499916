"""Each constant of both sides is met with its neighbours, whatever the size and the tolerance."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from both_sides import checked, side_by_side

from anesurgery.checking.adversarial import Drawing
from anesurgery.checking.aiming import aimed, crossed, targets
from anesurgery.checking.grades import Grade, Promise, SiteCheck, Tolerance
from anesurgery.mil import Array, Var, mb, types

FREE = Drawing(lambda var, rng: None)


def doubled(number: float, dtype: Any = np.float32) -> Any:
    """Numbers, but twice this one."""
    return lambda x: mb.select(cond=mb.equal(x=x, y=dtype(number)), a=mb.mul(x=x, y=dtype(2)), b=x)


@pytest.mark.one_of(27)
@pytest.mark.parametrize("number", [5.0, -5.0, 1e-5, 300.0, 6e4])
@pytest.mark.parametrize(
    ("shape", "rtol"), [((4, 64), 1e-2), ((200, 200), 1e-6), ((100, 100), 1e-3), ((1,), 1e-3)]
)
def test_one_number_of_all_is_met(number: float, shape: tuple[int, ...], rtol: float) -> None:
    promise = Promise(Tolerance(rtol))
    check = checked(doubled(number), lambda x: mb.identity(x=x), (types.fp32, shape), promise=promise)
    assert isinstance(check, SiteCheck)
    assert not check.within(promise.tolerance)
    assert check.grade is Grade.NUMBERS
    assert check.counterexample


def test_a_number_that_two_constants_make_is_met() -> None:
    def body(x: Var) -> Any:
        return mb.select(cond=mb.equal(x=mb.add(x=x, y=np.float32(3)), y=np.float32(40)), a=np.float32(0), b=x)

    promise = Promise(Tolerance(1e-3))
    check = checked(body, lambda x: mb.identity(x=x), (types.fp32, (20, 20)), promise=promise)
    assert isinstance(check, SiteCheck)
    assert not check.within(promise.tolerance)


def rounds_of(shape: tuple[int, ...], dtype: Any, numpy: Any, *, apart: bool) -> tuple[Array, list[Array]]:
    program, _, _, _ = side_by_side(doubled(5, numpy), lambda x: mb.identity(x=x), (dtype, shape))
    (x,) = program.functions["main"].inputs.values()
    constants = targets(program.functions["main"].operations)
    made = aimed([x], FREE, (*constants, 1e4), np.random.default_rng(0), apart=apart)
    found = [values[x] for values in made]
    return np.concatenate([v.ravel() for v in found]), found


@pytest.mark.parametrize("shape", [(1,), (3,), (40, 50)])
@pytest.mark.parametrize("apart", [True, False])
@pytest.mark.parametrize(("dtype", "numpy"), [(types.fp32, np.float32), (types.fp16, np.float16)])
def test_neighbours_are_met(shape: tuple[int, ...], apart: bool, dtype: Any, numpy: Any) -> None:
    found, rounds = rounds_of(shape, dtype, numpy, apart=apart)
    five, most = numpy(5), numpy(np.inf)
    wanted = {
        five,
        np.nextafter(five, most),
        np.nextafter(five, -most),
        numpy(4),
        numpy(6),
        numpy(0),
        numpy(1e4),
    }
    assert wanted <= set(found.tolist())
    assert {-n for n in wanted} <= set(found.tolist())
    if apart:
        assert all(np.abs(values).max() < 1e3 for values in rounds if five in values)


def test_integers_are_met() -> None:
    found, _ = rounds_of((2, 3), types.int32, np.int32, apart=True)
    assert {-6, -5, -4, -1, 0, 1, 2, 3, 4, 5, 6, 9999, 10000, 10001} <= set(found.tolist())


def test_sizes_and_places_are_no_targets() -> None:
    program, _, _, _ = side_by_side(
        lambda x: mb.reshape(x=mb.reduce_sum(x=x, axes=[1], keep_dims=True), shape=[1, 2]), doubled(7)
    )
    assert targets(program.functions["main"].operations) == (2.0, 7.0)


@pytest.mark.parametrize("shape", [(16,), (3, 2)])
def test_infinities_meet_each_other(shape: tuple[int, ...]) -> None:
    program, _, _, _ = side_by_side(
        lambda x, y: mb.add(x=x, y=y), lambda x, y: mb.sub(x=x, y=y), (types.fp32, shape), (types.fp32, shape)
    )
    both = list(program.functions["main"].inputs.values())
    finite = {v: np.ones(shape, np.float32) for v in both}
    count = int(np.prod(shape))
    rounds = [crossed(both, FREE, finite, count * i) for i in range(-(-16 // count))]
    pairs = {pair for made in rounds for pair in zip(*(map(str, made[v].ravel()) for v in both), strict=True)}
    assert len(pairs) == 16
