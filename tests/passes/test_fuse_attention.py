"""Parts that become fused attention: scales and masks, the way back, refusals, wrong versions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from pass_cases import refuses, rewrites, table

from anesurgery.mil import Program, Var, ct, mb, types, walk_ops
from anesurgery.passes.decompose_attention import DecomposeAttention
from anesurgery.passes.fuse_attention import FuseAttention
from anesurgery.testing import apply_pass, assert_same_numbers

SHAPE = (1, 2, 6, 16)


def kinds(program: Program) -> Counter[str]:
    return Counter(op.op_type for op in walk_ops(program) if op.op_type != "const")


def attention(between: Callable[..., Any], *masks: tuple[int, ...], opset: Any = ct.target.iOS18) -> Program:
    """Of one value, with masks that are inputs; `between` makes of the scores what the softmax reads."""
    specs = [mb.TensorSpec(SHAPE), *(mb.TensorSpec(s) for s in masks)]

    def built(x: Var, *given: Var) -> Var:
        scores = mb.matmul(x=x, y=x, transpose_y=True)
        return mb.matmul(x=mb.softmax(x=between(scores, *given), axis=-1), y=mb.relu(x=x))

    if len(masks) == 1:
        return mb.program(input_specs=specs, opset_version=opset)(lambda x, m: built(x, m))
    if masks:
        return mb.program(input_specs=specs, opset_version=opset)(lambda x, m, n: built(x, m, n))
    return mb.program(input_specs=specs, opset_version=opset)(lambda x: built(x))


def scaled(scores: Var, *masks: Var) -> Var:
    scores = mb.real_div(x=scores, y=np.float32(4))
    for mask in masks:
        scores = mb.add(x=mask, y=scores)
    return scores


@pytest.mark.parametrize("width", [16, 32])
def test_there_and_back_in_fp16(width: int) -> None:
    """Of 32 channels the scale is rounded in fp16."""
    shape = (1, 2, 6, width)
    specs = [mb.TensorSpec(shape, dtype=types.fp16), mb.TensorSpec((1, 1, 6, 6), dtype=types.fp16)]

    @mb.program(input_specs=specs, opset_version=ct.target.iOS18)
    def program(x: Var, mask: Var) -> Var:
        made = mb.mul(x=mask, y=np.float16(2))  # on the engine: a mask from elsewhere was ignored there
        return mb.scaled_dot_product_attention(query=x, key=x, value=mb.relu(x=x), attn_mask=made)

    parts, _ = apply_pass(DecomposeAttention(), program)
    whole, session = apply_pass(FuseAttention(), parts)
    assert session.changes
    assert kinds(whole) == kinds(program)
    assert_same_numbers(program, whole, rtol=1e-3)


test_cases, test_surroundings = table(
    FuseAttention(),
    *(
        refuses(reason, program)
        for program, reason in [
            (lambda: attention(scaled, opset=ct.target.iOS17), "the program is of iOS17"),
            (
                lambda: attention(lambda s, m: mb.mul(x=mb.add(x=s, y=m), y=np.float32(2)), (6, 6)),
                "after a mask",
            ),
            (lambda: attention(scaled, (6, 1)), "is the same for all keys"),
            (lambda: attention(lambda s: mb.maximum(x=s, y=np.float32(-9))), "maximum stands between"),
        ]
    ),
    *(rewrites(attention, scaled, *masks, rtol=1e-5) for masks in ((), ((6, 6),), ((1, 1, 6, 6), (2, 1, 6)))),
    rewrites(attention, lambda s: mb.mul(x=s, y=np.float32(0.7)), rtol=1e-5, id="another scale"),
)
