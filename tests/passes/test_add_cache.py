"""Decoders with a cache give what the stateless ones give, over the whole context; others are refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from decoders import Decoder as Small
from pass_cases import refuses, table

import anesurgery as ane
from anesurgery.checking.comparison import compare
from anesurgery.checking.output_comparison import compare_arrays
from anesurgery.errors import InterpretError, PassError, SurgeryError
from anesurgery.facts.token_axes import MIXES
from anesurgery.interpret import Predictor
from anesurgery.interpret.decoding import Decoder, generate
from anesurgery.interpret.sampler import Sampler
from anesurgery.mil import Array, Program, Var, ct, mb, types
from anesurgery.passes.add_cache import AddCache, caches
from anesurgery.testing import apply_pass, assert_refuses, reasons
from anesurgery.text import to_text

SPELLINGS = {
    "llama": Small(),
    "gpt": Small(positions="learned", groups=4, keys_turned=True),
    "window": Small(mask="window"),
    "window then whole": Small(tokens=80, mask="windows"),
    "selected": Small(mask="selected", positions="none"),
    "biased by distance": Small(mask="distance", positions="none"),
    "any bias": Small(mask="given", positions="none"),
    "fused": Small(fused=True),
    "distances and mask in one constant": Small(fused=True, mask="distance", positions="none"),
    "any bias and mask in one constant": Small(fused=True, mask="given", positions="none"),
    "flat": Small(flat=True, groups=4),
    "as many tokens as all other sizes": Small(tokens=16, heads=16, groups=16, width=16, words=16, layers=1),
    "one group": Small(groups=1, keys_turned=True),
    "neighbours rotated": Small(positions="interleaved"),
    "picked from one product": Small(groups=4, picked=True),
    "keys written in parts": Small(written=True),
}


def cached(program: Program, target: str | None = None, **options: Any) -> tuple[Program, Any]:
    after, session = apply_pass(AddCache(**options), program, target=target)
    assert session.changes, session.refusals
    return after, session


def assert_agree(expected: Array, found: Array) -> None:
    """In fp32 logits agree to 90 dB."""
    assert compare_arrays("logits", expected, found).psnr >= 90


@pytest.mark.one_of(20)
@pytest.mark.parametrize(
    ("name", "cache"), [*((n, "state") for n in SPELLINGS), ("llama", "io"), ("one group", "io")]
)
def test_every_spelling_gives_what_it_gave(name: str, cache: str) -> None:
    program = SPELLINGS[name].program()
    after, session = cached(program, prefill=5, cache=cache)
    # sums in fp32 lie in another order, and that of a matrix library hangs on the processor: 119 to 140 dB
    assert compare(program, after, contract=session.contract, gate=110).ok


def test_half_precision() -> None:
    program = Small(half=True).program()
    after, session = cached(program, prefill=8)
    found = compare(program, after, precision="fp16", contract=session.contract, gate=60)
    assert found.ok, found.verdict


def held(program: Program) -> list[tuple[int, ...]]:
    """The shapes of the states."""
    states = [v for v in program.functions["decode"].inputs.values() if types.is_state(v.sym_type)]
    return [tuple(v.sym_type.wrapped_type().get_shape()) for v in states]


WINDOW = Small(tokens=100, mask="window", layers=1)


@pytest.mark.one_of(6)
@pytest.mark.parametrize("prefill", [1, 5, 8])
@pytest.mark.parametrize("cache", ["state", "io"])
def test_a_window_is_kept_in_a_ring(prefill: int, cache: str) -> None:
    program = WINDOW.program()
    after, session = cached(program, prefill=prefill, cache=cache)
    assert cache == "io" or held(after) == [(2, 2, 32, 4)]
    assert compare(program, after, contract=session.contract, gate=120).ok
    tokens = np.random.default_rng(0).integers(0, 31, 100)
    expected, decoder = Decoder(program).feed(tokens), Decoder(after)
    parts = np.split(tokens, [3, 4, 11, 36, 37, 50, 83, 99])  # calls begin anywhere, and run over the end
    rows = np.concatenate([decoder.feed(part) for part in parts])
    assert_agree(expected, rows)


@pytest.mark.slow
def test_windows_and_whole_contexts_have_a_state_each() -> None:
    program = SPELLINGS["window then whole"].program()
    after, session = cached(program, prefill=8)
    assert held(after) == [(2, 2, 32, 4), (2, 2, 80, 4)]
    assert compare(program, after, contract=session.contract, gate=120).ok
    for options in ({"windows": "mask"}, {"target": "M1/macOS 26"}):
        masked, session = cached(program, prefill=8, **options)
        assert held(masked) == [(4, 2, 80, 4)]
    assert "rings would take one more state" in session.notes[0]
    kept, _ = cached(program, prefill=8, windows="ring", target="M1/macOS 26")
    assert held(kept) == held(after)


@pytest.mark.one_of(2)
@pytest.mark.parametrize(("size", "rows"), [(13, 24), (14, 24)])
def test_a_ring_that_is_too_small_would_be_found(size: int, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A window of 7 and calls of 8 tokens take 14 slots."""
    monkeypatch.setattr(caches, "ring", lambda *sizes, **_: caches.Ring(size, rows))
    program = WINDOW.program()
    after, session = cached(program, prefill=8)
    assert compare(program, after, contract=session.contract, gate=90).ok == (size == 14)


