"""Long sums in parts: both sides of a product, stored and dynamic, turned or not."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from pass_cases import refuses, rewrites_each, stays, table

import anesurgery as ane
from anesurgery.errors import PassError
from anesurgery.mil import Program, Var, ct, mb, new_symbol, types, walk_ops
from anesurgery.passes.split_inner_axis import SplitInnerAxis
from anesurgery.placement.target import Target
from anesurgery.testing import apply_pass, assert_refuses, assert_same_numbers

WEIGHT = np.random.default_rng(0).standard_normal((3, 10)).astype(np.float32)


def product(x: tuple[Any, ...], y: tuple[int, ...] | None = None, **turned: bool) -> Program:
    @mb.program(input_specs=[mb.TensorSpec(x), mb.TensorSpec(y or (1,))])
    def program(a: Var, b: Var) -> Any:
        other = WEIGHT if y is None else b
        return mb.matmul(x=a, y=other, **turned), mb.relu(x=b)

    return program


def linear() -> Program:
    return mb.program(input_specs=[mb.TensorSpec((2, 4, 10))])(
        lambda x: mb.linear(x=x, weight=WEIGHT, bias=WEIGHT[:, 0])
    )


CASES = {
    "linear": linear(),
    "stored": product((4, 10), transpose_y=True),
    "dynamic": product((2, 4, 10), (2, 10, 3)),
    "turned": product((2, 10, 4), (2, 3, 10), transpose_x=True, transpose_y=True),
}


def test_refusals_name_what_was_found() -> None:
    with pytest.raises(PassError, match="most=0"):
        SplitInnerAxis(most=0)

    @mb.program(input_specs=[mb.TensorSpec((2, 10))], opset_version=ct.target.iOS18)
    def vectors(x: Var) -> Any:
        table = np.ones((1, 1, 16, 2), np.float32)
        indices = np.zeros((3, 5), types.np_uint4_dtype)
        return mb.linear(
            x=x, weight=mb.constexpr_lut_to_dense(indices=indices, lut=table, vector_axis=np.int32(1))
        )

    assert_refuses(SplitInnerAxis(most=4), vectors, "the edit cuts vectors of 2 numbers")


def flattened(shape: tuple[int, ...], rows: tuple[int, ...]) -> Program:
    @mb.program(input_specs=[mb.TensorSpec(shape)], opset_version=ct.target.iOS17)
    def program(x: Var) -> Any:
        weight = np.random.default_rng(0).standard_normal((3, rows[-1])).astype(np.float32)
        return mb.linear(x=mb.reshape(x=mb.relu(x=x), shape=rows), weight=weight, bias=weight[:, 0], name="y")

    return program


@pytest.mark.parametrize(
    ("shape", "rows", "most"),
    [
        ((1, 6, 2, 2), (1, 24), 8),
        ((2, 5, 3, 1), (2, 15), 7),
        ((1, 7, 4), (28,), 12),
        ((2, 1, 6, 4), (2, 24), 9),
    ],
)
def test_no_long_row_is_made_of_what_a_reshape_flattens(
    shape: tuple[int, ...], rows: tuple[int, ...], most: int
) -> None:
    program = flattened(shape, (1, *rows) if len(rows) == 1 else rows)
    after, session = apply_pass(SplitInnerAxis(most=most), program)
    lengths = [op.outputs[0].shape[-1] for op in walk_ops(after) if op.op_type == "reshape"]
    assert lengths, session.refusals
    assert max(lengths) <= most
    assert session.changes[0].proof is not None
    assert_same_numbers(program, after, rtol=1e-5)


def test_rows_that_are_read_elsewhere_or_too_coarse_are_cut_themselves() -> None:
    after, _ = apply_pass(SplitInnerAxis(most=3), flattened((1, 3, 4), (1, 12)))
    assert [op.outputs[0].shape for op in walk_ops(after) if op.op_type == "reshape"] == [(1, 12)]


def test_a_dense_layer_after_a_large_image_is_legal_on_an_m1() -> None:
    """256 channels of 12 x 12 are a row of 36864."""

    @mb.program(input_specs=[mb.TensorSpec((1, 256, 12, 12), types.fp16)], opset_version=ct.target.iOS17)
    def program(x: Var) -> Any:
        weight = np.zeros((8, 36864), np.float16)
        return mb.linear(x=mb.reshape(x=mb.relu(x=x), shape=[1, 36864]), weight=weight)

    target = Target.parse("M1/macOS 14")
    (step,) = SplitInnerAxis.variants(target)
    found = ane.inspect(program, target=target)
    assert ("long-rows", "split_inner_axis") in {(f.rule, f.remedy) for f in found.all_findings}
    after = ane.apply(program, [step], prove=None, quiet=True).program
    assert all(row.legal for row in ane.inspect(after, target=target).ops)


test_cases, test_surroundings = table(
    SplitInnerAxis(most=4),
    *rewrites_each(CASES, rtol=1e-5),
    *(stays(CASES.__getitem__, name, step=SplitInnerAxis(most=10)) for name in CASES),
    refuses(
        "has the symbolic length", product, (2, new_symbol()), (3, 4), transpose_y=True, step=SplitInnerAxis()
    ),
)
