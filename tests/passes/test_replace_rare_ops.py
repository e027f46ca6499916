"""Rare ops as common ones: each kind, its edges, and what `auto` gains."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from pass_cases import refuses, rewrites, table
from scores import scored

import anesurgery as ane
from anesurgery.mil import Program, Var, ct, mb, new_symbol, types
from anesurgery.passes.replace_rare_ops import ReplaceRareOps
from anesurgery.placement.target import Target


def built(body: Callable[[Var], Any], shape: tuple[Any, ...] = (2, 3, 6, 7)) -> Program:
    return mb.program(input_specs=[mb.TensorSpec(shape)])(lambda x: body(x))


FORMS: dict[str, Callable[[Var], Any]] = {
    "all sides": lambda x: mb.crop(x=x, crop_height=[1, 2], crop_width=[3, 1], name="y"),
    "one side": lambda x: mb.crop(x=x, crop_height=[0, 0], crop_width=[0, 1], name="y"),
    "no side": lambda x: mb.crop(x=x, crop_height=[0, 0], crop_width=[0, 0], name="y"),
    "flatten": lambda x: mb.flatten2d(x=x, axis=2, name="y"),
    "flatten from the end": lambda x: mb.flatten2d(x=x, axis=-1, name="y"),
    "clamped": lambda x: mb.clamped_relu(x=x, alpha=0.25, beta=0.5, name="y"),
    "negative slope": lambda x: mb.clamped_relu(x=x, alpha=-0.5, beta=0.25, name="y"),
}


def clamped_in_types(x: Any, limit: Any) -> Program:
    return mb.program(
        input_specs=[mb.TensorSpec((2, 3), dtype=types.numpy_type_to_builtin_type(x))],
        opset_version=ct.target.iOS17,
    )(lambda x: mb.clamped_relu(x=x, alpha=type(limit)(0.25), beta=limit, name="y"))


@pytest.mark.slow
def test_a_transposed_convolution_that_is_cropped_stays_on_the_engine() -> None:
    weight = np.random.default_rng(0).standard_normal((64, 64, 3, 3)).astype(np.float16) / 24

    @mb.program(input_specs=[mb.TensorSpec((1, 64, 64, 64), dtype=types.fp16)], opset_version=ct.target.iOS17)
    def program(x: Var) -> Any:
        y = mb.crop(
            x=mb.conv_transpose(x=x, weight=weight, strides=[2, 2]), crop_height=[1, 0], crop_width=[1, 0]
        )
        return mb.relu(x=mb.conv(x=y, weight=weight, pad_type="same"), name="y")

    target = Target.parse("M4/macOS 15")
    surgery = ane.apply(program, "auto", target="M4/macOS 15", prove="both", quiet=True)
    before, after = (scored(p, target)[0] for p in (program, surgery.program))
    assert after.share["ops"] > before.share["ops"]
    assert surgery.proof is not None
    assert surgery.proof.psnr == float("inf")


test_cases, test_surroundings = table(
    ReplaceRareOps(),
    refuses("has the symbolic shape", built, FORMS["all sides"], (1, 3, new_symbol(), 8)),
    *(rewrites(built, FORMS[form], rtol=0, id=form) for form in FORMS),
    rewrites(clamped_in_types, np.float16, np.float32(0.5), rtol=0),
    rewrites(clamped_in_types, np.float32, np.float16(0.3), rtol=0),
    refuses("0.3 is no number of fp16", clamped_in_types, np.float16, np.float32(0.3)),
)
