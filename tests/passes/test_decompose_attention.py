"""Masks of each kind, refusals, and the wrong versions that the check of sites catches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from pass_cases import refuses, rewrites, table

from anesurgery.errors import SurgeryError
from anesurgery.mil import Program, Var, ct, mb, new_symbol, types, walk_ops
from anesurgery.passes.decompose_attention import DecomposeAttention
from anesurgery.rewriting.builder import Builder
from anesurgery.rewriting.pattern import Match
from anesurgery.testing import apply_pass

SHAPE = (1, 2, 6, 8)


def fused(mask: Any = None, shape: tuple[Any, ...] = SHAPE) -> Program:
    """With a mask of a dtype, broadcast over heads; without one by default."""
    specs = [mb.TensorSpec(shape), mb.TensorSpec((1, 1, 6, 6), dtype=mask or types.fp32)]

    @mb.program(input_specs=specs, opset_version=ct.target.iOS18)
    def program(x: Var, mask_: Var) -> Any:
        given = {} if mask is None else {"attn_mask": mask_}
        unread = mb.mul(x=mask_, y=np.float32(1)) if mask is None else None
        made = mb.scaled_dot_product_attention(query=x, key=x, value=mb.relu(x=x), **given, name="y")
        return made if unread is None else (made, unread)

    return program


@dataclass(frozen=True)
class Unscaled(DecomposeAttention):
    """Wrong: the query is taken as it is."""

    def rewrite(self, mb: Builder, m: Match) -> Var:
        weights = mb.softmax(x=mb.matmul(x=m.query, y=m.key, transpose_y=True), axis=-1)
        return mb.matmul(x=weights, y=m.value)


@dataclass(frozen=True)
class WithoutMask(DecomposeAttention):
    """Wrong: the mask is forgotten."""

    def rewrite(self, mb: Builder, m: Match) -> Var:
        return super().rewrite(mb, m.bind(mask=None))


@pytest.mark.parametrize("wrong", [Unscaled(), WithoutMask()], ids=lambda w: type(w).__name__)
def test_the_check_of_sites_catches_wrong_parts(wrong: DecomposeAttention) -> None:
    with pytest.raises(SurgeryError, match="decompose_attention"):
        apply_pass(wrong, fused(types.bool))


@pytest.mark.one_of(2)
@pytest.mark.parametrize("width", [20, 32, 80, 128])
def test_a_scale_that_fp16_rounds_is_made_of_two(width: int) -> None:
    shape = (1, 2, 6, width)

    @mb.program(input_specs=[mb.TensorSpec(shape, dtype=types.fp16)], opset_version=ct.target.iOS18)
    def program(x: Var) -> Var:
        return mb.scaled_dot_product_attention(query=x, key=x, value=mb.relu(x=x))

    after, session = apply_pass(DecomposeAttention(), program)
    assert session.changes
    assert sum(op.op_type == "mul" for op in walk_ops(after)) == 2


test_cases, test_surroundings = table(
    DecomposeAttention(),
    *(
        rewrites(
            fused,
            mask,
            rtol=1e-05,
            inputs={
                "x": np.random.default_rng(0).standard_normal(SHAPE).astype(np.float32),
                "mask_": np.tril(np.ones((1, 1, 6, 6), bool))
                if mask is types.bool
                else np.where(np.tril(np.ones((1, 1, 6, 6), bool)), 0, -10000.0).astype(np.float32),
            },
        )
        for mask in [None, types.fp32, types.bool]
    ),
    refuses("%x has a dynamic shape", fused, shape=(1, 2, new_symbol(), 8)),
)
