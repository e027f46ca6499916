"""Which outputs are a choice among classes or tokens: there KL divergence and the best entry mean something."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import anesurgery as ane
from anesurgery.facts.makeup import logits_of
from anesurgery.mil import Function, Program, Var, mb


def head(outputs: int, last: str, name: str = "y") -> Program:
    """A product of 8 with some outputs, and what stands behind it."""
    weight = np.random.default_rng(0).standard_normal((outputs, 8)).astype(np.float32)

    @mb.program(input_specs=[mb.TensorSpec((1, 4, 8))])
    def program(x: Var) -> Any:
        y = mb.linear(x=mb.relu(x=x), weight=weight)
        if last == "softmax":
            return mb.softmax(x=y, axis=-1, name=name)
        if last == "norm":
            return mb.l2_norm(x=mb.expand_dims(x=y, axes=[0]), name=name)
        return mb.mul(x=mb.tanh(x=y), y=np.float32(30), name=name)

    return program


def function(program: Program) -> Function:
    return program.functions["main"]


@pytest.mark.parametrize(
    ("outputs", "last", "name", "chosen"),
    [
        (40, "cap", "y", True),
        (16, "cap", "y", True),
        (12, "cap", "y", False),
        (40, "norm", "y", False),
        (8, "softmax", "y", True),
        (8, "cap", "class_scores", True),
    ],
)
def test_a_head_is_told_from_a_projection_of_features(outputs: int, last: str, name: str, chosen: bool) -> None:
    assert (logits_of(function(head(outputs, last, name))) == {name}) is chosen


def test_kl_and_top_1_are_shown_of_logits_alone() -> None:
    words, features = (str(ane.compare(p, p)) for p in (head(40, "cap"), head(12, "cap")))
    assert "KL" in words
    assert "top-1" in words
    assert "KL" not in features
    assert "top-1" not in features
    assert words.startswith("ok: the outputs are identical (fp32 arithmetic)")
