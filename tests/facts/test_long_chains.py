"""What is asked about one value is answered for chains of more ops than Python allows nested calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import anesurgery as ane
from anesurgery.facts import half, integer_masks, loops
from anesurgery.mil import Program, Var, ct, mb, types, walk_ops
from anesurgery.placement.rules import lost_in_conversion, numeric
from anesurgery.semantics import bounds, reading

OPS = 1500
"""Python allows 1,000 nested calls."""


def chain(link: Callable[[Var, Var], Var], dtype: Any = types.fp32, ops: int = OPS) -> Program:
    """Apply `link` to the result so far and the input, again and again."""

    def body(x: Var) -> Var:
        y = x
        for _ in range(ops):
            y = link(y, x)
        return y

    return mb.program(input_specs=[mb.TensorSpec((1, 4, 8, 8), dtype)], opset_version=ct.target.iOS17)(
        lambda x: body(x)
    )


def end(program: Program) -> Var:
    return program.functions["main"].outputs[0]


def two_before(link: Callable[[Var, Var], Var], first: Callable[[Var], Var], dtype: Any = types.fp32) -> Var:
    """Let each result read the two before it: looked at path by path, the work doubles with each op."""

    def body(x: Var) -> Var:
        before = first(x)
        y = link(before, before)
        for _ in range(60):
            before, y = y, link(y, before)
        return y

    specs = [mb.TensorSpec((1, 4), dtype)]
    return end(mb.program(input_specs=specs, opset_version=ct.target.iOS17)(lambda x: body(x)))


CONV = np.eye(4, dtype=np.float32).reshape(4, 4, 1, 1)


def clipped(y: Var, x: Var) -> Var:
    return mb.clip(x=mb.conv(x=y, weight=CONV), alpha=np.float32(0), beta=np.float32(6))


@pytest.mark.parametrize(
    ("link", "dtype"),
    [
        (clipped, types.fp32),
        (lambda y, x: mb.square(x=y), types.fp16),
        (lambda y, x: mb.mul(x=y, y=x), types.fp16),
        (lambda y, x: mb.sub(x=np.float16(1), y=y), types.fp16),
    ],
)
def test_inspect_of_a_long_chain(link: Callable[[Var, Var], Var], dtype: Any) -> None:
    def rooted(x: Var) -> Var:
        y = x
        for _ in range(OPS // 2):
            y = link(y, x)
        return mb.sqrt(x=y)

    specs = [mb.TensorSpec((1, 4, 8, 8), dtype)]
    program = mb.program(input_specs=specs, opset_version=ct.target.iOS17)(lambda x: rooted(x))
    assert len(ane.inspect(program).ops) > OPS // 2


def test_a_chain_of_factors() -> None:
    last = end(chain(lambda y, x: mb.mul(x=y, y=np.float32(1)))).op
    found = None if last is None else reading.scaled_by_all(last)
    assert found is not None
    assert (found[0].op, found[1], len(found[2])) == (None, 1.0, OPS)


def test_a_power_of_many_factors() -> None:
    power = reading.integer_power(end(chain(lambda y, x: mb.mul(x=y, y=x))))
    assert power is not None
    assert (power.base.op, power.exponent, len(power.ops)) == (None, OPS + 1, OPS)
    assert reading.integer_power(two_before(lambda y, x: mb.mul(x=y, y=x), lambda x: x)) is None


def test_a_range_behind_casts() -> None:
    program = chain(lambda y, x: mb.cast(x=mb.cast(x=y, dtype="int32"), dtype="fp32"))
    (name,) = program.functions["main"].inputs
    assert half.known_range(end(program), {name: (0.0, 3.0)}) == (0.0, 3.0)


def test_masks_of_many_ops() -> None:
    var = two_before(lambda y, x: mb.mul(x=y, y=x), lambda x: x, types.int32)
    assert integer_masks.bits(var) is None  # more than it looks through
    few = end(chain(lambda y, x: mb.mul(x=y, y=x), types.int32, ops=3))
    assert integer_masks.bits(few) == (0, 1)
    moved = chain(lambda y, x: mb.transpose(x=y, perm=[0, 1, 3, 2]), types.int32)
    (mask,) = moved.functions["main"].inputs.values()
    assert not integer_masks.masks_scores(mask)


def test_integers_behind_limits() -> None:
    def as_float(x: Var) -> Var:
        return mb.cast(x=x, dtype="fp16")

    var = two_before(lambda y, x: mb.maximum(x=y, y=x), as_float, types.int32)
    assert lost_in_conversion.integers_behind(var) is None  # more than coremltools writes
    few = mb.program(input_specs=[mb.TensorSpec((4,), types.int32)], opset_version=ct.target.iOS17)(
        lambda x: mb.maximum(x=as_float(x), y=np.float16(2))
    )
    (x,) = few.functions["main"].inputs.values()
    assert lost_in_conversion.integers_behind(end(few)) == [x]


def test_a_length_behind_many_scales() -> None:
    def scaled(count: int) -> Var:
        def body(x: Var) -> Var:
            y = mb.layer_norm(x=x, axes=[-1], epsilon=np.float32(1e-5))
            for _ in range(count):
                y = mb.mul(x=y, y=np.float32(1))
            return y

        return end(
            mb.program(input_specs=[mb.TensorSpec((2, 16))], opset_version=ct.target.iOS17)(lambda x: body(x))
        )

    assert bounds.row_length(scaled(2)) == pytest.approx(4)
    assert bounds.row_length(scaled(OPS)) == np.inf


def test_a_value_far_behind_a_norm() -> None:
    """150 nested ops are more than one question looks at; the second begins half-way up."""

    def body(x: Var, ops: int) -> Var:
        y = mb.layer_norm(x=x, axes=[-1], epsilon=np.float16(1e-3))
        for _ in range(ops):
            y = mb.abs(x=y)
        return y

    def largest(ops: int) -> float:
        specs = [mb.TensorSpec((2, 16), types.fp16)]
        return numeric.magnitude_behind_norms(
            end(mb.program(input_specs=specs, opset_version=ct.target.iOS17)(lambda x: body(x, ops)))
        )

    assert largest(10) == largest(150) < np.inf
    assert largest(OPS) == np.inf


def test_the_rounds_of_a_loop_that_counts_by_many_ops() -> None:
    def count(k: Var, y: Var) -> tuple[Var, Var]:
        for _ in range(OPS // 2):
            k = mb.sub(x=mb.add(x=k, y=np.int32(2)), y=np.int32(2))
        return mb.add(x=k, y=np.int32(1)), mb.add(x=y, y=y)

    def counted(x: Var) -> Var:
        less = lambda k, y: mb.less(x=k, y=np.int32(3))  # noqa: E731
        return mb.while_loop(_cond=less, _body=count, loop_vars=(np.int32(0), x))[1]

    specs = [mb.TensorSpec((3,))]
    program = mb.program(input_specs=specs, opset_version=ct.target.iOS17)(lambda x: counted(x))
    (loop,) = (op for op in walk_ops(program) if op.op_type == "while_loop")
    assert loops.loop_rounds(loop) == 3
