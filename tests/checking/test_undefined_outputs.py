"""Outputs that are NaN in fp32 too judge nothing, and the report says so."""

from __future__ import annotations

import numpy as np
import pytest

import anesurgery as ane
from anesurgery.checking.exactness import Yardstick
from anesurgery.errors import InterpretError
from anesurgery.mil import Program, Var, ct, mb, types

X = {"x": np.linspace(1, 2, 8, dtype=np.float16)}


def logarithm_of(sign: float) -> Program:
    """A logarithm, of negative numbers where the sign is negative."""

    @mb.program(input_specs=[mb.TensorSpec((8,), dtype=types.fp16)], opset_version=ct.target.iOS17)
    def program(x: Var) -> Var:
        return mb.log(x=mb.mul(x=x, y=np.float16(sign)), name="y")

    return program


@pytest.mark.parametrize(
    ("sign", "said"),
    [
        (-1.0, "output %y is NaN to 100%, in fp32 too"),
        (1.0, "output %y is finite now: it was NaN to 100%, in fp32 too, so that these cannot be compared"),
    ],
)
def test_an_output_that_was_nan_is_compared_with_nothing(sign: float, said: str) -> None:
    near = Yardstick(logarithm_of(-1.0), inputs=[X]).measure(logarithm_of(sign))
    assert near is not None
    assert near.blank
    assert near.notes == (f"in fp16 {said}",)


@mb.program(input_specs=[mb.TensorSpec((8,), dtype=types.fp16)], opset_version=ct.target.iOS17)
def repeated_by_a_count(x: Var) -> Var:
    """A tile with as many copies as numbers are above 100; what Core ML makes of none is not known."""
    above = mb.non_zero(x=mb.cast(x=mb.greater(x=x, y=np.float16(100)), dtype="int32"))
    copies = mb.slice_by_size(x=mb.shape(x=above), begin=[0], size=[1])
    return mb.tile(x=mb.pow(x=x, y=np.float16(2)), reps=copies, name="y")


def test_a_model_that_cannot_be_run_has_no_undefined_outputs_and_is_not_refused() -> None:
    with pytest.raises(InterpretError, match="reps is"):
        ane.run(repeated_by_a_count, X)
    assert Yardstick(repeated_by_a_count, constant_inputs=(0.0, 1.0)).undefined(repeated_by_a_count) == 0
    assert not ane.apply(repeated_by_a_count, "auto", target="iPhone 13", quiet=True).changes


def test_a_compressed_addend_is_no_infinite_constant() -> None:
    """The wrong version: a TypeError of numpy, for what has no numbers in the program."""
    codes, table = np.arange(8, dtype=np.uint8), np.linspace(0, 1, 256, dtype=np.float16)

    @mb.program(input_specs=[mb.TensorSpec((8,), dtype=types.fp16)], opset_version=ct.target.iOS18)
    def program(x: Var) -> Var:
        addend = mb.constexpr_lut_to_dense(indices=codes, lut=table[None, :, None])
        return mb.add(x=x, y=addend, name="y")

    near = Yardstick(program, inputs=[X]).measure(program)
    assert near is not None
    assert min(near.values()) > 60
