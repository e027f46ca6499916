"""Edges mirrored and repeated by slices."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pass_cases import rewrites, stays, table

import anesurgery as ane
from anesurgery.errors import ProofError
from anesurgery.mil import Program, constant, mb, new_symbol, types, walk_ops
from anesurgery.passes import reflect_pad_slices
from anesurgery.passes.reflect_pad_slices import ReflectPadSlices
from anesurgery.testing import apply_pass, assert_refuses


def padded(amounts: list[int], mode: str, shape: tuple[Any, ...] = (2, 3, 5, 6)) -> Program:
    return mb.program(input_specs=[mb.TensorSpec(shape)])(
        lambda x: mb.pad(x=x, pad=amounts, mode=mode, name="y")
    )


def test_refusals_name_the_value() -> None:
    from coremltools.converters.mil.mil import get_new_symbol

    length = get_new_symbol()
    assert_refuses(ReflectPadSlices(), padded([1, 1], "reflect", (1, 2, length)), "has the symbolic length")
    many = padded([20, 0], "replicate", (1, 2, 3))
    assert_refuses(ReflectPadSlices(), many, "an edge is repeated 20 times, above 16")
    assert apply_pass(ReflectPadSlices(most_repeats=20), many)[1].changes

    dynamic = mb.program(input_specs=[mb.TensorSpec((1, 2, 3)), mb.TensorSpec((6,), dtype=types.int32)])(
        lambda x, n: mb.pad(x=x, pad=n, mode="reflect")
    )

    assert_refuses(ReflectPadSlices(), dynamic, "the amounts %n are dynamic")


def test_an_edge_that_is_not_reversed_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """The wrong version: the slice as it is."""
    monkeypatch.setattr(reflect_pad_slices, "_mirrored", reflect_pad_slices._cut)
    with pytest.raises(ProofError, match="old and new differ"):
        apply_pass(ReflectPadSlices(), padded([2, 1], "reflect"))


def test_a_real_model_loses_its_mirrored_pads(corpus: Path) -> None:
    path = corpus / "basic_pitch_nmp.mlpackage"
    surgery = ane.apply(path, "reflect_pad_slices", quiet=True)
    assert len(surgery.changes) == 9
    pads = [op for op in walk_ops(surgery.program) if op.op_type == "pad"]
    assert all(constant(op.mode) == "constant" for op in pads)
    assert ane.compare(path, surgery.program, precision="fp32").psnr == float("inf")


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
)
