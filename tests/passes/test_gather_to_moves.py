"""Gathers at constant indices as slices and views: every form of them, and those that are none."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from pass_cases import refuses, rewrites, rewrites_each, stays, table

from anesurgery.mil import Array, Program, Var, ct, mb, types, walk_ops
from anesurgery.passes.gather_to_moves import GatherToMoves
from anesurgery.testing import apply_pass, assert_same_numbers

SHAPE = (2, 5, 3)


def built(op_type: str, indices: Any, **options: Any) -> Program:
    @mb.program(input_specs=[mb.TensorSpec(SHAPE, dtype=types.fp16)], opset_version=ct.target.iOS17)
    def program(x: Var) -> Var:
        made = getattr(mb, op_type)(x=x, indices=np.asarray(indices, np.int32), **options)
        return mb.add(x=made, y=np.float16(0), name="y")

    return program


def kinds(program: Program) -> list[str]:
    return [op.op_type for op in walk_ops(program) if op.op_type not in ("const", "add")]


CASES: dict[str, Program] = {
    "all of it vanishes": built("gather", range(5), axis=1),
    "one row": built("gather", [2], axis=1),
    "one row, without its axis": built("gather", 2, axis=1),
    "two rows backwards": built("gather", [2, 1], axis=2),
    "backwards": built("gather", [4, 3, 2, 1, 0], axis=1),
    "every second": built("gather", [0, 2, 4], axis=1),
    "a roll": built("gather", [3, 4, 0, 1, 2], axis=1),
    "a row twice": built("gather", [1, 1], axis=1),
    "a table of indices": built("gather", [[0, 1], [2, 3]], axis=1),
    "a transpose": built("gather_nd", [[[i, j] for i in range(2)] for j in range(5)]),
    "a row of the first axis": built("gather_nd", [[1]]),
    "along an axis": built("gather_along_axis", np.broadcast_to(np.arange(5)[::-1, None], SHAPE), axis=1),
}


@given(rows=st.lists(st.integers(-5, 4), min_size=1, max_size=6), axis=st.integers(0, 2), nested=st.booleans())
@settings(max_examples=30, deadline=None)
def test_any_rows_of_any_axis(rows: list[int], axis: int, nested: bool) -> None:
    indices: Array = np.asarray(rows) % SHAPE[axis]
    program = built("gather", indices[None] if nested else indices, axis=axis)
    after, session = apply_pass(GatherToMoves(most_pieces=9), program)
    assert len(session.changes) == 1
    assert not [k for k in kinds(after) if k.startswith("gather")]
    assert_same_numbers(program, after)


def dynamic_indices_are_left_to_other_passes() -> Program:
    return mb.program(input_specs=[mb.TensorSpec((3,), dtype=types.int32)], opset_version=ct.target.iOS17)(
        lambda i: mb.gather(x=np.ones((4, 2), np.float16), indices=i, axis=0)
    )


def from_the_end(op_type: str, indices: Any) -> Program:
    """Before iOS 17 negative indices count from the end."""
    axis = {} if op_type == "gather_nd" else {"axis": 0}
    return mb.program(input_specs=[mb.TensorSpec((4, 3))])(
        lambda x: mb.relu(x=getattr(mb, op_type)(x=x, indices=np.array(indices, np.int32), **axis))
    )


test_cases, test_surroundings = table(
    GatherToMoves(),
    refuses(
        "slices would be needed, the limit is 8",
        built,
        "gather",
        np.random.default_rng(0).integers(0, 5, 40),
        axis=1,
    ),
    refuses(
        "differ along another axis",
        built,
        "gather_along_axis",
        np.add.outer(np.arange(2), np.arange(4))[:, :, None] * np.ones(3),
        axis=1,
    ),
    refuses("the index -1: from iOS 17 on", built, "gather", [-1], axis=1),
    refuses("two axes of the source are read along one axis", built, "gather_nd", [[i, i] for i in range(2)]),
    refuses("elements are repeated along axis 0", built, "gather_nd", [[[0], [1]], [[0], [1]]]),
    stays(dynamic_indices_are_left_to_other_passes),
    *rewrites_each(CASES, rtol=0),
    *(
        rewrites(from_the_end, op_type, indices, rtol=0)
        for op_type, indices in (
            ("gather", [-1, -2]),
            ("gather_nd", [[-1], [-2]]),
            ("gather_along_axis", [[-1] * 3, [-2] * 3]),
        )
    ),
)
