"""Rows at places of the run: batches, wrapped places, short integers, refusals, a wrong version."""

from __future__ import annotations

from typing import Any

import numpy as np
from pass_cases import refuses, rewrites, stays, table

from anesurgery.interpret import run
from anesurgery.mil import Program, Var, ct, mb, types
from anesurgery.passes.flat_gather import FlatGather
from anesurgery.testing import apply_pass

SHAPE = (2, 3, 4, 5)


def built(
    places: tuple[int, ...], batch_dims: int = 0, short: bool = False, dtype: Any = types.fp16
) -> Program:
    specs = [mb.TensorSpec(SHAPE, dtype=dtype), mb.TensorSpec(places, dtype=types.int32)]

    @mb.program(input_specs=specs, opset_version=ct.target.iOS17)
    def program(x: Var, k: Var) -> Var:
        index = mb.cast(x=k, dtype="int16") if short else k
        return mb.gather_nd(x=x, indices=index, batch_dims=batch_dims, name="y")

    return program


def test_negative_places_that_the_program_wraps_stay_right() -> None:
    """As torch's are converted: a select adds the length where a place is negative."""

    @mb.program(input_specs=[mb.TensorSpec((3, 4)), mb.TensorSpec((3, 2), dtype=types.int32)])
    def program(x: Var, k: Var) -> Var:
        wrapped = mb.add(x=k, y=np.array([3, 4], np.int32))
        at = mb.select(cond=mb.greater_equal(x=k, y=np.int32(0)), a=k, b=wrapped)
        return mb.gather_nd(x=x, indices=at, name="y")

    after, session = apply_pass(FlatGather(), program)
    assert len(session.changes) == 1
    x = np.arange(12, dtype=np.float32).reshape(3, 4)
    (value,) = run(
        after, {"x": x, "k": np.array([[-1, -3], [1, -1], [0, 2]], np.int32)}, precision="fp32"
    ).values()
    assert value.tolist() == [9, 7, 2]


OUTSIDE = dict.fromkeys(("in a condition", "in a loop"), "places from outside of a block may be any integer")

test_cases, test_surroundings = table(
    FlatGather(),
    stays(built, (6, 2), dtype=types.int32),
    refuses("at one place alone", built, (2,)),
    *(
        rewrites(built, places, batch_dims, short, alone=OUTSIDE if short else {})
        for short in [False, True]
        for places, batch_dims in [
            ((6, 2), 0),
            ((6, 4), 0),
            ((2, 7, 1), 0),
            ((2, 7, 2), 1),
            ((2, 3, 5, 1), 2),
            ((2, 1), 1),
        ]
    ),
)
