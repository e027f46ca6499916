"""Regions between space_to_batch and batch_to_space as dilated convolutions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from pass_cases import refuses, refuses_each, rewrites_each, table

import anesurgery as ane
from anesurgery.mil import Program, Var, ct, mb, types, walk_ops
from anesurgery.passes.dilated_convolution import DilatedConvolution
from anesurgery.testing import apply_pass

Body = Callable[[Var], Var]


def weight(*shape: int) -> Any:
    return np.random.default_rng(1).standard_normal(shape).astype(np.float32)


def region(
    body: Body,
    shape: tuple[int, ...] = (1, 2, 8, 8),
    block: tuple[int, int] = (2, 2),
    paddings: Any = ((2, 2), (2, 2)),
    crops: Any = ((0, 0), (0, 0)),
) -> Program:
    @mb.program(input_specs=[mb.TensorSpec(shape)])
    def program(x: Var) -> Var:
        parts = mb.space_to_batch(x=x, block_shape=block, paddings=np.array(paddings, np.int32))
        return mb.batch_to_space(x=body(parts), block_shape=block, crops=np.array(crops, np.int32), name="y")

    return program


def conv(x: Var, *shape: int, **more: Any) -> Var:
    return mb.conv(x=x, weight=weight(*shape), **more)


def residual(x: Var) -> Var:
    first = mb.relu(x=conv(x, 2, 2, 3, 3, pad_type="same"))
    return mb.add(x=first, y=conv(first, 2, 2, 3, 3, pad_type="custom", pad=[1, 1, 1, 1]))


def biased(x: Var) -> Var:
    x = mb.exp(x=conv(x, 4, 1, 3, 3, groups=2, bias=weight(4)))
    return mb.batch_norm(x=mb.mul(x=x, y=weight(4, 1, 1)), mean=weight(4), variance=np.ones(4, np.float32))


CASES = {
    "crops": region(lambda x: conv(x, 2, 2, 3, 3), paddings=((2, 4), (1, 5)), crops=((0, 1), (1, 2))),
    "blocks of 2x3": region(lambda x: conv(x, 3, 2, 3, 2), (1, 2, 8, 9), (2, 3), ((2, 4), (3, 3))),
    "crops above the padding": region(
        lambda x: conv(x, 2, 2, 1, 3), paddings=((0, 0), (0, 0)), crops=((3, 1), (0, 0))
    ),
    "pointwise before": region(lambda x: conv(mb.relu(x=x), 2, 2, 3, 3)),
    "not zero of zero before": region(lambda x: conv(mb.cos(x=x), 2, 2, 3, 3)),
    "dilated already": region(lambda x: conv(x, 2, 2, 3, 1, dilations=[2, 1]), (2, 2, 12, 12)),
    "residual": region(residual, paddings=((0, 0), (0, 0)), crops=((1, 2), (0, 1))),
    "biased and normalised": region(biased, paddings=((1, 3), (2, 2))),
}


def test_compressed_weights_stay_compressed() -> None:
    indices = np.random.default_rng(0).integers(0, 4, (2, 2, 3, 3)).astype(types.np_uint2_dtype)

    @mb.program(input_specs=[mb.TensorSpec((1, 2, 8, 8))], opset_version=ct.target.iOS18)
    def program(x: Var) -> Var:
        table = np.array([-1, 0, 0.5, 2], np.float32).reshape(1, 1, 1, 1, 4, 1)
        edges = np.array([[2, 2], [2, 2]], np.int32)
        parts = mb.space_to_batch(x=x, block_shape=[2, 2], paddings=edges)
        made = mb.conv(x=parts, weight=mb.constexpr_lut_to_dense(indices=indices, lut=table))
        return mb.batch_to_space(x=made, block_shape=[2, 2], crops=np.zeros((2, 2), np.int32), name="y")

    after, _ = apply_pass(DilatedConvolution(), program)
    assert [op.op_type for op in walk_ops(after) if op.op_type != "const"] == ["constexpr_lut_to_dense", "conv"]


def pooled(x: Var) -> Var:
    return mb.max_pool(x=conv(x, 2, 2, 3, 3), kernel_sizes=[1, 1], strides=[1, 1], pad_type="valid")


REFUSALS = {
    "steps by [2, 2]": region(lambda x: conv(x, 2, 2, 3, 3, strides=[2, 2])),
    "max_pool": region(pooled),
    "differs between images or pixels": region(lambda x: mb.mul(x=conv(x, 2, 2, 3, 3), y=weight(4, 1, 1, 1))),
    "the blocks are [2, 2] before and [1, 2] after": region(
        lambda x: mb.space_to_batch(x=x, block_shape=[2, 2], paddings=np.zeros((2, 2), np.int32)),
        block=(1, 2),
        paddings=((0, 0), (0, 0)),
    ),
}


def test_inspect_names_the_pass() -> None:
    found = ane.inspect(CASES["crops"], target="M4/macOS 15").all_findings
    assert ("space-to-batch", "dilated_convolution") in {(f.rule, f.remedy) for f in found}


def an_inner_value_that_is_an_output_is_refused() -> Program:
    @mb.program(input_specs=[mb.TensorSpec((1, 2, 8, 8))])
    def program(x: Var) -> tuple[Var, Var]:
        zeros = np.zeros((2, 2), np.int32)
        inner = conv(mb.space_to_batch(x=x, block_shape=[2, 2], paddings=zeros), 2, 2, 1, 1, name="inner")
        return mb.batch_to_space(x=inner, block_shape=[2, 2], crops=zeros, name="y"), inner

    return program


test_cases, test_surroundings = table(
    DilatedConvolution(),
    refuses("%inner is read elsewhere", an_inner_value_that_is_an_output_is_refused),
    *rewrites_each(
        CASES,
        rtol=1e-4,
        alone={"crops above the padding": {"after the default pipeline": "coremltools loses the crops"}},
    ),
    *refuses_each(REFUSALS),
)
