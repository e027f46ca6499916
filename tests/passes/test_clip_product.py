"""Products between two quantizations: signed and unsigned codes, refusals, a wrong version."""

from __future__ import annotations

import numpy as np
import pytest

from anesurgery.errors import ProofError
from anesurgery.mil import Program, Var, ct, mb, types
from anesurgery.passes.clip_product import ClipProduct
from anesurgery.rewriting.builder import Builder
from anesurgery.rewriting.pattern import Match
from anesurgery.testing import apply_pass, assert_refuses, assert_same_numbers

HALF = np.float16


def built(
    dtype: str = "int8", zero: int | None = None, by_channel: bool = False, plain: bool = False
) -> Program:
    point = {} if zero is None else {"zero_point": np.array(zero, dtype)}
    scale = np.full(4, 0.5, HALF) if by_channel else HALF(0.5)
    more = {"axis": np.int32(1)} if by_channel else {}

    @mb.program(input_specs=[mb.TensorSpec((2, 4), dtype=types.fp16)], opset_version=ct.target.iOS17)
    def program(x: Var) -> Var:
        code = mb.quantize(input=x, scale=HALF(1 / 16), output_dtype="int8")
        factor = mb.relu(x=x) if plain else mb.dequantize(input=code, scale=HALF(1 / 16))
        product = mb.mul(x=x, y=factor)
        return mb.dequantize(
            input=mb.quantize(input=product, scale=scale, output_dtype=dtype, **point, **more),
            scale=scale,
            name="y",
            **point,
            **more,
        )

    return program


@pytest.mark.parametrize(("dtype", "zero"), [("int8", None), ("uint8", 100), ("int8", -3)])
def test_the_codes_stay(dtype: str, zero: int | None) -> None:
    program = built(dtype, zero)
    after, session = apply_pass(ClipProduct(), program)
    assert len(session.changes) == 1
    assert_same_numbers(program, after)


def test_refuses_a_scale_for_each_channel() -> None:
    assert_refuses(ClipProduct(), built(by_channel=True), "a scale for each channel")


def test_a_product_of_plain_numbers_stays() -> None:
    _, session = apply_pass(ClipProduct(), built(plain=True))
    assert not session.changes


class _Wrong(ClipProduct):
    name = "wrong_clip"

    def rewrite(self, mb: Builder, m: Match) -> Var:
        """Clips to half of the range."""
        product = mb.clip(x=mb.mul(x=m.x, y=m.y), alpha=m.ends[0] / 2, beta=m.ends[1] / 2)
        made: Var = mb.quantize(input=product, scale=m.root.scale, output_dtype="int8")
        return made


def test_a_wrong_version_is_caught() -> None:
    with pytest.raises(ProofError):
        apply_pass(_Wrong(), built())
