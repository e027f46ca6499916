"""What the running test compares, and how far off it is: the suite's own tolerances alone would miss much."""

from __future__ import annotations

from typing import Any

import numpy as np

ALL_OF = 20
"""Programs and networks of one test that are rewritten before a stride is taken."""


class Recorder:
    """What the running test did."""

    def __init__(self) -> None:
        self.both_sources, self.mutate, self.stride = False, "", 1
        self.rewriting: Any = None
        self.core_ai: Any = None
        """The folder in which predictions are kept for Apple's runtime."""
        self.reset()

    def reset(self) -> None:
        """Begin a test."""
        self.predictions = 0
        self.error = 0.0
        self.compared = 0
        self.half = 0
        self.stored = ""
        self.xfail = ""
        self.passes: list[dict[str, Any]] = []
        self.rewritten: list[dict[str, Any]] = []
        self.built = 0

    def in_stride(self) -> bool:
        """Is the next model that the test runs one of those that are rewritten?"""
        self.built += 1
        return self.built <= ALL_OF or self.built % self.stride == 0


RECORD = Recorder()


def recorded(allclose: Any) -> Any:
    """`assert_allclose`, with the true error noted, relative to the largest number expected.

    Programs and expectations of half floats are held to half floats: the suite widens its tolerance for
    programs that it converts to fp16, and forgets those that are built so.
    """

    def compare(actual: Any, desired: Any, *args: Any, **kwargs: Any) -> None:
        error = _relative_error(actual, desired)
        try:
            allclose(actual, desired, *args, **kwargs)
        except AssertionError:
            half = RECORD.stored == "fp16" or np.asarray(desired).dtype == np.float16
            if not (half and RECORD.predictions and error <= HALF_UNITS * 2.0**-10):
                raise
            RECORD.half += 1
        RECORD.compared += 1
        RECORD.error = max(RECORD.error, 0.0 if np.isnan(error) else error)

    return compare


def noted(compare: Any) -> Any:
    """A test class's own `_test_predictions`, with the true error noted: its tolerance is 1 %."""

    def both(self: Any, expected: Any, actual: Any, *args: Any, **kwargs: Any) -> None:
        compare(self, expected, actual, *args, **kwargs)
        error = _relative_error(np.ravel(actual), np.ravel(expected))
        RECORD.compared += 1
        RECORD.error = max(RECORD.error, 0.0 if np.isnan(error) else error)

    return both


HALF_UNITS = 4
"""Units in the last place of fp16 that a program of half floats may be off by."""


def _relative_error(actual: Any, desired: Any) -> float:
    """The largest difference over the largest number expected; NaN where that makes no sense."""
    try:
        a, b = np.asarray(actual, np.float64), np.asarray(desired, np.float64)
        if a.shape != b.shape or (np.isfinite(a) != np.isfinite(b)).any():
            return np.nan
    except (TypeError, ValueError):
        return np.nan
    both = np.isfinite(b)
    scale = np.abs(b[both]).max(initial=0)
    error = np.abs(a[both] - b[both]).max(initial=0)
    return float(error / max(scale, np.finfo(np.float32).tiny)) if scale else float(error)


def same_numbers(apply_pass: Any) -> Any:
    """`apply_pass_and_basic_check`, which then runs the program before and after the pass.

    What it finds is noted, and fails no test: some passes change numbers on purpose, some programs cannot run.
    """

    def check(program: Any, name: Any, *args: Any, **kwargs: Any) -> Any:
        made = apply_pass(program, name, *args, **kwargs)
        note = {"pass": str(name), "error": 0.0, "why": ""}
        try:
            note["error"] = _difference(made[0], program)
        except Exception as error:
            note["why"] = f"{type(error).__name__}: {error}"[:300]
        RECORD.passes.append(note)
        return made

    return check


def _difference(before: Any, after: Any) -> float:
    """The largest relative difference of an output."""
    from anesurgery.interpret import run
    from anesurgery.interpret.sampling import sample_inputs

    values = sample_inputs(before)
    expected, found = run(before, values), run(after, values)
    errors = [_relative_error(b, a) for a, b in zip(expected.values(), found.values(), strict=True)]
    return max(errors, default=0.0)
