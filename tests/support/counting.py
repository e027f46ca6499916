"""How much work a call is, in lines executed: the same number on every machine, busy or idle."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

LINEAR = 2.2
"""Twice the input is at most so much more work, where work is proportional to it."""


def lines(work: Callable[[], object]) -> int:
    """Lines of Python that a call executes, in this thread; each turn of a loop counts."""
    count = 0

    def watch(frame: FrameType, event: str, argument: object) -> Any:
        nonlocal count
        count += event == "line"
        return watch

    before, collects = sys.gettrace(), gc.isenabled()
    gc.disable()  # what others left is not this work
    sys.settrace(watch)
    try:
        work()
    finally:
        sys.settrace(before)
        if collects:
            gc.enable()
    return count


def assert_linear(work: Callable[[Any], object], small: Any, double: Any) -> None:
    """Twice the input is about twice the work.

    Args:
        work: What is done with an input.
        small: An input.
        double: One of the same kind, twice as large.

    Raises:
        AssertionError: With both counts, where the work grows faster than the input.
    """
    work(small)  # what is computed once and kept
    few, many = lines(lambda: work(small)), lines(lambda: work(double))
    assert many <= LINEAR * few, f"{many} lines for twice the input of {few} lines"
