"""What cannot be written is an error in words, with a cache and without."""

from __future__ import annotations

import inspect
import itertools
import re
from typing import Any

import numpy as np
import pytest
from decoders import Decoder as Small
from decoders import cached

import anesurgery as ane
from anesurgery.errors import InterpretError, SurgeryError
from anesurgery.interpret import Predictor
from anesurgery.interpret.decoding import Decoder, generate
from anesurgery.interpret.sampler import Sampler
from anesurgery.mil import Program, Var, ct, mb, types
from anesurgery.passes.add_cache import AddCache
from anesurgery.passes.embedding_matmul import EmbeddingMatmul
from anesurgery.passes.select_last_token import SelectLastToken
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


@pytest.mark.one_of(3)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("words", TOKENS)
def test_prompts_that_hold_no_tokens(name: str, words: str) -> None:
    with pytest.raises(InterpretError, match=words):
        generate(MODELS[name], TOKENS[words], 2)


@pytest.mark.parametrize("steps", [0, -1, 1.5, True])
def test_steps_that_are_none(steps: Any) -> None:
    with pytest.raises(InterpretError, match=r"steps=.*; it must be a positive integer"):
        generate(MODELS["cached"], [1], steps)


STOPS: list[tuple[Any, str]] = [
    (99, "99 is no token of the model; tokens are from 0 to 30"),
    (-1, "-1 is no token of the model"),
    ([3, 31], "31 is no token of the model"),
    ("7", r"stop='7'; it must be a token, or several as \[2, 7\]; `chat` takes texts"),
    (["7"], "'7' is no token; tokens are whole numbers; `chat` takes texts"),
    (1.5, "stop=1.5; it must be a token"),
    ([2, 1.5], "1.5 is no token"),
    (True, "stop=True; it must be a token"),
    (object(), "it must be a token, or several"),
]


@pytest.mark.parametrize(("stop", "words"), STOPS)
def test_stops_that_are_no_tokens(stop: Any, words: str) -> None:
    with pytest.raises(InterpretError, match=words):
        generate(MODELS["cached"], [1], 2, stop=stop)


def test_a_single_token_has_no_speed() -> None:
    """The wrong version: "1 tokens ... nan tokens/s"."""
    single, two = (str(generate(MODELS["cached"], [1, 2], steps)) for steps in (1, 2))
    assert re.fullmatch(r"1 token after a prompt of 2: prompt \d+\.\d\d s", single)
    assert re.fullmatch(r"2 tokens after .*, then [\d.]+ tokens/s", two)


@pytest.mark.parametrize("name", MODELS)
def test_a_text_ends_with_any_of_the_tokens_to_stop_after(name: str) -> None:
    model = MODELS[name]
    free = generate(model, [1, 2, 3], 10).written
    assert len(free) == 10
    first = {token: free.index(token) for token in free}
    last = max(first, key=lambda token: first[token])
    any_of: tuple[Any, ...] = (last, [last], (last, 30), {last}, np.array([last]), np.int64(last))
    for stop in any_of:
        assert generate(model, [1, 2, 3], 10, stop=stop).written == free[: first[last] + 1]
    assert generate(model, [1, 2, 3], 10, stop=[last, free[1]]).written == free[: first[free[1]] + 1]
    unused = next(token for token in range(31) if token not in free)
    none_of: tuple[Any, ...] = (None, [], unused, [unused])
    for stop in none_of:
        assert generate(model, [1, 2, 3], 10, stop=stop).written == free


@pytest.mark.parametrize("seed", [-1, 1.5, "x", None, True])
def test_seeds_that_are_none(seed: Any) -> None:
    with pytest.raises(SurgeryError, match=r"seed=.*; it must be a whole number from 0 up"):
        generate(MODELS["cached"], [1], 2, seed=seed)


SAMPLERS: list[tuple[dict[str, Any], str]] = [
    ({"temperature": -1.0}, "temperature=-1.0"),
    ({"temperature": float("nan")}, "temperature=nan"),
    ({"temperature": "hot"}, "temperature='hot'; it must be a finite number"),
    ({"temperature": True}, "temperature=True"),
    ({"temperature": None}, "temperature=None"),
    ({"top_p": "all"}, "top_p='all'; it must be above 0"),
    ({"top_p": True}, "top_p=True"),
    ({"top_k": True}, "top_k=True"),
    ({"top_k": -3}, "top_k=-3"),
    ({"top_k": 1.5}, "top_k=1.5"),
    ({"top_p": 0.0}, "top_p=0.0"),
    ({"top_p": 2.0}, "top_p=2.0"),
]


