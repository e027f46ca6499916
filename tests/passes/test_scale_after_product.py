"""Scales of palettes after the product: kinds of products, biases, refusals, what `auto` gains."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from pass_cases import refuses, rewrites, stays, table
from scores import scored

import anesurgery as ane
from anesurgery.mil import Array, Program, Var, ct, mb, types
from anesurgery.passes.scale_after_product import ScaleAfterProduct
from anesurgery.placement.target import Target


def half(*shape: int) -> Array:
    made: Array = np.random.default_rng(0).uniform(0.5, 2, shape).astype(np.float16)
    return made


def palette(*shape: int) -> Var:
    kind = types.nptype_from_builtin(types.uint4)
    indices: Any = np.random.default_rng(0).integers(0, 16, shape).astype(kind)
    table = np.random.default_rng(0).standard_normal((*[1] * len(shape), 16, 1)).astype(np.float16)
    made: Var = mb.constexpr_lut_to_dense(indices=indices, lut=table)
    return made


def scaled(scale: Array, *shape: int, **more: Any) -> Var:
    made: Var = mb.constexpr_blockwise_shift_scale(data=palette(*shape), scale=scale, **more)
    return made


def built(body: Callable[[Var], Any], shape: tuple[int, ...]) -> Program:
    return mb.program(input_specs=[mb.TensorSpec(shape, dtype=types.fp16)], opset_version=ct.target.iOS18)(
        lambda x: body(x)
    )


FORMS: dict[str, tuple[Callable[[Var], Any], tuple[int, ...]]] = {
    "linear": (lambda x: mb.linear(x=x, weight=scaled(half(8, 1), 8, 16), name="y"), (2, 16)),
    "bias": (lambda x: mb.linear(x=x, weight=scaled(half(8, 1), 8, 16), bias=half(8), name="y"), (2, 3, 16)),
    "conv": (
        lambda x: mb.conv(x=x, weight=scaled(half(8, 1, 1, 1), 8, 4, 3, 3), bias=half(8), name="y"),
        (1, 4, 6, 6),
    ),
    "conv in 1-D": (lambda x: mb.conv(x=x, weight=scaled(half(8, 1, 1), 8, 4, 3), name="y"), (1, 4, 6)),
    "groups of channels": (lambda x: mb.linear(x=x, weight=scaled(half(2, 1), 8, 16), name="y"), (2, 16)),
    "matmul": (lambda x: mb.matmul(x=x, y=scaled(half(1, 8), 16, 8), name="y"), (2, 16)),
    "transposed": (
        lambda x: mb.matmul(x=x, y=scaled(half(8, 1), 8, 16), transpose_y=True, name="y"),
        (3, 2, 16),
    ),
}


def test_auto_brings_the_product_to_the_engine() -> None:
    def body(x: Var) -> Any:
        for _ in range(3):
            x = mb.relu(x=mb.conv(x=x, weight=scaled(half(128, 1, 1, 1), 128, 128, 3, 3), pad_type="same"))
        return x

    program, target = built(body, (1, 128, 64, 64)), Target.parse("M4/macOS 15")
    surgery = ane.apply(program, "auto", target="M4/macOS 15", prove=None, quiet=True)
    before, after = (scored(p, target)[0] for p in (program, surgery.program))
    assert before.share["flop"] == 0
    assert after.share["flop"] == 1


BREAKS = {"after the default pipeline": "fuse_elementwise_to_batchnorm of coremltools mixes fp16 and fp32"}

test_cases, test_surroundings = table(
    ScaleAfterProduct(),
    *(
        rewrites(built, *FORMS[form], rtol=0.001, id=form, alone=BREAKS if form == "conv" else {})
        for form in FORMS
    ),
    refuses(
        "8x2 scales: several for one output channel",
        built,
        lambda x: mb.linear(x=x, weight=scaled(half(8, 2), 8, 16)),
        (2, 16),
    ),
    refuses(
        "1x16 scales: several for one output channel",
        built,
        lambda x: mb.linear(x=x, weight=scaled(half(1, 16), 8, 16)),
        (2, 16),
    ),
    stays(built, lambda x: mb.linear(x=x, weight=palette(8, 16)), (2, 16)),
)