def test_a_prompt_whose_call_is_filled_up_disturbs_nothing() -> None:
    """What is written for tokens that come later is overwritten before it is read."""
    program = WINDOW.program()
    after, _ = cached(program, prefill=8)
    prefill, decode = (Predictor(after, function=name) for name in ("prefill", "decode"))
    state, tokens = prefill.make_state(), np.random.default_rng(1).integers(0, 31, 100).astype(np.int32)
    expected = Decoder(program).feed(tokens)
    for start in range(0, 64, 8):
        given = np.where(np.arange(8) < 5, tokens[start : start + 8], 30)[None]
        prefill({"ids": given, "position": [start]}, state=state)
        for position in range(start + 5, start + 8):
            made = decode({"ids": tokens[None, position : position + 1], "position": [position]}, state=state)
            found = next(iter(made.values())).ravel()
            assert_agree(expected[position], found)


@pytest.mark.slow
@pytest.mark.parametrize("sampler", [Sampler(), Sampler(temperature=0.8, top_k=20, top_p=0.95)])
def test_200_steps_to_the_end_of_the_context(sampler: Sampler) -> None:
    program = Small(tokens=216, layers=1).program()
    after, _ = cached(program)
    prompt = list(np.random.default_rng(3).integers(0, 31, 17))
    texts = [generate(model, prompt, 200, sampler, seed=4) for model in (program, after)]
    assert texts[0].ids == texts[1].ids
    assert len(set(texts[0].written)) > 3  # it says more than one thing
    with pytest.raises(InterpretError, match="17 tokens and 201 steps do not fit into the context of 216"):
        generate(after, prompt, 201)


@pytest.mark.one_of(6)
@pytest.mark.parametrize("length", [1, 4, 5, 9, 20])
def test_prompts_of_any_length(length: int) -> None:
    program = Small(tokens=20).program()
    after, _ = cached(program, prefill=8)
    prompt = list(np.random.default_rng(length).integers(0, 31, length))
    rows = [Decoder(model).feed(prompt) for model in (program, after)]
    assert_agree(*rows)


def test_a_decoder_goes_on_after_what_it_has_read() -> None:
    after, _ = cached(Small().program(), prefill=8)
    decoder = Decoder(after)
    first = generate(decoder, [1, 2, 3], 5)
    again = generate(after, [*first.ids, 7], 4)
    assert generate(decoder, [first.written[-1], 7], 4).written == again.written
    decoder.reset()
    assert generate(decoder, [1, 2, 3], 5).written == first.written
    with pytest.raises(InterpretError, match=r"25 tokens do not fit into the context of 24"):
        Decoder(after).feed([1] * 25)


@pytest.mark.slow
@pytest.mark.parametrize(("chunks", "count"), [(3, 3), ("30 KB", 2)])
def test_chunks_have_a_state_each_and_write_the_same(chunks: int | str, count: int, tmp_path: Path) -> None:
    program = Small(layers=4, words=97).program()
    after, session = cached(program, prefill=5, chunks=chunks)
    assert session.notes == [f"add_cache: a state for each of {count} chunks: split(model, {count})"]
    chain = ane.split(after, count)
    for chunk, state in zip(chain.chunks, ("cache_0", "cache_1", "cache_2"), strict=False):
        for function in chunk.program.functions.values():
            assert [n for n, v in function.inputs.items() if types.is_state(v.sym_type)] == [state]
    assert compare(program, after, contract=session.contract, gate=120).ok
    saved = chain.save(tmp_path / "chain")
    assert compare(program, saved, contract=session.contract, gate=120).ok
    tokens = np.random.default_rng(0).integers(0, 97, 24)
    rows = [Decoder(model).feed(tokens) for model in (program, chain, saved)]
    assert_agree(rows[0], rows[1])
    np.testing.assert_array_equal(rows[1], rows[2])
    decoder = Decoder(saved)
    found = np.concatenate([decoder.feed(part) for part in np.split(tokens, [3, 4, 11, 23])])
    assert_agree(rows[0], found)


@pytest.mark.slow
def test_one_state_for_all_layers_cannot_be_cut() -> None:
    after, _ = cached(Small(layers=4).program())
    with pytest.raises(SurgeryError, match="the state cache_0 stays in one chunk"):
        ane.split(after, max_bytes="4 KB")


