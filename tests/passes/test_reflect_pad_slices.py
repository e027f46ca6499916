"""Edges mirrored and repeated by slices."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import anesurgery as ane
from anesurgery.errors import ProofError
from anesurgery.mil import Program, Var, constant, mb, types, walk_ops
from anesurgery.passes import reflect_pad_slices
from anesurgery.passes.reflect_pad_slices import ReflectPadSlices
from anesurgery.testing import apply_pass, assert_refuses, assert_same_numbers


def padded(amounts: list[int], mode: str, shape: tuple[Any, ...] = (2, 3, 5, 6)) -> Program:
    @mb.program(input_specs=[mb.TensorSpec(shape)])
    def program(x: Var) -> Var:
        return mb.pad(x=x, pad=amounts, mode=mode, name="y")

    return program


@pytest.mark.parametrize("mode", ["reflect", "replicate"])
@pytest.mark.parametrize(
    "amounts", [[2, 1], [0, 3], [1, 0], [3, 4, 2, 5], [1, 1, 4, 0]], ids=lambda a: "-".join(map(str, a))
)
def test_numbers_are_the_same_bit_by_bit(mode: str, amounts: list[int]) -> None:
    program = padded(amounts, mode)
    after, session = apply_pass(ReflectPadSlices(), program)
    assert len(session.changes) == 1
    assert session.changes[0].proof is not None
    assert "pad" not in [op.op_type for op in walk_ops(after)]
    assert_same_numbers(program, after)


def test_a_constant_pad_is_no_match() -> None:
    _, session = apply_pass(ReflectPadSlices(), padded([1, 1], "constant"))
    assert not session.changes
    assert not session.refusals


def test_refusals_name_the_value() -> None:
    from coremltools.converters.mil.mil import get_new_symbol

    length = get_new_symbol()
    assert_refuses(ReflectPadSlices(), padded([1, 1], "reflect", (1, 2, length)), "has the symbolic length")
    many = padded([20, 0], "replicate", (1, 2, 3))
    assert_refuses(ReflectPadSlices(), many, "an edge is repeated 20 times, above 16")
    assert apply_pass(ReflectPadSlices(most_repeats=20), many)[1].changes

    @mb.program(input_specs=[mb.TensorSpec((1, 2, 3)), mb.TensorSpec((6,), dtype=types.int32)])
    def dynamic(x: Var, n: Var) -> Var:
        return mb.pad(x=x, pad=n, mode="reflect")

    assert_refuses(ReflectPadSlices(), dynamic, "the amounts %n are dynamic")


def test_a_symbolic_axis_that_is_not_padded_is_no_obstacle() -> None:
    from coremltools.converters.mil.mil import get_new_symbol

    program = padded([1, 2], "reflect", (get_new_symbol(), 4))
    after, session = apply_pass(ReflectPadSlices(), program)
    assert session.changes
    assert_same_numbers(program, after, {"x": np.arange(12, dtype=np.float32).reshape(3, 4)})


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
