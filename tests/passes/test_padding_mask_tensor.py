"""Masks from inputs: every spelling, fills that are shared, what must stay, and wrong fills."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from closeness import assert_close
from pass_cases import refuses, rewrites, stays, table

import anesurgery as ane
from anesurgery.errors import PassError
from anesurgery.interpret import run
from anesurgery.mil import Program, Var, ct, mb, types, walk_ops
from anesurgery.passes.padding_mask_tensor import PaddingMaskTensor
from anesurgery.testing import apply_pass, assert_refuses

LEAST: dict[Any, Any] = {types.fp32: np.finfo(np.float32).min, types.fp16: -np.inf}


def attention(mask: Callable[[Var, Var, Any], Var], dtype: Any = types.fp32, layers: int = 1) -> Program:
    """Scores of 8 positions under what `mask` makes of them, of a mask of integers and of the lowest number."""
    shapes = [mb.TensorSpec((1, 2, 8, 4), dtype=dtype), mb.TensorSpec((1, 1, 1, 8), dtype=types.int32)]
    least = (np.float16 if dtype is types.fp16 else np.float32)(LEAST[dtype])

    @mb.program(input_specs=shapes, opset_version=ct.target.iOS17)
    def program(x: Var, mask_ids: Var) -> Any:
        made = x
        word = "fp16" if dtype is types.fp16 else "fp32"
        number = mb.cast(x=mask_ids, dtype=word)
        for _ in range(layers):
            scores = mb.matmul(x=made, y=made, transpose_y=True)
            made = mb.matmul(x=mb.softmax(x=mask(scores, number, least), axis=-1), y=made)
        return made

    return program


def products(scores: Var, number: Var, least: Any) -> Any:
    one = type(least)(1)
    return mb.add(x=scores, y=mb.mul(x=mb.sub(x=one, y=number), y=least))


def selects(scores: Var, number: Var, least: Any) -> Any:
    return mb.select(cond=mb.cast(x=number, dtype="bool"), a=scores, b=least)


def inverted(scores: Var, number: Var, least: Any) -> Any:
    shut = mb.sub(x=type(least)(1), y=number)
    wide = mb.tile(x=mb.cast(x=shut, dtype="bool"), reps=[1, 1, 8, 1])
    fill = mb.select(cond=wide, a=least, b=type(least)(0))
    return mb.add(x=scores, y=fill)


def clamped(scores: Var, number: Var, least: Any) -> Any:
    return mb.maximum(x=products(scores, number, least), y=least)


def constants(program: Program) -> list[float]:
    held = [np.asarray(v.val) for op in walk_ops(program) if op.op_type == "const" for v in op.outputs]
    return [float(v.min()) for v in held if v.dtype.kind == "f"]


@pytest.mark.parametrize("mask", [products, selects, inverted, clamped])
@pytest.mark.parametrize("dtype", [types.fp32, types.fp16])
def test_every_fill_is_finite_and_the_weights_stay(mask: Any, dtype: Any) -> None:
    program = attention(mask, dtype)
    after, session = apply_pass(PaddingMaskTensor(), program)
    assert session.changes
    assert min(constants(after)) == -1e4
    x = np.random.default_rng(0).standard_normal((1, 2, 8, 4)).astype(np.float32)
    kind = np.float16 if dtype is types.fp16 else np.float32
    keep = np.array([1, 1, 1, 1, 1, 0, 0, 0], np.int32).reshape(1, 1, 1, 8)
    (found,) = ane.run(after, {"x": x.astype(kind), "mask_ids": keep}).values()
    scores = np.where(
        keep, x.astype(kind).astype(np.float32) @ x.astype(kind).astype(np.float32).swapaxes(-1, -2), -np.inf
    )
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    wanted = weights / weights.sum(-1, keepdims=True) @ x.astype(kind).astype(np.float32)
    assert_close(found, wanted, rtol=1e-5)
    assert not apply_pass(PaddingMaskTensor(), after)[1].changes


def shared() -> Callable[[Var, Var, Any], Var]:
    """A mask that is made for the first layer and read by all."""
    made: list[Var] = []

    def mask(scores: Var, number: Var, least: Any) -> Any:
        if not made:
            made.append(mb.mul(x=mb.sub(x=np.float32(1), y=number), y=least))
        return mb.add(x=scores, y=made[0])

    return mask


def test_a_softmax_without_a_kept_score_is_finite() -> None:
    """In fp16 0 * -inf is NaN where the mask keeps a score, and a row of -inf where it keeps none."""
    program = attention(products, types.fp16)
    after, _ = apply_pass(PaddingMaskTensor(), program)
    for keep in (np.ones((1, 1, 1, 8), np.int32), np.zeros((1, 1, 1, 8), np.int32)):
        values = {"x": np.ones((1, 2, 8, 4), np.float16), "mask_ids": keep}
        assert not np.isfinite(next(iter(ane.run(program, values).values()))).any()
        assert np.isfinite(next(iter(ane.run(after, values).values()))).all()


def whole_rows(step: PaddingMaskTensor, mask: Any, dtype: Any = types.fp32) -> tuple[Any, Any, Any]:
    """The result before, after, and the mean of the values, where a mask keeps nothing."""
    program = attention(mask, dtype)
    after, _ = apply_pass(step, program)
    x = np.random.default_rng(0).standard_normal((1, 2, 8, 4)).astype(np.float32)
    values = {"x": x, "mask_ids": np.zeros((1, 1, 1, 8), np.int32)}
    old, new = (next(iter(run(p, values, precision="fp32").values())) for p in (program, after))
    return old, new, np.broadcast_to(x.mean(-2, keepdims=True), x.shape)


@pytest.mark.parametrize("mask", [products, selects, inverted, clamped])
def test_rows_that_keep_nothing_have_equal_weights_where_asked(mask: Any) -> None:
    old, new, mean = whole_rows(PaddingMaskTensor(equal=True), mask)
    assert_close(old, mean, rtol=1e-5)
    assert_close(new, mean, rtol=1e-5)


def test_else_a_sum_leaves_them_those_of_the_scores() -> None:
    """The wrong version, which the caveat states."""
    _, new, mean = whole_rows(PaddingMaskTensor(), products)
    assert np.abs(new - mean).max() > 0.1
    _, new, mean = whole_rows(PaddingMaskTensor(), selects)
    assert_close(new, mean, rtol=1e-5)


def test_safe_numbers_keeps_them_equal() -> None:
    program = attention(products, types.fp16)
    surgery = ane.apply(program, "safe_numbers", target="M1/macOS 14", quiet=True)
    x = np.random.default_rng(0).standard_normal((1, 2, 8, 4)).astype(np.float16)
    keep = np.zeros((1, 1, 1, 8), np.int32)
    (found,) = run(surgery.program, {"x": x, "mask_ids": keep}, precision="fp32").values()
    mean = x.astype(np.float32).mean(-2, keepdims=True)
    assert_close(found, np.broadcast_to(mean, found.shape), rtol=1e-2)


def test_a_mask_that_is_a_result_stays() -> None:
    shapes = [mb.TensorSpec((1, 1, 4, 4)), mb.TensorSpec((1, 1, 1, 4))]

    @mb.program(input_specs=shapes, opset_version=ct.target.iOS17)
    def program(x: Var, mask: Var) -> Any:
        fill = mb.mul(x=mask, y=np.float32(-1e9), name="fill")
        scores = mb.matmul(x=x, y=x, transpose_y=True)
        return mb.softmax(x=mb.add(x=scores, y=fill), axis=-1), fill

    assert_refuses(PaddingMaskTensor(), program, "%fill is a result of the model")


@pytest.mark.parametrize("fill", [-1.0, -4e4, 1e4])
def test_a_fill_that_masks_nothing_or_overflows(fill: float) -> None:
    with pytest.raises(PassError, match="it must lie in"):
        PaddingMaskTensor(fill=fill)


def test_a_fill_that_is_too_small_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """The wrong version: a fill whose share of the weights can be seen."""
    monkeypatch.setattr(PaddingMaskTensor, "__post_init__", lambda self: None)
    with pytest.raises(ane.SurgeryError, match="old and new differ"):
        apply_pass(PaddingMaskTensor(fill=-3.0), attention(products))


def test_auto_makes_the_mask_of_a_converted_encoder_finite() -> None:
    program = attention(products, types.fp16)
    findings = {f.remedy for f in ane.inspect(program, "M1").all_findings}
    assert "padding_mask_tensor" in findings
    surgery = ane.apply(program, "auto", target="M1/macOS 14", quiet=True)
    assert "padding_mask_tensor" in {change.pass_name for change in surgery.changes}


test_cases, test_surroundings = table(
    PaddingMaskTensor(),
    rewrites(lambda: attention(shared(), layers=3), id="one mask for three layers"),
    refuses(
        "the mask is causal; causal_mask_tensor",
        attention,
        lambda scores, number, least: mb.select(cond=np.tril(np.ones((1, 1, 8, 8), bool)), a=scores, b=least),
    ),
    *(
        stays(attention, mask)
        for mask in [
            lambda s, n, least: mb.add(x=s, y=n),
            lambda s, n, least: mb.mul(x=s, y=type(least)(0.125)),
        ]
    ),
)
