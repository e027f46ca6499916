"""Scores of attention are bounded by the singular values of heads, and some input comes near."""

from __future__ import annotations

import math

import numpy as np
import pytest

import anesurgery as ane
from anesurgery.files.copying import copy_program
from anesurgery.mil import Array, Operation, Program, Var, ct, mb, types, walk_ops
from anesurgery.semantics.intervals import head_length, largest_score, magnitude, stored_score

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
def test_a_rough_bound_is_above_the_exact_one(weight: Array) -> None:
    """The wrong version takes the longest of the parts for their sum; of rows that are alike both are equal."""
    value = product(scores(weight)).x
    exact, rough = (head_length(value, -1, roughly=roughly) for roughly in (False, True))
    assert exact * (1 - 1e-6) <= rough
    assert rough <= exact * 1.01 or weight is SPREAD
    assert rough < 3 * exact


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


def fused(weight: Array, sizes: tuple[int, ...]) -> Program:
    """Query, key and value of one layer, split behind it."""

    @mb.program(
        input_specs=[mb.TensorSpec((1, TOKENS, WIDTH), dtype=types.fp16)], opset_version=ct.target.iOS17
    )
    def program(x: Var) -> Var:
        rows = mb.linear(x=mb.layer_norm(x=x, axes=[-1], epsilon=HALF(1e-5)), weight=weight)
        parts = mb.split(x=rows, split_sizes=sizes, axis=-1)
        shape = (1, TOKENS, -1, SIZE)
        query, key = (mb.transpose(x=mb.reshape(x=part, shape=shape), perm=[0, 2, 1, 3]) for part in parts[:2])
        product = mb.matmul(x=query, y=key, transpose_y=True)
        return mb.softmax(x=mb.mul(x=product, y=HALF(0.18), name="scores"), axis=-1, name="y")

    return program


def computed(program: Program, inputs: dict[str, Array], precision: str) -> Array:
    """The scores as an output."""
    copy = copy_program(program)
    function = copy.functions["main"]
    function.set_outputs([next(op for op in function.operations if op.op_type == "mul").outputs[0]])
    (scores,) = ane.run(copy, inputs, precision=precision).values()
    return scores


@pytest.mark.parametrize("weight", [SPREAD, ALIKE], ids=["spread", "alike"])
def test_heads_of_a_split_layer_are_bounded(weight: Array) -> None:
    """In fp16, too: the wrong version would leave out what rounding adds."""
    program = fused(np.tile(weight, (3, 1)), (WIDTH, WIDTH, WIDTH))
    most = stored_score(
        next(op for op in walk_ops(program.functions["main"]) if op.op_type == "mul").outputs[0]
    )
    x = {"x": np.tile(weight[0] * 40, (1, TOKENS, 1)).astype(HALF)}
    for precision in ("fp32", "fp16"):
        reached = np.abs(computed(program, x, precision)).max()
        assert reached <= most
    if weight is ALIKE:
        assert reached > most / 1.6


def test_a_split_within_a_head_bounds_nothing() -> None:
    program = fused(np.tile(SPREAD, (3, 1)), (SIZE // 2 * 2, SIZE // 2 * 4, 3 * WIDTH - 3 * SIZE))
    assert math.isfinite(head_length(product(program).x, -1))
    within = fused(np.tile(SPREAD, (4, 1)), (SIZE, SIZE, SIZE // 2, 4 * WIDTH - 2 * SIZE - SIZE // 2))
    assert math.isinf(head_length(product(within).x, -1))
