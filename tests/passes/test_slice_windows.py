"""Windows and reversed sequences as slices."""

from __future__ import annotations

from typing import Any

import numpy as np
from pass_cases import refuses, rewrites_each, table

from anesurgery.mil import Program, Var, mb, types
from anesurgery.passes.slice_windows import SliceWindows


def windows(shape: tuple[int, ...] = (2, 10, 3), **options: Any) -> Program:
    return mb.program(input_specs=[mb.TensorSpec(shape)])(lambda x: mb.sliding_windows(x=x, **options))


def turned(lengths: Any, seq: int = 1, batch: int = 0, shape: tuple[int, ...] = (4, 5, 2)) -> Program:
    @mb.program(input_specs=[mb.TensorSpec(shape), mb.TensorSpec((4,), dtype=types.int32)])
    def program(x: Var, k: Var) -> Any:
        at = k if lengths is None else np.array(lengths, np.int32)
        return mb.reverse_sequence(x=x, lengths=at, seq_axis=seq, batch_axis=batch), mb.identity(x=k)

    return program


CASES = {
    "few windows": windows(axis=1, size=7),
    "many windows": windows(axis=1, size=3, stride=2),
    "side by side": windows(axis=1, size=3, stride=3),
    "the last axis": windows(axis=-1, size=2),
    "one window": windows(axis=0, size=2),
    "lengths": turned([3, 3, 5, 0]),
    "whole": turned([5, 5, 5, 5]),
    "nothing": turned([1, 0, 1, 1]),
    "batch last": turned([2, 1, 3, 3], seq=0, batch=2, shape=(3, 2, 4)),
}


test_cases, test_surroundings = table(
    SliceWindows(),
    refuses("the lengths %k are dynamic", turned, None),
    refuses("3 slices would be needed", windows, axis=1, size=3, step=SliceWindows(most_slices=2)),
    refuses("12 slices would be needed", turned, [1, 2, 3, 4], step=SliceWindows(most_slices=8)),
    *rewrites_each(CASES, rtol=0),
)
