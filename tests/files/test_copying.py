"""Copies of programs: what is edited in one stays as it was in the other."""

from typing import Any

import numpy as np
import pytest

from anesurgery.files.copying import copied
from anesurgery.mil import Program, Var, mb, new_symbol, types
from anesurgery.rewriting.fixed_shapes import Shapes
from anesurgery.text import to_text

WEIGHT = np.ones((4, 4), np.float32)


def cut(length: Any) -> Program:
    """The last place of each row left out."""

    @mb.program(input_specs=[mb.TensorSpec((1, length, 4))])
    def program(x: Var) -> Var:
        return mb.slice_by_index(
            x=mb.linear(x=x, weight=WEIGHT), begin=[0, 0, 0], end=[1, -1, 4], end_mask=[True, False, True]
        )

    return program


def nested() -> Program:
    @mb.program(input_specs=[mb.TensorSpec((1,), dtype=types.bool), mb.TensorSpec((4,))])
    def program(a: Var, b: Var) -> Any:
        return mb.cond(
            pred=mb.squeeze(x=a, axes=[0]), _true_fn=lambda: mb.relu(x=b), _false_fn=lambda: mb.exp(x=b)
        )

    return program


@pytest.mark.parametrize("program", [cut(5), cut(new_symbol()), nested()], ids=["plain", "dynamic", "nested"])
def test_a_copy_reads_the_same_and_shares_no_op(program: Program) -> None:
    twin = copied(program)
    assert to_text(twin) == to_text(program)
    ops = [*program.functions["main"].operations]
    assert not {*map(id, ops)} & {*map(id, twin.functions["main"].operations)}
    twin.functions["main"].operations[-1].outputs[0].name = "other"
    assert to_text(twin) != to_text(program)


def test_each_length_has_ends_of_its_own() -> None:
    program = cut(new_symbol())
    for length in (9, 5, 7):
        twin = copied(program)
        for again in (length + 1, length):  # coremltools overwrites a negative end while it infers
            other = copied(twin)
            Shapes({"x": (1, again, 4)}, 1).fix(other.functions["main"])
            assert other.functions["main"].outputs[0].shape == (1, again - 1, 4)
    assert "end=[1, -1, 4]" in to_text(program)


def test_large_weights_are_shared() -> None:
    program = cut(5)
    weights = [
        next(op.weight.val for op in p.functions["main"].operations if op.op_type == "linear")
        for p in (program, copied(program))
    ]
    assert weights[0] is weights[1]
