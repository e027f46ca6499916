"""`against_host`: folded values are held against those of coremltools, and one that differs stays computed."""

from __future__ import annotations

import re

import numpy as np
import pytest

from anesurgery.checking.grades import Grade, SiteCheck
from anesurgery.errors import Refusal
from anesurgery.mil import Array, Var, mb
from anesurgery.passes import fold_constants
from anesurgery.passes.fold_constants import _is_inferred, compare_with_host
from anesurgery.testing import apply_pass, assert_refuses


def constant(array: Array) -> Var:
    program = mb.program(input_specs=[mb.TensorSpec((1,))])(
        lambda x: mb.identity(x=mb.const(val=array, name="c"))
    )

    var: Var = next(op for op in program.functions["main"].operations if op.op_type == "const").outputs[0]
    return var


FLOATS = np.array([1.5, -np.inf, np.nan, 1000.0], np.float32)


def test_equal_bits_leave_nothing_to_try() -> None:
    seen = compare_with_host([constant(FLOATS)], [FLOATS])
    assert isinstance(seen, SiteCheck)
    assert (seen.grade, seen.max_abs, seen.values) == (Grade.EXHAUSTIVE, 0.0, 4)


def test_rounding_is_shown() -> None:
    seen = compare_with_host([constant(FLOATS)], [FLOATS * np.float32(1.001)])
    assert isinstance(seen, SiteCheck)
    assert seen.grade == Grade.NUMBERS
    assert seen.max_abs == pytest.approx(1.0, 1e-3)
    assert seen.max_rel == pytest.approx(1e-3, 1e-3)


@pytest.mark.parametrize(
    ("inferred", "value", "words"),
    [
        (np.array([1, 2], np.int32), np.array([1, 3], np.int32), "%c holds 3, and 2 by coremltools"),
        (np.array([True, False]), np.array([True, True]), "%c holds True, and False by coremltools"),
        (FLOATS, np.where(FLOATS == 1000, np.float32(900), FLOATS), "%c holds 900.0, and 1000.0"),
        (FLOATS, np.abs(FLOATS), "%c holds inf, and -inf"),
        (FLOATS, np.nan_to_num(FLOATS, nan=0.0, neginf=-np.inf), "%c holds 0.0, and nan"),
        (np.float32(2), np.array([2], np.float32), r"%c has the shape \(1,\), and \(\) by coremltools"),
    ],
)
def test_another_value_is_refused_with_both(inferred: Array, value: Array, words: str) -> None:
    seen = compare_with_host([constant(inferred)], [value])
    assert isinstance(seen, Refusal)
    assert re.match(words, seen.reason), seen.reason


def test_what_is_not_inferred_is_not_compared() -> None:
    program = mb.program(input_specs=[mb.TensorSpec((1,))])(lambda x: mb.relu(x=x))

    assert not _is_inferred(program.functions["main"].outputs[0])
    assert _is_inferred(constant(FLOATS))


def test_a_fold_has_a_second_opinion() -> None:
    _, session = apply_pass(fold_constants.FoldConstants(), fold_constants.example())
    assert [change.proof.grade for change in session.changes if change.proof] == [Grade.EXHAUSTIVE]


def test_a_wrong_fold_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    right = fold_constants.compute
    monkeypatch.setattr(fold_constants, "compute", lambda *args: [value + 1 for value in right(*args)])
    assert_refuses(fold_constants.FoldConstants(), fold_constants.example(), "by coremltools")
