"""The guard of ids: where it goes, and where nothing says that it may."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from pass_cases import refuses, rewrites, stays, table

import anesurgery as ane
from anesurgery.errors import PassError, SurgeryError, UnknownName
from anesurgery.mil import Program, Var, ct, mb, types, walk_ops
from anesurgery.passes.token_id_guard import TokenIdGuard
from anesurgery.testing import apply_pass, assert_same_numbers

IDS = {"x": (0, 8)}


def guarded(kept: Callable[[Var], Var] = lambda x: x, zero: int = 0, rows: int = 9) -> Program:
    @mb.program(input_specs=[mb.TensorSpec((1, 4), dtype=types.int32)], opset_version=ct.target.iOS17)
    def program(x: Var) -> Var:
        table = np.arange(2 * rows, dtype=np.float16).reshape(rows, 2)
        inside = mb.greater_equal(x=x, y=np.int32(zero))
        ids = mb.select(cond=inside, a=kept(x), b=mb.add(x=x, y=np.int32(9)), name="guarded")
        return mb.gather(x=table, indices=ids, axis=0, name="y")

    return program


def kinds(program: Program) -> list[str]:
    return [op.op_type for op in walk_ops(program) if op.op_type != "const"]


def test_undeclared_ids_of_a_lookup_need_two_ops() -> None:
    """For every id that the table has, one by one."""
    after, session = apply_pass(TokenIdGuard(), guarded())
    assert kinds(after) == ["add", "mod", "gather"]
    assert not session.notes
    for first in range(-9, 9, 4):
        ids = np.clip(np.arange(first, first + 4), -9, 8).astype(np.int32)[None]
        assert_same_numbers(guarded(), after, {"x": ids})


def test_what_is_assumed_must_make_sense() -> None:
    with pytest.raises(PassError, match="before it begins"):
        TokenIdGuard(assume={"x": (5, 4)})
    with pytest.raises(UnknownName, match="unknown input 'ids'"):
        ane.apply(guarded(), "token_id_guard", assume={"ids": (0, 8)}, quiet=True)
    with pytest.raises(SurgeryError, match="before it begins"):
        ane.apply(guarded(), "token_id_guard", assume={"x": (5, 4)}, quiet=True)


@pytest.mark.slow
def test_auto_takes_the_guard_away_where_the_caller_says_so(converted: Callable[..., Any]) -> None:
    made = converted("gpt2")
    plain = ane.apply(made.model, "auto", target="M4/macOS 15", quiet=True)
    guards = {"greater_equal", "mod"}  # as three ops, or as two
    assert guards & {*kinds(plain.program)}
    surgery = ane.apply(made.model, "auto", target="M4/macOS 15", assume={"input_ids": (0, 100)}, quiet=True)
    assert not guards & {*kinds(surgery.program)}
    assert any("assumed of the inputs: input_ids in [0, 100]" in note for note in surgery.notes)
    (found,) = ane.run(surgery.program, made.inputs, precision="fp16").values()
    (expected,) = ane.run(plain.program, made.inputs, precision="fp16").values()
    np.testing.assert_array_equal(found, expected)


test_cases, test_surroundings = table(
    TokenIdGuard(assume=IDS),
    refuses(
        '%x may be negative; say assume={"x": (0, 8)} if it never is', guarded, rows=10, step=TokenIdGuard()
    ),
    refuses("%x is assumed to be as low as -1", guarded, step=TokenIdGuard(assume={"x": (-1, 8)})),
    stays(guarded, zero=1),
    stays(guarded, kept=lambda x: mb.mul(x=x, y=np.int32(2))),
    stays(guarded, kept=lambda x: mb.reverse(x=x)),
    rewrites(
        guarded,
        inputs={"x": np.array([[0, 8, 3, 1]], np.int32)},
        alone={"after the default pipeline": "coremltools guards the ids of a lookup again"},
    ),
)
