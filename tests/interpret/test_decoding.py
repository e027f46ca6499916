"""What cannot be written is an error in words, with a cache and without."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from decoders import Decoder as Small
from decoders import cached

from anesurgery.errors import InterpretError
from anesurgery.interpret import Predictor
from anesurgery.interpret.decoding import Decoder, Sampler, generate
from anesurgery.mil import Program
from anesurgery.passes.embedding_matmul import EmbeddingMatmul
from anesurgery.testing import apply_pass

MODELS = {"cached": cached(layers=1), "stateless": Small(half=True, layers=1).program()}
"""Of 31 tokens, with a context of 24."""

TOKENS: dict[str, Any] = {
    "-1 is no token of the model; tokens are from 0 to 30": [1, -1],
    "31 is no token of the model": [31],
    "1099511627776 is no token": [2**40],
    r"tokens are whole numbers, and not \[1.5, 2\]": [1.5, 2],
    "whole numbers, and not .nan": [float("nan")],
    "whole numbers, and not .'a'": ["a"],
    "whole numbers, and not 'abc'": "abc",
    "whole numbers, and not .True": [True, False],
    "one row, and not an array of shape": [[1, 2], [3, 4]],
    "no tokens; give one at least": [],
    r"25 tokens and 2 steps do not fit into the context of 24": [1] * 25,
}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("words", TOKENS)
def test_prompts_that_hold_no_tokens(name: str, words: str) -> None:
    with pytest.raises(InterpretError, match=words):
        generate(MODELS[name], TOKENS[words], 2)


@pytest.mark.parametrize("steps", [0, -1, 1.5, True])
def test_steps_that_are_none(steps: Any) -> None:
    with pytest.raises(InterpretError, match=r"steps=.*; it must be a positive integer"):
        generate(MODELS["cached"], [1], steps)


SAMPLERS: list[tuple[dict[str, Any], str]] = [
    ({"temperature": -1.0}, "temperature=-1.0"),
    ({"temperature": float("nan")}, "temperature=nan"),
    ({"top_k": -3}, "top_k=-3"),
    ({"top_k": 1.5}, "top_k=1.5"),
    ({"top_p": 0.0}, "top_p=0.0"),
    ({"top_p": 2.0}, "top_p=2.0"),
]


@pytest.mark.parametrize(("options", "words"), SAMPLERS)
def test_samplers_that_choose_nothing(options: dict[str, Any], words: str) -> None:
    with pytest.raises(InterpretError, match=words):
        Sampler(**options)


@pytest.mark.parametrize("sampler", [Sampler(1e-320), Sampler(1e-320, top_k=1000), Sampler(1.0, top_k=1)])
def test_the_coldest_samplers_take_the_likeliest(sampler: Sampler) -> None:
    expected = generate(MODELS["cached"], [1, 2], 6).written
    assert generate(MODELS["cached"], [1, 2], 6, sampler).written == expected


def test_a_sampler_of_its_own_must_give_tokens() -> None:
    model = MODELS["cached"]
    assert generate(model, [1, 2], 2, lambda logits, rng: 7).written == (7, 7)
    with pytest.raises(InterpretError, match="99 is no token of the model"):
        generate(model, [1, 2], 1, lambda logits, rng: 99)
    with pytest.raises(InterpretError, match="sampler='greedy'; it must be a Sampler"):
        generate(model, [1, 2], 1, "greedy")  # type: ignore[arg-type]


def test_where_no_table_says_how_many_tokens_there_are_the_logits_do() -> None:
    by_product, session = apply_pass(EmbeddingMatmul(), Small(half=True).program(), target="M1/macOS 14")
    assert session.changes
    with pytest.raises(InterpretError, match="31 is no token of the model; tokens are from 0 to 30"):
        generate(by_product, [31], 1)


@pytest.mark.parametrize("wrong", [np.nan, np.inf])
def test_logits_that_are_no_numbers_are_an_error(wrong: float) -> None:
    logits = np.array([0.0, wrong, 2.0])
    for sampler in (Sampler(), Sampler(1.0)):
        with pytest.raises(InterpretError, match="the largest logit is"):
            sampler(logits, np.random.default_rng(0))


def test_whole_numbers_may_be_floats_and_in_a_batch_of_one() -> None:
    expected = Decoder(MODELS["cached"]).feed([1, 2, 3])
    for given in (np.array([1.0, 2.0, 3.0]), np.array([[1, 2, 3]])):
        np.testing.assert_array_equal(Decoder(MODELS["cached"]).feed(given), expected)


@pytest.mark.parametrize(("function", "position"), [("decode", 24), ("decode", -1), ("prefill", 21)])
def test_positions_beyond_the_context(function: str, position: int) -> None:
    program: Program = MODELS["cached"]
    predict = Predictor(program, function=function)
    count = {"decode": 1, "prefill": 4}[function]
    state = predict.make_state()
    ids = np.ones((1, count), np.int32)
    predict({"ids": ids, "position": [0]}, state=state)
    predict({"ids": ids, "position": [24 - count]}, state=state)
    words = f"position is {position}.* it is from 0 to {24 - count}, as the context holds 24"
    with pytest.raises(InterpretError, match=words):
        predict({"ids": ids, "position": [position]}, state=state)
