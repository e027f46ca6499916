"""Orders of ops: what moves, what keeps its place, and orders that are wrong."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from pass_cases import rewrites, stays, table
from scores import scored

import anesurgery as ane
from anesurgery.mil import Program, Var, ct, mb, types, walk_ops
from anesurgery.passes.group_by_unit import GroupByUnit, example
from anesurgery.placement.target import Target
from anesurgery.rewriting.session import Session
from anesurgery.testing import apply_pass, assert_same_numbers

WEIGHT = np.random.default_rng(0).standard_normal((64, 64, 3, 3)).astype(np.float16)
SHAPE = (1, 64, 64, 64)


def conv(x: Var, **options: Any) -> Var:
    made: Var = mb.conv(x=x, weight=WEIGHT, pad_type="same", **options)
    return made


def kinds(program: Program) -> list[str]:
    return [op.op_type for op in program.functions["main"].operations if op.op_type != "const"]


@mb.program(input_specs=[mb.TensorSpec(SHAPE, dtype=types.fp16)], opset_version=ct.target.iOS17)
def with_a_chain(x: Var) -> Any:
    """A legal op stands between two that are off the engine, whose result is wanted later."""
    trunk = conv(conv(x))
    aside = mb.cumsum(x=mb.relu(x=mb.cumsum(x=x, axis=1)), axis=1)
    return conv(mb.add(x=trunk, y=aside), name="y")


@mb.program(input_specs=[mb.TensorSpec(SHAPE, dtype=types.fp16)], opset_version=ct.target.iOS17)
def with_noise(x: Var) -> Any:
    """Random numbers between the convolutions, in an order of their own."""
    found = x
    for seed in (1, 2):
        noise = mb.random_normal(shape=SHAPE, mean=np.float16(0), stddev=np.float16(1), seed=seed)
        found = mb.add(x=conv(found), y=noise)
    return mb.relu(x=found, name="y")


@mb.program(input_specs=[mb.TensorSpec(SHAPE, dtype=types.fp16)], opset_version=ct.target.iOS17)
def with_a_branch(x: Var) -> Any:
    """A cond that reads from outside what a convolution makes."""
    first = conv(x)
    total = mb.reduce_sum(x=x, axes=[0, 1, 2, 3], keep_dims=False)
    taken = mb.cond(
        pred=mb.greater(x=total, y=np.float16(0)),
        _true_fn=lambda: mb.relu(x=first),
        _false_fn=lambda: mb.exp(x=x),
    )
    return mb.add(x=conv(first), y=taken, name="y")


@pytest.mark.one_of(3)
@pytest.mark.parametrize("program", [example(), with_a_chain, with_noise, with_a_branch])
@pytest.mark.parametrize("target", ["M1/macOS 14", "M4/macOS 15", "A15/iOS 17"])
def test_it_never_stands_worse_and_a_second_run_changes_nothing(program: Program, target: str) -> None:
    aim = Target.parse(target)
    after, session = apply_pass(GroupByUnit(target), program)
    assert sorted(kinds(after)) == sorted(kinds(program))
    assert not scored(after, aim)[0].loss(scored(program, aim)[0])
    assert bool(session.changes) == (kinds(after) != kinds(program))
    assert not apply_pass(GroupByUnit(target), after)[1].changes


def test_random_numbers_are_drawn_in_their_order() -> None:
    after, session = apply_pass(GroupByUnit("M4/macOS 15"), with_noise)
    assert session.changes
    assert kinds(after)[:2] == ["random_normal", "random_normal"]
    assert [op.seed.val for op in walk_ops(after) if op.op_type == "random_normal"] == [1, 2]


@mb.program(
    input_specs=[mb.TensorSpec((1, 128, 256), dtype=types.fp16), mb.TensorSpec((1, 128), dtype=types.fp16)],
    opset_version=ct.target.iOS17,
)
def with_a_small_start(x: Var, seen: Var) -> Any:
    """After a cumsum a product of one row begins the run; it is worth no place on the engine there."""
    rows = mb.cumsum(x=x, axis=1)
    count = mb.matmul(x=seen, y=np.triu(np.ones((128, 128), np.float16)))
    scale = mb.expand_dims(x=mb.mul(x=count, y=seen), axes=[2])
    added = mb.add(x=rows, y=np.ones((1, 128, 256), np.float16))
    return mb.linear(x=mb.mul(x=added, y=scale), weight=np.ones((256, 256), np.float16), name="y")


def test_small_ops_do_not_begin_a_run() -> None:
    aim = Target.parse("M4/macOS 15")
    after, session = apply_pass(GroupByUnit("M4/macOS 15"), with_a_small_start)
    assert session.changes
    new, old = (scored(one, aim)[0] for one in (after, with_a_small_start))
    assert new.ops - new.on_ops < old.ops - old.on_ops
    assert kinds(after)[:3] == ["cumsum", "add", "matmul"]
    assert_same_numbers(with_a_small_start, after)


@pytest.mark.parametrize("wrong", ["late", "missing", "twice"])
def test_a_wrong_order_is_an_error(wrong: str) -> None:
    """The wrong versions: an op before what it reads, one that is left out, one that stands there twice."""
    program = example()
    main = program.functions["main"]
    ops = [op for op in main.operations if op.op_type != "const"]
    given = {"late": ops[::-1], "missing": ops[:-1], "twice": [*ops, ops[0]]}[wrong]
    with pytest.raises(ane.SurgeryError, match="out of order|left out"):
        GroupByUnit().rearrange(main, given, Session())


def test_auto_tries_it() -> None:
    surgery = ane.apply(with_noise, "auto", target="M4/macOS 15", quiet=True)
    assert "group_by_unit" in {change.pass_name for change in surgery.changes}


test_cases, test_surroundings = table(
    GroupByUnit("M4/macOS 15"),
    rewrites(lambda: with_a_chain, id="a short chain goes with the op that it leads to"),
    stays(
        mb.program(input_specs=[mb.TensorSpec(SHAPE, dtype=types.fp16)]),
        lambda x: conv(conv(x)),
        step=GroupByUnit("M4"),
    ),
    rewrites(lambda: with_a_branch, id="what a branch reads from outside comes before it"),
)
