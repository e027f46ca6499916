"""Attention head by head: against layers written by hand, with masks of every shape, and what is refused."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import hand_layers
import numpy as np
import pytest
from coremltools.converters.mil.mil import get_new_symbol
from pass_cases import refuses, rewrites, table
from transformer_blocks import BLOCKS, Size, block

from anesurgery.checking.grades import Grade
from anesurgery.mil import Program, Var, ct, mb, types, walk_ops
from anesurgery.passes.channels_first import ChannelsFirst
from anesurgery.passes.fold_constants import FoldConstants
from anesurgery.passes.split_heads import SplitHeads
from anesurgery.rewriting.passes import Pipeline
from anesurgery.testing import apply_pass, assert_refuses, assert_same_numbers

RNG = np.random.default_rng(0)
ALL = Pipeline(steps=(FoldConstants(), ChannelsFirst(), SplitHeads()))


def floats(*shape: int) -> np.ndarray[Any, np.dtype[np.float32]]:
    return RNG.standard_normal(shape).astype(np.float32)


def kinds(program: Program) -> Counter[str]:
    return Counter(op.op_type for op in walk_ops(program) if op.op_type != "const")


SMALL = Size(width=24, heads=3, shared=3, tokens=5, batch=2, hidden=40)
"""An odd number of heads, which all share one of keys where a model has such."""
ONE = Size(width=16, heads=1, shared=1, tokens=5, hidden=24)
SIZES = [*((name, Size()) for name in BLOCKS), ("llama", SMALL), ("masked bert", SMALL), ("cross", ONE)]


@pytest.mark.quick_cases("bert-size0", "vit-size1", "gpt2-size3")
@pytest.mark.one_of(4)
@pytest.mark.parametrize(("name", "size"), SIZES)
def test_a_layer_has_no_op_more_than_one_written_by_hand(name: str, size: Size) -> None:
    one, two = (kinds(apply_pass(ALL, block(name, n, size), prove=False)[0]) for n in (1, 2))
    layer = two - one
    assert not {"linear", "reshape", "matmul"} & layer.keys()
    by_hand = kinds(hand_layers.layer(name, size))
    # keys of each attention; those that only put a norm over axis 1 are not counted
    by_hand["transpose"] = 2 if name == "cross" else 1
    assert layer.total() <= by_hand.total()
    assert layer - by_hand == Counter(), "an op more"


@pytest.mark.quick_cases("vit-size1", "llama-size4")
@pytest.mark.one_of(2)
@pytest.mark.parametrize(("name", "size"), SIZES)
def test_each_edit_of_a_block_is_proved(name: str, size: Size) -> None:
    after, session = apply_pass(ALL, block(name, 1, size))
    edits = [c for c in session.changes if c.pass_name != "fold_constants"]
    assert {c.pass_name for c in edits} == {"channels_first", "split_heads"}
    assert all(c.proof and c.proof.grade >= Grade.PROVED for c in edits)
    assert not apply_pass(SplitHeads(), after, prove=False)[1].changes


def attention(
    mask: tuple[int, ...] | None = None, shared: int = 1, dynamic: bool = False, batch: int = 1
) -> Program:
    """Four heads of eight channels over five tokens of queries and six of keys, in the usual form."""
    few = 4 // shared
    shapes = [(batch, 5, 32), (batch, 6, 8 * few), (batch, 6, 8 * few), *([mask] if mask and dynamic else [])]

    def built(*inputs: Var) -> Var:
        q, k, v = (
            mb.transpose(x=mb.reshape(x=x, shape=[batch, -1, n, 8]), perm=[0, 2, 1, 3])
            for x, n in zip(inputs, (4, few, few), strict=False)
        )
        if shared > 1:
            k, v = (
                mb.reshape(
                    x=mb.tile(x=mb.expand_dims(x=x, axes=[2]), reps=[1, 1, shared, 1, 1]),
                    shape=[batch, 4, 6, 8],
                )
                for x in (k, v)
            )
        scores = mb.mul(x=mb.matmul(x=q, y=k, transpose_y=True), y=np.float32(0.35))
        if mask is not None:
            scores = mb.add(x=inputs[3] if dynamic else floats(*mask), y=scores)
        out = mb.matmul(x=mb.softmax(x=scores, axis=-1), y=v)
        return mb.reshape(x=mb.transpose(x=out, perm=[0, 2, 1, 3]), shape=[batch, 5, 32])

    specs = [mb.TensorSpec(s) for s in shapes]
    made: Program
    if len(specs) == 3:
        made = mb.program(input_specs=specs, opset_version=ct.target.iOS17)(lambda q, k, v: built(q, k, v))
    else:
        made = mb.program(input_specs=specs, opset_version=ct.target.iOS17)(
            lambda q, k, v, mask: built(q, k, v, mask)
        )
    return made


def test_fused_attention_is_taken_apart_and_split() -> None:
    """Of 16 channels each, so that the scale has no rounding."""

    @mb.program(input_specs=[mb.TensorSpec((1, 5, 32))], opset_version=ct.target.iOS18)
    def program(x: Var) -> Var:
        q, k, v = (
            mb.transpose(
                x=mb.reshape(x=mb.linear(x=x, weight=floats(32, 32)), shape=[1, 5, 2, 16]), perm=[0, 2, 1, 3]
            )
            for _ in range(3)
        )
        out = mb.scaled_dot_product_attention(query=q, key=k, value=v, attn_mask=floats(5, 5))
        out = mb.reshape(x=mb.transpose(x=out, perm=[0, 2, 1, 3]), shape=[1, 5, 32])
        return mb.linear(x=out, weight=floats(32, 32))

    after, session = apply_pass(ALL, program)
    assert not {"scaled_dot_product_attention", "linear", "reshape"} & kinds(after).keys()
    assert all(c.proof and c.proof.grade >= Grade.PROVED for c in session.changes)
    assert_same_numbers(program, after, rtol=1e-5)


def pair(build: Callable[[Var, Var], Any], shape: tuple[int, ...] = (1, 2, 4, 8)) -> Program:
    return mb.program(input_specs=[mb.TensorSpec(shape), mb.TensorSpec(shape)])(lambda x, y: build(x, y))


def plain(x: Var, y: Var) -> Var:
    return mb.matmul(x=mb.softmax(x=mb.matmul(x=x, y=y, transpose_y=True), axis=-1), y=y)


def watched(x: Var, y: Var) -> tuple[Var, Var]:
    weights = mb.softmax(x=mb.matmul(x=x, y=y, transpose_y=True), axis=-1, name="weights")
    return mb.matmul(x=weights, y=y), weights


def test_fused_attention_whose_scale_fp16_rounds() -> None:
    """Of 32 channels each, as most language models have 128."""

    @mb.program(input_specs=[mb.TensorSpec((1, 5, 64), dtype=types.fp16)], opset_version=ct.target.iOS18)
    def program(x: Var) -> Var:
        q, k, v = (
            mb.transpose(
                x=mb.reshape(x=mb.linear(x=x, weight=floats(64, 64).astype(np.float16)), shape=[1, 5, 2, 32]),
                perm=[0, 2, 1, 3],
            )
            for _ in range(3)
        )
        out = mb.scaled_dot_product_attention(query=q, key=k, value=v)
        return mb.reshape(x=mb.transpose(x=out, perm=[0, 2, 1, 3]), shape=[1, 5, 64])

    after, session = apply_pass(ALL, program)
    assert not {"scaled_dot_product_attention", "linear", "reshape"} & kinds(after).keys()
    assert session.changes


def test_positions_of_unknown_number_are_refused() -> None:
    """The wrong version: an error of the pass, since a length is no number."""
    n = get_new_symbol()

    @mb.program(input_specs=[mb.TensorSpec((1, n, 8), types.fp16)], opset_version=ct.target.iOS16)
    def program(x: Var) -> Var:
        scores = mb.add(x=mb.matmul(x=x, y=x, transpose_y=True), y=np.float16(1))
        return mb.matmul(x=mb.softmax(x=scores, axis=-1), y=x)

    assert_refuses(SplitHeads(), program, reason="has the shape ('1', 'is")


test_cases, test_surroundings = table(
    SplitHeads(),
    *(
        rewrites(attention, mask, dynamic=dynamic, batch=2, rtol=1e-05)
        for mask in [(5, 6), (1, 1, 1, 6), (1, 4, 5, 6), (2, 1, 5, 6), (4, 1, 6), (2, 4, 5, 6)]
        for dynamic in [False, True]
    ),
    *(rewrites(attention, shared=shared, rtol=1e-05) for shared in [2, 4]),
    *(
        refuses(reason, program, step=step)
        for step, program, reason in [
            (SplitHeads(), lambda: pair(watched), "%weights is read elsewhere"),
            (SplitHeads(), lambda: pair(plain, (2, 4, 8)), "the result has the shape ('2', '4', '8')"),
            (SplitHeads(most=1), lambda: pair(plain), "2 heads are more than 1"),
        ]
    ),
)
