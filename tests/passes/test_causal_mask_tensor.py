"""Masks written by hand in MIL, one for each way to say "do not look ahead"."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from closeness import assert_close
from hypothesis import given, settings
from hypothesis import strategies as st

from anesurgery.errors import PassError, ProofError
from anesurgery.interpret import run
from anesurgery.mil import Array, Program, Var, constant, ct, mb, np_dtype, types, walk_ops
from anesurgery.passes.causal_mask_tensor import CausalMaskTensor
from anesurgery.testing import apply_pass, assert_refuses, assert_same_numbers, random_inputs, reasons

Q = 5
KEEP = np.tril(np.ones((1, 1, Q, Q), bool))
Apply = Callable[..., Any]
"""From scores (and further inputs) to masked scores."""


def attention(
    apply: Apply,
    *,
    layers: int = 2,
    dtype: Any = types.fp32,
    lead: tuple[int, ...] = (1, 2),
    size: tuple[int, int] = (Q, Q),
    **more: Any,
) -> Program:
    """Layers of attention, each with a mask of its own; `more` are further inputs as {name: (shape, dtype)}."""
    shapes = [(*lead, size[0], 4), (*lead, size[1], 4)]
    specs = [mb.TensorSpec(s, dtype) for s in shapes] + [mb.TensorSpec(*s) for s in more.values()]

    def body(*inputs: Var) -> Any:
        q, k, *rest = inputs
        for _ in range(layers):
            scores = mb.matmul(x=q, y=k, transpose_y=True)
            weights = mb.softmax(x=apply(scores, *rest), axis=-1)
            q = mb.matmul(x=weights, y=k)
        return mb.identity(x=q, name="y"), mb.identity(x=weights, name="weights")

    names = ["q", "k", *more]
    source = f"lambda {', '.join(names)}: body({', '.join(names)})"
    made: Program = mb.program(input_specs=specs, opset_version=ct.target.iOS17)(
        eval(source, {"body": body})  # the builder wants one parameter for each input
    )
    return made


def number(like: Var, value: float) -> Any:
    return np_dtype(like).type(value)


def floats(like: Var, keep: Array, shut: float) -> Array:
    return np.where(keep, 0, shut).astype(np_dtype(like))


def word(like: Var) -> str:
    return "fp16" if np_dtype(like) == np.float16 else "fp32"


def below() -> tuple[Var, Var]:
    rows = mb.expand_dims(x=mb.range_1d(start=0, end=Q, step=1), axes=[1])
    return rows, mb.expand_dims(x=mb.range_1d(start=0, end=Q, step=1), axes=[0])


def by_ranges(s: Var) -> Var:
    rows, columns = below()
    seen = mb.expand_dims(x=mb.less_equal(x=columns, y=rows), axes=[0, 1])
    filled = mb.fill(shape=[1, 2, Q, Q], value=number(s, -65504))
    return mb.select(cond=mb.tile(x=seen, reps=[1, 2, 1, 1]), a=s, b=filled)


def by_band(s: Var) -> Var:
    ones = mb.fill(shape=mb.shape(x=s), value=number(s, 1))
    band = mb.band_part(x=ones, lower=-1, upper=0)
    return mb.add(x=s, y=mb.mul(x=mb.sub(x=number(s, 1), y=band), y=number(s, -3e4)))


def by_products(s: Var) -> Var:
    m = KEEP.astype(np_dtype(s))
    return mb.sub(x=mb.mul(x=s, y=m), y=(1 - m) * number(s, 1e4))


def in_fp32(s: Var) -> Var:
    wide = mb.add(x=mb.cast(x=s, dtype="fp32"), y=np.where(KEEP, 0, -3e38).astype(np.float32))
    return mb.cast(x=wide, dtype=word(s))


def through_a_view(s: Var) -> Var:
    x = mb.add(x=s, y=floats(s, KEEP, -np.inf))
    return mb.reshape(x=mb.mul(x=x, y=number(s, 0.5)), shape=[2, Q, Q])


SPELLINGS: dict[str, Apply] = {
    "select": lambda s: mb.select(cond=KEEP, a=s, b=number(s, -np.inf)),
    "select the fill": lambda s: mb.select(cond=~KEEP, a=number(s, -1e4), b=s),
    "boolean made of a number": lambda s: mb.select(
        cond=mb.cast(x=KEEP.astype(np.float32), dtype="bool"), a=s, b=number(s, -1e4)
    ),
    "additive": lambda s: mb.add(x=s, y=floats(s, KEEP, -np.inf)),
    "additive, a copy for each head": lambda s: mb.add(
        x=floats(s, np.broadcast_to(KEEP, (1, 2, Q, Q)), -65504), y=s
    ),
    "additive, of lower rank": lambda s: mb.add(x=s, y=floats(s, KEEP[0, 0], -3e4)),
    "subtracted": lambda s: mb.sub(x=s, y=floats(s, KEEP, 3e4)),
    "ranges": by_ranges,
    "band_part": by_band,
    "products": by_products,
    "fp32": in_fp32,
    "a floor": lambda s: mb.maximum(x=mb.add(x=s, y=floats(s, KEEP, -65504)), y=number(s, -6e4)),
    "scaled afterwards": lambda s: mb.real_div(
        x=mb.select(cond=KEEP, a=s, b=number(s, -65504)), y=number(s, 8)
    ),
    "after a constant bias": lambda s: mb.select(
        cond=KEEP, a=mb.add(x=s, y=floats(s, KEEP, -0.5)), b=number(s, -1e4)
    ),
    "before a constant bias": lambda s: mb.add(x=mb.add(x=s, y=floats(s, KEEP, -1e4)), y=floats(s, KEEP, -0.5)),
}
LEFT = {"select", "band_part", "range_1d", "fill", "less_equal", "tile", "maximum", "expand_dims"}
"""What no mask is made with afterwards."""


def masks_of(program: Program) -> list[Var]:
    """Constants that shut something out."""
    values = [op.outputs[0] for op in walk_ops(program) if op.op_type == "const"]
    numbers = [v for v in values if isinstance(v.val, np.ndarray) and v.val.dtype.kind == "f"]
    return [v for v in numbers if v.val.size > 1 and v.val.min() <= -5000]


def once(program: Program, step: CausalMaskTensor | None = None, edits: int = 2) -> Program:
    """The program afterwards; every site bit-exact, nothing left to do."""
    step = step or CausalMaskTensor()
    after, session = apply_pass(step, program)
    assert len(session.changes) == edits, reasons(session)
    assert all(c.proof is not None and c.proof.max_abs == 0 for c in session.changes)
    second = apply_pass(step, after)[1]
    assert not second.changes
    assert not second.refusals
    return after


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


def one(apply: Apply, **more: Any) -> Program:
    return attention(apply, layers=1, **more)


BIASED = np.where(KEEP, -np.arange(Q, dtype=np.float32), -1e4)
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


PADDED: dict[str, Apply] = {
    "and": lambda s, p: mb.select(
        cond=mb.logical_and(x=KEEP, y=mb.not_equal(x=p, y=0)), a=s, b=number(s, -np.inf)
    ),
    "or": lambda s, p: mb.select(cond=mb.logical_or(x=mb.equal(x=p, y=0), y=~KEEP), a=number(s, -3e4), b=s),
    "not and": lambda s, p: mb.select(
        cond=mb.logical_not(x=mb.logical_and(x=mb.cast(x=p, dtype="bool"), y=KEEP)),
        a=number(s, -1e9 if np_dtype(s) == np.float32 else -6e4),
        b=s,
    ),
    "product": lambda s, p: mb.add(
        x=s,
        y=mb.mul(
            x=number(s, -3e4),
            y=mb.sub(
                x=number(s, 1), y=mb.cast(x=mb.logical_and(x=KEEP, y=mb.cast(x=p, dtype="bool")), dtype=word(s))
            ),
        ),
    ),
    "one after the other": lambda s, p: mb.select(
        cond=mb.cast(x=p, dtype="bool"), a=mb.add(x=s, y=floats(s, KEEP, -1e4)), b=number(s, -1e4)
    ),
    "two additive terms": lambda s, p: mb.add(
        x=mb.select(cond=KEEP, a=s, b=number(s, -1e4)),
        y=mb.mul(x=mb.sub(x=number(s, 1), y=mb.cast(x=p, dtype=word(s))), y=number(s, -1e4)),
    ),
    "a sum": lambda s, p: mb.add(
        x=s,
        y=mb.add(
            x=floats(s, KEEP, -65504),
            y=mb.mul(x=mb.sub(x=number(s, 1), y=mb.cast(x=p, dtype=word(s))), y=number(s, -1e4)),
        ),
    ),
}


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


def test_fused_attention_without_a_causal_mask_is_left_alone() -> None:
    program = fused(lambda p: mb.cast(x=p, dtype="bool"))
    _, session = apply_pass(CausalMaskTensor(), program)
    assert not session.changes
    assert not session.refusals
    biased = fused(lambda p: BIASED.astype(np.float16))
    assert_refuses(CausalMaskTensor(), biased, "neither kept nor masked")


def test_equal_masks_share_and_different_masks_do_not() -> None:
    window = KEEP & ~np.tril(KEEP, -3)
    turn = iter([KEEP, window, KEEP, window])
    program = attention(lambda s: mb.select(cond=next(turn), a=s, b=np.float32(-1e4)), layers=4)
    after = once(program, edits=4)
    assert len(masks_of(after)) == 2
    assert_same_numbers(program, after)
    _, session = apply_pass(CausalMaskTensor(as_input=True), program)
    names = sorted(name for change in session.contract for name in change.names)
    assert names[0] == "causal_mask"
    assert names[1].startswith("causal_mask_")


def test_masks_of_two_sizes_as_inputs() -> None:
    specs = [mb.TensorSpec((1, 2, 4, 4)), mb.TensorSpec((1, 2, 6, 4))]

    @mb.program(input_specs=specs, opset_version=ct.target.iOS17)
    def program(q: Var, k: Var) -> Any:
        made = []
        for x in (q, k):
            scores = mb.matmul(x=x, y=x, transpose_y=True)
            keep = np.tril(np.ones((1, 1, x.shape[2], x.shape[2]), bool))
            masked = mb.select(cond=keep, a=scores, b=np.float32(-1e4))
            made.append(mb.softmax(x=masked, axis=-1))
        return tuple(made)

    after, session = apply_pass(CausalMaskTensor(as_input=True), program)
    assert list(after.functions["main"].inputs) == ["q", "k", "causal_mask", "causal_mask_6x6"]
    assert_same_numbers(program, after, session=session)


def test_one_triangle_for_scores_of_two_ranks() -> None:
    specs = [mb.TensorSpec((1, 2, Q, 4)), mb.TensorSpec((2, Q, 4))]

    @mb.program(input_specs=specs, opset_version=ct.target.iOS17)
    def program(q: Var, k: Var) -> Any:
        scores = [mb.matmul(x=x, y=x, transpose_y=True) for x in (q, k)]
        masked = [mb.select(cond=KEEP if s.rank == 4 else KEEP[0], a=s, b=np.float32(-1e4)) for s in scores]
        return tuple(mb.softmax(x=x, axis=-1) for x in masked)

    after = once(program)
    assert sorted(mask.rank for mask in masks_of(after)) == [3, 4]
    assert_same_numbers(program, after)


def test_a_window_beside_padding() -> None:
    """Rows of which the padding leaves nothing are left out of the proof by the numbers it draws."""
    window = KEEP & ~np.tril(KEEP, -2)
    program = attention(
        lambda s, p: mb.select(
            cond=mb.logical_and(x=window, y=mb.cast(x=p, dtype="bool")), a=s, b=number(s, -1e4)
        ),
        p=((1, 1, 1, Q), types.int32),
    )
    after = once(program)
    padding = np.array([1, 0, 1, 1, 1], np.int32).reshape(1, 1, 1, Q)
    assert_same_numbers(program, after, {**random_inputs(program), "p": padding})


@pytest.mark.parametrize(
    "apply",
    [
        lambda s: s,
        lambda s: mb.mul(x=s, y=np.array([[[[2]], [[3]]]], np.float32)),
        lambda s: mb.add(x=s, y=np.arange(Q, dtype=np.float32)),
        lambda s: mb.mul(x=SPELLINGS["select the fill"](s), y=np.float32(1e-3)),  # -10 shuts nothing out
        lambda s: mb.mul(x=SPELLINGS["select the fill"](s), y=np.float32(-1)),
        lambda s, p: mb.add(x=s, y=p),
        lambda s, p: mb.select(cond=mb.greater(x=p, y=np.float32(0)), a=s, b=np.float32(-1e4)),
    ],
)
def test_what_is_no_causal_mask_is_passed_over_in_silence(apply: Apply) -> None:
    more: dict[str, Any] = {"p": ((1, 1, 1, Q), types.fp32)} if apply.__code__.co_argcount == 2 else {}
    _, session = apply_pass(CausalMaskTensor(), attention(apply, **more))
    assert not session.changes
    assert not session.refusals


def test_a_tensor_with_a_copy_for_each_head_is_made_one() -> None:
    copies = np.broadcast_to(np.where(KEEP, 0, -1e4), (1, 2, Q, Q)).astype(np.float32)

    @mb.program(input_specs=[mb.TensorSpec((1, 2, Q, 4))], opset_version=ct.target.iOS17)
    def program(q: Var) -> Var:
        mask = mb.const(val=copies)
        return mb.softmax(x=mb.add(x=mb.matmul(x=q, y=q, transpose_y=True), y=mask), axis=-1)

    (mask,) = masks_of(once(program, edits=1))
    assert mask.shape == (1, 1, Q, Q)


def test_two_readers_of_a_mask_and_of_the_masked_scores() -> None:
    specs = [mb.TensorSpec((1, 2, Q, 4))]

    @mb.program(input_specs=specs, opset_version=ct.target.iOS17)
    def program(q: Var) -> Any:
        scores = mb.matmul(x=q, y=q, transpose_y=True)
        masked = mb.select(cond=KEEP, a=scores, b=np.float32(-1e4), name="masked")
        return mb.softmax(x=masked, axis=-1), mb.relu(x=masked)

    after = once(program, edits=1)
    assert_same_numbers(program, after)
    assert "select" in [op.op_type for op in walk_ops(after)]  # its other reader still needs it


def test_a_nested_block_reads_the_shared_tensor_of_the_function() -> None:
    specs = [mb.TensorSpec((1, 2, Q, 4)), mb.TensorSpec((1, 1, 1, Q), types.bool)]

    @mb.program(input_specs=specs, opset_version=ct.target.iOS17)
    def program(q: Var, p: Var) -> Var:
        def attend() -> Var:
            scores = mb.matmul(x=q, y=q, transpose_y=True)
            cond = mb.logical_and(x=KEEP, y=p)
            return mb.softmax(x=mb.select(cond=cond, a=scores, b=np.float32(-1e4)), axis=-1)

        first = attend()
        total = mb.reduce_sum(x=first, axes=[0, 1, 2, 3], keep_dims=False)
        positive = mb.greater(x=total, y=np.float32(0))
        return mb.add(x=mb.cond(pred=positive, _true_fn=attend, _false_fn=attend), y=first)

    after = once(program, edits=3)
    assert len(masks_of(after)) == 1
    assert [op.op_type for op in walk_ops(after)].count("minimum") == 1
    inputs = {**random_inputs(program), "p": np.array([1, 0, 1, 1, 0], bool).reshape(1, 1, 1, Q)}
    assert_same_numbers(program, after, inputs)


@pytest.mark.parametrize("spelling", ["select", "additive", "ranges"])
@pytest.mark.parametrize(
    ("ios", "dtype", "held"), [(17, types.fp16, "fp16"), (17, types.fp32, "fp32"), (15, types.fp16, "fp32")]
)
def test_the_mask_as_an_input(spelling: str, ios: int, dtype: Any, held: str) -> None:
    if ios == 15:
        specs = [mb.TensorSpec((1, 2, Q, 4), types.fp32)]

        @mb.program(input_specs=specs, opset_version=ct.target.iOS15)
        def old(q: Var) -> Var:
            x = mb.cast(x=q, dtype="fp16")
            for _ in range(2):
                s = mb.matmul(x=x, y=x, transpose_y=True)
                x = mb.matmul(x=mb.softmax(x=SPELLINGS["select"](s), axis=-1), y=x)
            return mb.cast(x=x, dtype="fp32", name="y")

        program: Program = old
    else:
        program = attention(SPELLINGS[spelling], dtype=dtype)
    after, session = apply_pass(CausalMaskTensor(as_input=True, fill=-2e4), program)
    assert len(session.changes) == 2
    assert not masks_of(after)
    mask = after.functions["main"].inputs["causal_mask"]
    assert mask.shape == (1, 1, Q, Q)
    assert types.builtin_to_string(mask.dtype) == held
    readers = [op.op_type for op in mask.child_ops]
    assert readers == (["cast"] if ios == 15 else ["add", "add"])
    (change,) = session.contract
    assert (
        change.words
        == f"give causal_mask (1x1x{Q}x{Q}, {np_dtype(mask)}): 0 where a position may look, -20000 elsewhere"
    )
    assert_same_numbers(program, after, session=session)
    assert not apply_pass(CausalMaskTensor(as_input=True), after)[1].changes


def test_the_mask_as_an_input_beside_padding() -> None:
    program = attention(PADDED["and"], p=((1, 1, 1, Q), types.int32))
    after, session = apply_pass(CausalMaskTensor(as_input=True), program)
    padding = np.array([1, 1, 0, 1, 0], np.int32).reshape(1, 1, 1, Q)
    assert_same_numbers(program, after, {**random_inputs(program), "p": padding}, session=session)
    assert len(session.contract) == 1


def test_a_constant_tensor_becomes_an_input_on_demand() -> None:
    program = once(attention(SPELLINGS["select"]))
    after, session = apply_pass(CausalMaskTensor(as_input=True), program)
    assert len(session.changes) == 2
    assert_same_numbers(program, after, session=session)


@pytest.mark.parametrize("fill", [0.0, -100.0, -65504.0, float("-inf"), float("nan")])
def test_a_fill_that_does_not_do_is_an_error(fill: float) -> None:
    with pytest.raises(PassError, match=r"causal_mask_tensor: fill=.*must lie in"):
        CausalMaskTensor(fill=fill)


@pytest.mark.parametrize("shift", [-1, 1])
@pytest.mark.parametrize("spelling", ["select", "ranges"])
def test_the_proof_catches_a_wrong_triangle(shift: int, spelling: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(self: CausalMaskTensor, keep: Array, dtype: Any) -> Array:
        queries, keys = keep.shape[-2:]
        tensor = np.where(np.tri(queries, keys, shift, dtype=bool), 0, self.fill)
        return tensor.reshape(keep.shape).astype(dtype)

    monkeypatch.setattr(CausalMaskTensor, "tensor", wrong)
    with pytest.raises(ProofError):
        apply_pass(CausalMaskTensor(), attention(SPELLINGS[spelling]))


@settings(max_examples=40, deadline=None)
@given(
    queries=st.integers(1, 5),
    keys=st.integers(1, 7),
    lead=st.sampled_from([(), (3,), (2, 2)]),
    half=st.booleans(),
    seed=st.integers(0, 2**16),
    free=st.booleans(),
    copies=st.booleans(),
)
def test_any_mask_is_kept_exactly_or_refused(
    queries: int, keys: int, lead: tuple[int, ...], half: bool, seed: int, free: bool, copies: bool
) -> None:
    """Random masks: those that mask all that is ahead are rewritten, the others are not."""
    rng = np.random.default_rng(seed)
    shape = (*(lead if copies else [1] * len(lead)), queries, keys)
    keep = rng.random(shape) < 0.7
    seen = np.tri(queries, keys, max(keys - queries, 0), dtype=bool)
    if not free:
        keep &= seen
        keep[..., 0] = True
    program = attention(
        lambda s: mb.select(
            cond=np.broadcast_to(keep, (*lead, queries, keys)).copy(), a=s, b=number(s, -np.inf)
        ),
        layers=1,
        size=(queries, keys),
        lead=lead,
        dtype=types.fp16 if half else types.fp32,
    )
    after, session = apply_pass(CausalMaskTensor(), program)
    fits = not (keep & ~seen).any() and keep.any(-1).all() and not seen.all() and not keep.all()
    assert bool(session.changes) == bool(fits), reasons(session)
    if fits:
        (mask,) = masks_of(after)
        assert mask.rank == len(lead) + 2
        assert_same_numbers(program, after)


def test_constants_hold_one_finite_number() -> None:
    (mask,) = masks_of(once(attention(SPELLINGS["additive"]), CausalMaskTensor(fill=-3e4)))
    assert set(np.unique(constant(mask))) == {0, -3e4}