def test_a_target_that_cannot_load_it_is_named() -> None:
    (note,) = cached(Small().program(), "M1/macOS 14")[1].notes
    assert "macOS 14 cannot load it: specification 9 needs macOS 15" in note
    assert not cached(Small().program(), "M1/macOS 15")[1].notes


@pytest.mark.parametrize("chunks", [0, -1, "much"])
def test_chunks_that_are_none_are_an_error(chunks: int | str) -> None:
    with pytest.raises(SurgeryError, match="a model has 1 or more|is not a size"):
        apply_pass(AddCache(chunks=chunks), Small().program())


def test_a_state_of_another_model_is_an_error() -> None:
    one, two = (cached(Small(width=w).program(), prefill=8)[0] for w in (2, 4))
    decoder = Decoder(one)
    decoder._state = Decoder(two)._state
    with pytest.raises(InterpretError, match="the state is of another model"):
        decoder.feed([1])


def test_grouped_heads_keep_small_caches_in_one_state() -> None:
    after, _ = cached(Small(groups=1).program())
    for function in after.functions.values():
        (state,) = [v for v in function.inputs.values() if types.is_state(v.sym_type)]
        assert state.sym_type.wrapped_type().get_shape() == (4, 1, 24, 4)  # two layers, keys and values


def test_what_is_shared_is_written_once(tmp_path: Path) -> None:
    program = Small(layers=1, words=4000).program()
    before = ane.apply(program, [], quiet=True).save(tmp_path / "before.mlpackage")
    made = ane.apply(before, AddCache(prefill=4), prove="model", quiet=True)
    after = made.save(tmp_path / "after.mlpackage")
    sizes = [sum(f.stat().st_size for f in p.rglob("weight.bin")) for p in (before, after)]
    assert sizes[1] < 1.1 * sizes[0]
    described = ane.load(after).spec.description
    assert [f.name for f in described.functions] == ["prefill", "decode"]
    assert [s.name for f in described.functions for s in f.state] == ["cache_0", "cache_0"]
    assert generate(after, [1, 2], 3).written == generate(before, [1, 2], 3).written


@pytest.mark.slow
def test_a_program_that_was_never_saved_is_saved(tmp_path: Path) -> None:
    program = Small(layers=1).program()
    after = ane.apply(program, AddCache(prefill=4), quiet=True).save(tmp_path / "after.mlpackage")
    assert sorted(ane.load(after).program.functions) == ["decode", "prefill"]
    assert generate(after, [1, 2], 3).written == generate(program, [1, 2], 3).written


def test_other_inputs_become_constants() -> None:
    @mb.program(
        input_specs=[mb.TensorSpec((1, 8), types.int32), mb.TensorSpec((1, 8))], opset_version=ct.target.iOS18
    )
    def program(ids: Var, seen: Var) -> Var:
        x = mb.gather(x=np.eye(8, dtype=np.float32), indices=ids, axis=0)
        mask = mb.add(x=np.triu(np.full((8, 8), -1e4, np.float32), 1), y=mb.mul(x=mb.sub(x=seen, y=1.0), y=1e4))
        weights = mb.softmax(x=mb.add(x=mb.matmul(x=x, y=x, transpose_y=True), y=mask))
        return mb.matmul(x=weights, y=x, name="y")

    assert_refuses(AddCache(), program, "There are %ids, %seen; make the others constants by `fixed`")
    after, _ = cached(program, fixed={"seen": 1}, prefill=3)
    ids = np.arange(8, dtype=np.int32)[None] % 5
    expected = ane.run(program, {"ids": ids, "seen": np.ones((1, 8), np.float32)})["y"][0]
    assert_agree(expected, Decoder(after).feed(ids))


def built(make: Callable[[Var], Var], opset: Any = ct.target.iOS18) -> Program:
    """A model of 8 tokens."""

    return mb.program(input_specs=[mb.TensorSpec((1, 8), types.int32)], opset_version=opset)(
        lambda ids: make(mb.gather(x=np.ones((5, 4), np.float32), indices=ids, axis=0, name="x"))
    )


def bidirectional(x: Var) -> Var:
    weights = mb.softmax(x=mb.matmul(x=x, y=x, transpose_y=True, name="scores"), name="weights")
    return mb.matmul(x=weights, y=x)


def unmasked_sum(x: Var) -> Var:
    return mb.matmul(x=mb.matmul(x=x, y=x, transpose_y=True), y=x, name="sum")


def one_masked_head(x: Var) -> Var:
    """Heads that are joined after a mask of the first one alone: the second sees what comes."""
    x = mb.transpose(x=mb.reshape(x=x, shape=[1, 8, 2, 2]), perm=[0, 2, 1, 3])
    first, second = mb.split(x=mb.matmul(x=x, y=x, transpose_y=True), num_splits=2, axis=1)
    masked = mb.add(x=first, y=np.triu(np.full((8, 8), -1e4, np.float32), 1))
    weights = mb.softmax(x=mb.concat(values=[masked, second], axis=1), axis=-1, name="both")
    return mb.matmul(x=weights, y=x, name="y")


