"""What tests count instead of time: work that grows too fast is noticed, on any machine."""

from __future__ import annotations

import sys

import pytest
from counting import assert_linear, lines


def once(values: list[int]) -> int:
    return sum(value * value for value in values)


def each_with_each(values: list[int]) -> int:
    return sum(a == b for a in values for b in values)


def test_linear_work_is_told_from_quadratic() -> None:
    small, double = list(range(50)), list(range(100))
    assert_linear(once, small, double)
    with pytest.raises(AssertionError, match="lines for twice the input"):
        assert_linear(each_with_each, small, double)


def test_a_count_repeats_and_leaves_no_trace_function() -> None:
    before = sys.gettrace()
    assert lines(lambda: once([1, 2, 3])) == lines(lambda: once([1, 2, 3])) > 3
    assert sys.gettrace() is before
