"""Heads in pieces: how many, of which length, what goes into them, and which heads stay whole."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from pass_cases import refuses, rewrites, table
from scores import scored

import anesurgery as ane
from anesurgery.mil import Program, Var, ct, mb, types, walk_ops
from anesurgery.passes.split_head import SplitHead
from anesurgery.placement.target import Target
from anesurgery.testing import apply_pass, assert_same_numbers


def weights(*shape: int) -> np.ndarray[Any, np.dtype[np.float16]]:
    return np.random.default_rng(0).standard_normal(shape).astype(np.float16)


def built(build: Callable[[Var], Any], shape: tuple[int, ...] = (1, 3, 8)) -> Program:
    return mb.program(input_specs=[mb.TensorSpec(shape, dtype=types.fp16)], opset_version=ct.target.iOS17)(
        lambda x: build(x)
    )


def head(x: Var, outputs: int = 500) -> Var:
    return mb.linear(x=x, weight=weights(outputs, 8), bias=weights(outputs), name="logits")


def widths(program: Program) -> list[int]:
    found = [op for op in walk_ops(program) if op.op_type in ("linear", "matmul")]
    return [int(op.outputs[0].shape[-1]) for op in found]


@pytest.mark.parametrize(
    ("outputs", "most", "expected"),
    [
        (500, 256, [256, 244]),
        (500, 200, [192, 192, 116]),
        (512, 256, [256, 256]),
        (500, 500, [500]),
        (129, 128, [128, 1]),
    ],
)
def test_pieces_are_equal_and_a_multiple_of_64(outputs: int, most: int, expected: list[int]) -> None:
    program = built(lambda x: head(x, outputs))
    after, session = apply_pass(SplitHead(most=most), program)
    assert widths(after) == expected
    assert all(change.proof for change in session.changes)
    assert_same_numbers(program, after, rtol=1e-5)
    assert not apply_pass(SplitHead(most=most), after)[1].changes


@pytest.mark.parametrize("turned", [False, True])
def test_a_matmul_is_a_head_too(turned: bool) -> None:
    weight = weights(500, 8) if turned else weights(8, 500)
    program = built(lambda x: mb.matmul(x=x, y=weight, transpose_y=turned, name="logits"))
    after, _ = apply_pass(SplitHead(most=256), program)
    assert widths(after) == [256, 244]
    assert_same_numbers(program, after, rtol=1e-5)


def test_auto_splits_the_head_of_an_m1_and_leaves_that_of_an_m4_whole() -> None:
    program = built(
        lambda x: mb.linear(x=mb.tanh(x=x), weight=weights(32000, 512), name="logits"), (1, 512, 512)
    )
    for target, pieces in (("M1/macOS 14", 2), ("M4/macOS 15", 1)):
        surgery = ane.apply(program, "auto", target=target, prove=None, quiet=True)
        assert len(widths(surgery.program)) == pieces
        after, before = (scored(p, Target.parse(target))[0] for p in (surgery.program, program))
        assert after.share["flop"] >= before.share["flop"]
        assert after.share["flop"] == 1


def capped(x: Var) -> Var:
    soft = mb.mul(x=mb.tanh(x=mb.real_div(x=head(x), y=np.float16(30))), y=np.float16(30))
    return mb.cast(x=soft, dtype="fp32", name="y")


def refusals() -> Program:
    return mb.program(input_specs=[mb.TensorSpec((1, 3, 8)), mb.TensorSpec((8, 500))])(
        lambda x, w: mb.matmul(x=x, y=w)
    )


test_cases, test_surroundings = table(
    SplitHead(most=256),
    rewrites(built, capped, rtol=1e-05),
    rewrites(built, lambda x: mb.mul(x=mb.sigmoid(x=(y := head(x))), y=y), rtol=1e-05),
    refuses("the weight %w is dynamic", refusals),
)
