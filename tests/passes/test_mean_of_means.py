"""Means of very many values: axes kept or not, refusals, a wrong version."""

from __future__ import annotations

from typing import Any

from pass_cases import refuses, rewrites, stays, table

from anesurgery.mil import Program, mb, new_symbol, types
from anesurgery.passes.mean_of_means import MeanOfMeans


def built(shape: tuple[Any, ...] = (1, 512, 512), axes: tuple[int, ...] = (1, 2), keep: bool = True) -> Program:
    return mb.program(input_specs=[mb.TensorSpec(shape, dtype=types.fp16)])(
        lambda x: mb.reduce_mean(x=x, axes=list(axes), keep_dims=keep, name="y")
    )


test_cases, test_surroundings = table(
    MeanOfMeans(),
    *(
        rewrites(built, axes=axes, keep=keep, rtol=0.0001)
        for axes, keep in [((1, 2), True), ((-2, -1), False), ((0, 1, 2), False)]
    ),
    refuses("lie along one axis", built, (1, 1, 1 << 18)),
    stays(built, (1, 64, 64)),
    stays(built, (1, new_symbol(), 512)),
)
