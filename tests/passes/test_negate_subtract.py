"""x - y is x + (-y): for tensors, scalars and broadcasts, floats and integers, to the last bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from pass_cases import refuses, rewrites, table

from anesurgery.errors import Refusal
from anesurgery.mil import Program, Var, ct, mb, types, walk_ops
from anesurgery.passes.negate_subtract import NegateSubtract
from anesurgery.rewriting.pattern import matches, op

LOWEST = np.array([1, -(2**31)], np.int32)
EDGES = np.array([np.inf, -np.inf, 0, -0.0, 3e38], np.float32)


def difference(x: tuple[Any, ...], y: Any, dtype: Any = types.fp32, swap: bool = False) -> Program:
    """`a - y`, where y is an input of that shape or a constant; swapped: `y - a`."""
    specs = [mb.TensorSpec(shape, dtype=dtype) for shape in (x, y) if isinstance(shape, tuple)]

    def minus(a: Any, b: Any) -> Any:
        return mb.sub(x=b, y=a, name="y") if swap else mb.sub(x=a, y=b, name="y")

    build = mb.program(input_specs=specs, opset_version=ct.target.iOS17)
    made: Program = build((lambda a, b: minus(a, b)) if isinstance(y, tuple) else (lambda a: minus(a, y)))
    return made


def chained() -> Program:
    """A value with two readers, one that is an output too, and a constant with another reader."""
    row = np.arange(3, dtype=np.float32)

    @mb.program(input_specs=[mb.TensorSpec((2, 3)), mb.TensorSpec((3,))])
    def program(a: Var, b: Var) -> Any:
        first = mb.sub(x=a, y=b, name="first")
        second = mb.sub(x=first, y=(held := mb.const(val=row, name="row")), name="second")
        itself = mb.sub(x=a, y=a, name="itself")
        return first, mb.sub(x=mb.exp(x=first), y=second, name="third"), mb.mul(x=second, y=held), itself

    return program


test_cases, test_surroundings = table(
    NegateSubtract(),
    *(
        rewrites(difference, x, y, dtype, swap=swap)
        for swap in (False, True)
        for dtype in (types.fp32, types.fp16, types.int32)
        for x, y in (((2, 3), (2, 3)), ((2, 1), (1, 3)), ((4,), (2, 3, 4)))
    ),
    *(
        rewrites(
            difference, (2, 3), dtype(2 * np.ones(shape)), types.numpy_type_to_builtin_type(dtype), swap=swap
        )
        for swap in (False, True)
        for dtype in (np.float32, np.float16, np.int32)
        for shape in ((), (3,), (4, 1, 1))
    ),
    *(rewrites(difference, (5,), (5,), inputs={"a": np.full(5, a, np.float32), "b": EDGES}) for a in EDGES),
    rewrites(difference, (2,), (2,), types.int32, inputs={"a": LOWEST, "b": LOWEST[::-1].copy()}),
    rewrites(chained),
    rewrites(difference, (2,), LOWEST, types.int32, swap=True),
    refuses("holds -2147483648, which has no", difference, (2,), LOWEST, types.int32),
)


@pytest.mark.parametrize("dtype", [types.int16, types.uint16])
def test_refuses_other_integers(dtype: Any) -> None:
    """No builder of coremltools makes such a program, but a package may hold it."""
    (sub,) = [o for o in walk_ops(difference((2,), (2,), types.int32)) if o.op_type == "sub"]
    sub.y._sym_type = types.tensor(dtype, (2,))
    (m,), _ = matches(NegateSubtract().pattern(op), sub)
    refusal = NegateSubtract().check(m)
    assert isinstance(refusal, Refusal)
    assert f"the operands are {types.builtin_to_string(dtype)}" in refusal.reason
