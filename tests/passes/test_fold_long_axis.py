"""Long axes in rows: windows across rows, strides, regions that share rows, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from pass_cases import refuses, rewrites, stays, table

import anesurgery as ane
from anesurgery.mil import Program, Var, ct, mb, types, walk_ops
from anesurgery.passes.fold_long_axis import FoldLongAxis
from anesurgery.placement.target import Target
from anesurgery.testing import apply_pass, assert_same_numbers

RNG = np.random.default_rng(0)
LENGTH = 96
STEP = FoldLongAxis(limit=32)
"""Rows of 16 for an axis of 96."""


def built(build: Callable[..., Any], shape: tuple[int, ...] = (2, 4, LENGTH), inputs: int = 1) -> Program:
    shapes = [mb.TensorSpec(shape, dtype=types.fp32) for _ in range(inputs)]

    return mb.program(input_specs=shapes, opset_version=ct.target.iOS17)(lambda x: build(x))


def weight(out: int, inner: int, width: int) -> Any:
    return RNG.standard_normal((out, inner, width)).astype(np.float32)


@pytest.mark.parametrize(("target", "limit"), [("M1", 16384), ("M4", 65536)])
def test_the_limit_is_that_of_the_target(target: str, limit: int) -> None:
    (step,) = FoldLongAxis.variants(Target.parse(target))
    assert step.options()["limit"] == limit


@pytest.mark.slow
def test_auto_repairs_long_audio() -> None:
    @mb.program(input_specs=[mb.TensorSpec((1, 32, 32768), dtype=types.fp16)], opset_version=ct.target.iOS17)
    def program(x: Var) -> Any:
        for _ in range(2):
            x = mb.conv(x=x, weight=RNG.standard_normal((32, 32, 5)).astype(np.float16), pad_type="same")
        return mb.reduce_mean(x=x, axes=[1], keep_dims=True)

    surgery = ane.apply(program, "auto", target="M1/macOS 14", quiet=True)
    assert "fold_long_axis" in {change.pass_name for change in surgery.changes}
    before, after = (ane.inspect(p, "M1/macOS 14").residency["flop"] for p in (program, surgery.program))
    assert before == 0
    assert after > 0.9


@pytest.mark.parametrize("groups", [1, 4])
def test_a_compressed_weight_stays_compressed(groups: int) -> None:
    indices = np.random.default_rng(0).integers(0, 4, (4, 4 // groups, 3)).astype(types.np_uint2_dtype)
    table = np.random.default_rng(1).standard_normal((4, 1, 1, 4, 1)).astype(np.float32)

    @mb.program(input_specs=[mb.TensorSpec((2, 4, LENGTH))], opset_version=ct.target.iOS18)
    def program(x: Var) -> Var:
        weight = mb.constexpr_lut_to_dense(indices=indices, lut=table)
        return mb.conv(x=x, weight=weight, pad_type="same", groups=groups, name="y")

    after, session = apply_pass(STEP, program)
    assert session.changes, session.refusals
    (conv,) = (op for op in walk_ops(after) if op.op_type == "conv")
    assert conv.weight.op.op_type == "constexpr_lut_to_dense"
    assert conv.weight.shape == (4, 4 // groups, 1, 3)
    assert_same_numbers(program, after, rtol=1e-5)


def convolved(width: int, inner: int = 4, **options: Any) -> Callable[[Var], Any]:
    bias = RNG.standard_normal(8).astype(np.float32)
    return lambda x: mb.conv(x=x, weight=weight(8, inner, width), bias=bias, **options)


def two_convolutions(x: Var) -> Any:
    """They share the rows."""
    a = mb.relu(x=mb.conv(x=x, weight=weight(4, 4, 3), pad_type="same"))
    return mb.add(x=mb.conv(x=a, weight=weight(4, 4, 3), pad_type="same"), y=x)


WHOLE: dict[str, Any] = {"pad_type": "valid", "exclude_padding_from_average": True}
BY_ROWS: dict[str, Callable[[Var], Any]] = {
    "relu": lambda x: mb.relu(x=x),
    "clip": lambda x: mb.clip(x=x, alpha=np.float32(-1), beta=np.float32(1)),
    "a factor for each channel": lambda x: mb.mul(x=x, y=np.arange(1, 5, dtype=np.float32).reshape(1, 4, 1)),
    "a term for each place": lambda x: mb.add(x=x, y=np.arange(LENGTH, dtype=np.float32)),
    "sub": lambda x: mb.sub(x=np.float32(1), y=x),
    "a mean": lambda x: mb.mul(x=x, y=mb.reduce_mean(x=x, axes=[2], keep_dims=True)),
    "select": lambda x: mb.select(cond=mb.greater(x=x, y=np.float32(0)), a=x, b=mb.exp(x=x)),
    "cast": lambda x: mb.cast(x=x, dtype="fp16"),
    "max_pool": lambda x: mb.max_pool(x=x, kernel_sizes=[2], strides=[2], pad_type="valid"),
    "avg_pool": lambda x: mb.avg_pool(x=x, kernel_sizes=[4], strides=[4], **WHOLE),
    "instance_norm": lambda x: mb.instance_norm(x=x, epsilon=np.float32(1e-5)),
    "batch_norm": lambda x: mb.batch_norm(x=x, mean=np.ones(4, np.float32), variance=np.full(4, 2, np.float32)),
}
CONVOLUTIONS: list[dict[str, Any]] = [
    {"width": 3, "pad_type": "same"},
    {"width": 5, "pad_type": "custom", "pad": [4, 0]},
    {"width": 5, "pad_type": "custom", "pad": [0, 4]},
    {"width": 4, "pad_type": "same"},
    {"width": 3, "pad_type": "same", "dilations": [3]},
    {"width": 4, "pad_type": "custom", "pad": [1, 1], "strides": [2]},
    {"width": 4, "pad_type": "valid", "strides": [4]},
    {"width": 8, "pad_type": "custom", "pad": [2, 2], "strides": [4]},
    {"width": 1, "pad_type": "valid"},
    {"width": 3, "pad_type": "same", "groups": 4, "inner": 1},
]
test_cases, test_surroundings = table(
    STEP,
    stays(built, lambda x: mb.relu(x=x), (1, 4, 32)),
    refuses("97 cannot be cut into equal rows of 2 to 16", built, lambda x: mb.relu(x=x), (1, 4, 97)),
    refuses(
        "a stride of 1 makes 94 of 96 in rows of 16",
        built,
        lambda x: mb.conv(x=x, weight=weight(4, 4, 3), pad_type="valid"),
    ),
    refuses(
        "a stride of 3 makes 32 of 96 in rows of 16",
        built,
        lambda x: mb.conv(x=x, weight=weight(4, 4, 3), pad_type="same", strides=[3]),
    ),
    refuses(
        "the kernel reads 40 numbers of other rows",
        built,
        lambda x: mb.conv(x=x, weight=weight(4, 4, 41), pad_type="same"),
    ),
    refuses(
        "the pool overlaps or is padded",
        built,
        lambda x: mb.max_pool(x=x, kernel_sizes=[3], strides=[1], pad_type="same"),
    ),
    *(
        rewrites(built, convolved(**options), rtol=1e-5, id=f"convolution, {options}")
        for options in CONVOLUTIONS
    ),
    *(rewrites(built, BY_ROWS[name], rtol=1e-5, id=name) for name in BY_ROWS),
    rewrites(built, two_convolutions, rtol=1e-5),
)
