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


@pytest.mark.parametrize(("fill", "seen"), [(-np.inf, 0), (-1e4, 0), (7.0, 1)])
def test_a_bias_that_is_filled_may_be_causal(fill: float, seen: int) -> None:
    """As Doge has it: a dynamic number for each key, the keys ahead filled, and heads that share it."""
    ahead = np.triu(np.ones((1, 1, 6, 6), bool), 1)

    @mb.program(input_specs=[mb.TensorSpec((1, 2, 6, 4))], opset_version=ct.target.iOS17)
    def program(x):  # type: ignore[no-untyped-def]
        scores = mb.matmul(x=x, y=x, transpose_y=True)
        one = mb.linear(x=mb.reduce_sum(x=x, axes=[1]), weight=np.ones((1, 4), np.float32))
        keys = mb.tile(x=mb.reshape(x=one, shape=[1, 1, 1, 6]), reps=[1, 1, 6, 1])
        own = mb.expand_dims(x=mb.select(cond=ahead, a=np.float32(fill), b=keys), axes=[2])
        bias = mb.reshape(x=mb.tile(x=own, reps=[1, 1, 2, 1, 1]), shape=[1, 2, 6, 6])
        return mb.matmul(x=mb.softmax(x=mb.add(x=scores, y=bias), axis=-1), y=x)

    found = makeup(program)
    assert (found.attentions, found.open) == (1, seen)
