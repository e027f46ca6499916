"""Loops, branches and lists as straight code: how often a round runs, what is selected, what is read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from closeness import assert_close
from pass_cases import refuses, rewrites, rewrites_each, table

import anesurgery as ane
from anesurgery.mil import Program, Var, ct, mb, quiet_host, types, walk_ops
from anesurgery.ops import CONTROL, LISTS
from anesurgery.passes.unroll_loop import UnrollLoop
from anesurgery.testing import apply_pass, assert_same_numbers, random_inputs

WEIGHT = np.random.default_rng(0).standard_normal((4, 4)).astype(np.float32)


def less(count: Any) -> Callable[..., Var]:
    return lambda i, *_: mb.less(x=i, y=count)


def one_more(i: Var) -> Var:
    return mb.add(x=i, y=np.int32(1))


def counted(rounds: Any = 3, start: int = 0) -> Program:
    """A product in every round, by a weight and by what no round changes."""

    @mb.program(input_specs=[mb.TensorSpec((2, 4))])
    def program(x: Var) -> Any:
        def body(i: Var, h: Var) -> tuple[Var, Var]:
            fixed = mb.tanh(x=x, name="fixed")
            scale = mb.cast(x=i, dtype="fp32")
            return one_more(i), mb.add(x=mb.mul(x=mb.linear(x=h, weight=WEIGHT), y=scale), y=fixed)

        return mb.while_loop(_cond=less(np.int32(rounds)), _body=body, loop_vars=(np.int32(start), x))[1]

    return program


def branched(pred: bool | None, body: Callable[[Var], Var] = lambda x: mb.exp(x=x)) -> Program:
    @mb.program(input_specs=[mb.TensorSpec((3,)), mb.TensorSpec((1,))])
    def program(x: Var, p: Var) -> Any:
        large = mb.squeeze(x=mb.greater(x=p, y=np.float32(0)), axes=[0])
        false = lambda: mb.sub(x=x, y=np.float32(2))  # noqa: E731
        made = mb.cond(
            pred=large if pred is None else pred, _true_fn=lambda: body(x), _false_fn=false, name="made"
        )
        return made, mb.relu(x=p)

    return program


def listed(length: int = 2, read: Any = (1, 0), **more: Any) -> Program:
    """Two elements are written; some are read."""

    @mb.program(input_specs=[mb.TensorSpec((2, 3)), mb.TensorSpec((1,), dtype=types.int32)])
    def program(x: Var, k: Var) -> Any:
        made = mb.make_list(init_length=length, dynamic_length=False, elem_shape=(3,))
        made = mb.list_scatter(ls=made, indices=np.array([0, 1], np.int32), value=x)
        at = mb.squeeze(x=k, axes=[0]) if more.get("dynamic") else np.int32(more.get("at", 1))
        made = mb.list_write(ls=made, index=at, value=mb.reduce_sum(x=x, axes=[0]))
        count = mb.list_length(ls=made)
        return mb.list_gather(ls=made, indices=np.array(read, np.int32)), mb.add(x=count, y=k)

    return program


def is_straight(program: Program) -> bool:
    return not (CONTROL | LISTS) & {op.op_type for op in walk_ops(program)}


def test_a_nested_loop_may_run_no_round_at_first() -> None:
    @mb.program(input_specs=[mb.TensorSpec((2, 4))])
    def program(x: Var) -> Any:
        def outer(i: Var, h: Var) -> tuple[Var, Var]:
            inner = lambda j, g: (one_more(j), mb.tanh(x=g))  # noqa: E731
            inside = mb.while_loop(_cond=less(i), _body=inner, loop_vars=(np.int32(0), h))[1]
            return one_more(i), mb.exp(x=inside)

        return mb.while_loop(_cond=less(np.int32(3)), _body=outer, loop_vars=(np.int32(0), x))[1]

    after, session = apply_pass(UnrollLoop(), program)
    assert is_straight(after), session.refusals
    assert_same_numbers(program, after, random_inputs(program))


def test_a_dynamic_branch_is_selected() -> None:
    program = branched(None)
    after, session = apply_pass(UnrollLoop(), program)
    assert is_straight(after), session.refusals
    for seed in range(4):
        assert_same_numbers(program, after, random_inputs(program, seed=seed))


def dynamic_count() -> Program:
    @mb.program(input_specs=[mb.TensorSpec((3,)), mb.TensorSpec((1,), dtype=types.int32)])
    def program(x: Var, count: Var) -> Any:
        n = mb.squeeze(x=count, axes=[0])

        def body(i: Var, h: Var) -> tuple[Var, Var]:
            return one_more(i), mb.relu(x=h)

        return mb.while_loop(_cond=less(n), _body=body, loop_vars=(np.int32(0), x))[1]

    return program


def noisy(x: Var) -> Var:
    noise: Var = mb.random_normal(shape=np.array([3], np.int32), mean=np.float32(0), stddev=np.float32(1))
    return mb.add(x=x, y=noise)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
def test_a_scripted_loop_of_torch() -> None:
    class Steps(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for _ in range(4):
                x = torch.sin(x) * x
            return x

    module, x = torch.jit.script(Steps()), torch.randn(2, 3)
    with quiet_host():
        model = ct.convert(
            module,
            inputs=[ct.TensorType("x", x.shape)],
            compute_precision=ct.precision.FLOAT32,
            minimum_deployment_target=ct.target.iOS16,
            skip_model_load=True,
        )
    surgery = ane.apply(model, "unroll_loop", quiet=True)
    assert is_straight(surgery.program)
    (found,) = ane.run(surgery.program, {"x": x.numpy()}).values()
    assert_close(found, module(x).numpy(), rtol=1e-5)


def collected(start: float = 0.0, mode: str = "add") -> Program:
    """A recurrence that keeps its states in the rows of a tensor, as a converted GRU of torch does."""

    @mb.program(input_specs=[mb.TensorSpec((3, 4), dtype=types.fp16)], opset_version=ct.target.iOS17)
    def program(x: Var) -> Any:
        def body(i: Var, rows: Var) -> tuple[Var, Var]:
            half = mb.cast(x=rows, dtype="fp16")
            before = mb.gather(x=half, indices=i, axis=0)
            state = mb.tanh(x=mb.add(x=before, y=mb.gather(x=x, indices=i, axis=0)))
            following = one_more(i)
            half = mb.scatter(data=half, indices=following, updates=state, axis=0, mode=mode)
            return following, mb.cast(x=half, dtype="fp32")

        first = np.full((4, 4), start, np.float32)
        zero = np.zeros((1,), np.int32)
        _, rows = mb.while_loop(_cond=less(np.int32(3)), _body=body, loop_vars=(zero, first))
        return mb.slice_by_index(x=rows, begin=[1, 0], end=[4, 4])

    return program


@mb.program(input_specs=[mb.TensorSpec((4,))])
def loop_in_a_loop(x: Var) -> Any:
    def inner(j: Var, h: Var) -> tuple[Var, Var]:
        return one_more(j), mb.sin(x=h)

    def outer(i: Var, h: Var) -> tuple[Var, Var]:
        deep = mb.while_loop(_cond=less(np.int32(2)), _body=inner, loop_vars=(i, h))[1]
        return one_more(i), mb.mul(x=deep, y=np.float32(2))

    return mb.while_loop(_cond=less(np.int32(2)), _body=outer, loop_vars=(np.int32(0), x))[1]


@mb.program(input_specs=[mb.TensorSpec((4,)), mb.TensorSpec((4,))])
def changing_places(x: Var, y: Var) -> Any:
    def swap(i: Var, a: Var, b: Var) -> tuple[Var, ...]:
        return one_more(i), mb.relu(x=b), a

    return mb.while_loop(_cond=less(np.int32(3)), _body=swap, loop_vars=(np.int32(0), x, y))[1:]


@mb.program(input_specs=[mb.TensorSpec((1, 4))])
def first_row_from_input(x: Var) -> Any:
    """The row that is written is the input in round 0, and a number after."""

    def body(i: Var, total: Var, row: Var) -> tuple[Var, ...]:
        at = mb.expand_dims(x=i, axes=[0])
        rows = mb.scatter(data=np.zeros((3, 4), np.float32), indices=at, updates=row, axis=0, mode="add")
        number = mb.cast(x=i, dtype="fp32")
        following = mb.fill(shape=np.array([1, 4], np.int32), value=np.float32(1))
        return one_more(i), mb.add(x=total, y=rows), mb.add(x=following, y=number)

    start = (np.int32(0), np.zeros((3, 4), np.float32), x)
    return mb.while_loop(_cond=less(np.int32(3)), _body=body, loop_vars=start)[1]


def test_an_element_that_was_never_written() -> None:
    _, session = apply_pass(UnrollLoop(), listed(3, (2,)))
    assert "element 2 of %make_list_0 was never written" in str(session.refusals)


def test_an_element_that_is_written_by_its_place_from_the_end() -> None:
    """The wrong version reads the value that was there before."""
    _, session = apply_pass(UnrollLoop(), listed(at=-1))
    assert "is written by its place from the end" in str(session.refusals)


STEP = UnrollLoop()
test_cases, test_surroundings = table(
    UnrollLoop(most_ops=5),
    refuses("more than 5 ops would be written", counted, 3),
    rewrites(collected, 0.5, "add", rtol=1e-06, step=UnrollLoop()),
    *(rewrites(counted, *case, step=STEP, rtol=0) for case in ((3, 0), (1, 0), (0, 0))),
    rewrites(counted, 3, -2, step=STEP, rtol=0, alone={"mutated": "the round of 0 hides those before"}),
    *(rewrites(branched, pred, step=STEP, rtol=0) for pred in (True, False)),
    *(rewrites(listed, read=read, step=STEP, rtol=0) for read in ((1, 0), (0,), (0, 1))),
    *rewrites_each(
        {
            "a loop in a loop": loop_in_a_loop,
            "values that change places": changing_places,
            "rows of the input, then of numbers": first_row_from_input,
        },
        step=STEP,
        rtol=0,
    ),
    refuses("whether round 1 runs depends on %less", dynamic_count, step=STEP),
    refuses("the loop runs more than 64 rounds", counted, 65, step=STEP),
    refuses("does more than compute its results", branched, None, noisy, step=STEP),
    refuses("the places written of", listed, dynamic=True, step=STEP),
    rewrites(collected, 0.0, "add", rtol=1e-6, step=STEP),
    rewrites(collected, 0.0, "update", rtol=1e-6, step=STEP),
    rewrites(collected, 0.5, "update", rtol=1e-6, step=STEP),
)
