"""Long sums in parts: both sides of a product, stored and dynamic, turned or not."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from anesurgery.errors import PassError, ProofError
from anesurgery.mil import Program, Var, ct, mb, types, walk_ops
from anesurgery.passes import split_inner_axis
from anesurgery.passes.split_inner_axis import SplitInnerAxis
from anesurgery.testing import apply_pass, assert_refuses, assert_same_numbers

WEIGHT = np.random.default_rng(0).standard_normal((3, 10)).astype(np.float32)


def product(x: tuple[Any, ...], y: tuple[int, ...] | None = None, **turned: bool) -> Program:
    @mb.program(input_specs=[mb.TensorSpec(x), mb.TensorSpec(y or (1,))])
    def program(a: Var, b: Var) -> Any:
        other = WEIGHT if y is None else b
        return mb.matmul(x=a, y=other, **turned), mb.relu(x=b)

    return program


def linear() -> Program:
    @mb.program(input_specs=[mb.TensorSpec((2, 4, 10))])
    def program(x: Var) -> Any:
        return mb.linear(x=x, weight=WEIGHT, bias=WEIGHT[:, 0])

    return program


CASES = {
    "linear": linear(),
    "stored": product((4, 10), transpose_y=True),
    "dynamic": product((2, 4, 10), (2, 10, 3)),
    "turned": product((2, 10, 4), (2, 3, 10), transpose_x=True, transpose_y=True),
}


@pytest.mark.parametrize("name", CASES)
def test_the_parts_are_added(name: str) -> None:
    after, session = apply_pass(SplitInnerAxis(most=4), CASES[name])
    kinds = [op.op_type for op in walk_ops(after)]
    assert kinds.count("matmul") + kinds.count("linear") == 3, session.refusals
    assert session.changes[0].proof is not None
    assert_same_numbers(CASES[name], after, rtol=1e-5)
    assert not apply_pass(SplitInnerAxis(most=10), CASES[name])[1].changes


def test_refusals_name_what_was_found() -> None:
    from coremltools.converters.mil.mil import get_new_symbol

    symbol = get_new_symbol()
    assert_refuses(SplitInnerAxis(), product((2, symbol), (3, 4), transpose_y=True), "has the symbolic length")
    with pytest.raises(PassError, match="most=0"):
        SplitInnerAxis(most=0)

    @mb.program(input_specs=[mb.TensorSpec((2, 10))], opset_version=ct.target.iOS18)
    def vectors(x: Var) -> Any:
        table = np.ones((1, 1, 16, 2), np.float32)
        indices = np.zeros((3, 5), types.np_uint4_dtype)
        return mb.linear(
            x=x, weight=mb.constexpr_lut_to_dense(indices=indices, lut=table, vector_axis=np.int32(1))
        )

    assert_refuses(SplitInnerAxis(most=4), vectors, "the edit cuts vectors of 2 numbers")


def test_a_part_that_is_lost_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The wrong version: the first part of one side is taken twice."""
    right = split_inner_axis._parts

    def wrong(mb: Any, v: Var, axis: int, edges: Any) -> Any:
        parts = right(mb, v, axis, edges)
        return [parts[0], parts[0]] if axis == -1 else parts

    monkeypatch.setattr(split_inner_axis, "_parts", wrong)
    with pytest.raises(ProofError, match="old and new differ"):
        apply_pass(SplitInnerAxis(most=5), CASES["dynamic"])
