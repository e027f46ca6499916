"""Convolutions over three axes as sums: strides, dilations, groups, edges."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from closeness import assert_close
from pass_cases import refuses, rewrites_each, table

import anesurgery as ane
from anesurgery.errors import PassError
from anesurgery.mil import Program, Var, ct, mb, quiet_host
from anesurgery.passes.split_conv3d import SplitConv3d
from anesurgery.placement.target import Target
from anesurgery.testing import assert_refuses


def convolved(
    kernel: tuple[int, ...] = (3, 2, 3), groups: int = 1, bias: bool = True, **options: Any
) -> Program:
    rng = np.random.default_rng(0)
    weight = rng.standard_normal((4, 4 // groups, *kernel)).astype(np.float32)

    @mb.program(input_specs=[mb.TensorSpec((2, 4, 7, 6, 5))], opset_version=ct.target.iOS16)
    def program(x: Var) -> Any:
        more = {"bias": weight[:, 0, 0, 0, 0]} if bias else {}
        return mb.conv(x=x, weight=weight, groups=groups, **more, **options)

    return program


CASES: dict[str, Program] = {
    "valid": convolved(),
    "no bias": convolved(bias=False),
    "groups": convolved(groups=2),
    "strides": convolved(strides=[2, 1, 2]),
    "dilations": convolved(dilations=[2, 1, 1]),
    "custom": convolved(pad_type="custom", pad=[2, 1, 0, 1, 1, 0]),
    "same": convolved((4, 2, 3), pad_type="same", strides=[2, 2, 1]),
    "same, lower": convolved((4, 2, 3), pad_type="same_lower", strides=[1, 2, 1]),
    "one step": convolved((1, 3, 3)),
    "patches of a film": convolved((2, 3, 2), strides=[2, 3, 2]),
    "patches, padded": convolved((3, 2, 2), strides=[3, 2, 2], pad_type="custom", pad=[1, 1, 0, 0, 0, 0]),
    "patches in groups": convolved((2, 2, 2), groups=2, strides=[2, 2, 2]),
}


def test_refusals_name_what_was_found() -> None:
    with pytest.raises(PassError, match="most_depth=0"):
        SplitConv3d(most_depth=0)

    @mb.program(input_specs=[mb.TensorSpec((1, 1, 3, 3, 3)), mb.TensorSpec((1, 1, 2, 2, 2))])
    def program(x: Var, w: Var) -> Any:
        return mb.conv(x=x, weight=w)

    assert_refuses(SplitConv3d(), program, "the weight %w is dynamic")


def test_a_converted_convolution() -> None:
    torch.manual_seed(0)
    module, x = torch.nn.Conv3d(2, 3, 3, stride=2, padding=1).eval(), torch.randn(1, 2, 6, 6, 6)
    with quiet_host(), torch.no_grad():
        model = ct.convert(
            torch.jit.trace(module, x),  # type: ignore[no-untyped-call]
            inputs=[ct.TensorType("x", x.shape)],
            compute_precision=ct.precision.FLOAT32,
            minimum_deployment_target=ct.target.iOS16,
            skip_model_load=True,
        )
        expected = module(x).numpy()
    surgery = ane.apply(model, "split_conv3d", quiet=True)
    assert surgery.changes
    (found,) = ane.run(surgery.program, {"x": x.numpy()}).values()
    assert_close(found, expected, rtol=1e-5)


def test_films_are_split_where_a_3d_convolution_is_in_doubt() -> None:
    assert SplitConv3d.variants(Target.parse("M1/macOS 14")) == (SplitConv3d(),)
    assert SplitConv3d.variants(Target.parse("M4/macOS 15")) == ()


test_cases, test_surroundings = table(
    SplitConv3d(),
    *rewrites_each(CASES, rtol=1e-5),
    refuses("the kernel is 3 deep, above 2", convolved, step=SplitConv3d(most_depth=2)),
)
