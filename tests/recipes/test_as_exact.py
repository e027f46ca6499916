"""`safe_numbers` and `auto` leave real models as exact as they were, in fp16 and on the engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from exactness import NOISE, less_exact

import anesurgery as ane
from anesurgery import registry
from anesurgery.mil import Program, Var, mb, types

MODELS = (
    "basic_pitch_nmp",
    "dtln_aec_128_part1_fp16",
    "dtln_aec_128_part2_fp16",
    "mlc_mosaic",
    "silero_unified",
    "silero_unified_palette_4bit",
)
"""The programs of the corpus that have their weights."""
TARGET = "M1/macOS 14"


def scaled(*factors: float) -> Program:
    """A value times some factors, one after the other."""

    @mb.program(input_specs=[mb.TensorSpec((4, 64), dtype=types.fp16)])
    def program(x: Var) -> Any:
        for factor in factors:
            x = mb.mul(x=x, y=np.float16(factor))
        return mb.identity(x=x, name="y")

    return program


def test_what_is_less_exact_is_found() -> None:
    """The wrong version of a repair: two more roundings where one was enough."""
    plain = scaled(0.25)
    ((before, after),) = less_exact(plain, plain, scaled(3, 1 / 3, 0.25), "fp16").values()
    assert before - after > NOISE
    assert not less_exact(plain, plain, scaled(0.5, 0.5), "fp16")
    assert less_exact(plain, plain, scaled(2.0**15, 2.0**15, 2.0**-16, 2.0**-16), "fp16"), "infinite"


def test_what_is_never_finite_is_not_called_exact() -> None:
    """The wrong version: NaN that equals NaN."""
    plain = scaled(np.inf)
    with pytest.raises(ValueError, match="the outputs of sample 0 are not finite in fp32"):
        less_exact(plain, plain, plain, "fp16")


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["safe_numbers", "auto"])
@pytest.mark.parametrize("name", MODELS)
def test_real_models(corpus: Path, name: str, recipe: str) -> None:
    """Where a step rounds to bring ops onto the engine, the others are judged by what it alone leaves.

    Of a model of which nothing runs on the engine, its arithmetic says nothing.
    """
    original = corpus / f"{name}.mlpackage"
    surgery = ane.apply(original, recipe, target=TARGET, quiet=True, prove=None)
    if not surgery.changes:
        return
    rounding = {c.pass_name for c in surgery.changes if registry.pass_class(c.pass_name).rounds}
    before = (
        ane.apply(original, sorted(rounding), target=TARGET, quiet=True, prove=None).model
        if rounding
        else original
    )
    assert not less_exact(original, before, surgery.model, "fp16")
    if rounding:
        assert ane.compare(original, surgery.model, precision="fp16").psnr >= 60
    if any(op.preferred == "ane" for op in ane.inspect(surgery.model, target=TARGET).ops):
        assert not less_exact(original, before, surgery.model, "ane:M1")
