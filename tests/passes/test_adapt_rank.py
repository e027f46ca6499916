"""Ops between reshapes: which axes are merged, and which masks allow it."""

from __future__ import annotations

from typing import Any

import numpy as np
from pass_cases import refuses, rewrites_each, stays, table

from anesurgery.mil import Program, Var, ct, mb
from anesurgery.passes.adapt_rank import AdaptRank

WEIGHT = np.random.default_rng(0).standard_normal((5, 3)).astype(np.float32)


def linear(*shape: int) -> Program:
    return mb.program(input_specs=[mb.TensorSpec(shape)])(
        lambda x: mb.linear(x=x, weight=WEIGHT, bias=WEIGHT[:, 0])
    )


def attention(mask: Any = None, query: Any = (2, 3, 2, 4, 6), key: Any = (2, 3, 2, 5, 6)) -> Program:
    specs = [mb.TensorSpec(shape) for shape in (query, key, key, mask or (1,))]

    @mb.program(input_specs=specs, opset_version=ct.target.iOS18)
    def program(q: Var, k: Var, v: Var, m: Var) -> Any:
        masked = {} if mask is None else {"attn_mask": m}
        return mb.scaled_dot_product_attention(query=q, key=k, value=v, **masked), mb.relu(x=m)

    return program


CASES = {
    "linear": linear(2, 1, 2, 2, 3),
    "attention": attention(),
    "mask of two axes": attention((4, 5)),
    "mask of heads": attention((2, 4, 5)),
    "mask of four axes": attention((1, 2, 4, 5)),
    "mask of all": attention((2, 3, 2, 4, 5)),
    "mask of ones": attention((1, 1, 1, 4, 5)),
}


test_cases, test_surroundings = table(
    AdaptRank(),
    stays(linear, 2, 2, 2, 3),
    stays(attention, None, (2, 4, 6), (2, 5, 6)),
    refuses("the mask (1, 3, 1, 4, 5) is broadcast over the axes", attention, (1, 3, 1, 4, 5)),
    refuses("the mask (3, 2, 4, 5) is broadcast", attention, (3, 2, 4, 5)),
    *rewrites_each(CASES, rtol=1e-5),
)
