"""Operands of one rank, or of one shape: the same numbers to the last bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from pass_cases import refuses, rewrites, stays, table

from anesurgery.mil import Operation, Program, Var, ct, mb, new_symbol, op_inputs, types, walk_ops
from anesurgery.ops import BINARY, BROADCASTING
from anesurgery.passes.explicit_broadcast import ExplicitBroadcast
from anesurgery.testing import apply_pass, assert_same_numbers, random_inputs

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


def broadcasting(program: Program) -> list[Operation]:
    return [op for op in walk_ops(program) if op.op_type in BROADCASTING]


def shapes(program: Program) -> set[tuple[int, ...]]:
    """The shapes of all operands and results of the elementwise ops."""
    found = set()
    for op in broadcasting(program):
        read = [op.inputs[k] for k in ("cond", "a", "b", "x", "y") if op.inputs.get(k) is not None]
        found |= {tuple(v.shape or ()) for v in (*read, *op.outputs)}
    return found


FLOATS = [k for k in sorted(BINARY) if not k.startswith("logical")]
INTEGERS = [k for k in FLOATS if k not in ("real_div", "pow")]


def test_one_rank_copies_no_weight() -> None:
    table = np.ones((500, 9), np.float32)
    program = program_of(lambda a: mb.add(x=a, y=table), (1, 500, 9))
    (aligned,) = [v for op in broadcasting(apply_pass(RANK, program)[0]) for v in [op.y]]
    (given,) = [op.y for op in broadcasting(program)]
    assert np.shares_memory(aligned.val, given.val)


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


RANK = ExplicitBroadcast()


def nonzero(program: Program) -> dict[str, Any]:
    """Numbers to divide by."""
    return {k: np.where(v == 0, 1, v).astype(v.dtype) for k, v in random_inputs(program).items()}


def each_side(kind: str, dtype: Any = np.float32) -> Callable[..., Any]:
    op = getattr(mb, kind)
    return lambda a, b: (op(x=a, y=b), op(x=b, y=a), op(x=np.arange(1, 5, dtype=dtype), y=a))


def conditions(a: Var, b: Var, c: Var) -> Any:
    zero = np.float32(0)
    mask = mb.logical_or(x=mb.greater(x=a, y=zero), y=mb.less(x=b, y=zero))
    mask = mb.logical_xor(x=mask, y=np.array([True, False, True, False]))
    return mb.select(cond=mask, a=a, b=c), mb.select(cond=mb.less(x=b, y=zero), a=a, b=np.float32(-1))


def one_row(a: Var) -> Any:
    """A constant that three ops read is made once."""
    row = mb.const(val=np.arange(9).astype(types.nptype_from_builtin(a.dtype)))
    return mb.mul(x=mb.add(x=mb.sub(x=a, y=row), y=row), y=row)


def dynamic_scalar(a: Var, b: Var) -> Any:
    return mb.add(x=a, y=mb.reduce_max(x=b, keep_dims=False))


def two_consumers(a: Var, b: Var) -> Any:
    narrow = mb.exp(x=b, name="narrow")
    return mb.add(x=a, y=narrow, name="sum"), mb.relu(x=narrow, name="other"), narrow


def six_axes(a: Var, b: Var) -> Any:
    return mb.add(x=mb.mul(x=a, y=b), y=np.arange(3, dtype=np.float32))


test_cases, test_surroundings = table(
    RANK,
    *(
        rewrites(
            program_of, each_side(kind), (2, 3, 4), (3, 1), step=step, inputs=nonzero, id=f"{kind}, {name}"
        )
        for kind in FLOATS
        for name, step in (("one rank", RANK), ("one shape", FULL))
    ),
    *(
        rewrites(
            program_of,
            each_side(kind, np.int32),
            (2, 3, 4),
            (4,),
            dtype=types.int32,
            step=FULL,
            inputs=nonzero,
            id=f"{kind} of integers",
        )
        for kind in INTEGERS
    ),
    rewrites(program_of, conditions, (2, 3, 4), (3, 1), (1,), step=FULL),
    *(
        rewrites(
            program_of,
            lambda a, b: mb.gelu(x=mb.mul(x=mb.add(x=a, y=b), y=np.float32(0.5))),
            (2, 3, 4),
            (4,),
            step=step,
            id=str(step),
        )
        for step in (RANK, FULL, ExplicitBroadcast(rank4=True))
    ),
    *(
        rewrites(program_of, one_row, (2, 5, 9), dtype=dtype, step=step)
        for dtype in (types.fp16, types.fp32)
        for step in (RANK, FULL)
    ),
    stays(program_of, lambda a, b: mb.add(x=a, y=b), (2, 3), (1, 3), id="equal ranks"),
    stays(program_of, dynamic_scalar, (2, 3), (5,)),
    rewrites(program_of, dynamic_scalar, (2, 3), (5,), step=FULL),
    rewrites(program_of, two_consumers, (2, 3, 4), (4,), step=FULL),
    rewrites(program_of, six_axes, (2, 2, 2, 2, 2, 3), (2, 3)),
    rewrites(program_of, six_axes, (2, 2, 2, 2, 2, 3), (2, 3), step=FULL),
    stays(program_of, lambda a: mb.add(x=a, y=np.float32(1)), (new_symbol(), 3), id="a scalar, any batch"),
    refuses(
        "as 2x3x4 has 24 elements, above materialize_limit=23",
        program_of,
        lambda a: mb.add(x=a, y=np.ones((1, 1, 4), np.float32)),
        (2, 3, 4),
        step=ExplicitBroadcast(materialize_limit=23),
    ),
    refuses(
        "a shape is symbolic: ?", program_of, lambda a: mb.add(x=a, y=np.ones(3, np.float32)), (new_symbol(), 3)
    ),
    refuses(
        "an operand is wider than the result 3",
        program_of,
        lambda a, b: mb.select(cond=mb.less(x=a, y=np.float32(0)), a=b, b=b),
        (2, 3),
        (3,),
    ),
)
