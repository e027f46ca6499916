"""Scales of palettes folded into the tables: groups of inputs and outputs, tables of 8 bits, plain ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import anesurgery as ane
from anesurgery.mil import Array, Program, Var, ct, mb, types, walk_ops
from anesurgery.passes.fold_palette_scales import FoldPaletteScales
from anesurgery.testing import apply_pass, assert_same_numbers

RNG = np.random.default_rng(0)


def indices(*shape: int) -> Any:
    return RNG.integers(0, 16, shape).astype(types.nptype_from_builtin(types.uint4))


def half(*shape: int) -> Array:
    made: Array = RNG.uniform(0.5, 2, shape).astype(np.float16)
    return made


def table(data: Array, scale: Array) -> Var:
    made: Var = mb.constexpr_blockwise_shift_scale(data=data, scale=scale)
    return made


def linear(lut: Callable[[], Any]) -> Program:
    return mb.program(input_specs=[mb.TensorSpec((2, 16), dtype=types.fp16)], opset_version=ct.target.iOS18)(
        lambda x: mb.linear(x=x, weight=mb.constexpr_lut_to_dense(indices=indices(8, 16), lut=lut()), name="y")
    )


BYTES = RNG.integers(-128, 128, (1, 16, 16, 1)).astype(np.int8)
FORMS: dict[str, Callable[[], Var]] = {
    "a scale for each input": lambda: table(half(1, 16, 16, 1), half(1, 16, 1, 1)),
    "groups of outputs too": lambda: table(half(4, 16, 16, 1), half(1, 16, 1, 1)),
    "a scale for each output group": lambda: table(half(4, 1, 16, 1), half(4, 1, 1, 1)),
    "tables of 8 bits": lambda: table(BYTES, half(1, 16, 1, 1)),
    "one scale": lambda: table(half(1, 1, 16, 1), half(1, 1, 1, 1)),
}


@pytest.mark.parametrize("form", FORMS)
def test_no_bit_changes(form: str) -> None:
    program = linear(FORMS[form])
    after, _ = apply_pass(FoldPaletteScales(), program)
    kinds = [op.op_type for op in walk_ops(after) if op.op_type.startswith("constexpr")]
    assert kinds == ["constexpr_lut_to_dense"]
    assert_same_numbers(program, after, {"x": half(2, 16)}, rtol=0)


def test_a_plain_palette_is_no_match() -> None:
    program = linear(lambda: half(1, 1, 16, 1))
    assert not ane.apply(program, "fold_palette_scales", quiet=True).changes
