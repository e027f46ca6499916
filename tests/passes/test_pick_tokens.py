"""Models that give tokens in place of logits write what they wrote."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from coremltools.converters.mil.mil import get_new_symbol
from decoders import Decoder, cached
from pass_cases import refuses, table

import anesurgery as ane
from anesurgery.errors import InterpretError, PassError, UnknownName
from anesurgery.interpret.decoding import generate
from anesurgery.interpret.sampler import Sampler
from anesurgery.mil import Program, Var, ct, mb, types
from anesurgery.passes.add_cache import AddCache
from anesurgery.passes.pick_tokens import PickTokens
from anesurgery.passes.split_head import SplitHead
from anesurgery.testing import apply_pass, assert_refuses


@pytest.mark.one_of(4)
@pytest.mark.parametrize("options", [{}, {"k": 5}, {"k": 31}])
def test_a_decoder_writes_what_it_wrote(options: Any) -> None:
    program = cached()
    after, session = apply_pass(PickTokens(**options), program)
    assert session.changes
    assert [len(f.outputs) for f in after.functions.values()] == [1 + ("k" in options)] * 2
    assert generate(after, [3, 1, 4], 18).written == generate(program, [3, 1, 4], 18).written


def test_it_samples_from_the_likeliest_few() -> None:
    program = cached()
    after, _ = apply_pass(PickTokens(k=4, temperature=0.5), program)
    found = generate(after, [3, 1, 4], 18, Sampler(temperature=1.0), seed=2)
    expected = generate(program, [3, 1, 4], 18, Sampler(temperature=0.5, top_k=4), seed=2)
    assert found.written == expected.written


@pytest.mark.one_of(2)
@pytest.mark.parametrize("options", [{}, {"k": 3}])
def test_the_whole_chain_is_compared(options: Any) -> None:
    steps = [AddCache(prefill=4), PickTokens(**options)]
    surgery = ane.apply(Decoder(half=True).program(), steps, prove="model", quiet=True)
    assert surgery.proof is not None
    assert surgery.proof.ok


def head(words: int = 6, length: Any = 2) -> Program:
    @mb.program(input_specs=[mb.TensorSpec((1, length, 4))], opset_version=ct.target.iOS18)
    def program(x: Var) -> Any:
        weight = np.random.default_rng(0).standard_normal((words, 4)).astype(np.float32)
        return mb.linear(x=x, weight=weight, name="logits"), mb.relu(x=x, name="hidden")

    return program


def test_soft_caps_and_temperatures_of_the_few() -> None:
    after, _ = apply_pass(PickTokens(k=3, cap=2.0, temperature=0.5), head())
    x = np.random.default_rng(1).standard_normal((1, 2, 4)).astype(np.float32)
    logits, made = ane.run(head(), {"x": x})["logits"], ane.run(after, {"x": x})
    capped = np.sort(2 * np.tanh(logits / 2) / 0.5)[..., :-4:-1]
    np.testing.assert_allclose(made["top_values"], capped, rtol=1e-5)
    np.testing.assert_array_equal(made["top_tokens"], np.argsort(-logits)[..., :3])
    assert "hidden" in made


def test_each_part_of_a_head_gives_its_likeliest_token() -> None:
    program = cached(words=200)
    steps = [SplitHead(most=64), AddCache(prefill=4), PickTokens(each_part=True)]
    surgery = ane.apply(Decoder(half=True, words=200).program(), steps, prove="model", quiet=True)
    assert surgery.proof is not None
    assert surgery.proof.ok
    after = surgery.program
    decode = after.functions["decode"]
    assert {v.name: tuple(v.shape) for v in decode.outputs} == {
        "part_values": (1, 1, 4),
        "part_tokens": (1, 1, 4),
    }
    assert not any(int(v.shape[-1]) == 200 for op in decode.operations for v in op.outputs if v.val is None)
    writing = generate(after, [3, 1, 4], 18)
    assert writing.written == generate(program, [3, 1, 4], 18).written
    assert max(writing.written) >= 64  # of another part than the first
    for sampler in (Sampler(temperature=1.0), Sampler(repetition_penalty=1.2)):
        with pytest.raises(InterpretError, match="the model gives part_tokens, the likeliest, and no logits"):
            generate(after, [3, 1, 4], 2, sampler)


def test_words_that_interleave_are_one_part() -> None:
    parts = np.random.default_rng(0).standard_normal((2, 3, 4)).astype(np.float32)

    @mb.program(input_specs=[mb.TensorSpec((1, 2, 4))], opset_version=ct.target.iOS18)
    def program(x: Var) -> Any:
        return mb.concat(values=[mb.linear(x=x, weight=w) for w in parts], axis=-1, interleave=True)

    after, _ = apply_pass(PickTokens(each_part=True), program)
    x = np.random.default_rng(1).standard_normal((1, 2, 4)).astype(np.float32)
    (logits,) = ane.run(program, {"x": x}).values()
    np.testing.assert_array_equal(ane.run(after, {"x": x})["part_tokens"], np.argmax(logits, -1)[..., None])


def test_rows_of_dynamic_length() -> None:
    after, _ = apply_pass(PickTokens(), head(length=get_new_symbol()))
    x = np.random.default_rng(1).standard_normal((1, 5, 4)).astype(np.float32)
    logits = ane.run(head(length=5), {"x": x})["logits"]
    np.testing.assert_array_equal(ane.run(after, {"x": x})["tokens"], np.argmax(logits, -1))


def test_refusals() -> None:
    assert_refuses(PickTokens(k=7), head(), "%logits has 6 words, fewer than k=7")
    words = "%logits times 3e+39, by cap and temperature, overflows"
    assert_refuses(PickTokens(k=2, cap=30.0, temperature=1e-38), head(), words)

    numbers = mb.program(input_specs=[mb.TensorSpec((1, 2), types.int32)], opset_version=ct.target.iOS18)(
        lambda x: mb.add(x=x, y=1, name="y")
    )

    assert_refuses(PickTokens(), numbers, "no output holds logits: y")
    with pytest.raises(UnknownName, match="unknown output 'logit'; did you mean 'logits'"):
        apply_pass(PickTokens(output="logit"), head())
    for options, words in (
        ({"k": 0}, "k=0; it must be a positive integer"),
        ({"k": 2, "temperature": 0}, "temperature=0; it must be above 0"),
        ({"cap": 30.0}, "the likeliest token depends on no temperature or cap"),
        ({"k": 2, "each_part": True}, "each part gives one token; each_part=True takes no k"),
    ):
        with pytest.raises(PassError, match=words):
            PickTokens(**options)


def rows_that_are_drawn() -> Program:
    return mb.program(input_specs=[mb.TensorSpec((2, 4))], opset_version=ct.target.iOS18)(
        lambda x: mb.add(x=x, y=mb.random_normal(shape=[2, 4]), name="y")
    )


test_cases, test_surroundings = table(
    PickTokens(), refuses("%y is drawn at random, and is another in each run", rows_that_are_drawn)
)
