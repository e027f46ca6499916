"""Scores of attention are bounded by the singular values of heads, and some input comes near."""

from __future__ import annotations

import math

import numpy as np
import pytest

import anesurgery as ane
from anesurgery.mil import Array, Operation, Program, Var, ct, mb, types, walk_ops
from anesurgery.semantics.intervals import magnitude
from anesurgery.semantics.score_bounds import head_length, largest_score

HALF = np.float16
HEADS, SIZE, WIDTH, TOKENS = 2, 32, 64, 8
RNG = np.random.default_rng(0)
SPREAD = (RNG.standard_normal((HEADS * SIZE, WIDTH)) * 0.3).astype(HALF)
ALIKE = np.tile(SPREAD[:1], (HEADS * SIZE, 1))
"""All rows the same: one input brings all numbers of a head to their ends."""
BIAS = np.full(HEADS * SIZE, 0.25, HALF)


def scores(weight: Array, opens: bool = False, widely: bool = False) -> Program:
    """Query times key behind a layer norm, scaled after the product."""

    def heads(x: Var, perm: list[int]) -> Var:
        rows = mb.linear(x=x, weight=weight, bias=BIAS)
        shape = (1, TOKENS, SIZE, HEADS) if widely else (1, TOKENS, HEADS, SIZE)
        return mb.transpose(x=mb.reshape(x=rows, shape=shape), perm=perm)

    @mb.program(
        input_specs=[mb.TensorSpec((1, TOKENS, WIDTH), dtype=types.fp16)], opset_version=ct.target.iOS17
    )
    def program(x: Var) -> Var:
        x = x if opens else mb.layer_norm(x=x, axes=[-1], epsilon=HALF(1e-5))
        first = [0, 3, 1, 2] if widely else [0, 2, 1, 3]
        query, key = heads(x, first), heads(x, [first[0], first[1], first[3], first[2]])
        return mb.softmax(x=mb.mul(x=mb.matmul(x=query, y=key), y=HALF(0.18)), axis=-1, name="y")

    return program


def product(program: Program) -> Operation:
    return next(op for op in walk_ops(program.functions["main"]) if op.op_type == "matmul")


@pytest.mark.parametrize("weight", [SPREAD, ALIKE], ids=["spread", "alike"])
def test_no_row_of_a_head_is_longer(weight: Array) -> None:
    """Of rows that are alike the bound is reached; the wrong version takes the length of one row for all."""
    x = np.tile(weight[0], (1, TOKENS, 1)).astype(HALF)
    length = head_length(product(scores(weight)).x, -1)
    centred = x[0, 0].astype(np.float64) - x[0, 0].mean(dtype=np.float64)
    row = centred / math.sqrt(np.mean(centred**2))
    head = (weight.astype(np.float64) @ row + BIAS)[:SIZE]
    assert np.linalg.norm(head) <= length
    if weight is ALIKE:
        assert np.linalg.norm(head) > length / 1.2 > np.abs(head).max() * 4


def test_heads_that_are_spread_are_silent_and_those_alike_are_named() -> None:
    rules = {
        name: [f.rule for f in ane.inspect(scores(w), target="M1/macOS 14").all_findings if f.kind == "numeric"]
        for name, w in (("spread", SPREAD * HALF(3)), ("alike", ALIKE * HALF(3)))
    }
    assert rules == {"spread": [], "alike": ["num-scale-after"]}


def test_the_bound_is_nearer_than_that_of_single_numbers() -> None:
    op = product(scores(SPREAD))
    each = magnitude(op.x, products=2) * magnitude(op.y, products=2) * SIZE
    assert largest_score(op, math.inf) == each
    assert largest_score(op, 0.0) < each / 4


@pytest.mark.parametrize("how", [{"opens": True}, {"widely": True}])
def test_nothing_is_said_of_other_heads(how: dict[str, bool]) -> None:
    """Without a norm, and where the numbers of a head do not lie side by side."""
    assert math.isinf(head_length(product(scores(SPREAD, **how)).x, -1))
