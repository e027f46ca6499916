"""Causal masks that are combined with padding, in written and fused attention."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from closeness import assert_close
from masked_attention import BIASED, KEEP, PADDED, Q, attention, masks_of, number, once, one
from pass_cases import refuses, stays, table

import anesurgery as ane
from anesurgery.interpret import run
from anesurgery.mil import Program, Var, ct, mb, types, walk_ops
from anesurgery.passes.causal_mask_tensor import CausalMaskTensor
from anesurgery.testing import assert_same_numbers, random_inputs


@pytest.mark.one_of(9)
@pytest.mark.parametrize("dtype", [types.fp16, types.fp32])
@pytest.mark.parametrize("spelling", PADDED)
def test_padding_is_split_off_and_combined_once(
    spelling: str, dtype: Any, settled: Callable[[Program], Program]
) -> None:
    program = attention(PADDED[spelling], layers=3, dtype=dtype, p=((1, 1, 1, Q), types.int32))
    program = settled(program)  # its layers read one condition then, as in a converted program
    after = once(program, edits=3)
    assert len(masks_of(after)) == 1
    assert not {"select", "logical_and", "logical_or"} & {op.op_type for op in walk_ops(after)}
    combined = [
        op for op in walk_ops(after) if op.op_type in ("minimum", "add") and op.outputs[0].shape == KEEP.shape
    ]
    assert len(combined) == 1
    for padding in ([1, 1, 1, 1, 1], [1, 1, 1, 0, 0], [1, 0, 1, 0, 1]):
        inputs = {**random_inputs(program), "p": np.array(padding, np.int32).reshape(1, 1, 1, Q)}
        assert_same_numbers(program, after, inputs)
        assert_same_numbers(program, settled(after), inputs, rtol=1e-6)


@pytest.mark.one_of(3)
@pytest.mark.parametrize("spelling", ["and", "or", "product"])
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_rows_that_keep_nothing_stay_defined(spelling: str, precision: str) -> None:
    """Left padding: the first rows see only masked positions."""
    program = one(PADDED[spelling], dtype=types.fp16, p=((1, 1, 1, Q), types.int32))
    after = once(program, edits=1)
    padding = np.array([0, 0, 1, 1, 1], np.int32).reshape(1, 1, 1, Q)
    inputs = {**random_inputs(program), "p": padding}
    old, new = (run(p, inputs, precision=precision)["weights"] for p in (program, after))
    assert np.isfinite(new).all()
    np.testing.assert_allclose(new.sum(-1), 1, rtol=2e-3)
    np.testing.assert_array_equal(new[..., 2:, :], old[..., 2:, :])
    assert np.isnan(old[..., :2, :]).all() == (spelling == "and")
    if spelling == "product" and precision == "fp32":  # scores at -3e4 are rounded to 1/512
        assert_close(new[..., :2, :], old[..., :2, :], rtol=2e-3)


def fused(mask: Callable[[Var], Any], *, dtype: Any = types.fp16, size: int = Q) -> Program:
    specs = [mb.TensorSpec((1, 2, size, 4), dtype), mb.TensorSpec((1, 1, 1, Q), types.int32)]

    @mb.program(input_specs=specs, opset_version=ct.target.iOS18)
    def program(q: Var, p: Var) -> Var:
        k = q if size == Q else mb.pad(x=q, pad=[0, 0, 0, 0, 0, Q - size, 0, 0])
        for _ in range(2):
            q = mb.scaled_dot_product_attention(query=q, key=k, value=k, attn_mask=mask(p))
        return mb.add(x=q, y=number(q, 0), name="y")

    made: Program = program
    return made


@pytest.mark.one_of(9)
@pytest.mark.parametrize("dtype", [types.fp16, types.fp32])
@pytest.mark.parametrize(
    ("mask", "conditions"),
    [
        (lambda p: KEEP, 0),
        (lambda p: KEEP[0, 0], 0),
        (lambda p: mb.logical_and(x=KEEP, y=mb.cast(x=p, dtype="bool")), 1),
        (lambda p: mb.band_part(x=mb.fill(shape=[Q, Q], value=True), lower=-1, upper=0), 0),
    ],
)
def test_fused_attention_gets_the_tensor_as_its_mask(
    mask: Callable[[Var], Any], conditions: int, dtype: Any, settled: Callable[[Program], Program]
) -> None:
    program = settled(fused(mask, dtype=dtype))
    after = once(program)
    types_ = [op.op_type for op in walk_ops(after)]
    assert types_.count("scaled_dot_product_attention") == 2
    assert types_.count("minimum") == conditions
    (found,) = masks_of(after)
    assert found.shape == (1, 1, Q, Q)
    inputs = {**random_inputs(program), "p": np.array([1, 1, 0, 1, 0], np.int32).reshape(1, 1, 1, Q)}
    assert_same_numbers(program, after, inputs, rtol=1e-6)


test_cases, test_surroundings = table(
    CausalMaskTensor(),
    stays(fused, lambda p: mb.cast(x=p, dtype="bool")),
    refuses("neither kept nor masked", fused, lambda p: BIASED.astype(np.float16)),
)


def beside_a_bias(bound: float | None) -> Program:
    """Scores, a term of the run that is added to them, and a triangle of -inf."""
    specs = [mb.TensorSpec((1, 2, Q, 4), types.fp16), mb.TensorSpec((1, 1, 1, Q), types.fp16)]

    @mb.program(input_specs=specs, opset_version=ct.target.iOS17)
    def program(q: Var, bias: Var) -> Var:
        term = bias if bound is None else mb.mul(x=mb.tanh(x=bias), y=np.float16(bound))
        triangle = np.triu(np.full((1, 1, Q, Q), -np.inf, np.float16), 1)
        scores = mb.add(x=mb.matmul(x=q, y=q, transpose_y=True), y=term)
        return mb.softmax(x=mb.add(x=scores, y=triangle), axis=-1, name="weights")

    made: Program = program
    return made


def test_a_term_that_is_added_may_not_lift_what_is_masked() -> None:
    """A recipe ended in an error of its proof: a bias of 65472 brings a score back that -1e4 should mask."""
    inputs = random_inputs(beside_a_bias(None))
    large = {**inputs, "bias": np.full_like(inputs["bias"], 60000)}
    left = ane.apply(beside_a_bias(None), "causal_mask_tensor", inputs=large, quiet=True)
    assert not left.changes
    (refusal,) = (refusal for _, refusal in left.refusals)
    assert "reaches 6e+04 on 1 given set of inputs" in refusal.reason
    for given in (inputs, {**inputs, "bias": -large["bias"]}):  # what is masked further may be
        assert ane.apply(beside_a_bias(None), "causal_mask_tensor", inputs=given, quiet=True).changes
    assert ane.apply(beside_a_bias(8.0), "causal_mask_tensor", inputs=inputs, quiet=True).changes
