"""Frequencies that were decided by the length of a text are told from those that hold for every length."""

from __future__ import annotations

import re

import numpy as np
import pytest

from anesurgery.mil import Array, Program, Var, ct, mb, types
from anesurgery.passes.add_cache import AddCache
from anesurgery.passes.add_cache.frequencies import of_one_length
from anesurgery.testing import apply_pass

TOKENS, PAIRS = 256, 32
PLACES = np.arange(PAIRS) / PAIRS


def plain(base: float = 1e4) -> Array:
    return np.asarray(base**-PLACES)


def dynamic(factor: float, original: int, length: int = TOKENS) -> Array:
    """As published: the base grows with the length, so that the slowest pair is slowed down by the factor."""
    grown = factor * length / original - (factor - 1)
    return plain(1e4 * grown ** (PAIRS / (PAIRS - 1)))


def ramp(along: Array, low: float, high: float, factor: float, base: float = 1e4) -> Array:
    """The fast pairs as they are, the slow ones slower by a factor, and a ramp between."""
    share = np.clip((along - low) / (high - low), 0, 1)
    return np.asarray(plain(base) * (1 - share + share / factor))


def longrope(most: float) -> Array:
    factors = 1 + (most - 1) * np.sort(np.random.default_rng(0).random(PAIRS)) ** 2
    return plain() / factors


def table(speeds: Array, scale: float = 1.0, half: bool = False, interleaved: bool = False) -> Array:
    angles = np.outer(np.arange(TOKENS), speeds).astype(np.float32)
    angles = angles.repeat(2, 1) if interleaved else np.concatenate([angles, angles], 1)
    return np.asarray(np.cos(angles) * scale).astype(np.float16 if half else np.float32)


STATIC = {
    "default": plain(),
    "llama 3": plain(5e5),
    "starcoder 2": plain(999999.4420358813),
    "linear": plain(1e6) / 8,
    "yarn": ramp(PLACES, 0.2, 0.6, 4.0),
    "yarn from the first pair on": ramp(PLACES, 0.0, 0.4, 16.0),
    "llama3": ramp(-plain(5e5), -1 / 64, -1 / 256, 8.0, 5e5),
    "half of the pairs": plain() * (np.arange(PAIRS) < PAIRS // 2),
}
BY_LENGTH = {
    "dynamic": (dynamic(4.0, 128), 1.0, 'rotary base is [0-9]{2},[0-9]{3}.*"dynamic"'),
    "dynamic, just beyond": (dynamic(2.0, 250), 1.0, "computed from the length of the text"),
    "the short set": (longrope(2.0), 1.2, "no base, as those of a longrope"),
    "the long set": (longrope(60.0), 1.2, "no base, as those of a longrope"),
    "one long factor": (plain() / 4, 1.2, "4 times slower .* cosines scaled by 1.2"),
}


@pytest.mark.one_of(3)
@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("word", STATIC)
def test_static_frequencies_are_let_be(word: str, half: bool) -> None:
    assert of_one_length(table(STATIC[word], 1.0, half, interleaved=half)) is None


@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("word", BY_LENGTH)
def test_frequencies_of_one_length_are_named_with_what_they_are(word: str, half: bool) -> None:
    speeds, scale, words = BY_LENGTH[word]
    why = of_one_length(table(speeds, scale, half, interleaved=half))
    assert why is not None
    assert re.search(words, why)


def decoder(cosines: Array) -> Program:
    """Queries that are their own keys and values, turned by cosines only."""
    width = cosines.shape[1]
    words = np.random.default_rng(0).standard_normal((11, width)).astype(np.float32)
    mask = np.triu(np.full((TOKENS, TOKENS), -1e4, np.float32), 1)

    @mb.program(input_specs=[mb.TensorSpec((1, TOKENS), types.int32)], opset_version=ct.target.iOS18)
    def program(ids: Var) -> Var:
        x = mb.gather(x=words, indices=ids, axis=0)
        turned = mb.mul(x=x, y=mb.const(val=cosines[None], name="cos"), name="turned")
        scores = mb.add(x=mb.matmul(x=turned, y=turned, transpose_y=True), y=mask)
        return mb.linear(x=mb.matmul(x=mb.softmax(x=scores, axis=-1), y=x), weight=words, name="logits")

    made: Program = program
    return made


def refusals(program: Program, fixed_rope: bool = False) -> list[str]:
    made, session = apply_pass(AddCache(prefill=8, fixed_rope=fixed_rope), program)
    assert ("decode" in made.functions) is not bool(session.refusals)
    return [str(refusal) for _, refusal in session.refusals]


def test_a_cache_is_refused_for_a_table_of_one_length_and_added_where_the_caller_answers_for_it() -> None:
    assert not refusals(decoder(table(plain())))
    (reason,) = refusals(decoder(table(dynamic(4.0, 128))))
    assert reason.startswith("turned: %cos: its rotary base is")
    assert "say fixed_rope=True where they hold for texts of every length" in reason
    assert not refusals(decoder(table(dynamic(4.0, 128))), fixed_rope=True)