@pytest.mark.parametrize(("options", "words"), SAMPLERS)
def test_samplers_that_choose_nothing(options: dict[str, Any], words: str) -> None:
    with pytest.raises(InterpretError, match=words):
        Sampler(**options)


@pytest.mark.one_of(2)
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


def test_a_scalar_output_holds_no_logits() -> None:
    table = np.eye(7, dtype=np.float32)

    @mb.program(input_specs=[mb.TensorSpec((1, 2), dtype=types.int32)], opset_version=ct.target.iOS17)
    def model(tokens: Var) -> Any:
        logits = mb.mul(x=mb.gather(x=table, indices=tokens, axis=0), y=2.0)
        return logits, mb.reduce_sum(x=logits)

    assert list(generate(model, [1, 3], 1).written) == [3]


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


# -- the logits of the last token only ---------------------------------------------------------------------

PREFILL = 6


def last_only(window: bool, **options: Any) -> Program:
    """A decoder with a cache whose calls give one row each."""
    program = Small(layers=1, mask="window" if window else "added").program()
    for step in (AddCache(prefill=PREFILL, cache="io"), SelectLastToken(**options)):
        program, session = apply_pass(step, program)
        assert session.changes, session.refusals
    return program


LAST_ONLY = {
    "last": {},
    "input": {"position": "input"},
    "input of another name": {"position": "input", "input_name": "p"},
}


