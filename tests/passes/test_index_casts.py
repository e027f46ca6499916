"""Variants and refusals of `index_casts`, and what coremltools writes before a lookup."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import anesurgery as ane
from anesurgery.errors import NO_MATCH, Refusal, SurgeryError
from anesurgery.interpret import run
from anesurgery.mil import Program, Var, ct, mb, types, walk_ops
from anesurgery.passes.index_casts import IndexCasts
from anesurgery.passes.token_id_guard import TokenIdGuard
from anesurgery.rewriting.pattern import Match
from anesurgery.testing import apply_pass, assert_refuses, assert_same_numbers


def lookup(rows: int, *dtypes: str) -> Program:
    @mb.program(input_specs=[mb.TensorSpec((1, 4), dtype=types.int32)], opset_version=ct.target.iOS17)
    def program(ids: Var) -> Var:
        for dtype in dtypes:
            ids = mb.cast(x=ids, dtype=dtype)
        table = np.arange(2 * rows, dtype=np.float32).reshape(rows, 2)
        return mb.gather(x=table, indices=ids, axis=0, name="y")

    return program


def kinds(program: Program) -> list[str]:
    return [op.op_type for op in walk_ops(program) if op.op_type != "const"]


@pytest.mark.parametrize("dtypes", [("int16",), ("int16", "int32"), ("int16", "int32", "int16")])
def test_all_casts_go(dtypes: tuple[str, ...]) -> None:
    program = lookup(9, *dtypes)
    after, session = apply_pass(IndexCasts(), program)
    assert kinds(after) == ["gather"]
    ids = np.array([[0, 8, 3, 1]], np.int32)
    assert_same_numbers(program, after, {"ids": ids}, rtol=0, session=session)


def test_refuses_a_type_that_is_too_short() -> None:
    assert_refuses(IndexCasts(), lookup(40000, "int16"), "int16 does not hold the indices from -40000 to 39999")


@pytest.mark.parametrize("dtypes", [("uint16",), ("int16", "uint16")])
def test_unsigned_indices_are_not_negative(dtypes: tuple[str, ...]) -> None:
    program = lookup(32000, *dtypes)
    after, session = apply_pass(IndexCasts(), program)
    assert kinds(after) == ["gather"]
    ids = np.array([[0, 31999, 3, 1]], np.int32)
    assert_same_numbers(program, after, {"ids": ids}, rtol=0, session=session)


def test_refuses_an_unsigned_type_that_is_too_short() -> None:
    assert_refuses(IndexCasts(), lookup(70000, "uint16"), "uint16 does not hold the indices from 0 to 69999")


class Anyway(IndexCasts):
    """Wrong: whatever the table's length is."""

    def check(self, m: Match) -> Match | Refusal:
        cast = m.indices.op
        rows = int(m.table.shape[0])
        return NO_MATCH if cast is None else m.bind(source=cast.x, low=-rows, length=rows)


def test_the_check_of_sites_catches_a_cast_that_wraps() -> None:
    with pytest.raises(SurgeryError, match="index_casts"):
        apply_pass(Anyway(), lookup(40000, "int16"))


@pytest.mark.slow
def test_a_converted_model(converted: Callable[..., Any]) -> None:
    """With the promise that token ids are never negative nothing is left before the lookup."""
    made = converted("llama")
    steps = [TokenIdGuard(nonnegative=True), IndexCasts()]
    surgery = ane.apply(made.model, steps, quiet=True)
    assert "assumed of the inputs: token ids are never negative" in surgery.notes
    (lookup_,) = [op for op in walk_ops(surgery.program) if op.op_type == "gather" and op.indices.op is None]
    assert lookup_.indices.name == "input_ids"
    (found,) = run(surgery.program, made.inputs).values()
    (expected,) = run(made.model, made.inputs).values()
    np.testing.assert_array_equal(found, expected)


def test_without_the_promise_a_remainder_stays(converted: Callable[..., Any]) -> None:
    surgery = ane.apply(converted("llama").model, [TokenIdGuard(), IndexCasts()], quiet=True)
    assert [op.x.name for op in walk_ops(surgery.program) if op.op_type == "mod"] == ["input_ids"]
