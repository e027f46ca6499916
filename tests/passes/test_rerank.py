"""Other ranks, the same numbers: merged, lifted, permuted, sliced, reduced."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pass_cases import refuses, rewrites, stays, table

from anesurgery.mil import Program, Var, ct, mb, new_symbol, types, walk_ops
from anesurgery.ops import UNARY, VIEWS
from anesurgery.passes.rerank import Rerank
from anesurgery.testing import apply_pass, assert_same_numbers
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
    "zeros behind each pixel": (lambda a: mb.pad(x=a, pad=[0, 1, 0, 0, 0, 1, 0, 0]), 0),
    "blocks of a number": (
        lambda a: mb.pad(x=a, pad=[1, 2, 0, 0, 0, 0, 2, 0, 0, 0, 0, 0], constant_val=np.float32(7)),
        0,
    ),
    "edges": (lambda a: mb.pad(x=a, pad=[1, 1, 1, 1], mode="replicate"), 0),
    "transpose of blocks": (lambda a: mb.transpose(x=a, perm=[3, 4, 5, 0, 1, 2]), 0),
    "transpose of everything": (lambda a: mb.transpose(x=a, perm=[5, 3, 1, 4, 0, 2]), 0),
    "matmul": (lambda a: mb.matmul(x=a, y=a, transpose_y=True), 1e-6),
    "matmul, one weight": (lambda a: mb.matmul(x=a, y=np.ones((3, 5), np.float32)), 1e-6),
    "linear": (lambda a: mb.linear(x=a, weight=np.ones((5, 3), np.float32)), 1e-6),
}


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
@given(st.data())
def test_any_transposition(data: st.DataObject) -> None:
    rank = data.draw(st.integers(6, 8))
    shape = tuple(data.draw(st.lists(st.integers(1, 3), min_size=rank, max_size=rank)))
    perm = data.draw(st.permutations(range(rank)))
    program = program_of(lambda a: mb.transpose(x=a, perm=perm), shape)
    after, _ = apply_pass(Rerank(at_most=data.draw(st.integers(4, 5))), program)
    assert_same_numbers(program, after)
    assert all(len(op.perm.val) <= 5 for op in walk_ops(after) if op.op_type == "transpose"), to_text(after)


@pytest.mark.parametrize(("windows", "moves"), [((1, 28, 2, 28, 2, 96), 1), ((4, 14, 2, 14, 2, 96), 2)])
def test_windows_become_few_moves_of_short_axes(windows: tuple[int, ...], moves: int) -> None:
    """As Hiera cuts its image: coremltools writes six exchanges, one of 301,056 numbers in a row."""
    program = program_of(lambda a: mb.transpose(x=a, perm=[0, 2, 4, 1, 3, 5]), windows)
    after, _ = apply_pass(Rerank(), program)
    turned = [op for op in walk_ops(after) if op.op_type == "transpose"]
    assert len(turned) == moves
    assert max(n for op in turned for n in op.x.shape) <= 28 * 96
    assert all(op.perm.val[-1] == len(op.perm.val) - 1 for op in turned), "the last axis stays the last"


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


FOUR = Rerank(at_least=4)
POSITIVE = {"a": (0.5, 3.0)}
LOW: dict[str, Body] = {
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
    "zeros behind each pixel": lambda a: mb.pad(x=a, pad=[0, 1, 0, 1]),
    "blocks of a number": lambda a: mb.pad(x=a, pad=[1, 2, 0, 0, 0, 0], constant_val=np.float32(7)),
    "transpose of blocks": lambda a: mb.transpose(x=a, perm=[1, 2, 0]),
    "transpose of everything": lambda a: mb.transpose(x=a, perm=[-1, 1, 0]),
}
"""The same on three axes, of those whose body names axes."""


def a_block(a: Var) -> Any:
    """Views stand at the edges only; %a is read twice."""
    x = mb.gelu(x=mb.add(x=a, y=ONE_TWO_THREE))
    return mb.concat(values=[mb.softmax(x=mb.layer_norm(x=x, axes=[-1], epsilon=1e-3), axis=-1), a], axis=-1)


def high_middle(a: Var) -> Any:
    x = mb.transpose(x=mb.reshape(x=a, shape=[2, 4, 2, 4, 2, 3]), perm=[0, 2, 1, 3, 4, 5])
    return mb.reshape(x=mb.relu(x=x), shape=[4, 16, 6])


def low_middle(a: Var) -> Any:
    heads = mb.reshape(x=mb.layer_norm(x=a, axes=[-1], epsilon=1e-3), shape=[2, 4, 1, 3])
    return mb.transpose(x=heads, perm=[0, 2, 1, 3])


def kept(a: Var) -> Any:
    return (x := mb.relu(x=a, name="kept")), mb.exp(x=x), mb.square(x=x)


def one_table(a: Var) -> Any:
    table = mb.const(val=np.arange(144, dtype=np.float32).reshape(SIX))
    return mb.add(x=mb.mul(x=a, y=table), y=table)


def unary(kind: str) -> Body:
    two = ("clip", "clamped_relu", "linear_activation", "scaled_tanh", "sigmoid_hard")
    named = {"alpha": 0.3, **({"beta": 0.9} if kind in two else {})}
    takes = kind in (*two, "elu", "leaky_relu", "thresholded_relu", "threshold")
    return lambda a: getattr(mb, kind)(x=a, **(named if takes else {}))


def turned(perm: list[int]) -> Body:
    return lambda a: mb.transpose(x=a, perm=perm)


def largest(axes: list[int]) -> Body:
    return lambda a: mb.reduce_max(x=a, axes=axes, keep_dims=False)


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
    *(
        rewrites(program_of, body, SIX, rtol=rtol, inputs=POSITIVE, id=name)
        for name, (body, rtol) in HIGH.items()
    ),
    *(
        rewrites(
            program_of,
            LOW.get(name, body),
            (2, 4, 3),
            step=FOUR,
            rtol=rtol,
            inputs=POSITIVE,
            id=f"{name}, from three",
        )
        for name, (body, rtol) in HIGH.items()
        if name != "all"
    ),
    rewrites(program_of, a_block, (2, 4, 3), step=FOUR, rtol=1e-6),
    rewrites(program_of, high_middle, (2, 8, 8, 3)),
    rewrites(program_of, low_middle, (2, 4, 3), step=FOUR, rtol=1e-6),
    rewrites(program_of, kept, SIX),
    rewrites(program_of, one_table, SIX),
    *(
        rewrites(program_of, unary(kind), SIX, inputs={"a": (0.05, 0.95)}, id=kind)
        for kind in sorted(UNARY)
        if kind not in ("cast", "logical_not", "identity")
    ),
    *(
        rewrites(program_of, turned(perm), SIX, id=f"transposed {perm}")
        for perm in ([5, 4, 3, 2, 1, 0], [1, 3, 5, 0, 2, 4], [0, 1, 4, 5, 2, 3], [2, 0, 1, 5, 3, 4])
    ),
    *(
        rewrites(program_of, largest(axes), (2, 3, 1, 2, 1, 2, 2), id=f"largest along {axes}")
        for axes in ([0], [1, 3], [0, 2, 6], [3, 4, 5, 6])
    ),
)
