"""Batch norms in the weights of convolutions: groups, strides, missing parameters; fp16 is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from anesurgery.errors import ProofError
from anesurgery.mil import Program, Var, mb, types, walk_ops
from anesurgery.passes.fold_batch_norm import FoldBatchNorm
from anesurgery.testing import apply_pass, assert_refuses, assert_same_numbers


def program_of(
    weight: tuple[int, ...] = (4, 3, 3, 3), variance: Any = (1, 2, 3, 0.5), half: bool = False, **more: Any
) -> Program:
    kind = np.float16 if half else np.float32
    groups, without = more.pop("groups", 1), more.pop("without", ())
    given = {"gamma": [0.5, -2, 3, 0], "beta": [1, 2, -3, 4]}
    norm = {k: np.array(v, kind) for k, v in given.items() if k not in without}
    values = np.random.default_rng(0).standard_normal(weight).astype(kind)
    shape = (2, weight[1] * groups, *[9] * (len(weight) - 2))

    @mb.program(input_specs=[mb.TensorSpec(shape, dtype=types.fp16 if half else types.fp32)])
    def program(x: Var) -> Var:
        c = mb.conv(x=x, weight=values, groups=groups, **more)
        mean = np.array([1, -1, 0.25, 2], kind)
        return mb.batch_norm(x=c, mean=mean, variance=np.array(variance, kind), **norm, name="y")

    return program


CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "bias, stride and padding": {
        "bias": np.arange(4, dtype=np.float32),
        "strides": [2, 1],
        "pad_type": "custom",
        "pad": [1, 0, 2, 1],
    },
    "groups": {"weight": (4, 2, 3, 3), "groups": 2, "dilations": [2, 1]},
    "one dimension": {"weight": (4, 3, 5)},
    "no gamma and beta": {"without": ("gamma", "beta")},
}


@pytest.mark.one_of(3)
@pytest.mark.parametrize("name", CASES)
def test_numbers_are_kept(name: str) -> None:
    program = program_of(**CASES[name])
    after, session = apply_pass(FoldBatchNorm(), program)
    assert session.changes[0].proof is not None
    assert [op.op_type for op in walk_ops(after) if op.op_type != "const"] == ["conv"]
    assert_same_numbers(program, after, rtol=1e-5)


def test_refusals_name_the_value() -> None:
    assert_refuses(FoldBatchNorm(), program_of(half=True), "is fp16; its products would be rounded again")
    after, session = apply_pass(FoldBatchNorm(allow_rounding=True), program_of(half=True), prove=False)
    assert session.changes
    assert "batch_norm" not in [op.op_type for op in walk_ops(after)]
    broken = program_of(variance=(1, -2, 3, 4))
    assert_refuses(FoldBatchNorm(), broken, "the scale of a channel is nan")

    @mb.program(input_specs=[mb.TensorSpec((1, 3, 9, 9))])
    def shared(x: Var) -> Any:
        c = mb.conv(x=x, weight=np.ones((2, 3, 3, 3), np.float32), name="c")
        ones = np.ones(2, np.float32)
        return mb.batch_norm(x=c, mean=ones, variance=ones), mb.relu(x=c)

    assert_refuses(FoldBatchNorm(), shared, "%c is read elsewhere")


def test_a_forgotten_epsilon_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """The wrong version: the root of the variance alone."""
    monkeypatch.setattr("anesurgery.authoring.number", lambda var: -0.2)
    with pytest.raises(ProofError, match="old and new differ"):
        apply_pass(FoldBatchNorm(), program_of())
