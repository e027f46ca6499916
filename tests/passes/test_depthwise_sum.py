"""Depthwise convolutions that make one position as products and sums."""

from __future__ import annotations

from typing import Any

import numpy as np
from pass_cases import refuses, rewrites_each, stays, table

import anesurgery as ane
from anesurgery.mil import Program, Var, ct, mb, types
from anesurgery.passes.depthwise_sum import DepthwiseSum


def conv(shape: tuple[int, ...], weight: tuple[int, ...], bias: bool = False, **how: Any) -> Program:
    rng = np.random.default_rng(0)

    @mb.program(input_specs=[mb.TensorSpec(shape)], opset_version=ct.target.iOS17)
    def program(x: Var) -> Var:
        more = {"bias": rng.standard_normal(weight[0]).astype(np.float32)} if bias else {}
        numbers = rng.standard_normal(weight).astype(np.float32)
        return mb.conv(x=x, weight=numbers, name="y", **{"groups": weight[0], **more, **how})

    return program


CASES = {
    "one dimension": conv((2, 6, 4), (6, 1, 4), bias=True),
    "longer than the kernel": conv((1, 6, 5), (6, 1, 4), strides=[2]),
    "dilated": conv((1, 6, 5, 5), (6, 1, 3, 2), dilations=[2, 4], bias=True),
    "two dimensions": conv((1, 6, 3, 2), (6, 1, 3, 2)),
}


def test_inspect_names_the_pass() -> None:
    rng = np.random.default_rng(0)

    @mb.program(input_specs=[mb.TensorSpec((1, 1024, 3), types.fp16)], opset_version=ct.target.iOS17)
    def program(x: Var) -> Var:
        return mb.conv(x=x, weight=rng.standard_normal((1024, 1, 3)).astype(np.float16), groups=1024)

    found = {(f.rule, f.remedy) for f in ane.inspect(program, target="A19/iOS 26").all_findings}
    assert ("conv-depthwise-step", "depthwise_sum") in found
    after = ane.apply(program, [DepthwiseSum()], prove=None, quiet=True).program
    assert all(row.legal for row in ane.inspect(after, target="A19/iOS 26").ops)


test_cases, test_surroundings = table(
    DepthwiseSum(),
    refuses("it pads [1, 1]", conv, (1, 6, 2), (6, 1, 4), pad_type="custom", pad=[1, 1]),
    refuses("3 groups make 6 channels of 6", conv, (1, 6, 4), (6, 2, 4), groups=3),
    stays(conv, (1, 6, 5), (6, 1, 4)),
    *rewrites_each(CASES, rtol=1e-5),
)
