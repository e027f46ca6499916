"""The arithmetic of names hashes lists of factors, so it must look at their lengths itself."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from anesurgery.interpret.arithmetic.bitwise import Bitwise
from anesurgery.interpret.table import Unsupported
from anesurgery.mil import Operation, Var, mb, walk_ops

EQUATION = "nchw,nwhu->nchu"


def products() -> dict[str, Operation]:
    """A matmul, a linear and an einsum of 4 terms."""

    @mb.program(input_specs=[mb.TensorSpec((2, 4)), mb.TensorSpec((4, 2))])
    def program(x: Var, y: Var) -> tuple[Var, ...]:
        both = (mb.expand_dims(x=x, axes=[0, 2]), mb.expand_dims(x=y, axes=[0, 2]))
        made = mb.einsum(values=both, equation=EQUATION)
        return mb.matmul(x=x, y=y), mb.linear(x=x, weight=np.ones((3, 4), np.float32)), made

    ops = program.functions["main"].operations
    return {op.op_type: op for op in ops if op.op_type in ("matmul", "linear", "einsum")}


@pytest.mark.parametrize("terms", [3, 4, 5])
@pytest.mark.parametrize("kind", ["matmul", "linear", "einsum"])
def test_lists_of_factors_are_as_long_as_each_other(kind: str, terms: int) -> None:
    op, names = products()[kind], Bitwise()
    left, right = names.lift(np.ones((2, 4))), names.lift(np.ones((terms, 2)))
    arguments: dict[str, dict[str, Any]] = {
        "matmul": {"x": left, "y": right},
        "linear": {"x": left, "weight": right.map(lambda v: v.T)},
        "einsum": {"values": [v.map(lambda t: t[None, :, None]) for v in (left, right)], "equation": EQUATION},
    }
    given = arguments[kind]
    rule = names.rules[kind]
    if terms == 4:
        assert rule(names, op, **given).numel() == 4
    else:
        with pytest.raises(Unsupported, match=f"a sum of 4 times {terms} factors"):
            rule(names, op, **given)


def test_a_large_product_is_not_made_before_it_is_refused() -> None:
    names = Bitwise(largest=100)
    left, right = names.lift(np.ones((40, 4))), names.lift(np.ones((4, 40)))
    with pytest.raises(Unsupported, match="1600 elements"):
        names.rules["matmul"](names, products()["matmul"], left, right)


def test_a_function_of_rows_reads_its_other_operands_too() -> None:
    """The wrong version gives equal results where another operand than x differs."""
    program = mb.program(input_specs=[mb.TensorSpec((2, 3))])(lambda x: mb.softmax(x=x))
    arithmetic = Bitwise()
    x, other = (arithmetic.lift(np.full((2, 3), v, np.float32)) for v in (1, 2))
    softmax = next(op for op in walk_ops(program) if op.op_type == "softmax")
    results = [arithmetic.uninterpreted(softmax, {"x": x, "mask": v}) for v in (x, other, other)]
    assert not results[0].same(results[1])
    assert results[1].same(results[2])
