"""Which masks share a tensor, tensors that become inputs, and what is kept exactly or refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from masked_attention import KEEP, PADDED, SPELLINGS, Apply, Q, attention, masks_of, number, once
from pass_cases import rewrites, table

from anesurgery.errors import PassError
from anesurgery.mil import Program, Var, constant, ct, mb, np_dtype, types, walk_ops
from anesurgery.passes.causal_mask_tensor import CausalMaskTensor
from anesurgery.testing import apply_pass, assert_same_numbers, random_inputs, reasons


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


@pytest.mark.one_of(5)
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


@pytest.mark.parametrize("fill", [0.0, -100.0, -65504.0, float("-inf"), float("nan")])
def test_a_fill_that_does_not_do_is_an_error(fill: float) -> None:
    with pytest.raises(PassError, match=r"causal_mask_tensor: fill=.*must lie in"):
        CausalMaskTensor(fill=fill)


@settings(max_examples=20, deadline=None)
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


test_cases, test_surroundings = table(
    CausalMaskTensor(as_input=True),
    rewrites(once, attention(SPELLINGS["select"])),
    rewrites(
        attention,
        PADDED["and"],
        p=((1, 1, 1, Q), types.int32),
        inputs={
            **random_inputs(attention(PADDED["and"], p=((1, 1, 1, Q), types.int32))),
            "p": np.array([1, 1, 0, 1, 0], np.int32).reshape(1, 1, 1, Q),
        },
    ),
)
