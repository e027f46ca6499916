"""The index of the largest number in floats: ties, ends of the axis, readers of the integer, a wrong count."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from pass_cases import refuses, rewrites, table

import anesurgery as ane
from anesurgery.mil import Program, Var, ct, mb, types, walk_ops
from anesurgery.passes.argmax_as_floats import ArgmaxAsFloats
from anesurgery.testing import apply_pass, assert_refuses, assert_same_numbers


def search(
    kind: str = "reduce_argmax",
    axis: int = 1,
    shape: tuple[int, ...] = (2, 5, 3),
    dtype: Any = types.fp16,
    casts: tuple[str, ...] = ("fp16",),
    keep: bool = False,
) -> Program:
    @mb.program(input_specs=[mb.TensorSpec(shape, dtype=dtype)], opset_version=ct.target.iOS17)
    def program(x: Var) -> Any:
        found = getattr(mb, kind)(x=x, axis=axis, keep_dims=keep, name="index")
        return tuple(mb.cast(x=found, dtype=kind) for kind in casts) or found

    return program


@pytest.mark.one_of(9)
@pytest.mark.parametrize("kind", ["reduce_argmax", "reduce_argmin"])
@pytest.mark.parametrize("axis", [0, 1, -1])
@pytest.mark.parametrize("keep", [True, False])
def test_of_equal_numbers_the_first_counts(kind: str, axis: int, keep: bool) -> None:
    program = search(kind, axis, keep=keep)
    after, _ = apply_pass(ArgmaxAsFloats(), program)
    assert kind not in {op.op_type for op in walk_ops(after)}
    rng = np.random.default_rng(0)
    for values in (rng.integers(0, 3, (2, 5, 3)), np.zeros((2, 5, 3)), np.full((2, 5, 3), -np.inf)):
        assert_same_numbers(program, after, {"x": values.astype(np.float16)}, rtol=0)


@pytest.mark.parametrize("dtype", [types.fp16, types.fp32])
def test_fp16_counts_up_to_2048_and_not_beyond(dtype: Any) -> None:
    program = search(shape=(2, 2048), dtype=dtype, casts=())
    after, _ = apply_pass(ArgmaxAsFloats(), program, prove=False)
    values = np.zeros((2, 2048), np.float16)
    values[0, 2047], values[1, 2046] = 1, 1
    found = ane.run(after, {"x": values}, precision="fp16")
    assert next(iter(found.values())).tolist() == [2047, 2046]
    longer = search(shape=(2, 2049), dtype=dtype)
    assert_refuses(ArgmaxAsFloats(), longer, "axis 1 has 2049 places, above 2048")


def test_pixel_labels_reach_the_engine() -> None:
    weight = np.full((19, 64, 3, 3), 0.125, np.float16)

    @mb.program(input_specs=[mb.TensorSpec((1, 64, 128, 128), dtype=types.fp16)], opset_version=ct.target.iOS17)
    def program(x: Var) -> Var:
        scores = mb.conv(x=x, weight=weight, pad_type="same")
        return mb.cast(x=mb.reduce_argmax(x=scores, axis=1, keep_dims=False), dtype="fp16")

    with pytest.warns(ane.SurgeryWarning, match="argmax_as_floats: asked for, and done although the expected"):
        surgery = ane.apply(program, "argmax_as_floats", target="M4/macOS 15", quiet=True, prove=None)
    assert "done although the expected time would rise" in " ".join(surgery.notes)
    before, after = (ane.inspect(p, "M4/macOS 15") for p in (program, surgery.program))
    assert after.residency["ops"] == 1
    assert before.cost is not None
    assert after.cost is not None
    assert after.cost > before.cost  # so many pixels are labelled sooner on the CPU, by the estimate
    chosen = ane.apply(program, "auto", target="M4/macOS 15", quiet=True, prove=None)
    assert not chosen.changes
    assert "the expected time would rise" in " ".join(chosen.details.split())


test_cases, test_surroundings = table(
    ArgmaxAsFloats(),
    rewrites(search, casts=("fp16", "fp32", "int32", "bool")),
    refuses("%x is int32", search, dtype=types.int32),
    rewrites(search, casts=(), rtol=0),
)
