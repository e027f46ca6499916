"""Other ranks, the same numbers: merged, lifted, permuted, sliced, reduced."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pass_cases import refuses, stays, table

from anesurgery.mil import Program, Var, ct, mb, new_symbol, types, walk_ops
from anesurgery.ops import UNARY, VIEWS
from anesurgery.passes.rerank import Rerank
from anesurgery.testing import apply_pass, assert_same_numbers, random_inputs
from anesurgery.text import to_text

SIX = (2, 3, 1, 4, 2, 3)
ONE_TWO_THREE = np.arange(1, 4, dtype=np.float32)
Body = Callable[..., Any]


def program_of(body: Body, *shapes: tuple[int, ...], dtype: Any = types.fp32) -> Program:
    specs = [mb.TensorSpec(shape, dtype=dtype) for shape in shapes]

    def two(a: Var, b: Var) -> Any:
        return body(a, b)

    def one(a: Var) -> Any:
        return body(a)

    function = one if len(shapes) == 1 else two
    built: Program = mb.program(input_specs=specs, opset_version=ct.target.iOS17)(function)
    return built


def ranks(program: Program) -> list[int]:
    """Ranks of what ops make, the changes of rank left out."""
    return [
        len(v.shape or ())
        for op in walk_ops(program)
        if op.op_type not in (*VIEWS, "const")
        for v in op.outputs
    ]


def check(step: Rerank, program: Program, rtol: float = 0.0) -> Program:
    after, session = apply_pass(step, program)
    assert session.changes, session.refusals
    assert all(change.proof for change in session.changes), session.changes
    inputs = random_inputs(program)
    positive = {k: v if v.dtype == bool else np.abs(v) + 0.5 for k, v in inputs.items()}
    assert_same_numbers(program, after, positive, rtol=rtol)
    again, second = apply_pass(step, after)
    assert not second.changes, to_text(again)
    return after


HIGH: dict[str, tuple[Body, float]] = {
    "broadcast rows": (lambda a: mb.add(x=a, y=np.arange(3, dtype=np.float32)), 0),
    "broadcast planes": (lambda a: mb.mul(x=mb.reduce_max(x=a, axes=[0, 1], keep_dims=True), y=a), 0),
    "scalar": (lambda a: mb.maximum(x=a, y=np.float32(0.7)), 0),
    "comparison": (lambda a: mb.select(cond=mb.greater(x=a, y=np.float32(0.9)), a=a, b=mb.exp(x=a)), 0),
    "cast": (lambda a: mb.cast(x=mb.cast(x=a, dtype="int32"), dtype="fp32"), 0),
    "clip": (lambda a: mb.clip(x=a, alpha=0.6, beta=1.1), 0),
    "sum of neighbours": (lambda a: mb.reduce_sum(x=a, axes=[3, 4], keep_dims=False), 1e-6),
    "mean of strangers": (lambda a: mb.reduce_mean(x=a, axes=[-1, 1], keep_dims=True), 1e-6),
    "norm of a short axis": (lambda a: mb.reduce_l2_norm(x=mb.sub(x=a, y=np.float32(1)), axes=[2]), 0),
    "all": (lambda a: mb.reduce_max(x=a), 0),
    "softmax": (lambda a: mb.softmax(x=a, axis=-3), 1e-6),
    "cumsum": (lambda a: mb.cumsum(x=a, axis=1, reverse=True), 1e-6),
    "argmax": (lambda a: mb.reduce_argmax(x=a, axis=3, keep_dims=False), 0),
    "concat": (lambda a: mb.concat(values=[a, mb.relu(x=a)], axis=-2), 0),
    "split": (lambda a: mb.add(x=(p := mb.split(x=a, num_splits=2, axis=3))[0], y=p[1]), 0),
    "layer norm": (lambda a: mb.layer_norm(x=a, axes=[-1], gamma=ONE_TWO_THREE, epsilon=1e-3), 1e-6),
    "slice": (lambda a: mb.slice_by_index(x=a, begin=[0, 1, 0, 0, 0, 0], end=[2, 3, 1, 4, 2, 3]), 0),
    "strided slice": (
        lambda a: mb.slice_by_index(
            x=a,
            begin=[0, 0, 0, 3, 0, 0],
            end=[0] * 6,
            stride=[1, 1, 1, -2, 1, 1],
            begin_mask=[True] * 3 + [False] + [True] * 2,
            end_mask=[True] * 6,
        ),
        0,
    ),
    "one of an axis": (
        lambda a: mb.slice_by_index(
            x=a,
            begin=[0, -1, 0, 0, 0, 0],
            end=[2, 0, 1, 4, 2, 3],
            squeeze_mask=[False, True, False, False, False, False],
        ),
        0,
    ),
    "transpose of blocks": (lambda a: mb.transpose(x=a, perm=[3, 4, 5, 0, 1, 2]), 0),
    "transpose of everything": (lambda a: mb.transpose(x=a, perm=[5, 3, 1, 4, 0, 2]), 0),
    "matmul": (lambda a: mb.matmul(x=a, y=a, transpose_y=True), 1e-6),
    "matmul, one weight": (lambda a: mb.matmul(x=a, y=np.ones((3, 5), np.float32)), 1e-6),
    "linear": (lambda a: mb.linear(x=a, weight=np.ones((5, 3), np.float32)), 1e-6),
}


@pytest.mark.parametrize("name", HIGH)
def test_rank_six_comes_down(name: str) -> None:
    body, rtol = HIGH[name]
    after = check(Rerank(), program_of(body, SIX), rtol)
    assert max(ranks(after)) <= 5, to_text(after)


@pytest.mark.one_of(5)
@pytest.mark.parametrize("name", [n for n in HIGH if n not in ("all",)])
def test_rank_four_of_lower_ranks(name: str) -> None:
    """The same ops on three axes: the kept axes are those that the body names."""
    low: dict[str, Body] = {
        "broadcast planes": lambda a: mb.mul(x=mb.reduce_max(x=a, axes=[0], keep_dims=True), y=a),
        "sum of neighbours": lambda a: mb.reduce_sum(x=a, axes=[1, 2], keep_dims=False),
        "mean of strangers": lambda a: mb.reduce_mean(x=a, axes=[-1, 0], keep_dims=True),
        "norm of a short axis": lambda a: mb.reduce_l2_norm(x=a, axes=[0]),
        "argmax": lambda a: mb.reduce_argmax(x=a, axis=1, keep_dims=False),
        "split": lambda a: mb.add(x=(p := mb.split(x=a, num_splits=2, axis=1))[0], y=p[1]),
        "slice": lambda a: mb.slice_by_index(x=a, begin=[0, 1, 0], end=[2, 3, 3]),
        "strided slice": lambda a: mb.slice_by_index(x=a, begin=[0, 0, 0], end=[2, 4, 3], stride=[1, 2, 1]),
        "one of an axis": lambda a: mb.slice_by_index(
            x=a, begin=[0, -1, 0], end=[2, 0, 3], squeeze_mask=[False, True, False]
        ),
        "transpose of blocks": lambda a: mb.transpose(x=a, perm=[1, 2, 0]),
        "transpose of everything": lambda a: mb.transpose(x=a, perm=[-1, 1, 0]),
    }
    body, rtol = low.get(name, HIGH[name][0]), HIGH[name][1]
    after = check(Rerank(at_least=4), program_of(body, (2, 4, 3)), rtol)
    assert set(ranks(after)) == {4}, to_text(after)


def test_views_stand_at_the_edges_only() -> None:
    def body(a: Var) -> Any:
        x = mb.gelu(x=mb.add(x=a, y=ONE_TWO_THREE))
        x = mb.softmax(x=mb.layer_norm(x=x, axes=[-1], epsilon=1e-3), axis=-1)
        return mb.concat(values=[x, a], axis=-1)

    after = check(Rerank(at_least=4), program_of(body, (2, 4, 3)), 1e-6)
    views = [op.op_type for op in walk_ops(after) if op.op_type in VIEWS]
    assert views == ["expand_dims", "expand_dims", "squeeze"], to_text(after)  # %a is read twice


def test_a_reshape_of_a_reshape_loses_the_high_middle() -> None:
    def body(a: Var) -> Any:
        x = mb.transpose(x=mb.reshape(x=a, shape=[2, 4, 2, 4, 2, 3]), perm=[0, 2, 1, 3, 4, 5])
        return mb.reshape(x=mb.relu(x=x), shape=[4, 16, 6])

    after = check(Rerank(), program_of(body, (2, 8, 8, 3)))
    assert all(len(v.shape) <= 5 for op in walk_ops(after) for v in op.outputs), to_text(after)


def test_a_reshape_of_a_squeeze_loses_the_low_middle() -> None:
    def body(a: Var) -> Any:
        x = mb.layer_norm(x=a, axes=[-1], epsilon=1e-3)
        heads = mb.reshape(x=x, shape=[2, 4, 1, 3])
        return mb.transpose(x=heads, perm=[0, 2, 1, 3])

    after = check(Rerank(at_least=4), program_of(body, (2, 4, 3)), 1e-6)
    kinds = [op.op_type for op in walk_ops(after) if op.op_type != "const"]
    assert kinds == ["expand_dims", "layer_norm", "reshape", "transpose"], to_text(after)


def test_two_readers_and_an_output_keep_the_high_value() -> None:
    def body(a: Var) -> Any:
        x = mb.relu(x=a, name="kept")
        return x, mb.exp(x=x), mb.square(x=x)

    after = check(Rerank(), program_of(body, SIX))
    assert after.functions["main"].outputs[0].name == "kept"
    assert [tuple(v.shape) for v in after.functions["main"].outputs] == [SIX] * 3


def test_nested_blocks() -> None:
    @mb.program(input_specs=[mb.TensorSpec(SIX), mb.TensorSpec((1,), dtype=types.bool)])
    def program(a: Var, flag: Var) -> Any:
        pred = mb.squeeze(x=flag)
        return mb.cond(pred=pred, _true_fn=lambda: mb.exp(x=a), _false_fn=lambda: mb.mul(x=a, y=a))

    after = check(Rerank(), program)
    assert [op.outputs[0].rank for op in walk_ops(after) if op.op_type in ("exp", "mul")] == [5, 5]


def test_a_constant_is_reshaped_once() -> None:
    def body(a: Var) -> Any:
        table = mb.const(val=np.arange(144, dtype=np.float32).reshape(SIX))
        return mb.add(x=mb.mul(x=a, y=table), y=table)

    after = check(Rerank(), program_of(body, SIX))
    big = [op for op in walk_ops(after) if op.op_type == "const" and op.outputs[0].rank == 5]
    assert len(big) == 1


def test_survives_the_default_pipeline(settled: Callable[[Program], Program]) -> None:
    for step, shape in ((Rerank(), SIX), (Rerank(at_least=4), (2, 4, 3))):
        program = program_of(lambda a: mb.softmax(x=mb.relu(x=mb.add(x=a, y=ONE_TWO_THREE)), axis=-1), shape)
        after = settled(check(step, program, 1e-6))
        assert_same_numbers(program, after, rtol=1e-6)
        assert not apply_pass(step, after)[1].changes


@settings(max_examples=20, deadline=None)
@given(st.data())
def test_any_shape_any_broadcast(data: st.DataObject) -> None:
    rank = data.draw(st.integers(1, 8))
    shape = tuple(data.draw(st.lists(st.integers(1, 3), min_size=rank, max_size=rank)))
    other = tuple(n if data.draw(st.booleans()) else 1 for n in shape)[data.draw(st.integers(0, rank - 1)) :]
    kind = data.draw(st.sampled_from(["add", "maximum", "real_div", "greater"]))
    step = Rerank(at_most=data.draw(st.integers(4, 5)), at_least=data.draw(st.sampled_from([0, 4])))
    program = program_of(lambda a, b: getattr(mb, kind)(x=a, y=b), shape, other)
    after, session = apply_pass(step, program)
    assert_same_numbers(program, after)
    if not session.refusals:
        assert all(step.at_least <= r <= step.at_most for r in ranks(after)), to_text(after)


@settings(max_examples=20, deadline=None)
@given(st.permutations(range(6)), st.lists(st.integers(1, 3), min_size=6, max_size=6))
def test_any_transposition(perm: list[int], shape: list[int]) -> None:
    program = program_of(lambda a: mb.transpose(x=a, perm=list(perm)), tuple(shape))
    after, session = apply_pass(Rerank(), program)
    assert session.changes
    assert_same_numbers(program, after)
    assert max(ranks(after)) <= 5, to_text(after)


@settings(max_examples=25, deadline=None)
@given(st.lists(st.booleans(), min_size=7, max_size=7), st.booleans())
def test_any_reduction(reduced: list[bool], keep: bool) -> None:
    axes = [i for i, r in enumerate(reduced) if r] or [0]
    program = program_of(lambda a: mb.reduce_max(x=a, axes=axes, keep_dims=keep), (2, 3, 1, 2, 1, 2, 2))
    after, _ = apply_pass(Rerank(), program)
    assert_same_numbers(program, after)


@pytest.mark.parametrize("kind", [k for k in sorted(UNARY) if k not in ("cast", "logical_not", "identity")])
def test_every_unary_op_works_on_merged_axes(kind: str) -> None:
    options = {"clip": {"alpha": 0.1, "beta": 0.9}, "threshold": {"alpha": 0.1}}
    two = ("clamped_relu", "linear_activation", "scaled_tanh", "sigmoid_hard")
    named = options.get(kind, {"alpha": 0.3, "beta": 0.9} if kind in two else {})
    if kind in ("elu", "leaky_relu", "thresholded_relu"):
        named = {"alpha": 0.3}
    program = program_of(lambda a: getattr(mb, kind)(x=a, **named), SIX)
    after, session = apply_pass(Rerank(), program)
    assert session.changes, session.refusals
    inputs = {"a": np.random.default_rng(0).uniform(0.05, 0.95, SIX).astype(np.float32)}
    assert_same_numbers(program, after, inputs)
    assert max(ranks(after)) <= 5


def refuses_a_slice_at_a_dynamic_place(a: Var, b: Var) -> Any:
    begin = mb.cast(x=b, dtype="int32")
    cut = mb.slice_by_index(
        x=a,
        begin=begin,
        end=[2, 3, 1, 4, 2, 3],
        squeeze_mask=[True] + [False] * 5,
        begin_mask=[False] + [True] * 5,
    )
    return mb.relu(x=cut)


def leaves_integers_of_low_rank_and_what_fits_alone(a: Var) -> Any:
    return mb.gather(x=np.arange(12, dtype=np.float32), indices=mb.add(x=a, y=np.int32(1)), axis=0)


test_cases, test_surroundings = table(
    Rerank(),
    *(
        refuses(reason, program_of, body, (2, 1, 2, 1, 2, 1), (1, 2, 1, 2, 1, 2))
        for body, reason in [
            (lambda a, b: mb.add(x=a, y=b), "add of 2x1x2x1x2x1 and 1x2x1x2x1x2 and 2x2x2x2x2x2 cannot"),
            (lambda a, b: mb.reduce_max(x=a, axes=[0, 2, 4]), "reduce_max of 2x1x2x1x2x1"),
            (lambda a, b: mb.reverse(x=a, axes=[0]), "reverse makes rank 6 (2x1x2x1x2x1)"),
        ]
    ),
    refuses("where it starts or ends is dynamic", program_of, refuses_a_slice_at_a_dynamic_place, SIX, (6,)),
    refuses("symbolic", program_of, lambda a: mb.relu(x=a), (new_symbol(), 2, 2, 2, 2, 2)),
    stays(
        program_of,
        leaves_integers_of_low_rank_and_what_fits_alone,
        (3,),
        dtype=types.int32,
        step=Rerank(at_least=4),
    ),
)
