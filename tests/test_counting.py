"""What tests count instead of time, and which of them `make test` leaves out: both notice what is wrong."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import slow_cases
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


NAMED = """
import pytest

@pytest.mark.quick_cases("0", "{named}")
@pytest.mark.one_of(2)
@pytest.mark.parametrize("number", range(4))
def test_numbers(number): ...
"""


@pytest.mark.parametrize(("named", "stale"), [("2", []), ("5", ["test_it.py::test_numbers[5]"])])
def test_a_marker_that_names_no_case_is_noticed(
    named: str, stale: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "test_it.py").write_text(NAMED.format(named=named))
    (tmp_path / "conftest.py").write_text(CONFTEST)
    words = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", "-m", "not slow"]
    path = {"PYTHONPATH": str(Path(slow_cases.__file__).parent)}
    made = subprocess.run(words, cwd=tmp_path, env=os.environ | path, capture_output=True, text=True)
    told = made.stdout.splitlines()
    assert [one.removeprefix("stale ") for one in told if one.startswith("stale ")] == stale
    assert [one for one in told if one.startswith("test_it.py")] == ["test_it.py::test_numbers[0]"]


CONFTEST = """
import slow_cases

def pytest_configure(config):
    for name in ("quick_cases", "one_of", "slow"):
        config.addinivalue_line("markers", name)

def pytest_collection_modifyitems(items):
    for one in slow_cases.mark_slow(items):
        print("stale", one)
"""
