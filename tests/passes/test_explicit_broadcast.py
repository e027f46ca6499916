"""Operands of one rank, or of one shape: the same numbers to the last bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from coremltools.converters.mil.mil import get_new_symbol
from hypothesis import given, settings
from hypothesis import strategies as st

from anesurgery.mil import Operation, Program, Var, constant, ct, mb, op_inputs, types, walk_ops
from anesurgery.ops import BINARY, BROADCASTING
from anesurgery.passes.explicit_broadcast import ExplicitBroadcast
from anesurgery.testing import apply_pass, assert_refuses, assert_same_numbers, random_inputs
from anesurgery.text import to_text

FULL = ExplicitBroadcast(materialize_limit=10_000, tile=True, scalars=True)
"""Both operands of each op get the shape of the result."""


def program_of(body: Callable[..., Any], *shapes: tuple[Any, ...], dtype: Any = types.fp32) -> Program:
    specs = [mb.TensorSpec(shape, dtype=dtype) for shape in shapes]
    arities: dict[int, Callable[..., Any]] = {
        1: lambda a: body(a),
        2: lambda a, b: body(a, b),
        3: lambda a, b, c: body(a, b, c),
    }
    made: Program = mb.program(input_specs=specs, opset_version=ct.target.iOS17)(arities[len(shapes)])
    return made


def check(step: ExplicitBroadcast, program: Program) -> Program:
    after, session = apply_pass(step, program)
    assert session.changes, session.refusals
    assert all(change.proof for change in session.changes)
    inputs = {k: np.where(v == 0, 1, v).astype(v.dtype) for k, v in random_inputs(program).items()}
    assert_same_numbers(program, after, inputs)
    assert not apply_pass(step, after)[1].changes
    return after


def broadcasting(program: Program) -> list[Operation]:
    return [op for op in walk_ops(program) if op.op_type in BROADCASTING]


def shapes(program: Program) -> set[tuple[int, ...]]:
    """The shapes of all operands and results of the elementwise ops."""
    found = set()
    for op in broadcasting(program):
        read = [op.inputs[k] for k in ("cond", "a", "b", "x", "y") if op.inputs.get(k) is not None]
        found |= {tuple(v.shape or ()) for v in (*read, *op.outputs)}
    return found


def big_constants(program: Program, least: int = 2) -> list[tuple[int, ...]]:
    """Shapes of the constants that elementwise ops read."""
    seen = {v for op in broadcasting(program) for v in op.inputs.values() if isinstance(v, Var)}
    return [tuple(v.shape) for v in seen if v.shape and constant(v) is not None]


FLOATS = [k for k in sorted(BINARY) if not k.startswith("logical")]
INTEGERS = [k for k in FLOATS if k not in ("real_div", "pow")]


@pytest.mark.one_of(5)
@pytest.mark.parametrize("kind", FLOATS)
@pytest.mark.parametrize("step", [ExplicitBroadcast(), FULL], ids=["rank", "full"])
def test_every_op_on_either_side(kind: str, step: ExplicitBroadcast) -> None:
    def body(a: Var, b: Var) -> Any:
        op = getattr(mb, kind)
        return op(x=a, y=b), op(x=b, y=a), op(x=np.arange(1, 5, dtype=np.float32), y=a)

    after = check(step, program_of(body, (2, 3, 4), (3, 1)))
    assert {len(s) for s in shapes(after)} == {3}
    if step is FULL:
        assert shapes(after) == {(2, 3, 4)}


@pytest.mark.one_of(2)
@pytest.mark.parametrize("kind", INTEGERS)
def test_integers_stay_integers(kind: str) -> None:
    def body(a: Var, b: Var) -> Any:
        op = getattr(mb, kind)
        return op(x=a, y=b), op(x=a, y=np.arange(1, 5, dtype=np.int32))

    after = check(FULL, program_of(body, (2, 3, 4), (4,), dtype=types.int32))
    assert shapes(after) == {(2, 3, 4)}


def test_logic_and_select() -> None:
    def body(a: Var, b: Var, c: Var) -> Any:
        zero = np.float32(0)
        mask = mb.logical_or(x=mb.greater(x=a, y=zero), y=mb.less(x=b, y=zero))
        mask = mb.logical_xor(x=mask, y=np.array([True, False, True, False]))
        narrow = mb.less(x=b, y=zero)
        return mb.select(cond=mask, a=a, b=c), mb.select(cond=narrow, a=a, b=np.float32(-1))

    program = program_of(body, (2, 3, 4), (3, 1), (1,))
    after = check(FULL, program)
    for op in broadcasting(after):
        out = op.outputs[0].shape
        assert all(v.shape == out for v in op.inputs.values() if isinstance(v, Var)), to_text(after)


def test_by_default_nothing_is_repeated_and_scalars_stay() -> None:
    def body(a: Var, b: Var) -> Any:
        x = mb.mul(x=mb.add(x=a, y=b), y=np.float32(0.5))
        return mb.add(x=x, y=np.arange(4, dtype=np.float32))

    after = check(ExplicitBroadcast(), program_of(body, (2, 3, 4), (4,)))
    assert shapes(after) == {(2, 3, 4), (1, 1, 4), ()}
    assert not [op for op in walk_ops(after) if op.op_type == "tile"]


def test_does_not_apply_to_equal_ranks() -> None:
    program = program_of(lambda a, b: mb.add(x=a, y=b), (2, 3), (1, 3))
    _, session = apply_pass(ExplicitBroadcast(), program)
    assert not session.changes
    assert not session.refusals


@pytest.mark.parametrize("dtype", [types.fp16, types.fp32])
def test_a_constant_is_made_once_for_all_its_readers(dtype: Any) -> None:
    def body(a: Var) -> Any:
        row = mb.const(val=np.arange(9).astype(types.nptype_from_builtin(dtype)))
        return mb.mul(x=mb.add(x=mb.sub(x=a, y=row), y=row), y=row)

    program = program_of(body, (2, 5, 9), dtype=dtype)
    for step, shape in ((ExplicitBroadcast(), (1, 1, 9)), (FULL, (2, 5, 9))):
        after = check(step, program)
        assert big_constants(after) == [shape]
        assert all(v.dtype == dtype for op in broadcasting(after) for v in op.outputs)


def test_one_rank_copies_no_weight() -> None:
    table = np.ones((500, 9), np.float32)
    program = program_of(lambda a: mb.add(x=a, y=table), (1, 500, 9))
    (aligned,) = [v for op in broadcasting(check(ExplicitBroadcast(), program)) for v in [op.y]]
    (given,) = [op.y for op in broadcasting(program)]
    assert np.shares_memory(aligned.val, given.val)


def test_a_dynamic_scalar() -> None:
    program = program_of(lambda a, b: mb.add(x=a, y=mb.reduce_max(x=b, keep_dims=False)), (2, 3), (5,))
    assert not apply_pass(ExplicitBroadcast(), program)[1].changes
    assert shapes(check(FULL, program)) == {(2, 3)}


def test_two_consumers_keep_the_narrow_value() -> None:
    def body(a: Var, b: Var) -> Any:
        narrow = mb.exp(x=b, name="narrow")
        return mb.add(x=a, y=narrow, name="sum"), mb.relu(x=narrow, name="other"), narrow

    after = check(FULL, program_of(body, (2, 3, 4), (4,)))
    names = [v.name for v in after.functions["main"].outputs]
    assert names == ["sum", "other", "narrow"]


def test_nested_blocks_share_the_constant() -> None:
    row = np.arange(9, dtype=np.float32)

    @mb.program(input_specs=[mb.TensorSpec((2, 9)), mb.TensorSpec((1,), dtype=types.bool)])
    def program(a: Var, flag: Var) -> Any:
        shared = mb.const(val=row)
        return mb.cond(
            pred=mb.squeeze(x=flag),
            _true_fn=lambda: mb.add(x=a, y=shared),
            _false_fn=lambda: mb.mul(x=a, y=shared),
        )

    after = check(ExplicitBroadcast(), program)
    assert big_constants(after) == [(1, 9)]


def test_the_body_of_a_loop() -> None:
    @mb.program(input_specs=[mb.TensorSpec((2, 3)), mb.TensorSpec((3,))])
    def program(a: Var, b: Var) -> Any:
        return mb.while_loop(
            _cond=lambda i, x: mb.less(x=i, y=np.int32(3)),
            _body=lambda i, x: (mb.add(x=i, y=np.int32(1)), mb.add(x=x, y=b)),
            loop_vars=(np.int32(0), a),
        )[1]

    assert (1, 3) in shapes(check(ExplicitBroadcast(), program))


def test_rank_above_five_comes_down_first() -> None:
    def body(a: Var, b: Var) -> Any:
        return mb.add(x=mb.mul(x=a, y=b), y=np.arange(3, dtype=np.float32))

    after = check(ExplicitBroadcast(), program_of(body, (2, 2, 2, 2, 2, 3), (2, 3)))
    assert {len(s) for s in shapes(after)} == {5}
    assert shapes(check(FULL, program_of(body, (2, 2, 2, 2, 2, 3), (2, 3)))) == {(4, 2, 2, 2, 3)}


def test_rank_four_everywhere() -> None:
    def body(a: Var, b: Var) -> Any:
        x = mb.softmax(x=mb.add(x=a, y=b), axis=-1)
        return mb.mul(x=x, y=np.arange(4, dtype=np.float32))

    after = check(ExplicitBroadcast(rank4=True), program_of(body, (2, 3, 4), (4,)))
    assert {len(s) for s in shapes(after)} == {4}
    kinds = [op.op_type for op in walk_ops(after) if op.op_type != "const"]
    assert kinds == ["expand_dims", "expand_dims", "add", "softmax", "mul", "squeeze"], to_text(after)


@pytest.mark.parametrize(
    ("step", "reason"),
    [
        (ExplicitBroadcast(materialize_limit=23), "as 2x3x4 has 24 elements, above materialize_limit=23"),
        (ExplicitBroadcast(), "a shape is symbolic: ?"),
        (ExplicitBroadcast(), "an operand is wider than the result 3"),
    ],
)
def test_refuses(step: ExplicitBroadcast, reason: str) -> None:
    row = np.ones((1, 1, 4), np.float32)
    if "symbolic" in reason:
        shape = (get_new_symbol(), 3)
        program = program_of(lambda a: mb.add(x=a, y=np.ones(3, np.float32)), shape)
    elif "wider" in reason:
        zero = np.float32(0)
        program = program_of(lambda a, b: mb.select(cond=mb.less(x=a, y=zero), a=b, b=b), (2, 3), (3,))
    else:
        program = program_of(lambda a: mb.add(x=a, y=row), (2, 3, 4))
    assert_refuses(step, program, reason)


def test_a_symbolic_shape_with_scalars_only_needs_no_word() -> None:
    program = program_of(lambda a: mb.add(x=a, y=np.float32(1)), (get_new_symbol(), 3))
    _, session = apply_pass(ExplicitBroadcast(), program)
    assert not session.refusals


@pytest.mark.parametrize("step", [ExplicitBroadcast(), FULL, ExplicitBroadcast(rank4=True)], ids=str)
def test_survives_the_default_pipeline(step: ExplicitBroadcast, settled: Callable[[Program], Program]) -> None:
    def body(a: Var, b: Var) -> Any:
        x = mb.mul(x=mb.add(x=a, y=b), y=np.arange(4, dtype=np.float32))
        return mb.gelu(x=mb.sub(x=x, y=np.float32(0.5)))

    program = program_of(body, (2, 3, 4), (4,))
    after = settled(check(step, program))
    assert_same_numbers(program, after)
    assert not apply_pass(step, after)[1].changes


@pytest.mark.slow
@settings(max_examples=30, deadline=None)
@given(st.data())
def test_any_two_shapes(data: st.DataObject) -> None:
    rank = data.draw(st.integers(1, 5))
    shape = tuple(data.draw(st.lists(st.integers(1, 3), min_size=rank, max_size=rank)))

    def narrowed() -> tuple[int, ...]:
        cut = data.draw(st.integers(0, rank - 1))
        return tuple(n if data.draw(st.booleans()) else 1 for n in shape)[cut:]

    kind = data.draw(st.sampled_from(["add", "sub", "maximum", "less", "not_equal"]))
    dtype = data.draw(st.sampled_from([types.fp16, types.fp32, types.int32]))
    fixed = np.ones(narrowed(), types.nptype_from_builtin(dtype))

    def body(a: Var, b: Var) -> Any:
        return getattr(mb, kind)(x=a, y=b), getattr(mb, kind)(x=a, y=fixed)

    step = ExplicitBroadcast(materialize_limit=1000, tile=data.draw(st.booleans()), scalars=True)
    program = program_of(body, narrowed(), narrowed(), dtype=dtype)
    after, _ = apply_pass(step, program)
    assert_same_numbers(program, after)
    for op in broadcasting(after):
        assert len({len(v.shape) for v in (op.x, op.y, *op.outputs)}) == 1, to_text(after)
        if step.tile:
            assert tuple(op.x.shape) == tuple(op.y.shape) == tuple(op.outputs[0].shape)


H = np.float16
WIDE = (1, 2, 1, 2, 2, 4)
"""Of more axes than an op may have, so that what an op below reads is replaced."""


def image(x: Var) -> Var:
    made: Var = mb.reshape(x=mb.relu(x=x), shape=[2, 4, 2, 2])
    return made


DEFAULTS: dict[str, Callable[[Var], Any]] = {
    "pad": lambda x: mb.pad(x=mb.relu(x=x), pad=[0] * 10 + [1, 1]),
    "pad of another mode": lambda x: mb.pad(x=image(x), pad=[1, 0], mode="reflect"),
    "pad in a branch": lambda x: mb.cond(
        pred=mb.greater(x=mb.reduce_sum(x=x), y=H(0)),
        _true_fn=lambda: mb.pad(x=mb.relu(x=x), pad=[0] * 10 + [1, 1]),
        _false_fn=lambda: mb.pad(x=x, pad=[0] * 10 + [1, 1]),
    ),
    "batch norm": lambda x: mb.batch_norm(x=image(x), mean=np.ones(4, H), variance=np.ones(4, H)),
    "instance norm": lambda x: mb.instance_norm(x=image(x)),
    "layer norm": lambda x: mb.layer_norm(x=image(x), axes=[-1]),
    "norm of the length": lambda x: mb.l2_norm(x=image(x)),
    "local response": lambda x: mb.local_response_norm(x=image(x), size=3),
    "given": lambda x: mb.pad(x=mb.relu(x=x), pad=[0] * 10 + [1, 1], constant_val=H(2)),
}


@pytest.mark.parametrize("name", DEFAULTS)
def test_defaults_of_another_element_type(name: str) -> None:
    program = program_of(DEFAULTS[name], WIDE, dtype=types.fp16)
    after, session = apply_pass(ExplicitBroadcast(), program)
    assert session.changes
    assert_same_numbers(program, after, rtol=1e-4)
    for op in walk_ops(after):
        host: Any = op
        host.input_spec.validate_inputs(op.name, op.op_type, op_inputs(op))
