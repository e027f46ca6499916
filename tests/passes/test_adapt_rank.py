"""Ops between reshapes: which axes are merged, and which masks allow it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from pass_cases import refuses, stays, table

from anesurgery.errors import ProofError
from anesurgery.mil import Program, Var, ct, mb, walk_ops
from anesurgery.passes import adapt_rank
from anesurgery.passes.adapt_rank import AdaptRank
from anesurgery.testing import apply_pass, assert_same_numbers

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


@pytest.mark.one_of(2)
@pytest.mark.parametrize("name", CASES)
def test_the_numbers_stay(name: str) -> None:
    after, session = apply_pass(AdaptRank(), CASES[name])
    ranks = {
        op.op_type: op.outputs[0].rank
        for op in walk_ops(after)
        if op.op_type not in ("reshape", "relu", "const")
    }
    assert max(ranks.values()) <= 4, session.refusals
    assert session.changes[0].proof is not None
    assert_same_numbers(CASES[name], after, rtol=1e-5)


def test_a_mask_of_the_wrong_axis_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The wrong version: the mask of the heads is that of the merged axes."""
    monkeypatch.setattr(adapt_rank, "_mask", lambda mask, query: (mask[0], 1, *mask[1:]))
    with pytest.raises(ProofError, match="old and new differ"):
        apply_pass(AdaptRank(), attention((2, 4, 5), (1, 2, 2, 4, 6), (1, 2, 2, 5, 6)))


test_cases, test_surroundings = table(
    AdaptRank(),
    stays(linear, 2, 2, 2, 3),
    stays(attention, None, (2, 4, 6), (2, 5, 6)),
    refuses("the mask (1, 3, 1, 4, 5) is broadcast over the axes", attention, (1, 3, 1, 4, 5)),
    refuses("the mask (3, 2, 4, 5) is broadcast", attention, (3, 2, 4, 5)),
)
