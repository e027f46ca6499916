"""Slices within the last axis: ranks, large numbers on M1, refusals, a wrong version."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from pass_cases import Repaired, refuses, rewrites, stays, table

from anesurgery.interpret import run
from anesurgery.mil import Program, Var, mb, types
from anesurgery.passes.cut_rows import CutRows
from anesurgery.testing import apply_pass, assert_same_numbers


def built(shape: tuple[int, ...], begin: int = 2, known: bool = False, **more: Any) -> Program:
    @mb.program(input_specs=[mb.TensorSpec(shape, dtype=types.fp16)])
    def program(x: Var) -> Var:
        x = mb.tanh(x=x) if known else x
        return mb.slice_by_index(
            x=x, begin=[*[0] * (len(shape) - 1), begin], end=[*shape[:-1], 7], name="y", **more
        )

    return program


@pytest.mark.parametrize("shape", [(3, 8), (2, 4, 8), (1, 2, 3, 8)])
@pytest.mark.parametrize("sizes", [{"num_splits": 4}, {"split_sizes": [3, 5]}])
def test_the_parts_of_the_last_axis(shape: tuple[int, ...], sizes: dict[str, Any]) -> None:
    """Each part after the first was cut off in front."""

    @mb.program(input_specs=[mb.TensorSpec(shape, dtype=types.fp16)])
    def program(x: Var) -> Any:
        return tuple(mb.split(x=x, axis=-1, **sizes))

    after, session = apply_pass(CutRows(), program)
    assert len(session.changes) == 1
    assert_same_numbers(program, after)
    x = np.linspace(4200, 5000, int(np.prod(shape))).astype(np.float16).reshape(shape)
    old, new = (list(run(p, {"x": x}, precision="ane:M1").values()) for p in (program, after))
    assert [bool(np.isfinite(part).all()) for part in old] == [True, *[False] * (len(old) - 1)]
    assert np.array_equal(np.concatenate(new, axis=-1), x)


def test_other_splits_stay() -> None:
    @mb.program(input_specs=[mb.TensorSpec((4, 8), dtype=types.fp16)])
    def program(x: Var) -> Any:
        return (*mb.split(x=x, axis=0, num_splits=2), *mb.split(x=mb.tanh(x=x), axis=1, num_splits=2))

    session = apply_pass(CutRows(), program)[1]
    assert not session.changes
    assert ["is at most 1" in refusal.reason for _, refusal in session.refusals] == [True]


def sliced(**taken: Any) -> Program:
    return mb.program(input_specs=[mb.TensorSpec((4, 8), dtype=types.fp16)])(
        lambda x: mb.slice_by_index(x=x, **taken, name="y")
    )


test_cases, test_surroundings = table(
    CutRows(),
    stays(built, (4, 8), begin_mask=[False, True]),
    refuses("is at most 1", built, (4, 8), known=True),
    refuses("the slice has a stride", built, (4, 8), stride=[1, 2]),
    stays(built, (8,)),
    stays(built, (4, 8), begin=0),
    *(
        rewrites(
            built, shape, rtol=0, inputs={"x": np.full(shape, 5000, np.float16)}, repaired=Repaired("ane:M1")
        )
        for shape in ((4, 8), (2, 4, 8), (1, 2, 3, 8))
    ),
    *(
        rewrites(sliced, **taken, rtol=0)
        for taken in (
            {"begin": [0, 2], "end": [1, 3], "end_mask": [True, True]},
            {"begin": [0, -3], "end": [4, -1]},
            {"begin": [3, -1], "end": [0, 8], "begin_mask": [True, False], "end_mask": [True, False]},
            {"begin": [1, 2], "end": [3, 7], "stride": [1, 1], "squeeze_mask": [False, False]},
            {"begin": [1, -2], "end": [3, 7], "squeeze_mask": [False, True]},
            {"begin": [2, 3], "end": [3, 7], "squeeze_mask": [True, False]},
            {"begin": [2, 3], "end": [0, 0], "squeeze_mask": [True, True]},
            {"begin": [0, 3], "end": [0, 0], "begin_mask": [True, False]}
            | {"end_mask": [True, True], "squeeze_mask": [False, True]},
        )
    ),
)
