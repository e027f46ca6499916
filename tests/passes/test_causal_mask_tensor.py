"""Masks written by hand in MIL, one for each way to say "do not look ahead"."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from masked_attention import BIASED, KEEP, SPELLINGS, Q, attention, floats, masks_of, number, once, one

from anesurgery.mil import Program, Var, ct, mb, np_dtype, types, walk_ops
from anesurgery.passes.causal_mask_tensor import CausalMaskTensor
from anesurgery.testing import apply_pass, assert_refuses, assert_same_numbers


def through_a_view(s: Var) -> Var:
    x = mb.add(x=s, y=floats(s, KEEP, -np.inf))
    return mb.reshape(x=mb.mul(x=x, y=number(s, 0.5)), shape=[2, Q, Q])


LEFT = {"select", "band_part", "range_1d", "fill", "less_equal", "tile", "maximum", "expand_dims"}
"""What no mask is made with afterwards."""


@pytest.mark.one_of(24)
@pytest.mark.parametrize("dtype", [types.fp16, types.fp32])
@pytest.mark.parametrize("spelling", SPELLINGS)
def test_every_spelling_becomes_one_shared_tensor(
    spelling: str, dtype: Any, settled: Callable[[Program], Program]
) -> None:
    program = attention(SPELLINGS[spelling], dtype=dtype)
    after = once(program)
    (mask,) = masks_of(after)
    assert np_dtype(mask) == np_dtype(program.functions["main"].inputs["q"])
    np.testing.assert_array_equal(mask.val, np.where(KEEP, 0, -1e4))
    assert not LEFT & {op.op_type for op in walk_ops(after)}
    assert_same_numbers(program, after)
    later = settled(after)
    assert_same_numbers(program, later, rtol=1e-6)
    assert not apply_pass(CausalMaskTensor(), later)[1].changes
    assert len(masks_of(later)) == 1


def test_a_view_between_mask_and_softmax_stays() -> None:
    @mb.program(input_specs=[mb.TensorSpec((1, 2, Q, 4))], opset_version=ct.target.iOS17)
    def program(q: Var) -> Var:
        return mb.softmax(x=through_a_view(mb.matmul(x=q, y=q, transpose_y=True)), axis=-1)

    after = once(program, edits=1)
    assert_same_numbers(program, after)
    assert [op.op_type for op in walk_ops(after) if op.op_type != "const"] == [
        "matmul",
        "add",
        "mul",
        "reshape",
        "softmax",
    ]


def test_scores_made_fp32_for_the_softmax_only_are_masked_in_fp16() -> None:
    def upcast(s: Var) -> Var:
        wide = mb.add(x=mb.cast(x=s, dtype="fp32"), y=floats(mb.cast(x=s, dtype="fp32"), KEEP, -1e9))
        return mb.cast(x=mb.softmax(x=wide, axis=-1), dtype="fp16")

    @mb.program(input_specs=[mb.TensorSpec((1, 2, Q, 4), types.fp16)], opset_version=ct.target.iOS17)
    def program(q: Var) -> Var:
        return upcast(mb.matmul(x=q, y=q, transpose_y=True))

    after = once(program, edits=1)
    assert [np_dtype(v) for v in masks_of(after)] == [np.float16]
    for arithmetic in ("fp32", "fp16"):
        assert_same_numbers(program, after, precision=arithmetic)


UNMASKED = np.where(KEEP | (np.arange(Q) == 2), 0, -1e4)
SYMBOLIC: dict[str, Any] = {"mask": ((1, 1, Q, Q), types.fp32)}


@pytest.mark.parametrize(
    ("program", "reason"),
    [
        (one(lambda s: mb.add(x=s, y=floats(s, KEEP, -10.0) * 1)), None),
        (one(lambda s: mb.add(x=s, y=BIASED.astype(np.float32))), "the mask holds 6 distinct values"),
        (one(lambda s: mb.add(x=s, y=BIASED.astype(np.float32))), "1 * score + -1: neither kept nor"),
        (one(lambda s: mb.add(x=s, y=UNMASKED.astype(np.float32))), "position 0 sees position 2"),
        (one(lambda s: mb.select(cond=KEEP.swapaxes(2, 3), a=s, b=-1e4)), "is not causal: position 0"),
        (one(lambda s: mb.select(cond=KEEP, a=s, b=np.float32(0))), "0 * score + 0: neither kept nor"),
        (one(lambda s: mb.select(cond=KEEP, a=s, b=np.float32(-20))), "0 * score + -20"),
        (
            one(lambda s: mb.select(cond=np.tril(KEEP, -1), a=s, b=np.float32(-1e4))),
            "row 0 of the mask keeps nothing",
        ),
        (one(lambda s: mb.add(x=s, y=floats(s, KEEP, np.nan))), "the mask holds NaN"),
        (
            one(lambda s, m: mb.mul(x=mb.select(cond=KEEP, a=s, b=-1e4), y=m), **SYMBOLIC),
            "depends on %mask in a way that cannot be taken apart",
        ),
        (
            one(
                lambda s, p: mb.select(cond=mb.logical_or(x=KEEP, y=p), a=s, b=np.float32(-1e4)),
                p=((1, 1, 1, Q), types.bool),
            ),
            None,
        ),
        (
            one(
                lambda s, p: mb.add(
                    x=s,
                    y=mb.select(cond=p, a=floats(s, KEEP, -1e4), b=floats(s, KEEP & (np.arange(Q) > 1), -1e4)),
                ),
                p=((1, 1, Q, Q), types.bool),
            ),
            "is not a conjunction",
        ),
        (
            one(
                lambda s, p, m: mb.add(
                    x=mb.select(cond=mb.logical_and(x=KEEP, y=p), a=s, b=np.float32(-1e4)), y=m
                ),
                p=((1, 1, Q, Q), types.bool),
                **SYMBOLIC,
            ),
            "%mask is added after %p has replaced scores",
        ),
    ],
)
def test_refusals(program: Program, reason: str | None) -> None:
    if reason is not None:
        assert_refuses(CausalMaskTensor(), program, reason)
        return
    _, session = apply_pass(CausalMaskTensor(), program)
    assert not session.changes


def test_a_symbolic_length_is_refused_and_a_symbolic_batch_is_not() -> None:
    def dynamic(shape: tuple[int, ...], axis: int) -> Program:
        symbolic = (*shape[:axis], mil_symbol(), *shape[axis + 1 :])

        @mb.program(input_specs=[mb.TensorSpec(symbolic)], opset_version=ct.target.iOS17)
        def program(q: Var) -> Var:
            scores = mb.matmul(x=q, y=q, transpose_y=True)
            length = mb.gather(x=mb.shape(x=q), indices=1, axis=0)
            rows = mb.expand_dims(x=mb.range_1d(start=0, end=length, step=1), axes=[1])
            columns = mb.expand_dims(x=mb.range_1d(start=0, end=length, step=1), axes=[0])
            ahead = mb.cast(x=mb.greater(x=columns, y=rows), dtype="fp32")
            mask = mb.mul(x=ahead, y=-1e4) if axis == 1 else floats(scores, KEEP[0], -1e9)
            return mb.softmax(x=mb.add(x=scores, y=mask), axis=-1)

        made: Program = program
        return made

    assert_refuses(CausalMaskTensor(), dynamic((2, Q, 4), 1), "the symbolic shape")
    program = dynamic((2, Q, 4), 0)
    assert_same_numbers(program, once(program, edits=1))


def mil_symbol() -> Any:
    from coremltools.converters.mil.mil import get_new_symbol

    return get_new_symbol()
