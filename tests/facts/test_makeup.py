"""What a network is made of: attention with sinks counts as attention, and what resembles it does not."""

from __future__ import annotations

import numpy as np
import pytest

from anesurgery.facts.makeup import makeup
from anesurgery.mil import Program, ct, mb


def attended(sinks: bool, computed: bool = True, summed: bool = True) -> Program:
    """Scores with a number more for each head, as GPT-OSS has them, less the largest."""
    rng = np.random.default_rng(0)

    @mb.program(input_specs=[mb.TensorSpec((1, 2, 6, 4))], opset_version=ct.target.iOS17)
    def made(x):  # type: ignore[no-untyped-def]
        keys = x if computed else rng.standard_normal((1, 2, 6, 4)).astype(np.float32)
        scores = mb.mul(x=mb.matmul(x=x, y=keys, transpose_y=True), y=np.float32(0.5))
        if sinks:
            more = rng.standard_normal((1, 2, 6, 1)).astype(np.float32)
            scores = mb.concat(values=[scores, more], axis=-1)
        scores = mb.sub(x=scores, y=mb.reduce_max(x=scores, axes=[-1], keep_dims=True))
        weights = mb.softmax(x=scores, axis=-1)
        if sinks:
            weights = mb.slice_by_index(x=weights, begin=[0] * 4, end=[1, 2, 6, 6])
        return mb.matmul(x=weights, y=x) if summed else mb.relu(x=weights)

    return made


def test_attention_with_sinks_is_attention() -> None:
    assert makeup(attended(sinks=True)).attentions == 1
    assert makeup(attended(sinks=True)).open == 0  # what a query sees is not read


@pytest.mark.parametrize("wrong", [{"computed": False}, {"summed": False}])
def test_a_softmax_of_other_things_is_not(wrong: dict[str, bool]) -> None:
    assert makeup(attended(sinks=True, **wrong)).attentions == 0
