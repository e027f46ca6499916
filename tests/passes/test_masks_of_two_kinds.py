"""A padding mask of 0 and 1 times the least float, and a causal one, of which the smaller counts: TimesFM's."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
import torch
from conversion import convert

import anesurgery as ane
from anesurgery.mil import Array, Program, constant, walk_ops
from anesurgery.show.costs import costs

KEYS, WIDTH = 8, 16


class Attention(torch.nn.Module):
    """One head; `padding` is 1 where a key is none."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = torch.nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x: torch.Tensor, padding: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).split(WIDTH, 2)
        least = torch.finfo(x.dtype).min
        causal = torch.triu(torch.ones(KEYS, KEYS) * least, diagonal=1).view(1, KEYS, KEYS)
        mask = torch.minimum(padding.view(1, 1, -1) * least, causal)
        return torch.softmax(q @ k.transpose(1, 2) * 0.25 + mask, -1) @ v


@cache
def converted(precision: str) -> Program:
    torch.manual_seed(0)
    examples = {"x": torch.zeros(1, KEYS, WIDTH), "padding": torch.zeros(1, KEYS)}
    program: Program = convert(Attention().eval(), examples, "trace", "iOS17", precision)._mil_program
    return program


def inputs() -> dict[str, Array]:
    x = np.random.default_rng(0).normal(size=(1, KEYS, WIDTH)).astype(np.float32)
    return {"x": x, "padding": np.array([[0, 0, 1, 0, 0, 1, 1, 0]], np.float32)}


def answer(program: Program, precision: str) -> Array:
    (found,) = ane.run(program, inputs(), precision=precision).values()
    return np.asarray(found, np.float64)


@pytest.mark.one_of(2)
@pytest.mark.parametrize("passes", ["padding_mask_tensor", "decoder_ane", "encoder_ane", "auto"])
def test_what_was_nan_is_what_fp32_gives(passes: str) -> None:
    half = converted("FLOAT16")
    expected = answer(converted("FLOAT32"), "fp32")
    assert np.isnan(answer(half, "fp16")).any()
    surgery = ane.apply(half, passes, quiet=True)
    after = answer(surgery.program, "fp16")
    assert np.isfinite(after).all(), surgery.refusals
    psnr = 10 * np.log10(np.abs(expected).max() ** 2 / np.mean((after - expected) ** 2))
    assert psnr >= 60
    held = [constant(v) for op in walk_ops(surgery.program) for v in op.inputs.values() if hasattr(v, "val")]
    assert all(np.isfinite(h).all() for h in held if isinstance(h, np.ndarray) and h.dtype.kind == "f")


def test_inspect_names_the_product_and_the_constant_with_their_remedy() -> None:
    found = {(f.rule, f.remedy) for f in ane.inspect(converted("FLOAT16")).all_findings}
    assert ("num-mask-product", "padding_mask_tensor") in found
    assert ("num-mask", "padding_mask_tensor") in found
    repaired = ane.apply(converted("FLOAT16"), "padding_mask_tensor", quiet=True).program
    assert not {f.rule for f in ane.inspect(repaired).all_findings} & {
        "num-mask-product",
        "num-mask",
        "num-constant",
    }


class Repeated(torch.nn.Module):
    """Fused attention under a padding mask that is repeated for each query."""

    def forward(self, x: torch.Tensor, padding: torch.Tensor) -> torch.Tensor:
        mask = (padding * torch.finfo(x.dtype).min).expand(1, KEYS, KEYS)
        return torch.nn.functional.scaled_dot_product_attention(x, x, x, attn_mask=mask)


def test_a_mask_that_makes_every_row_nan_is_named_first() -> None:
    """The wrong version: a scale or a cast that takes a share of the time stands before it."""
    examples = {"x": torch.zeros(1, KEYS, WIDTH), "padding": torch.zeros(1, 1, KEYS)}
    repeated = convert(Repeated().eval(), examples, "trace", "iOS18", "FLOAT16")._mil_program
    for program in (converted("FLOAT16"), repeated):
        for units in ("CPU_AND_NE", "CPU_ONLY"):
            first = costs(ane.inspect(program, "M4/macOS 26", compute_units=units))[0]
            assert (first.rule, first.remedies[0]) == ("num-mask-product", "padding_mask_tensor")
        assert "numbers may be wrong: num-mask-product" in ane.inspect(program, "M4/macOS 26").summary
        assert "lost-infinity" not in {f.rule for f in ane.inspect(program).all_findings}


def test_a_certificate_blames_the_product_and_says_that_the_engine_gives_numbers() -> None:
    """0 * -inf is NaN in fp32 too; on the engine an infinity is a large number, as reported of an M4.

    The wrong version blames the op with the largest error among those that are finite.
    """
    made = ane.certify(converted("FLOAT16"), inputs(), target="M4")
    assert made.verdict == "fails"
    assert "is NaN in fp32 too (padding_mask_tensor may help)" in made.why
    (output,) = made.outputs["ane:M4"]
    assert output.only_reference == output.bad > 0 == output.undefined
    assert "in fp32, and finite in ane:M4" in made.why