MIXED = {
    "both: nothing is masked": one_masked_head,
    "weights: nothing is masked": bidirectional,
    "sum: it sums over scores that no causal softmax has masked": unmasked_sum,
    f"running: {MIXES}": lambda x: mb.cumsum(x=x, axis=1, name="running"),
    f"mean: {MIXES}": lambda x: mb.add(x=x, y=mb.reduce_mean(x=x, axes=[1], keep_dims=True, name="mean")),
    "last: it reads only some of the tokens": lambda x: mb.slice_by_index(
        x=x, begin=[0, 7, 0], end=[1, 8, 4], name="last"
    ),
    "part: it writes only some of the tokens": lambda x: mb.slice_update(
        x=np.zeros((1, 9, 4), np.float32), update=x, begin=[0, 1, 0], end=[1, 9, 4], name="part"
    ),
    "merged: it merges the axis of the tokens with others": lambda x: mb.reshape(
        x=x, shape=[1, 32], name="merged"
    ),
    f"back: {MIXES}": lambda x: mb.reverse(x=x, axes=[1], name="back"),
    "swap: the output %swap has no axis of tokens": lambda x: mb.const(
        val=np.ones((1, 8, 4), np.float32), name="swap"
    ),
}


@pytest.mark.parametrize("reason", MIXED)
def test_refuses_what_a_cache_cannot_follow(reason: str) -> None:
    program = built(MIXED[reason])
    after, session = apply_pass(AddCache(), program)
    assert [str(refusal) for _, refusal in session.refusals] == [reason]
    assert to_text(after) == to_text(program)


def test_refuses_models_of_other_forms() -> None:
    assert_refuses(
        AddCache(), built(lambda x: mb.relu(x=x), ct.target.iOS17), "states and slice_update came with iOS 18"
    )
    after, _ = cached(Small().program())
    assert reasons(apply_pass(AddCache(), after)[1]) == [
        "the model has the functions prefill, decode; a cache needs one"
    ]
    with pytest.raises(PassError, match="context=25 is longer than the 24 positions of the model"):
        apply_pass(AddCache(context=25), Small().program())
    with pytest.raises(PassError, match="cache='file'; it may be 'state' or 'io'"):
        AddCache(cache="file")
    with pytest.raises(PassError, match="prefill=0; it must be a positive integer"):
        AddCache(prefill=0)


FAMILIES = (
    "gpt2",
    "llama",
    "qwen2",
    "qwen3",
    "mistral",
    "gemma2",
    "gemma3",
    "phi3",
    "opt",
    "gpt_neox",
    "smollm3",
)


def test_the_page_names_the_families() -> None:
    page = (Path(__file__).parents[2] / "docs" / "decoder-families.md").read_text()
    listed = page.split("<!-- families: begin -->")[1].split("These are refused:")[0]
    assert all(f"`{name}`" in listed for name in FAMILIES)


def routed(axis: int) -> Program:
    """Ones are scattered for each token, along the axis of the tokens or that of the channels."""

    @mb.program(input_specs=[mb.TensorSpec((1, 8), types.int32)], opset_version=ct.target.iOS18)
    def program(ids: Var) -> Var:
        x = mb.gather(x=np.linspace(-1, 1, 20, dtype=np.float32).reshape(5, 4), indices=ids, axis=0)
        mask = np.triu(np.full((8, 8), -np.inf, np.float32), 1)
        shares = mb.softmax(x=mb.add(x=mb.matmul(x=x, y=x, transpose_y=True), y=mask))
        mixed = mb.matmul(x=shares, y=x)
        places = mb.topk(x=mixed, k=2, axis=axis)[1]
        ones = np.ones(places.shape, np.float32)
        zeros = np.zeros((1, 8, 4), np.float32)
        chosen = mb.scatter_along_axis(data=zeros, indices=places, updates=ones, axis=axis, mode="update")
        return mb.mul(x=mixed, y=chosen, name="routed")

    return program


def test_what_is_scattered_among_channels_belongs_to_its_token() -> None:
    program, ids = routed(2), np.arange(8, dtype=np.int32)[None] % 5
    (expected,) = ane.run(program, {"ids": ids}).values()
    after, _ = cached(program, prefill=3, cache="io")
    assert_agree(expected[0], Decoder(after).feed(ids))


test_cases, test_surroundings = table(
    AddCache(),
    refuses("there is nothing to keep", built, lambda x: mb.relu(x=x)),
    refuses("mixes tokens", routed, 1, step=AddCache(prefill=3)),
)
