"""Transposed convolutions as convolutions whose channels become neighbours."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from pass_cases import refuses, table

import anesurgery as ane
from anesurgery.checking.grades import Grade
from anesurgery.mil import Program, Var, ct, mb, types, walk_ops
from anesurgery.passes.subpixel_convolution import SubpixelConvolution
from anesurgery.testing import apply_pass, assert_same_numbers


def made(shape: tuple[Any, ...], weight: tuple[int, ...], bias: bool = False, **how: Any) -> Program:
    rng = np.random.default_rng(0)
    given = {"bias": rng.standard_normal(weight[1] * how.get("groups", 1)).astype(np.float32)} if bias else {}

    @mb.program(input_specs=[mb.TensorSpec(shape)], opset_version=ct.target.iOS17)
    def program(x: Var) -> Var:
        numbers = rng.standard_normal(weight).astype(np.float32)
        return mb.conv_transpose(x=x, weight=numbers, name="y", **given, **how)

    return program


CASES = {
    "stride 1": made((1, 2, 9), (2, 3, 5)),
    "wide and strided": made((2, 2, 9), (2, 3, 16), strides=[8], pad_type="custom", pad=[4, 4], bias=True),
    "odd": made((1, 2, 9), (2, 3, 7), strides=[3], pad_type="custom", pad=[2, 0]),
    "shorter than the stride": made((1, 2, 9), (2, 1, 2), strides=[5]),
    "dilated": made((1, 2, 9), (2, 1, 3), strides=[2], dilations=[3], pad_type="custom", pad=[5, 1]),
    "same": made((1, 2, 9), (2, 1, 6), strides=[3], pad_type="same"),
    "pixel_shuffle": made(
        (1, 2, 5, 6), (2, 3, 4, 4), strides=[2, 2], pad_type="custom", pad=[1] * 4, bias=True
    ),
    "other strides": made((1, 4, 5, 6), (4, 3, 4, 5), strides=[2, 5], groups=2, bias=True),
    "output padding": made(
        (1, 2, 5, 5), (2, 3, 3, 3), strides=[2, 2], pad_type="custom", pad=[1] * 4, output_shape=[1, 3, 10, 10]
    ),
    "beyond the last tap": made(
        (1, 2, 5), (2, 1, 1), strides=[4], pad_type="custom", pad=[0, 0], output_shape=[1, 1, 20], bias=True
    ),
    "cut off": made((1, 2, 9), (2, 1, 3), strides=[2], pad_type="custom", pad=[5, 6]),
}


@pytest.mark.one_of(3)
@pytest.mark.parametrize("name", CASES)
def test_numbers_are_kept(name: str) -> None:
    after, session = apply_pass(SubpixelConvolution(), CASES[name])
    kinds = [op.op_type for op in walk_ops(after)]
    assert "conv_transpose" not in kinds, session.refusals
    assert ("pixel_shuffle" in kinds) == (name in ("pixel_shuffle", "output padding"))
    proof = session.changes[0].proof
    assert proof is not None
    assert proof.grade >= Grade.PROVED, proof.no_proof
    assert_same_numbers(CASES[name], after, rtol=1e-4)


def test_the_new_kernel_is_as_many_times_shorter_as_the_stride() -> None:
    after, _ = apply_pass(SubpixelConvolution(), made((1, 2, 9), (2, 1, 32), strides=[8]))
    (small,) = [op for op in walk_ops(after) if op.op_type == "conv"]
    assert small.weight.shape == (8, 2, 4)


def test_the_products_of_a_long_result_stay_on_the_engine() -> None:
    """The last step of a vocoder: 40 times as many samples, more than an M1 takes on an axis."""
    rng = np.random.default_rng(0)

    @mb.program(input_specs=[mb.TensorSpec((1, 64, 800), types.fp16)], opset_version=ct.target.iOS17)
    def program(x: Var) -> Var:
        for _ in range(6):
            x = mb.relu(
                x=mb.conv(x=x, weight=rng.standard_normal((64, 64, 7)).astype(np.float16), pad_type="same")
            )
        last = rng.standard_normal((64, 1, 80)).astype(np.float16)
        return mb.conv_transpose(x=x, weight=last, strides=[40], pad_type="custom", pad=[20, 20], name="y")

    target = "M1/macOS 14"
    found = {f.rule for f in ane.inspect(program, target=target).all_findings}
    assert "deconv-result" in found
    surgery = ane.apply(program, [SubpixelConvolution()], prove=None)
    off = [row.op_type for row in ane.inspect(surgery.program, target=target).ops if row.legal is False]
    assert off == ["reshape"]


test_cases, test_surroundings = table(
    SubpixelConvolution(),
    refuses("three spatial axes", made, (1, 2, 3, 3, 3), (2, 1, 2, 2, 2)),
    refuses(
        "the new weight would hold 20480000 numbers, above 16777216",
        made,
        (1, 64, 3),
        (64, 64, 4),
        strides=[5000],
    ),
)


def test_auto_rewrites_an_uneven_stride_that_was_reported_to_fail() -> None:
    """The wrong version: auto tried only results longer than 65536 elements, and said nothing of it."""
    rng = np.random.default_rng(0)

    @mb.program(input_specs=[mb.TensorSpec((1, 64, 1, 32), types.fp16)], opset_version=ct.target.iOS17)
    def program(x: Var) -> Var:
        frames = rng.standard_normal((64, 1, 1, 64)).astype(np.float16)
        return mb.conv_transpose(x=mb.relu(x=x), weight=frames, strides=[1, 16], name="y")

    assert "refused-deconv-stride" in {f.rule for f in ane.inspect(program, target="A17").all_findings}
    surgery = ane.apply(program, "auto", target="A17", prove=None, quiet=True)
    assert "refused-deconv-stride" not in {f.rule for f in ane.inspect(surgery.program, "A17").all_findings}
    assert not apply_pass(SubpixelConvolution(uneven_from=32), program)[1].changes
