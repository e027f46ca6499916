"""Integers: exact beyond 2^24, wrapping beyond 2^31, saturating where floats become whole. NaN stays NaN."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import anesurgery as ane
from anesurgery.errors import InterpretError
from anesurgery.mil import Array, Program, Var, ct, mb, types

LOW, HIGH = -(2**31), 2**31 - 1
ODD = 2**24 + 1
"""The first integer that fp32 has not."""


def computed(build: Callable[[Var], Var], x: Array, dtype: Any = types.int32, **options: Any) -> Array:
    """What a program of one op makes of an input."""

    @mb.program(input_specs=[mb.TensorSpec(x.shape, dtype=dtype)], opset_version=ct.target.iOS17)
    def program(x: Var) -> Var:
        return build(x)

    made: Array = next(iter(ane.run(program, {"x": x}, **options).values()))
    return made


def whole(*values: int) -> Array:
    return np.array(values, np.int32)


@pytest.mark.parametrize("size", [1, 3])
def test_products_wrap_as_sums_do(size: int) -> None:
    a = np.full((2, size), HIGH, np.int32)
    b = np.arange(1, 2 * size + 1, dtype=np.int32).reshape(size, 2)
    expected = (a.astype(np.int64) @ b.astype(np.int64)).astype(np.int32)
    np.testing.assert_array_equal(computed(lambda x: mb.matmul(x=x, y=b), a), expected)
    np.testing.assert_array_equal(computed(lambda x: mb.mul(x=x, y=np.int32(3)), whole(HIGH)), [HIGH - 2])


def test_products_beyond_fp64_are_exact() -> None:
    a, b = np.full((1, 5), HIGH, np.int32), np.full((5, 1), HIGH - 1, np.int32)
    expected = np.array([[5 * HIGH * (HIGH - 1)]], object) % 2**32
    made = computed(lambda x: mb.matmul(x=x, y=b), a).astype(np.int64) % 2**32
    assert made.tolist() == expected.tolist()


def test_means_and_quotients_are_exact() -> None:
    for values in ((ODD,), (HIGH, HIGH, -3)):
        made = computed(lambda x: mb.reduce_mean(x=x, axes=[0], keep_dims=True), whole(*values))
        assert made.tolist() == [sum(values) // len(values)]
    assert computed(lambda x: mb.real_div(x=x, y=np.int32(1)), whole(ODD, -ODD)).tolist() == [ODD, -ODD]
    assert computed(lambda x: mb.real_div(x=x, y=np.int32(2)), whole(7, -7)).tolist() == [3, -3]


def test_a_scatter_divides_as_a_division_does() -> None:
    updates, places = whole(2, -1, 0), np.arange(3, dtype=np.int32)
    build = lambda x: mb.scatter_along_axis(data=x, indices=places, updates=updates, axis=0, mode="div")  # noqa: E731
    assert computed(build, whole(-7, LOW, 5)).tolist() == [-3, LOW, 5]  # by 0: as by 1, wherever it stands
    assert computed(lambda x: mb.real_div(x=x, y=updates), whole(-7, LOW, 5)).tolist() == [-3, LOW, 5]


def test_floats_saturate_on_the_way_to_integers() -> None:
    x = np.array([3e9, -3e9, np.inf, -np.inf, np.nan, 2.9, -2.9], np.float32)
    made = computed(lambda x: mb.cast(x=x, dtype="int32"), x, types.fp32)
    assert made.tolist() == [HIGH, LOW, HIGH, LOW, 0, 2, -2]


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_nan_stays(precision: str) -> None:
    x = np.array([np.nan, -2.0, 3.0], np.float32)
    sign = computed(lambda x: mb.sign(x=x), x, types.fp32, precision=precision)
    np.testing.assert_array_equal(sign, [np.nan, -1, 1])
    above = computed(lambda x: mb.thresholded_relu(x=x, alpha=1.0), x, types.fp32, precision=precision)
    np.testing.assert_array_equal(above, [np.nan, 0, 3])


def picked(index: int) -> Program:
    return mb.program(input_specs=[mb.TensorSpec((3, 2)), mb.TensorSpec((2,), dtype=types.int32)])(
        lambda x, at: mb.slice_by_index(
            x=x, begin=at, end=[0, 0], squeeze_mask=[True, False], end_mask=[False, True]
        )
    )


@pytest.mark.parametrize("index", [-3, -1, 0, 2])
def test_an_index_inside_picks_its_row(index: int) -> None:
    x = np.arange(6, dtype=np.float32).reshape(3, 2)
    made = ane.run(picked(index), {"x": x, "at": whole(index, 0)})
    np.testing.assert_array_equal(next(iter(made.values())), x[index])


@pytest.mark.parametrize("index", [-4, 3, 100])
def test_an_index_outside_is_an_error(index: int) -> None:
    x = np.arange(6, dtype=np.float32).reshape(3, 2)
    with pytest.raises(InterpretError, match=f"index {index} on axis 0 of 3; it may be -3 to 2"):
        ane.run(picked(index), {"x": x, "at": whole(index, 0)})


def test_a_linear_of_integers_is_predicted() -> None:
    """Its bias of zeros is a list, as all short rows of integers are."""

    @mb.program(input_specs=[mb.TensorSpec((2, 3), dtype=types.int32)])
    def program(x: Var) -> Any:
        return mb.linear(x=x, weight=np.ones((4, 3), np.int32), bias=np.zeros(4, np.int32), name="y")

    x = np.arange(6, dtype=np.int32).reshape(2, 3)
    np.testing.assert_array_equal(ane.Predictor(program)({"x": x})["y"], [[3] * 4, [12] * 4])
