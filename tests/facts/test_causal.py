"""One test of what is causal: the pass, the inspection and `auto` give the same answer for the same mask."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from coremltools.converters.mil.mil import get_new_symbol

from anesurgery.facts.masks import against_causal, is_decoder
from anesurgery.mil import Program, Var, ct, mb, types, walk_ops
from anesurgery.passes.causal_mask_tensor import CausalMaskTensor
from anesurgery.placement.rules.numeric import RULES
from anesurgery.placement.target import Target
from anesurgery.testing import apply_pass, reasons

N = 6
BELOW = np.tril(np.ones((N, N), bool))
FILL = np.float16(-np.inf)
CAUSAL, OTHER = (next(r for r in RULES if r.id == name) for name in ("num-mask-causal", "num-mask"))
Mask = Callable[[Var], Any]


def attention(mask: Mask, length: Any = N) -> Program:
    """One attention over `length` positions, whose scores `mask` masks."""
    specs = [mb.TensorSpec((1, 1, length, 4), types.fp16)]

    @mb.program(input_specs=specs)
    def program(x: Var) -> Var:
        scores = mb.matmul(x=x, y=x, transpose_y=True)
        return mb.matmul(x=mb.softmax(x=mask(scores), axis=-1), y=x)

    return program


def constant(keep: Any) -> Mask:
    return lambda s: mb.add(x=s, y=np.where(keep, np.float16(0), FILL))


def selected(keep: Any) -> Mask:
    return lambda s: mb.select(cond=keep, a=s, b=FILL)


def compared(compare: str) -> Mask:
    """Made of ranges: `compare(key, query)` keeps a score."""

    def mask(s: Var) -> Any:
        keys = mb.expand_dims(x=mb.range_1d(start=0, end=N, step=1), axes=[0])
        queries = mb.expand_dims(x=mb.range_1d(start=0, end=N, step=1), axes=[1])
        return mb.select(cond=getattr(mb, compare)(x=keys, y=queries), a=s, b=FILL)

    return mask


def band(lower: int, upper: int) -> Mask:
    def mask(s: Var) -> Any:
        kept = mb.band_part(x=np.ones((N, N), np.float32), lower=lower, upper=upper)
        return mb.select(cond=mb.cast(x=kept, dtype="bool"), a=s, b=FILL)

    return mask


MASKS: dict[str, tuple[Mask, bool]] = {
    "constant": (constant(BELOW), True),
    "select": (selected(BELOW), True),
    "ranges": (compared("less_equal"), True),
    "band": (band(-1, 0), True),
    "window": (band(2, 0), True),
    "all, looking ahead": (constant(BELOW.T), False),
    "select, looking ahead": (selected(BELOW.T), False),
    "ranges, looking ahead": (compared("greater_equal"), False),
    "band, looking ahead": (band(0, -1), False),
    "band in both directions": (band(1, 1), False),
    "row without a key": (selected(BELOW & (np.arange(N) != 0)[:, None]), False),
    "padding": (selected(np.arange(N)[None] < N - 1), False),
}


@pytest.mark.one_of(4)
@pytest.mark.parametrize("name", MASKS)
def test_pass_inspection_and_decoder_agree(name: str) -> None:
    mask, causal = MASKS[name]
    program = attention(mask)
    changed = bool(apply_pass(CausalMaskTensor(), program)[1].changes)
    ops, target = list(walk_ops(program)), Target.parse("any")
    named, others = (
        [r.test(op, target) for op in ops if op.op_type in r.ops] for r in (CAUSAL, OTHER) if r.test
    )
    assert changed == causal
    assert is_decoder(program.functions["main"]) == causal
    assert any(named) == causal
    assert any(others) == (not causal)


def test_the_reason_is_that_of_the_pass() -> None:
    refused = reasons(apply_pass(CausalMaskTensor(), attention(constant(BELOW.T)))[1])
    assert refused == ["the mask is not causal: position 0 sees position 1"]
    assert [str(against_causal(BELOW.T))] == refused
    assert against_causal(BELOW) is None


@pytest.mark.parametrize(("bias", "causal"), [(-1000.0, True), (30.0, True), (-4000.0, False)])
def test_a_bias_in_the_constant_of_a_mask_leaves_it_causal(bias: float, causal: bool) -> None:
    """Unless what is kept comes near to what is masked."""
    given = np.where(BELOW, bias * np.linspace(0, 1, N), -1e4).astype(np.float16)
    program = attention(lambda s: mb.add(x=s, y=given))
    assert is_decoder(program.functions["main"]) == causal


def fused(keep: Any) -> Program:
    @mb.program(input_specs=[mb.TensorSpec((1, 1, N, 4))], opset_version=ct.target.iOS18)
    def program(x: Var) -> Any:
        return mb.scaled_dot_product_attention(query=x, key=x, value=x, attn_mask=keep)

    return program


def test_masks_that_only_fused_attention_reads_are_told_apart() -> None:
    """Masks of one shape in models that are read one after the other; the first answer is cached."""
    asked = {"below": BELOW, "above": ~BELOW, "all": np.ones_like(BELOW), "again": BELOW}
    found = {name: is_decoder(fused(keep).functions["main"]) for name, keep in asked.items()}
    assert found == {"below": True, "above": False, "all": False, "again": True}


def test_a_triangle_that_no_attention_reads_makes_no_decoder() -> None:
    @mb.program(input_specs=[mb.TensorSpec((N, N), types.fp16)])
    def program(x: Var) -> Var:
        return mb.add(x=x, y=np.where(BELOW, np.float16(0), FILL))

    assert not is_decoder(program.functions["main"])


def test_a_dynamic_length_goes_by_the_spelling() -> None:
    def ranges(s: Var) -> Any:
        length = mb.squeeze(x=mb.slice_by_index(x=mb.shape(x=s), begin=[3], end=[4]))
        keys = mb.range_1d(start=0, end=length, step=1)
        keep = mb.less_equal(x=mb.expand_dims(x=keys, axes=[0]), y=mb.expand_dims(x=keys, axes=[1]))
        return mb.select(cond=keep, a=s, b=FILL)

    assert is_decoder(attention(ranges, get_new_symbol()).functions["main"])
    assert not is_decoder(attention(lambda s: mb.relu(x=s), get_new_symbol()).functions["main"])