@pytest.mark.one_of(6)
@pytest.mark.parametrize("window", [False, True])
@pytest.mark.parametrize("how", LAST_ONLY)
def test_prompts_of_every_length_are_read_as_the_whole_model_reads_them(how: str, window: bool) -> None:
    whole = Small(layers=1, mask="window" if window else "added").program()
    decoder, reads = Decoder(last_only(window, **LAST_ONLY[how])), Decoder(whole)
    ids = np.random.default_rng(1).integers(0, 31, 3 * PREFILL).tolist()
    expected = reads.feed(ids)
    for count in range(1, PREFILL + 4):
        decoder.reset()
        for whole_rows in (False, True):  # then a second part, after what was read
            rows = decoder.feed(ids[:count], whole=whole_rows)
            np.testing.assert_allclose(rows[-1], expected[count - 1], rtol=1e-4, atol=1e-5)
            if whole_rows:
                assert rows.shape == (count, 31)
                np.testing.assert_allclose(rows, expected[:count], rtol=1e-4, atol=1e-5)
            decoder.reset()
    for cut in (1, 4, PREFILL, 8, 2 * PREFILL, 17):
        decoder.reset()
        decoder.feed(ids[:cut], whole=False)
        np.testing.assert_allclose(decoder.feed(ids[cut:], whole=False)[-1], expected[-1], rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_a_short_prompt_costs_one_call_where_an_input_picks_the_row(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    host = Decoder._run

    def counted(self: Decoder, call: Any, *given: Any, **named: Any) -> Any:
        calls.append(call.length)
        return host(self, call, *given, **named)

    monkeypatch.setattr(Decoder, "_run", counted)
    for how, lengths in (("input", [PREFILL]), ("last", [1, 1, 1, 1])):
        calls.clear()
        Decoder(last_only(False, **LAST_ONLY[how])).feed([1, 2, 3, 4], whole=False)
        assert calls == lengths


@pytest.mark.one_of(4)
@pytest.mark.parametrize("how", LAST_ONLY)
def test_the_whole_model_is_compared_with_one_that_gives_its_last_token(how: str) -> None:
    steps = [AddCache(prefill=PREFILL, cache="io"), SelectLastToken(**LAST_ONLY[how])]
    found = ane.apply(Small().program(), steps, prove="model", quiet=True)
    assert found.proof is not None
    assert found.proof.ok, found.proof


def test_a_stateless_model_of_one_row_says_what_to_do() -> None:
    model, _ = apply_pass(SelectLastToken(), Small().program())
    with pytest.raises(InterpretError, match="3 tokens do not fill it: use `select_last_token` with position="):
        generate(model, [1, 2, 3], 2)
    picked, _ = apply_pass(SelectLastToken(position="input"), Small().program())
    assert generate(picked, [1, 2, 3], 4).written == generate(Small().program(), [1, 2, 3], 4).written


# -- beyond the context ------------------------------------------------------------------------------------


def left_of(read: list[int], new: int, drop: int, context: int = 24) -> list[int]:
    """What is left of a text where so many more are read."""
    while len(read) + new > context:
        read = read[drop:]
    return read


@pytest.mark.one_of(4)
@pytest.mark.parametrize("mask", ["added", "window"])
@pytest.mark.parametrize("positions", ["rotary", "learned"])
def test_beyond_the_context_positions_begin_anew(mask: str, positions: str) -> None:
    stateless = Small(layers=2, mask=mask, positions=positions).program()
    whole = Decoder(stateless)
    for writes in ("slice", "blend"):
        model, _ = apply_pass(AddCache(prefill=7, writes=writes, required=True), stateless)
        decoder = Decoder(model, drop=5)
        read: list[int] = []
        for token in np.random.default_rng(0).integers(0, 31, 40).tolist():
            read = [*left_of(read, 1, 5), token]
            whole.reset()
            expected = whole.feed(read)[-1]
            np.testing.assert_allclose(decoder.feed([token])[-1], expected, rtol=1e-2, atol=5e-3)
        assert decoder.position == len(read) == 20


@pytest.mark.one_of(4)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("count", [24, 25, 31, 60])
def test_of_a_prompt_beyond_the_context_the_last_tokens_are_read(name: str, count: int) -> None:
    prompt = np.random.default_rng(2).integers(0, 31, count).tolist()
    decoder, whole = Decoder(MODELS[name], drop=6), Decoder(MODELS["stateless"])
    decoder.feed([1, 2, 3])
    found = decoder.feed(prompt, whole=False)[-1]
    kept = left_of([1, 2, 3, *prompt], 0, 6)
    np.testing.assert_allclose(found, whole.feed(kept)[-1], rtol=1e-2, atol=5e-3)
    assert decoder.feed(prompt).shape == (count, 31)


@pytest.mark.slow
def test_a_text_has_no_end_where_old_tokens_are_forgotten() -> None:
    written = list(itertools.islice(ane.stream(MODELS["cached"], [1, 2, 3], drop=8), 100))
    assert len(written) == 100
    assert written == list(generate(MODELS["cached"], [1, 2, 3], 100, drop=8).written)
    assert written[:20] == list(generate(MODELS["cached"], [1, 2, 3], 20).written)


@pytest.mark.parametrize("drop", [0, -1, 24, 1.5, True])
def test_what_cannot_be_forgotten_is_an_error(drop: Any) -> None:
    with pytest.raises(InterpretError, match=r"drop=.*; it must be a whole number from 1 to 23"):
        generate(MODELS["cached"], [1], 2, drop=drop)


# -- every option does something, or is refused ------------------------------------------------------------


def test_a_decoder_has_its_own_options() -> None:
    decoder = Decoder(MODELS["cached"])
    options: tuple[dict[str, Any], ...] = (
        {"precision": "fp16"},
        {"device": "cpu"},
        {"tables": {}},
        {"drop": 2},
    )
    for option in options:
        with pytest.raises(InterpretError, match=f"{next(iter(option))}: a Decoder has its own"):
            generate(decoder, [1], 1, **option)


def test_tables_of_no_input_are_refused() -> None:
    with pytest.raises(InterpretError, match="tables: 'cos' is no input that needs a table; those are: none"):
        generate(MODELS["cached"], [1], 1, tables={"cos": np.ones((24, 4))})
    with pytest.raises(InterpretError, match="tables=3; give arrays by the names of inputs"):
        generate(MODELS["cached"], [1], 1, tables=3)  # type: ignore[arg-type]


class Nothing:
    """A value that no option can be."""


PREDICTED = {"ids": np.zeros((1, 24), np.int32)}
CALLS: dict[Any, Any] = {
    generate: lambda **options: generate(MODELS["cached"], [1, 2], 2, **options),
    Decoder: lambda **options: Decoder(MODELS["cached"], **options),
    Sampler: Sampler,
    Predictor: lambda **options: Predictor(MODELS["stateless"], **options)(PREDICTED),
    AddCache: lambda **options: apply_pass(AddCache(**options, required=True), Small(layers=1).program()),
}
SWITCHES = {"quiet", "fuse", "required", "fixed_rope"}
"""Options that are true or false, as anything is in Python."""


def options_of(call: Any) -> list[str]:
    """Its arguments that have a default."""
    return [
        n
        for n, p in inspect.signature(call).parameters.items()
        if p.default is not p.empty and n not in SWITCHES
    ]


@pytest.mark.parametrize(
    ("call", "option"), [(c, n) for c in CALLS for n in options_of(c)], ids=lambda v: getattr(v, "__name__", v)
)
def test_no_option_is_taken_and_ignored(call: Any, option: str) -> None:
    with pytest.raises(SurgeryError):
        CALLS[call](**{option: Nothing()})
