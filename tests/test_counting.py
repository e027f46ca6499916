"""What tests count instead of time, and which of them `make test` leaves out: both notice what is wrong."""

from __future__ import annotations

import sys

import long_tests
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


def test_a_row_of_the_long_tests_that_is_out_of_date_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(long_tests, "STAYS", {"test_a.py::test_one": ("x", "y")})
    monkeypatch.setattr(long_tests, "STANDS_IN", {"test_a.py::test_two": "its neighbours"})
    assert long_tests.stale({"test_a.py::test_one": {"x", "y", "z"}, "test_a.py::test_two": {""}}) == []
    assert long_tests.stale({"test_a.py::test_one": {"x"}, "test_a.py::test_three": {""}}) == [
        "test_a.py::test_one[y]",
        "test_a.py::test_two",
    ]
    assert long_tests.stale({"test_b.py::test_one": {""}}) == []
