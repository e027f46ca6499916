"""Shares of many keys: their product with values is made of larger numbers; refusals, a wrong version."""

from __future__ import annotations

import numpy as np
import pytest
from pass_cases import refuses, rewrites, table

import anesurgery as ane
from anesurgery.mil import Program, mb, types
from anesurgery.passes.scale_shares import ScaleShares


def built(keys: int = 2048, axis: int = -1, turned: bool = False) -> Program:
    values = (1, 4, keys) if turned else (1, keys, 4)
    specs = [mb.TensorSpec(shape, dtype=types.fp16) for shape in ((1, 2, keys), values)]

    return mb.program(input_specs=specs)(
        lambda p, v: mb.matmul(x=mb.softmax(x=p, axis=axis), y=v, transpose_y=turned, name="y")
    )


@pytest.mark.parametrize(("most", "edits"), [(1023.0, 1), (1024.0, 0), (6e4, 0)])
def test_values_whose_product_would_overflow_stay(most: float, edits: int) -> None:
    """The larger weights bring 1,024 to 65,536, which fp16 does not hold; the scores may have any size."""
    values = {"p": np.zeros((1, 2, 2048), np.float16), "v": np.full((1, 2048, 4), most, np.float16)}
    values["p"][..., 0] = 2000
    program = built()
    surgery = ane.apply(program, [ScaleShares()], inputs=values, quiet=True)
    assert len(surgery.changes) == edits
    if edits:
        assert "holds up to 1023; on 1 given set of inputs %v reaches 1023" in surgery.notes[0]
    else:
        assert f"%v reaches {most:.4g}" in surgery.refusals[0][1].reason
    (value,) = ane.run(surgery.program, values, precision="fp16").values()
    assert np.isfinite(value).all()


test_cases, test_surroundings = table(
    ScaleShares(),
    *(rewrites(built, turned=turned) for turned in [False, True]),
    refuses("512 keys, below 2048", built, 512),
    refuses("not over the axis that is summed", built, axis=1),
)
