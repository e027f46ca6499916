"""Edges mirrored and repeated by slices."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from pass_cases import refuses, rewrites, stays, table

import anesurgery as ane
from anesurgery.mil import Program, constant, mb, new_symbol, types, walk_ops
from anesurgery.passes.reflect_pad_slices import ReflectPadSlices


def padded(amounts: list[int], mode: str, shape: tuple[Any, ...] = (2, 3, 5, 6)) -> Program:
    return mb.program(input_specs=[mb.TensorSpec(shape)])(
        lambda x: mb.pad(x=x, pad=amounts, mode=mode, name="y")
    )


def test_a_real_model_loses_its_mirrored_pads(corpus: Path) -> None:
    path = corpus / "basic_pitch_nmp.mlpackage"
    surgery = ane.apply(path, "reflect_pad_slices", quiet=True)
    assert len(surgery.changes) == 9
    pads = [op for op in walk_ops(surgery.program) if op.op_type == "pad"]
    assert all(constant(op.mode) == "constant" for op in pads)
    assert ane.compare(path, surgery.program, precision="fp32").psnr == float("inf")


def dynamic_amounts() -> Program:
    return mb.program(input_specs=[mb.TensorSpec((1, 2, 3)), mb.TensorSpec((6,), dtype=types.int32)])(
        lambda x, n: mb.pad(x=x, pad=n, mode="reflect")
    )


test_cases, test_surroundings = table(
    ReflectPadSlices(),
    *(
        rewrites(padded, amounts, mode)
        for amounts in [[2, 1], [0, 3], [1, 0], [3, 4, 2, 5], [1, 1, 4, 0]]
        for mode in ["reflect", "replicate"]
    ),
    stays(padded, [1, 1], "constant"),
    rewrites(
        padded,
        [1, 2],
        "reflect",
        (new_symbol(), 4),
        inputs={"x": np.arange(12, dtype=np.float32).reshape(3, 4)},
    ),
    refuses("has the symbolic length", padded, [1, 1], "reflect", (1, 2, new_symbol())),
    refuses("an edge is repeated 20 times, above 16", padded, [20, 0], "replicate", (1, 2, 3)),
    rewrites(padded, [20, 0], "replicate", (1, 2, 3), step=ReflectPadSlices(most_repeats=20)),
    refuses("the amounts %n are dynamic", dynamic_amounts),
)
