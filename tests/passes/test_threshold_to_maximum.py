"""threshold as maximum: bit by bit, in fp16 too, and in a network that writes ReLU6 with it."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import anesurgery as ane
from anesurgery.loading import load
from anesurgery.mil import Program, Var, mb, types, walk_ops
from anesurgery.passes.threshold_to_maximum import ThresholdToMaximum
from anesurgery.testing import apply_pass, assert_refuses, assert_same_numbers


def threshold(alpha: Any, dtype: Any = types.fp32) -> Program:
    @mb.program(input_specs=[mb.TensorSpec((2, 3), dtype=dtype)])
    def program(x: Var) -> Var:
        return mb.threshold(x=x, alpha=alpha, name="y")

    return program


@pytest.mark.parametrize("alpha", [-6.0, 0.0, 1e30, -np.inf])
def test_numbers_are_the_same_bit_by_bit(alpha: float) -> None:
    program = threshold(np.float32(alpha))
    after, session = apply_pass(ThresholdToMaximum(), program)
    assert session.changes[0].proof is not None
    values = {"x": np.array([[-np.inf, -6, -0.0], [0, 7, np.inf]], np.float32)}
    assert_same_numbers(program, after, values)


def test_not_a_number_is_refused() -> None:
    assert_refuses(ThresholdToMaximum(), threshold(np.float32(np.nan)), "alpha is nan")


@pytest.mark.slow
def test_relu6_of_a_real_network_reaches_the_engine(corpus: Path) -> None:
    """An upgrade makes maxima of thresholds; of none is left what the pass would change."""
    model = ane.upgrade(corpus / "pose_cpm.mlmodel", precision="fp16")
    program = load(model).program
    counts = Counter(op.op_type for op in walk_ops(program))
    assert counts["maximum"] == 93
    assert not counts["threshold"]
    assert ane.inspect(model, target="M4/macOS 15").residency["ops"] > 0.9
